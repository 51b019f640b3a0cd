"""Tests of models with sliding windows against transformers, for every way to split steps.

Contexts are many windows long. Windows have 9 to 25 tokens and pages hold 16, so that pages leave
the window all the time.
"""

import json
from pathlib import Path

import pytest
import torch
from oracle import HYBRIDS
from safetensors.torch import load_file, save_file
from traced import Traced, expect_equal, prompts_of

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import CapacityError, UnsupportedModelError
from slotzero.kernels.quantized import QuantizedRows, dequantise, unpack_pairs
from slotzero.models.families.family import parse_config
from slotzero.pools.budget import Demand, GroupShape, split
from slotzero.quantization.mxfp4 import FORMAT

pytestmark = pytest.mark.slow

LENGTHS = [90, 1, 25, 130, 16, 48, 70, 7, 33]  # 9 rows


@pytest.mark.parametrize("family", HYBRIDS)
def test_batches_from_1_to_9(oracles, family):
    oracle = oracles(family)
    traced = Traced(oracle.path, backend="eager", max_num_seqs=9)
    prompts = prompts_of(LENGTHS, oracle.vocab_size)
    for rows in (1, 2, 3, 5, 9):
        expect_equal(traced, oracle, prompts[:rows], num_tokens=24)


@pytest.mark.parametrize(
    ("family", "backend", "chunk"),
    [
        *((family, "eager", chunk) for family in HYBRIDS for chunk in (5, 40)),
        ("gemma2", "cpu", 13),
    ],
)
def test_chunks_shorter_and_longer_than_the_window(oracles, family, backend, chunk):
    oracle = oracles(family)
    rows = 1 if backend == "cpu" else 2  # sizes to record
    traced = Traced(oracle.path, backend=backend, max_num_seqs=rows, max_num_batched_tokens=chunk)
    prompts = prompts_of([150, 3, 57], oracle.vocab_size)
    expect_equal(traced, oracle, prompts, num_tokens=20)
    traced.engine.check()


@pytest.mark.parametrize("family", HYBRIDS)
def test_prefixes_are_found_where_their_window_is(oracles, family):
    oracle = oracles(family)
    traced = Traced(oracle.path, backend="eager", max_num_seqs=4, max_num_batched_tokens=64)
    shared = prompts_of([112], oracle.vocab_size)[0]["prompt_token_ids"]
    tails = prompts_of([1, 9, 20], oracle.vocab_size, seed=5)
    prompts = [{"prompt_token_ids": shared + tail["prompt_token_ids"]} for tail in tails]
    branch = [{"prompt_token_ids": shared[:70] + tails[2]["prompt_token_ids"]}]
    for batch in (prompts, prompts, branch):
        expect_equal(traced, oracle, batch, num_tokens=12)
        traced.engine.check()
    assert traced.engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 112 * len(prompts)


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize(
    ("family", "backend"),
    [*((family, "eager") for family in ("gemma3", "gemma4", "gpt-oss")), ("gemma3", "cpu")],
)
def test_preemption(oracles, family, backend):
    oracle = oracles(family)
    settings = {"backend": backend, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    shapes = _shapes(oracle.path)
    least = sum((s.needed(160, 32) + 1) * s.num_bytes for s in shapes)
    traced = Traced(oracle.path, **settings, max_model_len=160, kv_cache_memory=int(1.3 * least))
    prompts = prompts_of([100, 60, 120, 50, 10, 110], oracle.vocab_size)
    expect_equal(traced, oracle, prompts, num_tokens=40)
    traced.engine.check()
    assert traced.engine.schedulers.num_preemptions > 0


def _shapes(path: str) -> list[GroupShape]:
    from slotzero.executor.limits import group_shapes

    config = parse_config(json.loads((Path(path) / "config.json").read_text()))
    return group_shapes(config.groups, 16, torch.float32)


def test_a_running_request_keeps_no_page_before_its_window():
    llm = LLM("tiny:gemma3", backend="eager", max_num_seqs=2, show_progress=False)
    engine = llm.engine
    engine.add("a", list(range(1, 200)), SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(60):
        engine.step()
    (request,) = engine.schedulers[0]._running
    full, sliding = request.pages
    first = (request.num_computed - 24 - 16) // 16  # a window of 24, and pages of 16
    assert all(full) and not any(sliding[:first]) and all(sliding[first + 2 :])
    table = engine.worker.tables["page_table_sliding"][request.slot]
    engine.worker.tables.apply()
    assert table[: len(sliding)].tolist() == sliding
    engine.cancel("a")
    engine.check()


def test_more_requests_fit_where_most_layers_slide():
    """The model has five sliding layers per full one, a window of 1,024, and 16k tokens a
    request."""
    page = {"page_size": 16, "num_kv_heads": 4, "width": 512, "dtype": torch.bfloat16}
    full = GroupShape("full", 4, **page)
    sliding = GroupShape("sliding", 20, window=1024, **page)
    length = 16384
    theory = (4 * length + 20 * 1024) * 4 * 512 * 2
    held = sum(s.held(length) * s.num_bytes for s in (full, sliding))
    everywhere = GroupShape("full", 24, **page).held(length) * 24 * 16 * 4 * 512 * 2
    assert held <= 1.15 * theory
    assert everywhere >= 3 * held
    demand = Demand(256, 8192, length, length, 131072)
    pages, _ = split([full, sliding], 40 << 30, demand)
    fitting = min((pages["full"] - 1) // full.held(length), (pages["sliding"] - 1 - 513) // 65)
    alone, _ = split([GroupShape("full", 24, **page)], 40 << 30, demand)
    assert fitting >= 3 * ((alone["full"] - 1) // 1024)


def test_a_split_can_be_set_and_is_kept():
    config = EngineConfig(
        model="tiny:gemma3", backend="eager", max_num_seqs=4, max_num_batched_tokens=32,
        kv_cache_memory=4 << 20, sliding_kv_memory=1 << 20, show_progress=False,
    )  # fmt: skip
    engine = Engine(config)
    sizes = {name: engine.worker.registry[f"kv_{name}"].nbytes for name in engine.limits.num_pages}
    assert sizes["sliding"] <= 1 << 20 and sum(sizes.values()) <= 4 << 20
    assert sizes["sliding"] > (1 << 20) - engine.worker.registry["kv_sliding"][:, 0].nbytes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache_memory": 20000}, ["window of 24", "--kv-cache-memory"]),
        ({"kv_cache_memory": 4 << 20, "sliding_kv_memory": 5000}, ["--sliding-kv-memory", "24"]),
        ({"kv_cache_memory": 1 << 20, "sliding_kv_memory": 1 << 20}, ["full layers", "lower"]),
    ],
)
def test_a_budget_too_small_is_refused(settings, words):
    with pytest.raises(CapacityError) as caught:
        Engine(EngineConfig(model="tiny:gemma3", backend="eager", show_progress=False, **settings))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sliding_window": 0}, ["sliding_window=0", "1 to"]),
        ({"sliding_window": None}, ["sliding_window=None"]),
        ({"sliding_window": 513}, ["sliding_window=513", "max_position_embeddings=512"]),
        ({"layer_types": ["full_attention"] * 3}, ["layer_types", "3 entries for 4"]),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, ["linear_attention"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0"]),
        ({"hidden_activation": "relu"}, ["hidden_activation='relu'"]),
    ],
)
def test_an_invalid_config_is_refused(fields, words):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config({**tiny_configs()["gemma3"], **fields})
    assert all(word in str(caught.value) for word in words), caught.value


MIXED = {"1": {"head_dim": 40}, "4": {"head_dim": 48}, "5": {"head_dim": 40}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_moe_block": True}, ["num_experts=None"]),
        (
            {
                "enable_moe_block": True,
                "moe_intermediate_size": 8,
                "num_experts": 2,
                "top_k_experts": 3,
            },
            ["num_experts=2", "top_k_experts=3"],
        ),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 1},
            ["moe_intermediate_size=None", "positive"],
        ),
        ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention='all'"]),
        ({"query_pre_attn_scalar": 20}, ["query_pre_attn_scalar=20"]),
        ({"per_layer_config": MIXED}, ["per_layer_config", "full layers differ"]),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, ["per_layer_config", "sliding", "differ"]),
        (
            {"per_layer_config": {str(i): {"intermediate_size": 9} for i in (1, 4, 5)}},
            ["per_layer_config", "intermediate_size=9", "num_key_value_heads"],
        ),
        (
            {"per_layer_config": {str(i): {"num_key_value_heads": 3} for i in (1, 4, 5)}},
            ["num_key_value_heads=3", "full"],
        ),
        ({"per_layer_config": None, "global_head_dim": 41}, ["head_dim=41", "even"]),
        ({"num_kv_shared_layers": 5}, ["num_kv_shared_layers=5", "no full layer"]),
        ({"num_kv_shared_layers": 6}, ["num_kv_shared_layers=6", "num_hidden_layers=6"]),
        ({"num_kv_shared_layers": -1}, ["num_kv_shared_layers=-1"]),
        ({"vocab_size_per_layer_input": 258}, ["vocab_size_per_layer_input=258", "259"]),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, ["layer_types ends"]),
        ({"rope_parameters": None}, ["rope_parameters", "full layers"]),
        ({"rope_parameters": {"full_attention": {}}}, ["rope_parameters", "sliding layers"]),
    ],
)
def test_an_invalid_gemma4_config_is_refused(fields, words):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config({**tiny_configs()["gemma4"], **fields})
    assert all(word in str(caught.value) for word in words), caught.value


GEMMA4_FIELDS = {
    "per_layer_config": {"0": {"head_dim": 8}},
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
}


@pytest.mark.parametrize("field", GEMMA4_FIELDS)
def test_other_families_refuse_the_fields_of_gemma4(field):
    with pytest.raises(UnsupportedModelError, match=field):
        parse_config({**tiny_configs()["gemma3"], field: GEMMA4_FIELDS[field]})


def test_layers_that_own_no_kv_have_no_pages():
    """tiny:gemma4 has layers s f s | s f f: the last three read the KV of layers 2 and 1."""
    llm = LLM("tiny:gemma4", backend="eager", max_num_seqs=2, show_progress=False)
    worker = llm.engine.worker
    full, sliding = worker.model.groups
    assert (full.layers, full.readers, sliding.layers, sliding.readers) == (
        (1,), (4, 5), (0, 2), (3,),
    )  # fmt: skip
    assert [sliding.owner_of(layer) for layer in (0, 2, 3)] == [0, 1, 1]
    assert worker.registry["kv_full"].shape[0] == 1
    assert worker.registry["kv_sliding"].shape[0] == 2


def test_the_older_fields_of_gemma4_mean_the_same():
    """Older versions of transformers did not write per_layer_config."""
    config = dict(tiny_configs()["gemma4"])
    older = {**config, "global_head_dim": 40, "num_global_key_value_heads": 1}
    del older["per_layer_config"]
    assert parse_config(older) == parse_config(config)
    without = parse_config({**older, "attention_k_eq_v": False})
    assert without.groups[0].heads.num_kv_heads == config["num_key_value_heads"]
    del older["global_head_dim"]
    assert parse_config(older).groups[0].heads.head_dim == 512


def test_unused_projections_may_be_stored(oracles, tmp_path):
    """Published Gemma 4 checkpoints have K and V projections of layers that share another's KV."""
    oracle = oracles("gemma4")
    tensors = load_file(oracle.folder / "model.safetensors")
    for layer in (4, 5, 6):
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(3)
    (tmp_path / "config.json").write_text((oracle.folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    traced = Traced(str(tmp_path), backend="eager", max_num_seqs=2)
    expect_equal(traced, oracle, prompts_of([30, 5], oracle.vocab_size), num_tokens=8)


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("gpt-oss", {"swiglu_limit": 5.0}, ["swiglu_limit=5.0"]),
        ("gpt-oss", {"quantization_config": {"quant_method": "hqq"}}, ["hqq", "mxfp4"]),
        ("gpt-oss", {"num_local_experts": 0}, ["num_local_experts=0"]),
        ("mimo-v2", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "3 layers"]),
        ("mimo-v2", {"n_shared_experts": 2}, ["n_shared_experts=2"]),
        ("mimo-v2", {"num_key_value_heads": 8}, ["num_key_value_heads=16", "sliding"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts=8"]),
        ("llama", {"v_head_dim": 8}, ["v_head_dim=8"]),
    ],
)
def test_invalid_experts_are_refused(model, fields, words):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config({**tiny_configs()[model], **fields})
    assert all(word in str(caught.value) for word in words), caught.value


def numbers_of(blocks, scales):
    """MXFP4 experts as a plain checkpoint has them: input features before output features."""
    rows = QuantizedRows(unpack_pairs(blocks, 32).flatten(2), scales)
    return dequantise(rows, FORMAT).transpose(1, 2).contiguous()


def test_mxfp4_is_dequantised_as_by_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 8, 4), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(numbers_of(blocks, scales), theirs)


def test_a_quantised_folder_is_read(oracles, tmp_path):
    """Published gpt-oss checkpoints have blocks and scales instead of the experts' weights."""
    oracle = oracles("gpt-oss")
    stored, plain = {}, {}
    for name, tensor in load_file(oracle.folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num, inner, outer = tensor.shape
            shape = (num, outer, inner // 32)
            generator = torch.Generator().manual_seed(inner)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            plain[name] = numbers_of(blocks, scales)
        else:
            stored[name] = plain[name] = tensor
    config = json.loads((oracle.folder / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "mxfp4"}}
    answers = []
    two_ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    for name, fields, tensors, more in (
        ("a", quantised, stored, {}),
        ("b", quantised, stored, {"tensor_parallel_size": 2}),
        ("c", quantised, stored, two_ranks),
        ("d", config, plain, {}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(tensors, folder / "model.safetensors")
        settings = {"backend": "eager", "skip_tokenizer_init": True, "show_progress": False, **more}
        llm = LLM(str(folder), **settings)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 33]}], params, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
        llm.engine.rank_group.close()
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_groups_of_whole_context_get_as_many_pages_each():
    """A request needs equally many of each: pages that the other group lacks would be wasted."""
    shapes = [
        GroupShape(name, n, 16, 2, 32, torch.float32) for name, n in (("full", 4), ("draft", 1))
    ]
    demand = Demand(max_num_seqs=64, chunk=64, expected_len=512, limit=4096)
    pages, _ = split(shapes, 300 * sum(s.num_bytes for s in shapes), demand)
    assert pages["full"] == pages["draft"] > 280


def test_the_smallest_accepted_memory_is_enough_for_a_request_with_drafts() -> None:
    """A chunk needs places for the drafts after it. They were not counted once, and a request
    waited for pages forever although it was alone."""
    settings = {
        "model": "tiny:gemma3", "backend": "eager", "page_size": 16, "max_model_len": 512,
        "max_num_seqs": 4, "max_num_batched_tokens": 208, "speculative": "draft",
        "speculative_model": "tiny:gemma3", "speculative_steps": 6, "speculative_topk": 8,
        "skip_tokenizer_init": True, "show_progress": False,
    }  # fmt: skip
    for memory in range(1_310_720, 2 << 20, 32 << 10):
        try:
            engine = Engine(EngineConfig(**settings, kv_cache_memory=memory))
        except CapacityError:
            continue
        break
    answer = engine.add("a", [i % 200 for i in range(500)], SamplingParams(max_tokens=8))
    for _ in range(30):
        engine.step()
    assert answer.finished


def test_a_deadlock_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(model="tiny:llama", backend="eager", show_progress=False))
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
    monkeypatch.setattr(engine.schedulers, "plan", lambda width: None)
    with pytest.raises(
        CapacityError, match="none of 0 running and 1 waiting requests can continue"
    ):
        engine.step()
    assert not engine.has_work
    assert not engine._handles
