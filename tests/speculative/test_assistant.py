"""Tests of assistants without KV: same proposals as transformers', and no token changes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from oracle import BASE, FAMILIES, Oracle
from traced import GREEDY, Traced, prompts_of

from slotzero.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.slow

CLUSTERS = 21
SIZES = {"hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 4}


class Assistant:
    def __init__(self, folder: Path, target: Oracle, is_clustered: bool) -> None:
        torch.manual_seed(3)
        family = FAMILIES["gemma4"].config
        shared = (
            "vocab_size",
            "head_dim",
            "global_head_dim",
            "num_global_key_value_heads",
            "sliding_window",
        )
        text = transformers.Gemma4TextConfig(
            **{**BASE, **SIZES, **{name: family[name] for name in shared}},
            attention_k_eq_v=True,
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
            num_kv_shared_layers=4,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        )
        text.tie_word_embeddings = True
        config = transformers.Gemma4AssistantConfig(
            text_config=text,
            backbone_hidden_size=target.model.config.hidden_size,
            use_ordered_embeddings=is_clustered,
            num_centroids=CLUSTERS,
            centroid_intermediate_top_k=3,
        )
        config._attn_implementation = text._attn_implementation = "eager"
        self.model = transformers.Gemma4AssistantForCausalLM(config).eval()
        for name, parameter in self.model.named_parameters():
            if "norm" in name:
                size = 0.35 if "q_norm" in name else 1.0
                torch.nn.init.normal_(parameter, size, 0.1 * size)
        if is_clustered:
            self.model.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
        self.model.save_pretrained(folder)
        self.target = target.model

    @torch.no_grad()
    def guesses(self, ids: list[int], num: int) -> list[int]:
        """Return drafts as transformers' candidate generator makes them.

        The position is constant, and the cache of sliding layers holds the window without the
        newest token.
        """
        out = self.target.model(
            torch.tensor([ids[:-1]]), return_shared_kv_states=True, use_cache=False
        )
        seen = dict(out.shared_kv_states)
        kept = FAMILIES["gemma4"].config["sliding_window"] - 1
        seen["sliding_attention"] = tuple(kv[:, :, -kept:] for kv in seen["sliding_attention"])
        state, token, made = out.last_hidden_state[:, -1:], torch.tensor([[ids[-1]]]), []
        for _ in range(num):
            embedded = self.target.model.embed_tokens(token)
            guess = self.model(
                inputs_embeds=torch.cat((embedded, state), dim=-1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=seen,
            )
            token, state = guess.logits.argmax(-1), guess.last_hidden_state
            made.append(int(token))
        return made


@pytest.fixture(scope="module")
def assistants(tmp_path_factory, oracles):
    made = {}

    def make(is_clustered: bool):
        if is_clustered not in made:
            folder = tmp_path_factory.mktemp("assistant")
            made[is_clustered] = folder, Assistant(folder, oracles("gemma4"), is_clustered)
        return made[is_clustered]

    return make


@pytest.mark.parametrize("is_clustered", [False, True])
def test_drafts_equal_those_of_transformers(oracles, assistants, is_clustered):
    """This covers contexts within the window of 24 and far beyond it."""
    folder, assistant = assistants(is_clustered)
    oracle, checked = oracles("gemma4"), 0
    traced = Traced(
        oracle.path, backend="eager", max_num_seqs=2, max_num_batched_tokens=16,
        speculative="mtp", speculative_model=str(folder), speculative_steps=3,
        speculative_adaptive=False, enable_prefix_caching=False,
    )  # fmt: skip
    engine = traced.engine
    for name, length in (("short", 9), ("long", 61)):
        ids = prompts_of([length], oracle.vocab_size)[0]["prompt_token_ids"]
        engine.add(name, ids, GREEDY)
        for _ in range(9):
            engine.step()
            tables = engine.worker.tables
            slot = int(tables.length.argmax())  # the only slot in use
            known = int(tables.length[slot])
            if int(tables["drafted_at"][slot]) != known or known < length:
                continue
            num = int(tables["num_drafts"][slot])
            text = tables.tokens[slot, : known + 1 + num].tolist()
            assert text[known + 1 :] == assistant.guesses(text[: known + 1], num)
            checked += num
        engine.cancel(name)
        while engine.has_work:
            engine.step()
    assert checked >= 24


@pytest.mark.parametrize(
    ("topk", "backend", "rows"),
    [(1, "eager", 4), (3, "eager", 4), (3, "cpu", 1)],  # one size to compile
)
def test_an_assistant_changes_no_token(oracles, assistants, topk, backend, rows):
    folder, _ = assistants(True)
    oracle = oracles("gemma4")
    traced = Traced(
        oracle.path, backend=backend, max_num_seqs=rows, max_num_batched_tokens=32,
        speculative="mtp", speculative_model=str(folder), speculative_steps=3,
        speculative_topk=topk, speculative_adaptive=False,
    )  # fmt: skip
    prompts = prompts_of([1, 40, 19, 70], oracle.vocab_size)
    tokens = traced.generate(prompts, replace(GREEDY, max_tokens=32))
    for prompt, got in zip(prompts, tokens, strict=True):
        assert got == oracle.generate(prompt["prompt_token_ids"], 32, guess=got)[0]
    assert traced.engine.speculation.num_drafts > 0


def test_an_assistant_owns_no_kv(oracles, assistants):
    folder, _ = assistants(False)
    engine = Traced(
        oracles("gemma4").path, backend="eager", speculative="mtp", speculative_model=str(folder)
    ).engine
    names = {entry.name for entry in engine.worker.registry.entries()}
    assert {name for name in names if name.startswith("kv_")} == {"kv_full", "kv_sliding"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_ordered_embeddings": True, "num_centroids": 50}, "num_centroids=50"),
        ({"backbone_hidden_size": 32}, "backbone_hidden_size is 32, the target's 64"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is 'LlamaForCausalLM'"),
        ({"text_config": {"vocab_size": 99}}, "vocab_size is 99, the target's 210"),
        ({"text_config": {"sliding_window": 12}}, "window of sliding layers is 12"),
        ({"text_config": {"num_key_value_heads": 4}}, "num_kv_heads of sliding layers is 4"),
    ],
)
def test_an_assistant_for_another_target_is_refused_by_name(
    oracles, assistants, tmp_path, changes, match
):
    folder, _ = assistants(False)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | changes.get("text_config", {})
    (tmp_path / "config.json").write_text(json.dumps(config | changes | {"text_config": text}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=match):
        Traced(
            oracles("gemma4").path, backend="eager", speculative="mtp",
            speculative_model=str(tmp_path),
        )  # fmt: skip


def test_an_assistant_is_refused_as_draft_model():
    with pytest.raises(ConfigError, match=r"is an assistant.* use --speculative mtp"):
        Traced("tiny:gemma4", speculative="draft", speculative_model="tiny:gemma4-assistant")


def test_a_target_with_other_layers_is_refused_by_name(oracles, assistants, tmp_path):
    folder, _ = assistants(False)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = BASE["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for family, match in (
        ("llama", "head_dim of full layers is 40, the target's 16"),
        ("deepseek-v2", "full layers and the target has none"),
    ):
        with pytest.raises(UnsupportedModelError, match=match):
            Traced(
                oracles(family).path, backend="eager", speculative="mtp",
                speculative_model=str(tmp_path),
            )  # fmt: skip
