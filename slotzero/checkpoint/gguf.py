"""A GGUF file as a checkpoint: tensors under Hugging Face names, in Hugging Face layout.

It does not know how the engine stores weights. `read_blocks` returns a quantised weight as it is
stored, for the types that quantization/gguf.py keeps packed; `read` converts any type to float32,
quantised ones by the optional package `gguf`. Nothing is cached.

llama.cpp rotates neighbouring pairs (0, 1), (2, 3) ... of a head, while Hugging Face rotates the
pairs (0, d/2), (1, d/2 + 1) ...; files of some architectures, such as llama, therefore store the
rows of Q and K in a different order. The rule: `read` restores Hugging Face's order, so callers
need not know the format of a tensor's source.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from slotzero.checkpoint.gguf_header import BLOCK_TYPES, StoredTensor, map_file, parse_header
from slotzero.checkpoint.gguf_names import (
    IN_PAIRS,
    ROPE_FACTORS,
    end_token_ids,
    hugging_face_config,
    hugging_face_name,
    llama3_scaling,
    pooling_modules,
)
from slotzero.errors import ConfigError, CorruptCheckpointError
from slotzero.models.checkpoint import Checkpoint
from slotzero.quantization.gguf import BLOCK_FORMATS
from slotzero.text.tokenizer import Tokenizer

Bytes = npt.NDArray[np.uint8]
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)")
_NUMBERS_PER_STEP = 1 << 17
_SMALL_BYTES = 2 << 30  # a quantised model up to this size in float32 runs in float32


@final
class GgufCheckpoint(Checkpoint):
    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or path.stem
        self.path = path
        self._data = map_file(path)
        header = parse_header(self._data, path)
        self._metadata = header.metadata
        self.config = self._make_config(header.tensors)
        self.eos_token_ids = end_token_ids(header.metadata)
        self._tensors = {
            hugging_face_name(name): tensor
            for name, tensor in header.tensors.items()
            if name != ROPE_FACTORS
        }
        types = {
            name.removesuffix(".weight"): BLOCK_TYPES[tensor.type_id].name
            for name, tensor in self._tensors.items()
            if BLOCK_TYPES[tensor.type_id].name in BLOCK_FORMATS
        }
        if types:
            self.config["quantization_config"] = {"quant_method": "gguf", "types": types}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise CorruptCheckpointError(
                f"{self.path} has no tensor {name}; download or convert it again"
            )
        tensor = self._unpack(self._tensors[name])
        num_heads = self._num_rotated_heads(name)
        return tensor if num_heads is None else halves_from_pairs(tensor, num_heads)

    def read_blocks(self, name: str) -> Bytes:
        """Return the packed blocks of a weight, [rows, bytes per row]."""
        tensor = self._tensors[name]
        stored = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        blocks, num_heads = stored.reshape(tensor.shape[0], -1), self._num_rotated_heads(name)
        if num_heads is None:
            return blocks
        return halves_from_pairs(torch.from_numpy(blocks.copy()), num_heads).numpy()

    def _num_rotated_heads(self, name: str) -> int | None:
        """Return how many heads the rows of a tensor belong to, if their order is llama.cpp's."""
        rotated = _ROTATED.fullmatch(name)
        if rotated is None or self._metadata["general.architecture"] not in IN_PAIRS:
            return None
        kind = "num_attention_heads" if rotated[1] == "q" else "num_key_value_heads"
        heads: int = self.config[kind]
        return heads

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self._metadata)

    def modules(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        return pooling_modules(self._metadata)

    def _make_config(self, tensors: dict[str, StoredTensor]) -> dict[str, Any]:
        embedding = tensors.get("token_embd.weight")
        if embedding is None:
            raise CorruptCheckpointError(
                f"{self.path} has no tensor token_embd.weight; download or convert it again"
            )
        config = hugging_face_config(self._metadata, tensors.keys(), embedding.shape[0])
        if ROPE_FACTORS in tensors:
            factors = self._unpack(tensors[ROPE_FACTORS]).tolist()
            scaling = llama3_scaling(factors, config["rope_theta"])
            config["rope_scaling"] = scaling or config["rope_scaling"]
        stored = _PLAIN.get(BLOCK_TYPES[embedding.type_id].name)
        # Quantised models run in float16 or float32: with float16 most answers equal those of
        # float32, with bfloat16 they do not.
        if stored is None:
            numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
            stored = torch.float32 if 4 * numbers <= _SMALL_BYTES else torch.float16
        config["dtype"] = str(stored).removeprefix("torch.")
        return config

    def _unpack(self, tensor: StoredTensor) -> torch.Tensor:
        stored = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)
        plain = _PLAIN.get(BLOCK_TYPES[tensor.type_id].name)
        if plain is not None:
            numbers = torch.from_numpy(stored.copy()).view(plain)
            return numbers.float().reshape(tensor.shape)
        return _dequantise(stored, tensor, self.path)


def halves_from_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head, from pairs (x0 y0 x1 y1 ..) to halves (x0 x1 .. y0 y1 ..)."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def _dequantise(stored: Bytes, tensor: StoredTensor, path: Path) -> torch.Tensor:
    """Dequantise a tensor.

    Blocks are independent, so they are reshaped to long rows that fit the CPU cache: the package
    processes sixteen rows at a time, and with one long row it is up to three times as fast.
    """
    dequantize, number_types = _gguf_package(path)
    block, number_type = BLOCK_TYPES[tensor.type_id], number_types(tensor.type_id)
    blocks = stored.reshape(-1, block.block_bytes)
    out = np.empty((len(blocks), block.block_len), np.float32)
    step = _NUMBERS_PER_STEP // block.block_len
    for first in range(0, len(blocks), step):
        chunk = blocks[first : first + step]
        out[first : first + step] = dequantize(chunk.reshape(1, -1), number_type).reshape(
            len(chunk), block.block_len
        )
    return torch.from_numpy(out).reshape(tensor.shape)


def _gguf_package(path: Path) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ConfigError(
            f"{path} is quantised and needs the gguf package: pip install 'slotzero[gguf]'"
        ) from None
    return dequantize, GGMLQuantizationType
