"""compressed-tensors: weights that the library compresses are read as it decompresses them.

It computes in the type of the scales; we compute in float32. Their scales are float32 where no
product is rounded twice, and bfloat16 where ours is rounded to it.
"""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from memory_source import MODULE, MemorySource, read_numbers, read_rows
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.quantization.compressed_tensors import CompressedTensorsMethod
from slotzero.quantization.fp8 import Fp8Layout
from slotzero.quantization.integers import ByteLayout, PackedLayout

SHAPE = ROWS, COLUMNS = 48, 256
BLOCK = 128
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
GROUPS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "dynamic": True}
IN_BLOCKS = FLOAT | {"strategy": "block", "block_structure": [BLOCK, BLOCK]}


def settings(weights: Any, inputs: Any, stored_as: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups = {"group_0": group | {"output_activations": None}}
    return {"config_groups": groups, "format": stored_as, "ignore": ["lm_head"], **more}


def parse(given: dict[str, Any]) -> CompressedTensorsMethod:
    given = {"quant_method": "compressed-tensors", **given}
    return CompressedTensorsMethod.parse({"quantization_config": given})


def parse_weights(weights: Any, inputs: Any, stored_as: str) -> CompressedTensorsMethod:
    return parse(settings(weights, inputs, stored_as))


def scales_shape(weights: dict[str, Any]) -> tuple[int, ...]:
    return {
        "tensor": (1,),
        "channel": (ROWS, 1),
        "group": (ROWS, COLUMNS // weights.get("group_size", 1)),
        "block": (-(-ROWS // BLOCK), COLUMNS // BLOCK),
    }[weights["strategy"]]


def compress(
    weights: dict[str, Any], stored_as: str, kind: torch.dtype = torch.float32
) -> tuple[MemorySource, Tensor]:
    """Compress a random weight; return the checkpoint and what the library makes of it."""
    generator = torch.Generator().manual_seed(0)
    shape = scales_shape(weights)
    top = 240.0 if weights["type"] == "float" else 1 << (weights["num_bits"] - 1)
    scales = ((torch.rand(shape, generator=generator) + 0.5) * 4 / top).to(kind)
    state = {"weight": torch.randn(SHAPE, generator=generator).to(kind), "weight_scale": scales}
    if not weights["symmetric"]:
        zeros = torch.randint(-7, 8, shape, generator=generator).to(torch.int8)
        state["weight_zero_point"] = zeros
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    stored = compressor.compress(state, scheme)
    return MemorySource(stored, MODULE), compressor.decompress(stored, scheme)["weight"]


@pytest.mark.parametrize(
    ("weights", "inputs", "activations"),
    [
        (FLOAT, None, "plain"),
        (FLOAT, TOKEN, "float8_row"),
        (FLOAT, STATIC, "float8_static"),
        (FLOAT | {"strategy": "channel"}, TOKEN, "float8_row"),
        (IN_BLOCKS, GROUPS, "float8_group"),
        (IN_BLOCKS, None, "plain"),
    ],
)
@pytest.mark.parametrize("stored_as", ["float-quantized", "naive-quantized"])
def test_float8(weights: Any, inputs: Any, activations: str, stored_as: str) -> None:
    source, expected = compress(weights, stored_as)
    if activations == "float8_static":
        source = source.replaced(input_scale=torch.tensor([0.5]))
    method = parse_weights(weights, inputs, stored_as)
    format = method.format_of(MODULE)
    assert format is not None
    assert (format.codes, format.activations) == ("float8", activations)
    assert torch.equal(read_numbers(method, source, SHAPE), expected)


STRATEGIES = ({"strategy": "group", "group_size": 32}, {"strategy": "channel"})
TENSOR = {"strategy": "tensor"}
INTEGERS = [
    *(("pack-quantized", 4, of, symmetric) for of in STRATEGIES for symmetric in (True, False)),
    *(("pack-quantized", 8, of, symmetric) for of in STRATEGIES for symmetric in (True, False)),
    *(("pack-quantized", bits, TENSOR, True) for bits in (4, 8)),
    *(("int-quantized", 8, of, True) for of in (*STRATEGIES, TENSOR)),
    *(("naive-quantized", 8, of, False) for of in (*STRATEGIES, TENSOR)),
]


@pytest.mark.parametrize(("stored_as", "bits", "scheme", "is_symmetric"), INTEGERS)
def test_integers(stored_as: str, bits: int, scheme: dict[str, Any], is_symmetric: bool) -> None:
    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, **scheme}
    method = parse_weights(weights, None, stored_as)
    source, expected = compress(weights, stored_as, torch.bfloat16)
    numbers = read_numbers(method, source, SHAPE)
    assert torch.equal(numbers.bfloat16(), expected)
    source, expected = compress(weights, stored_as)
    numbers = read_numbers(method, source, SHAPE)
    if is_symmetric:
        assert torch.equal(numbers, expected)
    else:  # the product of zero and scale is rounded by itself
        torch.testing.assert_close(numbers, expected, rtol=0, atol=1e-6)


def test_the_last_word_of_a_row_may_be_partly_used() -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "channel"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    state = {
        "weight": torch.randn(21, 43),
        "weight_scale": torch.full((21, 1), 0.5),
        "weight_zero_point": torch.arange(21).view(21, 1).to(torch.int8) % 8,
    }
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    method = parse_weights(weights, None, "pack-quantized")
    assert torch.equal(read_numbers(method, MemorySource(stored, MODULE), (21, 43)), expected)


def test_one_scale_may_have_no_axis() -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"}
    source, _ = compress(weights, "int-quantized")
    method = parse_weights(weights, None, "int-quantized")
    expected = read_numbers(method, source, SHAPE)
    ends = ("weight_scale", "weight_zero_point")
    without = source.replaced(**{end: source.read(f"{MODULE}.{end}").view(()) for end in ends})
    assert torch.equal(read_numbers(method, without, SHAPE), expected)
    for end in ends:
        two = source.read(f"{MODULE}.{end}").repeat(2)
        with pytest.raises(CorruptCheckpointError, match=f"{MODULE}.{end} has shape"):
            read_rows(method, source.replaced(**{end: two}), SHAPE)


def test_order_of_activations() -> None:
    """Today's library has no such order. Until 0.15 it took column c to be in group g_idx[c]."""
    source, expected = compress(INT4, "pack-quantized")
    plain = parse_weights(INT4 | {"actorder": "weight"}, None, "pack-quantized")
    assert torch.equal(read_numbers(plain, source, SHAPE), expected)
    order = torch.arange(COLUMNS) // 32
    order = order[torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))]
    source = source.replaced(weight_g_idx=order.int())
    codes = read_rows(plain, source, SHAPE).codes.float() - 8
    for name in ("group", "dynamic", True):
        method = parse_weights(INT4 | {"actorder": name}, None, "pack-quantized")
        scales = source.read(f"{MODULE}.weight_scale")[:, order]
        assert torch.equal(read_numbers(method, source, SHAPE), codes * scales)
    for wrong in (order.int() + 1, order.int() - 1):
        with pytest.raises(CorruptCheckpointError, match=r"up_proj\.weight_g_idx holds groups"):
            read_rows(method, source.replaced(weight_g_idx=wrong), SHAPE)


def test_each_module_belongs_to_the_group_that_fits_it_best() -> None:
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "group_1": {
            "targets": ["re:.*self_attn.(q|k)_proj$"],
            "weights": FLOAT,
            "input_activations": TOKEN,
            "format": "float-quantized",
        },
        "group_2": {
            "targets": ["model.layers.0.self_attn.q_proj"],
            "weights": INT4 | {"num_bits": 8},
            "format": "int-quantized",
        },
        "group_3": {"targets": ["re:.*layers.2.*"], "weights": None},
    }
    ignored = ["lm_head", "re:.*mlp.gate$", "language_model.model.layers.3.mlp.up_proj"]
    method = parse({"config_groups": groups, "ignore": ignored, "format": "mixed-precision"})
    layouts = {
        "layers.0.self_attn.q_proj": ByteLayout,
        "layers.1.self_attn.q_proj": Fp8Layout,
        "layers.0.self_attn.o_proj": PackedLayout,
        "layers.3.mlp.up_proj": type(None),
        "layers.30.mlp.up_proj": PackedLayout,
        "layers.2.mlp.up_proj": type(None),
        "layers.0.mlp.gate": type(None),
        "embed_tokens": type(None),
        "norm": type(None),
    }
    for module, layout in layouts.items():
        name = f"model.{module}"
        assert type(method._layout_of(name)) is layout, name
        assert (method.format_of(name) is None) == (method.tensors(name) == {})
    assert method.format_of("lm_head") is None
    assert parse({"config_groups": groups, "ignore": []}).format_of("lm_head") is not None


def test_cache() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    given = settings(FLOAT, TOKEN, "float-quantized")
    assert not parse(given).kv_cache_scheme
    assert parse(given | {"kv_cache_scheme": scheme}).kv_cache_scheme


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "nvfp4-pack-quantized"),
        ("format", "mxfp4-pack-quantized"),
        ("format", "mxfp8-quantized"),
        ("format", "marlin-24"),
        ("format", "int-quantized"),
        ("format", None),
        ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
        ("transform_config", {"config_groups": {"R1": {}}}),
        ("moe_sparsity_config", {"method": "prune"}),
        ("kv_cache_scheme", {"num_bits": 8, "type": "int"}),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "attn_head"}),
        ("config_groups", {}),
        ("config_groups.FP8", None),
        ("ignore", "lm_head"),
        ("ignore", ["re:("]),
    ],
)
def test_other_settings_are_refused(field: str, value: object) -> None:
    given = settings(FLOAT, TOKEN, "float-quantized") | {field: value}
    if field == "config_groups.FP8":
        given["config_groups"] = {"FP8": ["Linear"]}
    with pytest.raises(UnsupportedModelError, match=f"quantization_config has {field}="):
        parse(given)


OTHER_FLOATS = {
    "dynamic": FLOAT | {"dynamic": True},
    "symmetric": FLOAT | {"symmetric": False},
    "strategy": FLOAT | {"strategy": "group", "group_size": 32},
    "block_structure": FLOAT | {"strategy": "block", "block_structure": "128x128"},
}
OTHER_INTEGERS = {
    "num_bits": INT4 | {"num_bits": 3},
    "group_size": INT4 | {"group_size": None},
    "strategy": INT4 | {"strategy": "block"},
    "actorder": INT4 | {"actorder": "sideways"},
    "symmetric": INT4 | {"strategy": "tensor", "group_size": None, "symmetric": False},
}


@pytest.mark.parametrize("field", OTHER_FLOATS)
def test_other_float_weights_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"group_0\.weights\.{field}="):
        parse_weights(OTHER_FLOATS[field], TOKEN, "float-quantized")


@pytest.mark.parametrize("field", OTHER_INTEGERS)
def test_other_integer_weights_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"group_0\.weights\.{field}="):
        parse_weights(OTHER_INTEGERS[field], None, "pack-quantized")


def test_four_bit_floats_are_refused() -> None:
    weights = FLOAT | {"num_bits": 4}
    with pytest.raises(UnsupportedModelError, match=r"group_0\.weights="):
        parse_weights(weights, None, "float-quantized")


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        (INT4 | {"num_bits": 8}, {"num_bits": 8, "type": "int", "strategy": "token"}),
        (INT4, TOKEN),
        (FLOAT, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
        (FLOAT, TOKEN | {"num_bits": 4}),
        (FLOAT, GROUPS),
        (FLOAT, STATIC | {"dynamic": True}),
        (FLOAT, TOKEN | {"dynamic": "local"}),
        (FLOAT, TOKEN | {"dynamic": False}),
        (IN_BLOCKS, TOKEN),
        (IN_BLOCKS, GROUPS | {"group_size": 64}),
        (FLOAT, "float8"),
    ],
)
def test_other_inputs_are_refused(weights: Any, inputs: Any) -> None:
    stored_as = "float-quantized" if weights["type"] == "float" else "int-quantized"
    with pytest.raises(UnsupportedModelError, match=r"group_0\.input_activations"):
        parse_weights(weights, inputs, stored_as)


def test_other_groups_are_refused() -> None:
    given = settings(FLOAT, TOKEN, "float-quantized")
    for field, value in (
        ("output_activations", STATIC),
        ("targets", ["LlamaAttention"]),
        ("targets", ["Embedding"]),
        ("weights", None),
    ):
        group = given["config_groups"]["group_0"] | {field: value}
        with pytest.raises(UnsupportedModelError, match=rf"config_groups\.group_0\.{field}="):
            parse(given | {"config_groups": {"group_0": group}})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weight_packed", torch.zeros(ROWS, COLUMNS // 8 + 1, dtype=torch.int32)),
        ("weight_packed", torch.zeros(ROWS, COLUMNS // 8)),
        ("weight_shape", torch.tensor([COLUMNS, ROWS])),
        ("weight_shape", torch.tensor([1, ROWS, COLUMNS])),
        ("weight_scale", torch.ones(ROWS, 1)),
        ("weight_scale", torch.full((ROWS, COLUMNS // 32), float("nan"))),
        ("weight_zero_point", torch.zeros(ROWS, COLUMNS // 32, dtype=torch.int32)),
        ("weight_zero_point", torch.zeros(ROWS // 8, COLUMNS // 32, dtype=torch.int8)),
    ],
)
def test_broken_packed_tensors_are_refused(name: str, tensor: Tensor) -> None:
    weights = INT4 | {"symmetric": False}
    source, _ = compress(weights, "pack-quantized")
    method = parse_weights(weights, None, "pack-quantized")
    with pytest.raises(CorruptCheckpointError, match=f"tensor {MODULE}.{name} "):
        read_rows(method, source.replaced(**{name: tensor}), SHAPE)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weight", torch.zeros(SHAPE)),
        ("weight", torch.zeros(ROWS, 8, dtype=torch.int8)),
        ("weight_scale", torch.ones(ROWS)),
        ("weight_zero_point", torch.zeros(ROWS, 1)),
    ],
)
def test_broken_bytes_are_refused(name: str, tensor: Tensor) -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
    source, _ = compress(weights, "int-quantized")
    method = parse_weights(weights, None, "int-quantized")
    with pytest.raises(CorruptCheckpointError, match=f"tensor {MODULE}.{name} "):
        read_rows(method, source.replaced(**{name: tensor}), SHAPE)
