"""Tensors that another process has written for a running model: a .safetensors file, or a pickle.

A pickle is a program. This module runs none: it reads the few callables that tensors are rebuilt
with, each by a function that cannot do anything else, and refuses every other one by name. So
tensors that are shared by a handle (CUDA IPC, file descriptors) are refused too.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slotzero.errors import WeightUpdateError

_REMEDY = "write them to a .safetensors file, or send them through a broadcast group"
_SHARED = ("torch.multiprocessing.reductions", "sglang.srt.utils.patch_torch")


def tensors_of_file(path: str) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(Path(path))
        return tensors
    except (SafetensorError, OSError) as error:
        raise WeightUpdateError(f"{path}: {error}") from error


def tensors_of_pickle(data: bytes) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a pickled list or dict, by name."""
    try:
        read = _TensorUnpickler(io.BytesIO(data)).load()
    except WeightUpdateError:
        raise
    except Exception as error:  # malformed pickles raise many types
        raise WeightUpdateError(f"the pickled tensors cannot be read: {error}") from error
    pairs = list(read.items()) if isinstance(read, Mapping) else read
    if not isinstance(pairs, list) or not all(map(_is_named_tensor, pairs)):
        raise WeightUpdateError("the pickle must be a list of pairs of a name and a tensor")
    yield from pairs


def _is_named_tensor(pair: object) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], Tensor)
    )


def _bytes(text: str, encoding: str) -> bytes:
    """Return bytes as pickles before protocol 3 have them."""
    if encoding != "latin1":
        raise WeightUpdateError("the pickle has a string in an unexpected encoding")
    return text.encode("latin1")


def _storage(data: bytes) -> Any:
    """Read a storage as torch pickles it, without running what is inside."""
    return torch.load(io.BytesIO(data), weights_only=True)


def _parameter(tensor: Tensor, requires_grad: bool, hooks: object) -> Tensor:
    return tensor


def _tensor(storage: Any, *place: Any) -> Tensor:
    """Rebuild a tensor; its gradient and its hooks are not wanted."""
    offset, size, stride = place[:3]
    rebuilt: Tensor = torch._utils._rebuild_tensor(storage, offset, size, stride)  # type: ignore[no-untyped-call]
    return rebuilt


_ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _bytes,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
}


@final
class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in _SHARED:
            raise WeightUpdateError(
                f"tensors shared by a handle ({module}.{name}) are not supported: {_REMEDY}"
            )
        raise WeightUpdateError(f"a pickle with {module}.{name} is not read: {_REMEDY}")
