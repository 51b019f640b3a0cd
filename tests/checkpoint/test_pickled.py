"""Tests of pickled tensors: only tensors are rebuilt, and nothing is run."""

import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slotzero.checkpoint.pickled import tensors_of_file, tensors_of_pickle
from slotzero.errors import WeightUpdateError


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).bfloat16()[1:].T,
        torch.nn.Parameter(torch.randn(2)),
        torch.arange(3),
        torch.tensor(2.0, requires_grad=True),
    ],
    ids=["plain", "view", "parameter", "integers", "gradient"],
)
def test_tensors_are_read(tensor: torch.Tensor, protocol: int) -> None:
    for given in ([("a", tensor)], {"a": tensor}):
        ((name, read),) = tensors_of_pickle(pickle.dumps(given, protocol))
        assert name == "a"
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


class Program:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


class Hidden:
    """A storage that is itself a pickle of a program."""

    def __reduce__(self) -> Any:
        data = io.BytesIO()
        torch.save(Program(), data)
        return torch.storage._load_from_bytes, (data.getvalue(),)


def shared() -> bytes:
    data = io.BytesIO()
    ForkingPickler(data, 5).dump([("a", torch.ones(2))])
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps([("a", Program())]), "posix.mkdir is not read"),
        (pickle.dumps([("a", Hidden())]), "cannot be read"),
        (shared(), "shared by a handle"),
        (pickle.dumps([("a", 1)]), "list of pairs"),
        (pickle.dumps("a"), "list of pairs"),
        (b"x", "cannot be read"),
        (b"", "cannot be read"),
    ],
    ids=["program", "hidden", "handle", "number", "text", "noise", "empty"],
)
def test_everything_else_is_refused(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightUpdateError, match=message):
        list(tensors_of_pickle(data))
    assert not list(tmp_path.iterdir())


def test_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    (found,) = tensors_of_file(f"{tmp_path}/a.safetensors").items()
    assert (found[0], found[1].tolist()) == ("a", [1, 1])
    with pytest.raises(WeightUpdateError, match=r"b\.safetensors"):
        tensors_of_file(f"{tmp_path}/b.safetensors")
