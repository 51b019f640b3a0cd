"""Tests of the example add_a_family.py: its family generates the tokens of transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

import slotzero
from slotzero.errors import UnsupportedModelError
from slotzero.models.families.family import parse_config

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = "import add_a_family; add_a_family.main(backend='eager')"
PARSE = """
import add_a_family
from slotzero.errors import UnsupportedModelError
try:
    add_a_family.parse_helium({"attention_bias": True})
except UnsupportedModelError as error:
    print(error)
"""


def run(code: str) -> str:
    """Run code in a separate process, so that no other test sees the family."""
    path = [str(EXAMPLES), str(Path(slotzero.__file__).parents[1])]
    code = f"import sys; sys.path[:0] = {path!r}; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_family_is_not_part_of_the_package():
    with pytest.raises(UnsupportedModelError, match="'HeliumForCausalLM' is not supported"):
        parse_config({"architectures": ["HeliumForCausalLM"]})


@pytest.mark.slow
def test_the_example_generates_the_tokens_of_transformers():
    lines = run(RUN).splitlines()
    assert lines == [
        f"{num} tokens in: the same 24 tokens out as transformers" for num in (4, 3, 41)
    ]


@pytest.mark.slow
def test_another_value_is_refused_by_name():
    assert "attention_bias=True: only False is implemented" in run(PARSE)
