"""GGUF: every type is read to the numbers that the gguf package unpacks, to the bit.

The products of codes and scales are exact in float32, K-quants' too: a scale is the product of 11
bits and 7, a code has 6. One addition is rounded, in both.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.quantized import dequantise, pack_rows
from slotzero.quantization.gguf import BLOCK_FORMATS, GgufMethod
from slotzero.quantization.method import WeightPart

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 20, 768
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where a block's float16 numbers are."""


class BlocksInMemory:
    name = "memory"

    def __init__(self, blocks: npt.NDArray[np.uint8]) -> None:
        self.blocks = blocks

    def names(self) -> Collection[str]:
        return [f"{MODULE}.weight"]

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} must not be unpacked")

    def read_part(self, name: str, *wanted: slice) -> tuple[torch.Tensor, tuple[int, ...]]:
        raise AssertionError(f"{name} must not be unpacked")

    def read_blocks(self, name: str) -> npt.NDArray[np.uint8]:
        assert name == f"{MODULE}.weight"
        return self.blocks


def method_of(kind: str) -> GgufMethod:
    given = {"quant_method": "gguf", "types": {MODULE: kind}}
    return GgufMethod.parse({"quantization_config": given})


def random_blocks(kind: str) -> npt.NDArray[np.uint8]:
    """Return random rows of blocks whose float16 numbers are finite."""
    random = np.random.default_rng(0)
    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (ROWS, COLUMNS // block_len, block_bytes), np.uint8)
    for place in HALVES[kind]:
        halves = random.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_numbers_are_those_of_the_gguf_package(kind: str) -> None:
    blocks, method = random_blocks(kind), method_of(kind)
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    format = method.format_of(MODULE)
    assert format is not None
    for rows in (slice(0, ROWS), slice(0, 1), slice(7, 19)):
        part = WeightPart(rows, (ROWS, COLUMNS))
        read = method.read(BlocksInMemory(blocks), MODULE, part)
        assert torch.equal(dequantise(read, format), expected[rows])


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_nothing_is_lost_when_rows_are_packed(kind: str) -> None:
    method, part = method_of(kind), WeightPart(slice(0, ROWS), (ROWS, COLUMNS))
    format = method.format_of(MODULE)
    assert format is not None
    rows = method.read(BlocksInMemory(random_blocks(kind)), MODULE, part)
    assert int(rows.codes.max()) < 1 << format.bits
    packed = pack_rows(rows, format)
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in packed.items()}
    assert shapes == format.shapes(ROWS, COLUMNS)
    assert torch.equal(packed["scales"].float(), rows.scales)


def test_blocks_are_tested_for_every_type() -> None:
    assert HALVES.keys() == BLOCK_FORMATS.keys()
    for kind, stored in BLOCK_FORMATS.items():
        assert (stored.block_len, stored.block_bytes) == GGML_QUANT_SIZES[
            GGMLQuantizationType[kind]
        ]


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "F16", "F32", "BF16"])
def test_other_types_are_not_kept_packed(kind: str) -> None:
    assert method_of(kind).format_of(MODULE) is None


def test_modules_without_a_type_are_not_quantised() -> None:
    assert method_of("Q4_0").format_of("model.layers.0.mlp.down_proj") is None


def test_a_config_without_types_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="quantization_config has types=None"):
        GgufMethod.parse({"quantization_config": {"quant_method": "gguf"}})


@pytest.mark.parametrize("shape", [(ROWS + 1, COLUMNS), (ROWS, COLUMNS + 256), (ROWS, 100)])
def test_blocks_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    source = BlocksInMemory(random_blocks("Q4_K"))
    with pytest.raises(CorruptCheckpointError, match=rf"tensor {MODULE}\.weight "):
        method_of("Q4_K").read(source, MODULE, WeightPart(slice(None), shape))


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_scales_that_are_not_finite_are_refused(kind: str) -> None:
    for place in HALVES[kind]:
        blocks = random_blocks(kind)
        blocks[-1, place : place + 2] = np.array([np.nan], np.float16).view(np.uint8)
        part = WeightPart(slice(None), (ROWS, COLUMNS))
        with pytest.raises(CorruptCheckpointError, match=rf"{MODULE}\.weight .* not finite"):
            method_of(kind).read(BlocksInMemory(blocks), MODULE, part)
