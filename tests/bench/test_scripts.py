"""Tests of the scripts outside the package, most of which need hardware or hours to run."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_name_that_a_script_imports_exists(script: str) -> None:
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slotzero"):
            assert node.module is not None
            if ".triton" in node.module:
                pytest.importorskip("triton", reason="triton has no wheel for this platform")
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
