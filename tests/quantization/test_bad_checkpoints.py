"""Damaged quantised checkpoints: the error names the tensor or the config field, in every format.

A whole model is loaded, of which one weight is damaged. Its input features are not a multiple of
the group size.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from memory_source import PackedCheckpoint, load
from torch import Tensor

from slotzero.checkpoint.tiny import tiny_checkpoint
from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.quantization.method import is_layer_linear
from slotzero.quantization.mxfp4 import EXPERTS

GROUP, BLOCK = 32, 16
FLOAT8 = torch.float8_e4m3fn
NOT_FINITE = {FLOAT8: (torch.nan,), torch.uint8: (255,)}
"""Values of types without infinity; the others have NaN and two infinities."""
Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]


class Format(NamedTuple):
    settings: Mapping[str, Any]  # the quantization_config
    pack: Callable[[Shape], Tensors]
    """Return the tensors of a weight of this shape, by the ends of their names."""
    group: tuple[str, ...] = ()  # path of the field with the group size, in the settings
    wrong_groups: tuple[object, ...] = (0, -3, 2.5, "32", True, [32])
    model: str = "tiny:llama"
    module: str = "model.layers.0.mlp.down_proj"


def parts(size: int, part: int) -> int:
    return -(-size // part)


def compressed(stored_as: str, **weights: Any) -> dict[str, Any]:
    inputs = weights.pop("inputs", None)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def float8(scale: str, shape_of: Callable[[int, int], Shape], has_input: bool = False) -> Any:
    def pack(shape: Shape) -> Tensors:
        tensors = {".weight": torch.ones(shape).to(FLOAT8), scale: torch.ones(shape_of(*shape))}
        return tensors | ({".input_scale": torch.tensor(0.5)} if has_input else {})

    return pack


def packed(bits: int, is_symmetric: bool = True, has_order: bool = False) -> Any:
    """Integers in words, as compressed-tensors stores them."""

    def pack(shape: Shape) -> Tensors:
        rows, columns = shape
        groups, per_word = parts(columns, GROUP), 32 // bits
        tensors = {
            ".weight_packed": torch.zeros(rows, parts(columns, per_word), dtype=torch.int32),
            ".weight_scale": torch.ones(rows, groups),
            ".weight_shape": torch.tensor(shape),
        }
        if not is_symmetric:
            zeros = torch.zeros(parts(rows, per_word), groups, dtype=torch.int32)
            tensors[".weight_zero_point"] = zeros
        if has_order:
            tensors[".weight_g_idx"] = (torch.arange(columns) // GROUP).int()
        return tensors

    return pack


def signed_bytes(shape: Shape) -> Tensors:
    rows, columns = shape
    groups = parts(columns, GROUP)
    return {
        ".weight": torch.zeros(shape, dtype=torch.int8),
        ".weight_scale": torch.ones(rows, groups),
        ".weight_zero_point": torch.zeros(rows, groups, dtype=torch.int8),
    }


def gptq(shape: Shape) -> Tensors:
    rows, columns = shape
    groups = parts(columns, GROUP)
    return {
        ".qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        ".qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        ".scales": torch.ones(groups, rows).half(),
        ".g_idx": (torch.arange(columns) // GROUP).int(),
    }


def awq(shape: Shape) -> Tensors:
    rows, columns = shape
    groups = parts(columns, GROUP)
    return {
        ".qweight": torch.zeros(columns, rows // 8, dtype=torch.int32),
        ".qzeros": torch.zeros(groups, rows // 8, dtype=torch.int32),
        ".scales": torch.ones(groups, rows).half(),
    }


def mxfp4(shape: Shape) -> Tensors:
    experts, columns, rows = shape
    groups = experts, rows, parts(columns, GROUP)
    return {
        "_blocks": torch.zeros(*groups, GROUP // 2, dtype=torch.uint8),
        "_scales": torch.full(groups, 127, dtype=torch.uint8),
    }


INTEGERS = {"type": "int", "strategy": "group", "group_size": GROUP}
GROUP_SIZE = "config_groups", "group_0", "weights", "group_size"
BLOCKS = "config_groups", "group_0", "weights", "block_structure"
WRONG_BLOCKS = 0, 16, "16", [16], [16, 0], [16, 2.5], [True, 16]
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
PER_GROUP = {**PER_TOKEN, "strategy": "group", "group_size": BLOCK}
FORMATS = {
    "fp8 block": Format(
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
        float8(".weight_scale_inv", lambda rows, columns: (rows // BLOCK, columns // BLOCK)),
        ("weight_block_size",),
        WRONG_BLOCKS,
    ),
    "fp8 tensor": Format({"quant_method": "fp8"}, float8(".weight_scale", lambda *_: ())),
    "fp8 static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"},
        float8(".weight_scale", lambda *_: (), has_input=True),
    ),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        float8(".weight_scale", lambda *_: (), has_input=True),
    ),
    "compressed float channel": Format(
        compressed(
            "float-quantized", type="float", num_bits=8, strategy="channel", inputs=PER_TOKEN
        ),
        float8(".weight_scale", lambda rows, _: (rows, 1)),
    ),
    "compressed float block": Format(
        compressed(
            "float-quantized", type="float", num_bits=8, strategy="block",
            block_structure=[BLOCK, BLOCK], inputs=PER_GROUP,
        ),
        float8(".weight_scale", lambda rows, columns: (rows // BLOCK, columns // BLOCK)),
        BLOCKS,
        WRONG_BLOCKS,
    ),
    "compressed int4": Format(
        compressed("pack-quantized", num_bits=4, **INTEGERS), packed(4), GROUP_SIZE
    ),
    "compressed int4 asymmetric": Format(
        compressed("pack-quantized", num_bits=4, symmetric=False, **INTEGERS),
        packed(4, is_symmetric=False),
        GROUP_SIZE,
    ),
    "compressed int4 ordered": Format(
        compressed("pack-quantized", num_bits=4, actorder="group", **INTEGERS),
        packed(4, has_order=True),
        GROUP_SIZE,
    ),
    "compressed int8": Format(
        compressed("pack-quantized", num_bits=8, **INTEGERS), packed(8), GROUP_SIZE
    ),
    "compressed bytes": Format(
        compressed("int-quantized", num_bits=8, symmetric=False, **INTEGERS),
        signed_bytes,
        GROUP_SIZE,
    ),
    "gptq": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        gptq,
        ("group_size",),
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
        awq,
        ("group_size",),
    ),
    "mxfp4": Format(
        {"quant_method": "mxfp4"},
        mxfp4,
        model="tiny:gpt-oss",
        module="model.layers.0.mlp.experts.down_proj",
    ),
}  # fmt: skip


def packed_as(format: Format) -> PackedCheckpoint:
    """Return a tiny model whose linear layers, or whose experts, are quantised."""
    chosen = are_experts if format.pack is mxfp4 else is_layer_linear
    return PackedCheckpoint(tiny_checkpoint(format.model), format.settings, chosen, format.pack)


def are_experts(module: str) -> bool:
    return module.endswith(EXPERTS)


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
def checkpoint(format: Format) -> PackedCheckpoint:
    return packed_as(format)


def refused(checkpoint: PackedCheckpoint, name: str, wrong: Tensor | None) -> None:
    """Check that a checkpoint with another tensor, or without it, is refused by its name."""
    right = checkpoint.tensors.pop(name)
    if wrong is not None:
        checkpoint.tensors[name] = wrong
    with pytest.raises((CorruptCheckpointError, UnsupportedModelError), match=f"tensor {name} "):
        load(checkpoint)
    checkpoint.tensors[name] = right


def damaged(checkpoint: PackedCheckpoint, format: Format) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the weight that is damaged."""
    for end in format.pack((1, 8, 8) if format.pack is mxfp4 else (8, 8)):
        name = format.module + end
        yield name, checkpoint.tensors[name]


def test_sound_checkpoints_are_loaded(checkpoint: PackedCheckpoint) -> None:
    load(checkpoint)


def test_missing_tensors(format: Format, checkpoint: PackedCheckpoint) -> None:
    for name, _ in damaged(checkpoint, format):
        refused(checkpoint, name, None)


def test_tensors_of_another_shape(format: Format, checkpoint: PackedCheckpoint) -> None:
    """Among them are tensors for groups that divide the input features, which leave out a rest."""
    for name, tensor in damaged(checkpoint, format):
        if tensor.ndim == 0:
            refused(checkpoint, name, tensor.expand(2))
        for axis, size in enumerate(tensor.shape):
            refused(checkpoint, name, tensor.narrow(axis, 0, size - 1))
            longer = torch.cat([tensor, tensor.narrow(axis, 0, 1)], dim=axis)
            refused(checkpoint, name, longer)
        refused(checkpoint, name, tensor[None, None])


def test_numbers_that_are_not_finite(format: Format, checkpoint: PackedCheckpoint) -> None:
    tried = 0
    for name, tensor in damaged(checkpoint, format):
        if tensor.is_floating_point() or name.endswith("_scales"):
            for value in NOT_FINITE.get(tensor.dtype, (torch.nan, torch.inf, -torch.inf)):
                wrong = tensor.clone()
                wrong.view(-1)[-1] = value
                refused(checkpoint, name, wrong)
                tried += 1
    assert tried


def test_tensors_of_another_type(format: Format, checkpoint: PackedCheckpoint) -> None:
    for name, tensor in damaged(checkpoint, format):
        is_number = tensor.is_floating_point() and tensor.dtype is not FLOAT8
        if not name.endswith(".weight_shape"):
            refused(checkpoint, name, tensor.to(torch.int64 if is_number else torch.bfloat16))


def with_group(format: Format, value: object) -> PackedCheckpoint:
    """Return the checkpoint with another group size in its config."""

    def replaced(settings: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        first, *rest = path
        inner = replaced(settings[first], tuple(rest)) if rest else value
        return {**settings, first: inner}

    return packed_as(format._replace(settings=replaced(format.settings, format.group)))


WITH_GROUPS = [name for name, format in FORMATS.items() if format.group]


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_the_wrong_group_size(name: str) -> None:
    """The config is valid, but the tensors have other groups."""
    format = FORMATS[name]
    is_block = format.wrong_groups is WRONG_BLOCKS
    other: object = [BLOCK // 2, BLOCK] if is_block else GROUP // 2
    with pytest.raises(CorruptCheckpointError, match=r"tensor model\.layers\.\d\..* has shape"):
        load(with_group(format, other))


def test_groups_of_inputs_that_differ_from_the_blocks() -> None:
    checkpoint = with_group(FORMATS["compressed float block"], [BLOCK, BLOCK // 2])
    with pytest.raises(UnsupportedModelError, match=r"group_0\.input_activations=.*: 16"):
        load(checkpoint)


@pytest.mark.parametrize("name", WITH_GROUPS)
def test_a_group_size_that_is_no_size(name: str) -> None:
    format = FORMATS[name]
    for value in format.wrong_groups:
        with pytest.raises(UnsupportedModelError, match=rf"{format.group[-1]}=.*: implemented is"):
            load(with_group(format, value))


@pytest.mark.parametrize("method", ["bitsandbytes", "modelopt_fp4", "", None, 8, ["fp8"]])
def test_an_unknown_method(format: Format, method: object) -> None:
    settings = {**format.settings, "quant_method": method}
    with pytest.raises(UnsupportedModelError, match=r"quant_method=.*: implemented are fp8, "):
        load(packed_as(format._replace(settings=settings)))


@pytest.mark.parametrize("settings", ["fp8", ["fp8"], 8])
def test_a_config_that_is_no_mapping(settings: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantization_config=.*must be a mapping"):
        load(packed_as(FORMATS["fp8 tensor"]._replace(settings=settings)))


def test_a_tensor_that_the_format_does_not_have(
    format: Format, checkpoint: PackedCheckpoint
) -> None:
    """For example the second scale of NVFP4."""
    name = f"{format.module}.weight_scale_2"
    checkpoint.tensors[name] = torch.tensor(1.0)
    refused(checkpoint, name, checkpoint.tensors[name])
