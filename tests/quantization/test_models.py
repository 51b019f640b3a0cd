"""Whole models with quantised weights: their answers are those of the numbers that codes stand for.

The oracle is the same model with its weights rounded the same way and kept plain.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import VARIANTS
from safetensors.torch import load_file, save_file
from torch import Tensor
from traced import Traced, prompts_of

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.tiny import tiny_names
from slotzero.errors import ConfigError, UnsupportedModelError
from slotzero.executor import build
from slotzero.kernels.cpu import kernels as cpu_kernels
from slotzero.kernels.cpu.kernels import CpuKernels, is_integer
from slotzero.kernels.quantized import dequantise, quantise
from slotzero.kernels.weights import JoinedWeight, QuantizedWeight, WeightFormat
from slotzero.models import reading
from slotzero.models.families.gemma4_assistant import TINY, parse_assistant
from slotzero.models.param import Stored
from slotzero.quantization.method import is_layer_linear
from slotzero.quantization.quantization import Quantization

pytestmark = pytest.mark.slow

FEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)  # a few steps of decode
SETTINGS: dict[str, Any] = {"backend": "eager", "max_num_seqs": 2, "max_num_batched_tokens": 16}
INT4 = WeightFormat("uint4", 32, 8, scale_dtype=torch.float16)
Convert = Callable[[str, Tensor], dict[str, Tensor]]


def answers(model: str | Path, **settings: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Return the tokens and logits of two requests, one with its prompt in chunks."""
    traced = Traced(str(model), **{**SETTINGS, **settings})
    vocab = traced.engine.worker.vocab_size
    tokens = traced.generate(prompts_of([20, 5], vocab), FEW)
    return tokens, [torch.stack(rows) for rows in traced.logits.values()]


def is_quantised(model: str | Path, **settings: Any) -> bool:
    worker = Traced(str(model), **{**SETTINGS, **settings}).engine.worker
    found = [w for layer in worker.weights.layers for block in layer if block for w in block]
    return any(isinstance(weight, QuantizedWeight | JoinedWeight) for weight in found)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, weights are rounded as before and kept in the compute type."""

    def unpack() -> None:
        choose, read = Quantization.format_of, reading._read_plain
        formats: dict[str, WeightFormat | None] = {}

        def keep(self: Quantization, module: str, columns: int, is_sensitive: bool) -> None:
            formats[module] = choose(self, module, columns, is_sensitive)

        def rounded(one: Stored, checkpoint: Any, quantization: Quantization) -> Tensor:
            plain = read(one, checkpoint, quantization)
            format = formats.get(re.sub(r"experts\.\d+", "experts.0", one.module))
            return plain if format is None else dequantise(quantise(plain, format), format)

        monkeypatch.setattr(Quantization, "format_of", keep)
        monkeypatch.setattr(reading, "_read_plain", rounded)

    return unpack


@pytest.fixture
def plain_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of linear layers are not rounded. (If they are, a value between two codes is rounded
    to either of them after the least change, and two runs cannot be compared.)"""
    monkeypatch.setattr(CpuKernels, "round_input", lambda _, x, weight: x)


@pytest.fixture(autouse=True)
def plain_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of integer codes are computed in float32, for the same reason."""
    monkeypatch.setattr(cpu_kernels, "is_integer", lambda format: False)


SCALED = ("tiny:falcon-h1", "tiny:granite-hybrid", "tiny:mimo-v2")
"""Their multipliers change scales or numbers, which round differently."""


@pytest.mark.usefixtures("plain_inputs")
@pytest.mark.parametrize(
    "model", [name for name in tiny_names() if name.removeprefix("tiny:") not in VARIANTS]
)
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_converted_weights_compute_as_the_numbers_they_stand_for(
    model: str, quantization: str, unpacked: Callable[[], None]
) -> None:
    """To the bit: the C++ kernels decode a code and then use it as they use a plain weight."""
    packed = answers(model, quantization=quantization)
    unpacked()
    plain = answers(model, quantization=quantization)
    assert packed[0] == plain[0]
    for one, other in zip(packed[1], plain[1], strict=True):
        if model in SCALED:
            assert (one - other).abs().max() < 1e-4
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:gpt-oss"])
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_activations_in_8_bits_change_results_a_little(
    model: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answers(model, quantization=quantization)[1]
    monkeypatch.setattr(cpu_kernels, "is_integer", is_integer)
    rounded = answers(model, quantization=quantization)[1]
    for one, other in zip(rounded, plain, strict=True):
        error = (one[0] - other[0]).norm() / other[0].norm()
        assert 1e-5 < error < 0.05


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:gpt-oss", "tiny:deepseek-v3"])
def test_rounded_inputs_change_results_a_little(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs in FP8 keep three bits of their fractions."""
    rounded = answers(model, quantization="fp8")[1]
    monkeypatch.setattr(CpuKernels, "round_input", lambda _, x, weight: x)
    plain = answers(model, quantization="fp8")[1]
    for one, other in zip(rounded, plain, strict=True):
        error = (one[0] - other[0]).norm() / other[0].norm()
        assert 1e-4 < error < 0.3


# Checkpoints


def packed_ints(bits: int, group: int) -> Convert:
    """The layout of compressed-tensors, with float16 scales."""
    format = WeightFormat(
        "uint4" if bits == 4 else "uint8", group, 1 << (bits - 1), scale_dtype=torch.float16
    )

    def convert(module: str, weight: Tensor) -> dict[str, Tensor]:
        rows = quantise(weight, format)
        columns, per_word = weight.shape[1], 32 // bits
        codes = torch.nn.functional.pad(rows.codes, (0, -columns % per_word)).long()
        powers = torch.tensor([1 << bits * i for i in range(per_word)])
        words = (codes.view(len(codes), -1, per_word) * powers).sum(-1)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words)
        return {
            f"{module}.weight_packed": words.int(),
            f"{module}.weight_scale": rows.scales.half(),
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }

    return convert


def fp8_blocks(module: str, weight: Tensor) -> dict[str, Tensor]:
    height, width = (-(-size // 128) for size in weight.shape)
    scales = torch.rand(height, width) * 0.01 + 0.001
    each = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    codes = (weight / each[:, : weight.shape[1]]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}


def fp8_static(module: str, weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / 448
    return {
        f"{module}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{module}.weight_scale": scale,
        f"{module}.input_scale": torch.tensor(0.05),
    }


def compressed(bits: int, group: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        **more,
    }


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}


def write(
    folder: Path,
    oracle: Any,
    quantization: dict[str, Any],
    convert: Convert,
    chosen: Callable[[str], bool] = is_layer_linear,
) -> Path:
    """Write the oracle's model with the chosen modules quantised."""
    shutil.copytree(oracle.folder, folder)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and name.endswith(".weight") and chosen(module):
            stored |= convert(module, tensor.float())
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "bits", "group"), [("llama", 4, 32), ("qwen3", 8, 16), ("deepseek-v3", 4, 16)]
)
def test_a_packed_checkpoint_stays_packed(
    family: str, bits: int, group: int, oracles: Any, tmp_path: Path
) -> None:
    convert = packed_ints(bits, group)
    folder = write(tmp_path / "model", oracles(family), compressed(bits, group), convert)
    assert is_quantised(folder)
    assert not is_quantised(folder, quantization="none")
    packed, plain = answers(folder), answers(folder, quantization="none")
    assert packed[0] == plain[0]
    for one, other in zip(packed[1], plain[1], strict=True):
        assert torch.equal(one, other)
    assert answers(folder, backend="cpu")[0] == packed[0]


@pytest.mark.usefixtures("plain_inputs")
def test_fp8_blocks_stay_packed(oracles: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", oracles("deepseek-v3"), FP8_BLOCKS, fp8_blocks)
    assert is_quantised(folder)
    packed, plain = answers(folder), answers(folder, quantization="none")
    assert packed[0] == plain[0]
    for one, other in zip(packed[1], plain[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("plain_inputs")
@pytest.mark.parametrize(
    ("settings", "convert"),
    [
        (compressed(4, 16), packed_ints(4, 16)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_static),
        (FP8_BLOCKS, fp8_blocks),
    ],
    ids=["int4", "fp8", "fp8 blocks"],
)
def test_parts_of_a_fused_tensor_stay_packed(
    settings: dict[str, Any], convert: Convert, oracles: Any, tmp_path: Path
) -> None:
    """Phi-3 stores queries, keys and values in one tensor, and gates with values in another."""
    folder = write(tmp_path / "model", oracles("phi3"), settings, convert)
    assert is_quantised(folder)
    packed, plain = answers(folder), answers(folder, quantization="none")
    assert packed[0] == plain[0]
    for one, other in zip(packed[1], plain[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("mimo-v2", {}), ("mimo-v2", {"enable_dp_attention": True})],
)
def test_ranks_share_out_codes_and_scales(
    family: str, more: dict[str, Any], oracles: Any, tmp_path: Path
) -> None:
    """Groups that a rank's part of the input features does not divide are cut into smaller ones.

    With groups of 24, products are computed in float32: in integers, the parts of two ranks would
    round their activations in other chunks.
    """
    folder = write(tmp_path / "model", oracles(family), compressed(4, 24), packed_ints(4, 24))
    assert tokens_of_ranks(str(folder), **more) == answers(folder)[0]


def tokens_of_ranks(model: str, **settings: Any) -> list[list[int]]:
    """Return the tokens of the requests of `answers` from two ranks."""
    more = {"skip_tokenizer_init": True, "show_progress": False, "tensor_parallel_size": 2}
    llm = LLM(model, **{**SETTINGS, **more, **settings})
    try:
        prompts = prompts_of([20, 5], llm.engine.worker.vocab_size)
        outputs = llm.generate(prompts, FEW, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]
    finally:
        llm.engine.rank_group.close()


def test_modules_of_one_product_may_have_different_formats(oracles: Any, tmp_path: Path) -> None:
    """Keys are left out here: queries, keys and values are three products then."""

    def chosen(module: str) -> bool:
        return is_layer_linear(module) and not module.endswith("k_proj")

    settings = compressed(4, 32, ignore=["lm_head", "re:.*k_proj"])
    folder = write(tmp_path / "model", oracles("llama"), settings, packed_ints(4, 32), chosen)
    assert answers(folder) and answers(folder)[0] == answers(folder, quantization="none")[0]
    assert answers(folder, backend="cpu")[0] == answers(folder)[0]


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_random_scattered_weights_are_split_over_ranks(
    is_symmetric: bool, oracles: Any, tmp_path: Path
) -> None:
    """A rank has the scales of all groups, and some of their input features."""
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
    config = json.loads((oracles("llama").folder / "config.json").read_text())
    config["quantization_config"] = settings | {"sym": is_symmetric}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert all(tokens_of_ranks(str(tmp_path), load_format="dummy"))


def test_progress_ends_at_the_total(
    oracles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of a layer share one scale of their inputs."""
    settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
    folder = write(tmp_path / "model", oracles("deepseek-v3"), settings, fp8_static)
    seen, load = list[tuple[int, int]](), build.load_weights

    def watched(*args: Any, **more: Any) -> Any:
        *first, _ = args
        return load(*first, lambda done, total: seen.append((done, total)), **more)

    monkeypatch.setattr(build, "load_weights", watched)
    assert is_quantised(folder)
    assert max(done for done, _ in seen) == seen[-1][0] == seen[-1][1]


def test_experts_of_a_layer_have_one_format(oracles: Any, tmp_path: Path) -> None:
    def chosen(module: str) -> bool:
        return is_layer_linear(module) and "experts.1." not in module

    settings = compressed(4, 16, ignore=["lm_head", "re:.*experts[.]1[.].*"])
    folder = tmp_path / "model"
    write(folder, oracles("deepseek-v3"), settings, packed_ints(4, 16), chosen)
    with pytest.raises(UnsupportedModelError, match=r"experts\.1\.gate_proj.*different formats"):
        answers(folder)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_of_zeros_may_be_stored(value: float, oracles: Any, tmp_path: Path) -> None:
    """AutoGPTQ stores one for every layer; any other bias is refused."""
    folder = write(tmp_path / "model", oracles("llama"), compressed(4, 32), packed_ints(4, 32))
    expected = answers(folder)[0]
    tensors = load_file(folder / "model.safetensors")
    rows = len(tensors["model.layers.0.self_attn.o_proj.weight_scale"])
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.full((rows,), value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if value == 0:
        assert answers(folder)[0] == expected
    else:
        with pytest.raises(UnsupportedModelError, match=r"o_proj\.bias is unknown"):
            answers(folder)


def test_what_is_quantised_is_not_converted(oracles: Any, tmp_path: Path) -> None:
    convert = packed_ints(4, 32)
    folder = write(tmp_path / "model", oracles("llama"), compressed(4, 32), convert)
    with pytest.raises(ConfigError, match="quantised already"):
        Traced(str(folder), **SETTINGS, quantization="fp8")


def test_float8_weights_without_scales_are_refused(oracles: Any, tmp_path: Path) -> None:
    """Here a vocabulary head that the config does not list as quantised."""
    folder = write(tmp_path / "model", oracles("llama"), FP8_BLOCKS, fp8_blocks)
    stored = load_file(file := folder / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is torch\.float8_e4m3fn"):
        answers(folder)


def test_a_head_beside_a_packed_tied_embedding_must_equal_it(oracles: Any, tmp_path: Path) -> None:
    """The head may be packed as well, or stored as numbers."""
    embedding, head = "model.embed_tokens", "lm_head"

    def chosen(module: str) -> bool:
        return module == embedding or is_layer_linear(module)

    settings = compressed(4, 32, ignore=[])
    settings["config_groups"]["group_0"]["targets"] = [embedding, head, "re:.*layers.*"]
    folder = write(tmp_path / "model", oracles("llama"), settings, packed_ints(4, 32), chosen)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(file := folder / "model.safetensors")
    del tensors[f"{head}.weight"]
    save_file(tensors, file, {"format": "pt"})
    expected = answers(folder)[0]
    packed = {n.replace(embedding, head): t for n, t in tensors.items() if embedding in n}
    rows = quantise(load_file(oracles("llama").folder / file.name)[f"{embedding}.weight"], INT4)
    numbers = dequantise(rows._replace(scales=rows.scales.half().float()), INT4)
    for same in (packed, {f"{head}.weight": numbers}):
        save_file(tensors | {name: t.clone() for name, t in same.items()}, file, {"format": "pt"})
        assert answers(folder)[0] == expected
    for other in (
        packed | {f"{head}.weight_scale": packed[f"{head}.weight_scale"] * 2},
        {f"{head}.weight": numbers + 1},
    ):
        save_file(tensors | {name: t.clone() for name, t in other.items()}, file, {"format": "pt"})
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs from"):
            answers(folder)


def test_quantised_heads_and_assistants_are_refused(tmp_path: Path) -> None:
    settings = {"quantization_config": FP8_BLOCKS}
    head = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, **settings}
    (tmp_path / "config.json").write_text(json.dumps(head))
    save_file({"midlayer.hidden_norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="quantised EAGLE head"):
        Traced("tiny:llama", **SETTINGS, speculative="eagle3", speculative_model=str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="quantised assistant"):
        parse_assistant({**TINY["gemma4-assistant"], **settings}, "name")


def test_an_unknown_scheme_is_refused_before_weights_are_read(tmp_path: Path, oracles: Any) -> None:
    shutil.copytree(oracles("llama").folder, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization_config"] = compressed(3, 32)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"num_bits=3"):
        Traced(str(tmp_path / "model"), **SETTINGS)


def test_the_default_model_is_kept_packed() -> None:
    """Q4_1 and Q8_0 as they are in the file, in a third of the memory, with the same logits."""
    settings = {**SETTINGS, "max_model_len": 128, "kv_cache_memory": 64 << 20}
    packed, plain = (
        Traced("smollm2", **settings, quantization=choice) for choice in ("auto", "none")
    )
    assert packed.engine.worker.weight_bytes < plain.engine.worker.weight_bytes / 3
    prompts = prompts_of([20, 5], 49152)
    assert packed.generate(prompts, FEW) == plain.generate(prompts, FEW)
    for one, other in zip(packed.logits.values(), plain.logits.values(), strict=True):
        assert torch.equal(torch.stack(one), torch.stack(other))


def test_the_cpu_kernels_are_the_ones_that_are_tested() -> None:
    assert isinstance(Traced("tiny:llama", **SETTINGS).engine.worker.kernels, CpuKernels)
