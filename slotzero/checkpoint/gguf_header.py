"""The header of a GGUF file: its metadata, and the position of every tensor.

It does not know models, tokenizers or how blocks of numbers are unpacked. It does not use the
`gguf` package, whose reader creates several arrays per string: for the default model (49,152 tokens
and about as many merges) that takes four seconds; this reader takes a tenth of that.

The rule: every offset and length in the header is checked against the size of the file, so a
truncated file raises an error here and is never read beyond its end.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError

_U64 = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type id -> struct code
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class BlockType:
    """A number type, stored in blocks along a row; an unquantised number is a block of one."""

    name: str
    block_len: int
    block_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]  # rows first, as in torch; reversed in the file
    type_id: int
    start: int  # the tensor is bytes [start, start + num_bytes) of the file
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CorruptCheckpointError(
            f"{path} cannot be read ({error}); download it again"
        ) from None


def parse_header(data: mmap.mmap, path: Path) -> GgufHeader:
    cursor = _Cursor(data, path)
    cursor.check_magic()
    num_tensors, num_pairs = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32())
    _refuse_split(path, metadata)
    described = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CorruptCheckpointError(
            f"{path}: general.alignment={alignment!r} must be a positive number; download the file "
            "again"
        )
    first_byte = -(-cursor.position // alignment) * alignment
    tensors = {
        name: _place(path, len(data), name, shape, type_id, first_byte + offset)
        for name, shape, type_id, offset in described
    }
    return GgufHeader(metadata, tensors)


def _refuse_split(path: Path, metadata: Mapping[str, Any]) -> None:
    num_files = metadata.get("split.count", 1)
    if num_files > 1:
        raise UnsupportedModelError(
            f"{path} is one of {num_files} files; join them with `llama-gguf-split --merge` and "
            "pass the result"
        )


def _place(
    path: Path, file_len: int, name: str, shape: tuple[int, ...], type_id: int, start: int
) -> StoredTensor:
    block = BLOCK_TYPES.get(type_id)
    if block is None:
        known = ", ".join(known.name for known in BLOCK_TYPES.values())
        raise UnsupportedModelError(
            f"{path}: tensor {name} has number type {type_id}, which is not implemented; "
            f"implemented: {known}"
        )
    if not shape or shape[-1] % block.block_len:
        raise CorruptCheckpointError(
            f"{path}: the rows of tensor {name} {shape} do not divide into {block.name} blocks of "
            f"{block.block_len}; download the file again"
        )
    num_bytes = prod(shape) // block.block_len * block.block_bytes
    if start + num_bytes > file_len:
        raise CorruptCheckpointError(
            f"{path} is truncated: tensor {name} ends at byte {start + num_bytes}, but the file "
            f"has {file_len} bytes; download the file again"
        )
    return StoredTensor(shape, type_id, start, num_bytes)


class _Cursor:
    """Sequential reader of the header. Reading beyond the end of the file raises."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.position = 0
        self._data, self._path, self._end = data, path, len(data)

    def check_magic(self) -> None:
        if self._data[:4] != b"GGUF":
            raise CorruptCheckpointError(f"{self._path} is not a GGUF file; download it again")
        self.position = 4
        version = self.u32()
        if version not in (2, 3):  # version 1 is from 2023; a big-endian file has version 50331648
            raise UnsupportedModelError(
                f"{self._path} has GGUF version {version}, which is not implemented; convert the "
                "model again to version 3"
            )

    def u32(self) -> int:
        return int(self._numbers("I", 1)[0])

    def u64(self) -> int:
        return int(self._numbers("Q", 1)[0])

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(self.u32(), self.u64())
        return self._numbers(self._code(type_id), 1)[0]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.u32()
        shape = tuple(reversed(self._numbers("Q", num_dims)))
        return name, shape, self.u32(), self.u64()

    def _array(self, type_id: int, count: int) -> list[Any]:
        if type_id == _STRING:
            return self._strings(count)
        return list(self._numbers(self._code(type_id), count))

    def _code(self, type_id: int) -> str:
        if type_id not in _SCALARS:
            raise CorruptCheckpointError(
                f"{self._path}: unknown metadata type {type_id} at byte {self.position}; "
                "download the file again"
            )
        return _SCALARS[type_id]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start, size = self.position, struct.calcsize(f"<{code}") * count
        if start + size > self._end:
            self._fail()
        self.position = start + size
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def _strings(self, count: int) -> list[str]:
        """Read strings. A file can have 200,000, so this hot loop uses local variables only."""
        data, position, last = self._data, self.position, self._end - 8
        unpack_len, texts = _U64.unpack_from, []
        for _ in range(count):
            if position > last:
                self._fail()
            start = position + 8
            position = start + unpack_len(data, position)[0]
            texts.append(data[start:position].decode("utf-8", "replace"))
        if position > self._end:
            self._fail()
        self.position = position
        return texts

    def _fail(self) -> NoReturn:
        raise CorruptCheckpointError(
            f"{self._path} is truncated: its header is longer than its {self._end} bytes; "
            "download the file again"
        )
