"""GPTQ: weights packed as AutoGPTQ and GPTQModel pack them are read exactly."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from memory_source import MODULE, MemorySource, read_numbers, read_rows
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.quantization.gptq import GptqMethod

ROWS, COLUMNS, GROUP = 48, 128, 32
SHAPE = ROWS, COLUMNS
PLAIN = {"bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}


def parse(**changes: Any) -> GptqMethod:
    given = {"quant_method": "gptq", **PLAIN, **changes}
    return GptqMethod.parse({"dtype": "float16", "quantization_config": given})


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the first axis, the earlier ones in the lower bits of a word."""
    per_word = 32 // bits
    words = torch.zeros(len(codes) // per_word, codes.shape[1], dtype=torch.int64)
    for place in range(per_word):
        words |= codes[place::per_word].long() << (bits * place)
    return words.to(torch.int32)


class Packed:
    """A random weight and its tensors in a checkpoint."""

    def __init__(self, bits: int, group: int, is_symmetric: bool, is_ordered: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        top, groups = 1 << bits, COLUMNS // group
        codes = torch.randint(0, top, (COLUMNS, ROWS), generator=generator)
        zeros = torch.full((groups, ROWS), top // 2)
        if not is_symmetric:
            zeros = torch.randint(0, top, (groups, ROWS), generator=generator)
            zeros[0, 3:6] = torch.tensor([0, 1, 0])  # those of 0 borrow from their neighbours
        scales = torch.rand(groups, ROWS, generator=generator).half()
        order = torch.arange(COLUMNS) // group
        if is_ordered:
            order = order[torch.randperm(COLUMNS, generator=generator)]
        self.numbers = (scales[order].double() * (codes - zeros[order])).float().T
        stored = pack(zeros.T, bits).T.contiguous()
        self.tensors = {
            "qweight": pack(codes, bits),
            "qzeros": stored - (0x11111111 if bits == 4 else 0x01010101),
            "scales": scales,
            "g_idx": order.int(),
        }
        self.zeros_v2 = stored

    def source(self, **changes: Tensor) -> MemorySource:
        return MemorySource(self.tensors | changes, MODULE)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [GROUP, -1])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_numbers_are_those_that_were_packed(
    bits: int, group: int, is_symmetric: bool, is_ordered: bool
) -> None:
    packed = Packed(bits, COLUMNS if group == -1 else group, is_symmetric, is_ordered)
    settings = {"bits": bits, "group_size": group, "sym": is_symmetric, "desc_act": is_ordered}
    numbers = read_numbers(parse(**settings), packed.source(), SHAPE)
    assert torch.equal(numbers, packed.numbers)
    second = parse(**settings, checkpoint_format="gptq_v2")
    source = packed.source(qzeros=packed.zeros_v2)
    assert torch.equal(read_numbers(second, source, SHAPE), packed.numbers)


def test_a_table_of_groups_is_not_needed_without_an_order() -> None:
    packed = Packed(4, GROUP, True, False)
    source = packed.source().replaced(g_idx=None)
    assert torch.equal(read_numbers(parse(), source, SHAPE), packed.numbers)


def test_scales_are_kept_in_float16_if_that_is_the_type_of_the_model() -> None:
    given = {"quantization_config": PLAIN}
    halves = [GptqMethod.parse(given | {"torch_dtype": "float16"}), GptqMethod.parse(given)]
    assert [method.scale_dtype for method in halves] == [torch.float16] * 2
    method = GptqMethod.parse(given | {"dtype": "bfloat16"})
    packed = Packed(4, GROUP, True, False)
    source = packed.source(scales=(packed.tensors["scales"].float() * 2.0**-20).bfloat16())
    numbers = read_numbers(method, source, SHAPE)
    expected = source.read(f"{MODULE}.scales").float().repeat_interleave(GROUP, 0).T
    codes = read_rows(method, source, SHAPE).codes
    assert torch.equal(numbers, (codes.float() - 8) * expected)


def test_only_linear_layers_of_the_decoder_are_quantised() -> None:
    method = parse()
    for quantised in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.7.down_proj"):
        assert method.format_of(f"model.layers.3.{quantised}") is not None
    for plain in ("mlp.gate", "mlp.router", "mlp.shared_expert_gate", "input_layernorm",
                  "router.proj", "mixer.conv1d"):  # fmt: skip
        assert method.format_of(f"model.layers.3.{plain}") is None
    for outside in ("lm_head", "model.embed_tokens", "model.norm"):
        assert method.format_of(outside) is None


def test_modules_may_be_left_out() -> None:
    chosen = parse(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]])
    assert chosen.format_of("model.layers.0.self_attn.q_proj") is not None
    assert chosen.format_of("model.layers.0.self_attn.o_proj") is None
    for left_out in (
        parse(modules_to_not_convert=["model.layers.0"]),
        parse(dynamic={"-:.*self_attn.*": {}}),
    ):
        assert left_out.format_of("model.layers.0.self_attn.q_proj") is None
        assert left_out.format_of("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 3),
        ("bits", "4"),
        ("bits", None),
        ("group_size", 0),
        ("group_size", "128"),
        ("group_size", None),
        ("sym", "yes"),
        ("desc_act", 1),
        ("checkpoint_format", "marlin"),
        ("is_marlin_format", True),
        ("pack_dtype", "int16"),
        ("lm_head", True),
        ("dynamic", {"+:.*down_proj": {"bits": 8}}),
        ("dynamic", ["-:.*"]),
        ("dynamic", {"-:(": {}}),
        ("modules_to_not_convert", [1]),
        ("modules_in_block_to_quantize", "q_proj"),
    ],
)
def test_other_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config has {field}="):
        parse(**{field: value})


BROKEN: Mapping[str, Tensor] = {
    "qweight": torch.zeros(COLUMNS // 8, ROWS + 1, dtype=torch.int32),
    "scales": torch.full((COLUMNS // GROUP, ROWS), float("nan")).half(),
    "qzeros": torch.zeros(COLUMNS // GROUP, ROWS, dtype=torch.int32),
    "g_idx": torch.zeros(COLUMNS, dtype=torch.int32),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tensors_are_refused(name: str) -> None:
    source = Packed(4, GROUP, True, False).source(**{name: BROKEN[name]})
    with pytest.raises(CorruptCheckpointError, match=f"tensor {MODULE}.{name} "):
        read_rows(parse(), source, SHAPE)


def test_the_wrong_group_size_is_refused() -> None:
    source = Packed(4, GROUP, True, False).source()
    with pytest.raises(CorruptCheckpointError, match=r"up_proj\.scales has shape \[4, 48\]"):
        read_rows(parse(group_size=64), source, SHAPE)


def test_wrong_types_are_refused() -> None:
    packed = Packed(4, GROUP, True, False)
    for name, kind in (("qweight", torch.int64), ("qzeros", torch.int64), ("scales", torch.int32)):
        source = packed.source(**{name: packed.tensors[name].to(kind)})
        with pytest.raises(CorruptCheckpointError, match=rf"up_proj\.{name} is torch\.int"):
            read_rows(parse(), source, SHAPE)


def test_scales_too_large_for_float16_are_refused() -> None:
    source = Packed(4, GROUP, True, False).source(scales=torch.full((4, ROWS), 1e5))
    with pytest.raises(CorruptCheckpointError, match="scales holds a number that is not finite"):
        read_rows(parse(), source, SHAPE)


def test_symmetric_weights_must_have_the_middle_as_zero() -> None:
    source = Packed(4, GROUP, False, False).source()
    with pytest.raises(CorruptCheckpointError, match=r"up_proj\.qzeros .* sym=true"):
        read_rows(parse(), source, SHAPE)


def test_an_order_must_be_announced_and_name_groups_that_exist() -> None:
    packed = Packed(4, GROUP, True, True)
    with pytest.raises(CorruptCheckpointError, match=r"up_proj\.g_idx .* desc_act=false"):
        read_rows(parse(), packed.source(), SHAPE)
    for wrong in (packed.tensors["g_idx"] + 1, packed.tensors["g_idx"] - 1):
        with pytest.raises(CorruptCheckpointError, match=r"up_proj\.g_idx holds groups from"):
            read_rows(parse(desc_act=True), packed.source(g_idx=wrong), SHAPE)
