"""Tests of Qwen3.5: the text part of published checkpoints, joint experts, and MTP layers."""

import json

import pytest
import torch
from oracle import FAMILIES, build
from safetensors.torch import load_file, save_file
from traced import GREEDY, Traced, expect_equal, prompts_of
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as book

from slotzero.checkpoint.tiny import tiny_configs
from slotzero.errors import UnsupportedModelError
from slotzero.models.families.family import parse_config

pytestmark = pytest.mark.slow

FULL = 1  # a layer with full attention


class Published:
    """A checkpoint as Qwen publishes them, and a reference for its MTP layer.

    It has a nested config, tensors of a vision tower, joint experts, and separate experts in the
    MTP layer.
    """

    def __init__(self, folder) -> None:
        self.oracle = build(FAMILIES["qwen3.5-moe"], folder)
        self.folder, model = folder, self.oracle.model
        config, hidden = model.config, model.config.hidden_size
        torch.manual_seed(5)
        self.layer = book.Qwen3_5MoeDecoderLayer(config, layer_idx=FULL).eval()
        names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
        self.parts = {name: book.Qwen3_5MoeRMSNorm(hidden) for name in names}
        self.parts["fc"] = torch.nn.Linear(2 * hidden, hidden, bias=False)
        for module in (self.layer, *self.parts.values()):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, 0, 0.1)
        tensors = {"model.visual.x.weight": torch.ones(3), "lm_head.weight": model.lm_head.weight}
        for name, tensor in model.model.state_dict().items():
            tensors[f"model.language_model.{name}"] = tensor
        tensors |= {f"mtp.{name}.weight": part.weight for name, part in self.parts.items()}
        for name, tensor in self.layer.state_dict().items():
            tensors |= apart(f"mtp.layers.0.{name}", tensor)
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        text = json.loads((folder / "config.json").read_text())
        del text["architectures"]
        self.config = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "text_config": {**text, "mtp_num_hidden_layers": 1}, "dtype": "float32",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(self.config))

    @torch.no_grad()
    def guesses(self, ids: list[int], num: int) -> list[int]:
        """Return the drafts after the newest token."""
        model, text, parts = self.oracle.model, list(ids), self.parts
        states = model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        for _ in range(num):
            embedded = parts["pre_fc_norm_embedding"](
                model.model.embed_tokens(torch.tensor(text[1:]))
            )
            pair = torch.cat((embedded, parts["pre_fc_norm_hidden"](states)), dim=-1)
            x = parts["fc"](pair)[None]
            positions = torch.arange(len(text) - 1)[None]
            mask = torch.full((len(text) - 1,) * 2, float("-inf")).triu(1)[None, None]
            rotary = model.model.rotary_emb(x, positions)
            out = self.layer(x, position_embeddings=rotary, attention_mask=mask)
            out = parts["norm"](out)[0, -1:]
            text.append(int(model.lm_head(out).argmax()))
            states = torch.cat((states, out))
        return text[len(ids) :]


def apart(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor of experts as one tensor per expert."""
    if ".mlp.experts." not in name:
        return {name: tensor}
    prefix, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return {
        f"{prefix}.{expert}.{one}.weight": part
        for expert, both in enumerate(tensor)
        for one, part in zip(kinds, both.chunk(len(kinds)), strict=True)
    }


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(tmp_path_factory.mktemp("published"))


def test_the_text_part_with_joint_experts(published):
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in load_file(
        published.folder / "model.safetensors"
    )
    traced = Traced(
        str(published.folder), backend="eager", speculative="mtp", speculative_steps=2,
        speculative_adaptive=False, max_num_seqs=4,
    )  # fmt: skip
    oracle = published.oracle
    expect_equal(traced, oracle, prompts_of([30, 5], oracle.vocab_size), num_tokens=24)
    assert traced.engine.speculation.num_drafts > 0


def test_mtp_drafts_what_the_reference_drafts(published):
    """The second and third draft continue from normed hidden states."""
    traced = Traced(
        str(published.folder), backend="eager", max_num_seqs=2, max_num_batched_tokens=16,
        speculative="mtp", speculative_steps=3, speculative_adaptive=False,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine, checked = traced.engine, 0
    ids = prompts_of([37], published.oracle.vocab_size)[0]["prompt_token_ids"]
    engine.add("one", ids, GREEDY)
    for _ in range(12):
        engine.step()
        tables = engine.worker.tables
        length, num = int(tables.length[1]), int(tables["num_drafts"][1])
        if int(tables["drafted_at"][1]) != length or length < len(ids):
            continue
        text = tables.tokens[1].tolist()
        guessed = published.guesses(text[: length + 1], num)
        assert text[length + 1 : length + 1 + num] == guessed
        checked += num
    assert checked >= 12


@pytest.mark.parametrize(
    ("model", "fields", "word"),
    [
        ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3.5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ("qwen3.5", {"num_experts": 4}, "num_experts=4"),
        ("qwen3.5-moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("qwen3.5-moe", {"rope_parameters": {"rope_type": "default", "x": 1}}, "field x"),
    ],
)
def test_other_configs_are_refused_by_name(model, fields, word):
    with pytest.raises(UnsupportedModelError, match=word):
        parse_config({**tiny_configs()[model], **fields})
