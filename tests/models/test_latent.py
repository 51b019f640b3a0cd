"""Tests of DeepSeek's models: MLA in every way of serving, MTP layers, FP8 weights, refusals."""

import json
from pathlib import Path

import pytest
import torch
from oracle import FAMILIES, build
from safetensors.torch import load_file, save_file
from traced import GREEDY, Traced, prompts_of
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as book

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.errors import ConfigError, SlotzeroError, UnsupportedModelError
from slotzero.models.families.family import parse_config

pytestmark = pytest.mark.slow

FAMILY = ("deepseek-v2", "deepseek-v3", "deepseek-v3.2")


def expect_equal(traced: Traced, oracle, prompts, num_tokens=64):
    for got, request_id, prompt in zip(
        traced.generate(prompts), traced.request_ids, prompts, strict=True
    ):
        got = got[:num_tokens]
        tokens, logits = oracle.generate(prompt["prompt_token_ids"], num_tokens, guess=got)
        assert got == tokens
        rows = torch.stack(traced.logits[request_id][:num_tokens])
        assert (rows - logits).abs().max() < 1e-4


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("family", FAMILY)
def test_chunked_cached_and_preempted(oracles, family):
    """Chunks of 13 tokens, shared prefixes, and pages for half the rows, all at once."""
    oracle = oracles(family)
    traced = Traced(
        oracle.path, backend="eager", max_num_seqs=4, max_model_len=160, max_num_batched_tokens=13,
        kv_cache_memory=16 * page_bytes(oracle.path),
    )  # fmt: skip
    shared = prompts_of([40], oracle.vocab_size)[0]["prompt_token_ids"]
    tails = prompts_of([1, 20, 9, 33], oracle.vocab_size, seed=5)
    prompts = [{"prompt_token_ids": shared + tail["prompt_token_ids"]} for tail in tails]
    for _ in range(2):
        expect_equal(traced, oracle, prompts)
    scheduler = traced.engine.schedulers[0]
    assert scheduler.num_preemptions > 0 and scheduler.ledger.cache.stats.num_hit_tokens > 40


def page_bytes(path: str) -> int:
    config = json.loads((Path(path) / "config.json").read_text())
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"] + config.get("index_head_dim", 0)
    return config["num_hidden_layers"] * 16 * row * 4


def test_a_token_stores_one_short_row(oracles):
    oracle = oracles("deepseek-v3")
    engine = Traced(oracle.path, backend="eager", kv_cache_memory=1 << 20).engine
    kv = engine.worker.registry["kv_latent"]
    assert kv.shape[2:] == (16, 1, 48 + 8)


@pytest.fixture(scope="module")
def with_layers_ahead(tmp_path_factory):
    """Return a function that builds a model with MTP layers; it returns its folder and its
    drafts."""
    made = {}

    def make(num: int):
        if num not in made:
            folder = tmp_path_factory.mktemp(f"ahead-{num}")
            made[num] = folder, Book(folder, num)
        return made[num]

    return make


class Book:
    """Reference for MTP layers, made of transformers' parts and run over a whole text."""

    def __init__(self, folder: Path, num: int) -> None:
        self.oracle = build(FAMILIES["deepseek-v3"], folder)
        config = self.oracle.model.config
        self.config, hidden = config, config.hidden_size
        torch.manual_seed(5)
        self.layers, tensors = [], load_file(folder / "model.safetensors")
        for index in range(config.num_hidden_layers, config.num_hidden_layers + num):
            layer = book.DeepseekV3DecoderLayer(config, layer_idx=1).eval()
            parts = {
                "enorm": book.DeepseekV3RMSNorm(hidden),
                "hnorm": book.DeepseekV3RMSNorm(hidden),
                "eh_proj": torch.nn.Linear(2 * hidden, hidden, bias=False),
                "shared_head.norm": book.DeepseekV3RMSNorm(hidden),
            }
            for module in (layer, *parts.values()):
                for name, parameter in module.named_parameters():
                    is_norm = parameter.ndim == 1 and "bias" not in name
                    torch.nn.init.normal_(parameter, float(is_norm), 0.1 if is_norm else 0.15)
            self.layers.append((layer, parts))
            prefix = f"model.layers.{index}."
            for name, part in parts.items():
                tensors[f"{prefix}{name}.weight"] = part.weight.data
            tensors |= {prefix + name: value for name, value in stored(layer).items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        file = folder / "config.json"
        saved = json.loads(file.read_text()) | {"num_nextn_predict_layers": num}
        file.write_text(json.dumps(saved))

    @torch.no_grad()
    def guesses(self, ids: list[int], num: int) -> list[int]:
        """Return the drafts after the newest token: one of each layer, or many of a single one."""
        model, text = self.oracle.model, list(ids)
        states = model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        own = len(self.layers) > 1
        for k in range(num):
            layer, parts = self.layers[k if own else 0]
            shift = k if own else 0
            count = len(text) - 1 - shift
            embedded = model.model.embed_tokens(torch.tensor(text[1 + shift :]))
            pair = torch.cat((parts["enorm"](embedded), parts["hnorm"](states[:count])), dim=-1)
            out = self.run(layer, parts["eh_proj"](pair)[None])[0]
            logits = model.lm_head(parts["shared_head.norm"](out[-1]))
            text.append(int(logits.argmax()))
            states = out if own else torch.cat((states, out[-1:]))
        return text[len(ids) :]

    def run(self, layer, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        rotary = self.oracle.model.model.rotary_emb(x, positions)
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        result = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return result if isinstance(result, torch.Tensor) else result[0]


def stored(layer) -> dict[str, torch.Tensor]:
    """Return a layer's weights as in a checkpoint, with separate experts."""
    tensors = {}
    for name, value in layer.state_dict().items():
        if not name.startswith("mlp.experts."):
            tensors[name] = value.clone()
            continue
        for expert, weight in enumerate(value):
            parts = {"down_proj": weight}
            if name.endswith("gate_up_proj"):
                gate, up = weight.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, rows in parts.items():
                tensors[f"mlp.experts.{expert}.{part}.weight"] = rows.clone()
    return tensors


@pytest.mark.parametrize(("num", "steps"), [(1, 3), (2, 2), (3, 3)])
def test_mtp_layers_draft_what_the_reference_drafts(with_layers_ahead, num, steps):
    """Drafts are compared after a chunked prompt, and again after some steps."""
    folder, book_of = with_layers_ahead(num)
    traced = Traced(
        str(folder), backend="eager", max_num_seqs=2, max_num_batched_tokens=16,
        speculative="mtp", speculative_steps=steps, speculative_adaptive=False,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine, checked = traced.engine, 0
    ids = prompts_of([37], book_of.oracle.vocab_size)[0]["prompt_token_ids"]
    engine.add("one", ids, GREEDY)
    for _ in range(12):
        engine.step()
        length = int(engine.worker.tables.length[1])
        drafted = int(engine.worker.tables["drafted_at"][1])
        if drafted != length or length < len(ids):
            continue
        tokens = engine.worker.tables.tokens[1]
        text = tokens[: length + 1].tolist()
        num_drafts = int(engine.worker.tables["num_drafts"][1])
        guessed = tokens[length + 1 : length + 1 + num_drafts].tolist()
        assert guessed == book_of.guesses(text, num_drafts)
        checked += num_drafts
    assert checked >= 4 * steps


@pytest.mark.parametrize(
    ("num", "settings"),
    [
        (1, {"speculative_steps": 4}),
        (1, {"speculative_steps": 3, "speculative_topk": 3}),
        (2, {"speculative_steps": 2}),
        (2, {"speculative_steps": 2, "backend": "cpu", "max_num_seqs": 1}),  # one size to record
    ],
)
def test_mtp_layers_change_no_token(with_layers_ahead, num, settings):
    folder, book_of = with_layers_ahead(num)
    settings = {"backend": "eager", "max_num_seqs": 4, **settings}
    traced = Traced(
        str(folder), max_num_batched_tokens=32, speculative="mtp", speculative_adaptive=False,
        **settings,
    )  # fmt: skip
    prompts = prompts_of([1, 2, 40, 19], book_of.oracle.vocab_size)
    if "speculative_topk" in settings:  # a tree has logits for all of its branches
        for prompt, got in zip(prompts, traced.generate(prompts), strict=True):
            assert got == book_of.oracle.generate(prompt["prompt_token_ids"], guess=got)[0]
    else:
        expect_equal(traced, book_of.oracle, prompts)
    assert traced.engine.speculation.num_drafts > 0


@pytest.mark.parametrize(
    ("model", "assistant"),
    [
        ("tiny:deepseek-v3", None),
        ("tiny:deepseek-v3.2", None),
        ("tiny:gemma4", "tiny:gemma4-assistant"),
    ],
)
def test_sampled_answers_are_the_same(model, assistant):
    """With equal seeds every token is the same, so the distribution is the same."""
    params = [SamplingParams(temperature=1.2, top_k=9, seed=i, max_tokens=24) for i in range(8)]
    prompts, settings = prompts_of([3, 20, 1, 33] * 2, 259), {"backend": "eager"}
    made = []
    for more in ({}, {"speculative": "mtp", "speculative_model": assistant}):
        llm = LLM(model, show_progress=False, max_num_seqs=4, **settings, **more)
        made.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
    assert made[0] == made[1] and llm.engine.speculation.num_drafts > 0


def test_unsupported_settings_of_mtp_are_refused_by_name(with_layers_ahead, oracles, tmp_path):
    def refused(path, error, match, **settings):
        with pytest.raises(error, match=match):
            Traced(str(path), backend="eager", speculative="mtp", **settings)

    refused("tiny:llama", UnsupportedModelError, "tiny:llama has no MTP layers")
    two, _ = with_layers_ahead(2)
    refused(two, ConfigError, "2 MTP layers", speculative_steps=4)
    refused(
        two,
        UnsupportedModelError,
        "draft trees are not supported",
        speculative_steps=2,
        speculative_topk=2,
    )
    refused(two, ConfigError, "drop it", speculative_steps=2, speculative_model="smollm2")
    oracle = oracles("deepseek-v3")
    config = json.loads((oracle.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (tmp_path / "model.safetensors").symlink_to(oracle.folder / "model.safetensors")
    refused(tmp_path, SlotzeroError, "layers.3.*is missing.*drop --speculative mtp")


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("deepseek-v3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek-v3", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank=None"),
        ("deepseek-v3", {"n_group": 3}, "n_routed_experts=8 is not a multiple of n_group=3"),
        ("deepseek-v3", {"topk_group": 1}, "too few for that selection"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek-v3.2", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("deepseek-v3.2", {"index_topk": 0}, "index_topk=0"),
        ("deepseek-v3.2", {"index_head_dim": 4}, "index_head_dim=4"),
        ("deepseek-v3.2", {"layer_types": ["full_attention"] * 3}, "indexed_attention"),
        ("llama", {"kv_lora_rank": 16}, "kv_lora_rank=16"),
    ],
)
def test_configs_that_change_results_are_refused_by_name(kind, changes, match):
    with pytest.raises(UnsupportedModelError, match=match):
        parse_config({**tiny_configs()[kind], **changes})
