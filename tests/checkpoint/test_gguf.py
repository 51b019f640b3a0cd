"""Tests of GGUF files, written with llama.cpp's package and read with our own code."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Number

from slotzero.checkpoint.gguf import GgufCheckpoint, halves_from_pairs
from slotzero.checkpoint.gguf_header import BLOCK_TYPES, map_file, parse_header
from slotzero.checkpoint.gguf_names import llama3_factors, llama3_scaling
from slotzero.checkpoint.source import open_checkpoint
from slotzero.errors import ConfigError, CorruptCheckpointError, UnsupportedModelError
from slotzero.models.families.family import parse_config
from slotzero.models.tensors import expected_tensors

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 32, 64, 4, 2, 2, 40
LAYER = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def random_array(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def write_model(
    path: Path,
    arch: str = "llama",
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, float | str] | None = None,
    **sizes: int,
) -> Path:
    """Write a small model; `tensors` and `metadata` are added or replace its own."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(sizes.get("layers", LAYERS))
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(f"{arch}.{key}", value)
    arrays = {"token_embd.weight": random_array(VOCAB, HIDDEN)}
    arrays["output_norm.weight"] = random_array(HIDDEN)
    for layer in range(LAYERS):
        for name, shape in LAYER.items():
            arrays[f"blk.{layer}.{name}.weight"] = random_array(*shape)
    for name, array in (arrays | dict(tensors or {})).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_blocks(path: Path, number: Number, blocks: np.ndarray) -> Path:
    """Write a model whose lm_head is stored as `blocks`, bytes of the number type `number`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", random_array(VOCAB, HIDDEN))
    writer.add_tensor("output.weight", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.mark.parametrize("type_id", BLOCK_TYPES)
def test_our_block_sizes_are_those_of_the_format(type_id: int) -> None:
    block = BLOCK_TYPES[type_id]
    assert Number(type_id).name == block.name
    assert gguf.GGML_QUANT_SIZES[Number(type_id)] == (block.block_len, block.block_bytes)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # random bytes include NaN
@pytest.mark.parametrize("type_id", BLOCK_TYPES)
def test_every_number_type_reads_as_the_package_reads_it(type_id: int, tmp_path: Path) -> None:
    block, number = BLOCK_TYPES[type_id], Number(type_id)
    rows, row_blocks = 600, 3  # more than our reader decodes at once, for blocks of 256
    shape = (rows, row_blocks * block.block_bytes)
    blocks = np.random.default_rng(type_id).integers(0, 256, shape, dtype=np.uint8)
    checkpoint = GgufCheckpoint(write_blocks(tmp_path / "one.gguf", number, blocks))
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, number).copy())

    got = checkpoint.read("lm_head.weight")

    assert got.dtype == torch.float32
    assert got.shape == (rows, row_blocks * block.block_len)
    assert torch.equal(got.nan_to_num(7.0), expected.reshape(got.shape).nan_to_num(7.0))


def test_metadata_equals_that_of_the_package(model: Path) -> None:
    header = parse_header(map_file(model), model)
    reader = gguf.GGUFReader(model)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents(), key
    for tensor in reader.tensors:
        stored = header.tensors[tensor.name]
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert (stored.start, stored.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_config_and_names_are_those_of_hugging_face(model: Path) -> None:
    checkpoint = GgufCheckpoint(model)
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["head_dim"] == HIDDEN // HEADS
    assert checkpoint.config["dtype"] == "float32"
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert checkpoint.config["tie_word_embeddings"] is True
    expected = expected_tensors(checkpoint.config)
    assert {name: tuple(checkpoint.read(name).shape) for name in checkpoint.names()} == expected


def test_a_small_quantised_file_is_served_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_checkpoint("smollm2").config["dtype"] == "float32"
    monkeypatch.setattr("slotzero.checkpoint.gguf._SMALL_BYTES", 500 << 20)
    assert open_checkpoint("smollm2").config["dtype"] == "float16"


def llama_cpp_order(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of Q or K as llama.cpp's converter does."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_the_order_of_rotated_rows_is_undone(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape)
    assert torch.equal(halves_from_pairs(llama_cpp_order(rows, 3), 3), rows)
    assert not torch.equal(llama_cpp_order(rows, 3), rows)


GRANITE = {
    "attention.scale": 0.25, "embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 8.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "metadata"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("smollm3", {}), ("granite", GRANITE),
     ("arcee", {})],
)  # fmt: skip
def test_some_have_their_rows_in_another_order(
    arch: str, metadata: dict[str, float], tmp_path: Path
) -> None:
    query, key = torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN // 2, HIDDEN)
    bias = torch.randn(HIDDEN)
    stored_query, stored_key, stored_bias = query, key, bias
    if not arch.startswith("qwen"):
        stored_query, stored_key = llama_cpp_order(query, HEADS), llama_cpp_order(key, KV_HEADS)
        stored_bias = llama_cpp_order(bias, HEADS)
    tensors = {
        "blk.1.attn_q.weight": stored_query.numpy(),
        "blk.1.attn_k.weight": stored_key.numpy(),
        "blk.1.attn_q.bias": stored_bias.numpy(),
    }
    checkpoint = GgufCheckpoint(write_model(tmp_path / "m.gguf", arch, tensors, metadata))
    attention = "model.layers.1.self_attn"
    assert torch.equal(checkpoint.read(f"{attention}.q_proj.weight"), query)
    assert torch.equal(checkpoint.read(f"{attention}.k_proj.weight"), key)
    assert torch.equal(checkpoint.read(f"{attention}.q_proj.bias"), bias)


def test_the_factors_of_granite_come_from_metadata(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "granite", metadata=GRANITE)
    model = parse_config(GgufCheckpoint(path).config)
    (group,) = model.groups
    assert (model.embedding_scale, model.logits_scale, group.heads.scale) == (12.0, 0.125, 0.25)
    assert model.layers[0].mlp.down_scale == model.layers[0].mixer.scales.out == 0.5
    with pytest.raises(CorruptCheckpointError, match=r"granite\.attention\.scale is None"):
        GgufCheckpoint(write_model(tmp_path / "n.gguf", "granite"))


def test_every_fourth_layer_of_smollm3_is_not_rotated(tmp_path: Path) -> None:
    """Files do not say so: it is part of the architecture."""
    checkpoint = GgufCheckpoint(write_model(tmp_path / "m.gguf", "smollm3", layers=5))
    layers = parse_config(checkpoint.config).layers
    assert [layer.mixer.is_rotated for layer in layers] == [True, True, True, False, True]


def test_the_mlp_of_arcee_has_no_gate(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_model(tmp_path / "m.gguf", "arcee"))
    names = {name for name in checkpoint.names() if "gate_proj" not in name}
    assert names == set(expected_tensors(checkpoint.config))


def test_qwen3_norms_and_an_untied_head_are_found(tmp_path: Path) -> None:
    tensors = {"output.weight": random_array(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.attn_{kind}_norm.weight": random_array(8) for kind in "qk"}
    checkpoint = GgufCheckpoint(write_model(tmp_path / "m.gguf", "qwen3", tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert set(checkpoint.names()) == set(expected_tensors(checkpoint.config))


def test_a_file_cut_off_in_its_last_tensor_names_it(model: Path, tmp_path: Path) -> None:
    last = max(parse_header(map_file(model), model).tensors.items(), key=lambda item: item[1].start)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[: last[1].start + last[1].num_bytes - 1])
    with pytest.raises(CorruptCheckpointError, match=rf"cut\.gguf is truncated: tensor {last[0]}"):
        GgufCheckpoint(cut)


@pytest.mark.parametrize("num_bytes", [0, 3, 7, 12, 24, 30, 100, 250, 1000])
def test_a_file_cut_off_in_its_header_is_refused(
    num_bytes: int, model: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:num_bytes])
    with pytest.raises(CorruptCheckpointError, match=r"cut\.gguf"):
        GgufCheckpoint(cut)


def test_false_lengths_are_refused(model: Path, tmp_path: Path) -> None:
    lying = tmp_path / "lying.gguf"
    content = bytearray(model.read_bytes())
    content[24:32] = (2**63).to_bytes(8, "little")  # the length of the first key
    lying.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="header is longer than"):
        GgufCheckpoint(lying)


@pytest.mark.parametrize(("start", "error"), [(b"PK34", CorruptCheckpointError), (None, None)])
def test_a_file_of_another_format_is_refused(
    start: bytes | None, error: type | None, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    content = model.read_bytes()
    other.write_bytes(start + content[4:] if start else content[:4] + b"\x01" + content[5:])
    with pytest.raises(error or UnsupportedModelError, match=r"not a GGUF file|version 1"):
        GgufCheckpoint(other)


def test_an_unknown_number_type_names_its_tensor(tmp_path: Path) -> None:
    blocks = np.zeros((4, 18), np.uint8)
    path = write_blocks(tmp_path / "iq.gguf", Number.IQ4_NL, blocks)
    with pytest.raises(UnsupportedModelError, match=r"output\.weight has number type 20"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("arch", "metadata", "tensor", "message"),
    [
        ("gemma2", {}, None, "architecture 'gemma2'"),
        ("llama", {"expert_count": 8}, None, r"expert_count is 8"),
        ("llama", {"rope.scaling.type": "longrope"}, None, "'longrope'"),
        ("llama", {"rope.dimension_count": 4}, None, "rope.dimension_count"),
        ("llama", {}, "blk.0.ffn_gate_exps.weight", r"blk\.0\.ffn_gate_exps\.weight"),
        ("llama", {}, "rope_freqs.weight", "values of Llama 3's RoPE scaling"),
    ],
)
def test_unsupported_metadata_is_refused_by_name(
    arch: str, metadata: dict[str, Any], tensor: str | None, message: str, tmp_path: Path
) -> None:
    tensors = {tensor: np.array([1.0, 2.0, 9.0, 3.0], np.float32)} if tensor else {}
    path = write_model(tmp_path / "m.gguf", arch, tensors, metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        GgufCheckpoint(path)


def test_scalings_come_from_metadata(tmp_path: Path) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    assert GgufCheckpoint(write_model(tmp_path / "y.gguf", "qwen2", None, yarn)).config[
        "rope_scaling"
    ] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert GgufCheckpoint(write_model(tmp_path / "l.gguf", "llama", None, linear)).config[
        "rope_scaling"
    ] == {"rope_type": "linear", "factor": 2.0}
    window = {"attention.sliding_window": 16}
    config = GgufCheckpoint(write_model(tmp_path / "m.gguf", "llama", None, window)).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


def test_llama3_scaling_is_recognised_by_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert llama3_scaling(llama3_factors(scaling, 500000.0, 32), 500000.0) == scaling
    assert llama3_scaling([1.0] * 32, 500000.0) is None
    factors = np.array(llama3_factors(scaling, 500000.0, 4), np.float32)
    path = write_model(
        tmp_path / "m.gguf", "llama", {"rope_freqs.weight": factors}, {"rope.freq_base": 500000.0}
    )
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in checkpoint.names()


@pytest.mark.slow
def test_llama3_factors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(64) / 64)
    ours = torch.tensor(llama3_factors(scaling, 500000.0, 64))
    torch.testing.assert_close(plain / ours, scaled, rtol=1e-5, atol=0.0)


def test_the_error_for_a_split_file_says_how_to_join_it(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", random_array(VOCAB, HIDDEN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="one of 3 files; join them"):
        GgufCheckpoint(path)


def test_a_tensor_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"no tensor lm_head\.weight"):
        GgufCheckpoint(model).read("lm_head.weight")


def test_without_the_package_plain_numbers_still_load(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert GgufCheckpoint(model).read("model.norm.weight").shape == (HIDDEN,)
    with pytest.raises(ConfigError, match=r"pip install 'slotzero\[gguf\]'"):
        open_checkpoint("smollm2").read("model.embed_tokens.weight")


def test_the_default_model_opens_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # its reader would take four seconds
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.name == "smollm2"
    assert checkpoint.eos_token_ids == (2,)
    assert set(checkpoint.names()) == set(expected_tensors(checkpoint.config))


@pytest.mark.slow
def test_the_default_model_names_the_capital_of_france() -> None:
    """transformers runs our tensors: with wrong numbers, names or row order, it would write
    gibberish."""
    from transformers.models.llama import modeling_llama as llama

    checkpoint = open_checkpoint("smollm2")
    config = llama.LlamaConfig(**checkpoint.config)
    with torch.device("meta"):  # skip random weights, which are replaced at once
        network = llama.LlamaForCausalLM(config)
    network.model.rotary_emb = llama.LlamaRotaryEmbedding(config)
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    network.load_state_dict(weights, assign=True)
    tokenizer = checkpoint.tokenizer()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(question), add_special_tokens=False)
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")
    with torch.inference_mode():
        logits = network(torch.tensor([prompt + answer])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
