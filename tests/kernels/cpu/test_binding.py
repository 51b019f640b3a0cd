"""Tests of the binding to torch: its declarations are torch's own, and a wrong call is refused."""

import subprocess
from pathlib import Path

import pytest
import torch

from slotzero.kernels.cpu import build

SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>
#include "tensor.h"
template <slotzero::ScalarType ours, torch::headeronly::ScalarType its>
constexpr bool same = static_cast<int>(ours) == static_cast<int>(its);
using torch::headeronly::ScalarType;
static_assert(same<slotzero::ScalarType::Byte, ScalarType::Byte>);
static_assert(same<slotzero::ScalarType::Int, ScalarType::Int>);
static_assert(same<slotzero::ScalarType::Long, ScalarType::Long>);
static_assert(same<slotzero::ScalarType::Half, ScalarType::Half>);
static_assert(same<slotzero::ScalarType::Float, ScalarType::Float>);
"""


@pytest.mark.slow
def test_declarations_are_those_of_torch(tmp_path: Path) -> None:
    """A function of C that is declared twice in different ways does not compile."""
    source = tmp_path / "both.cpp"
    source.write_text(SOURCE)
    torch_include = Path(torch.__file__).parent / "include"
    include = f"-I{torch_include}", f"-I{Path(build.__file__).parent}"
    cxx = build.compiler() or "g++"
    command = [cxx, "-std=c++20", "-fsyntax-only", *include, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_tensor_with_too_few_axes_is_refused() -> None:
    flat = torch.zeros(16)
    with pytest.raises(RuntimeError, match="a tensor with 1 axes was used with more"):
        build.other_operators().linear(flat, flat, None, flat)
