"""Tests of whole models on the Triton kernel set against transformers."""

import pytest
import torch
from oracle import FAMILIES, RECURRENT, build
from traced import Traced, expect_scored, prompts_of

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.tiny import tiny_checkpoint
from slotzero.distributed.ranks import ALONE
from slotzero.graph import Registry
from slotzero.graph.backend import PlainPieces
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.attention import decode, verify
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.types import PagedKv, Rows, Tokens
from slotzero.models.decoder import Decoder
from slotzero.models.families.family import parse_config
from slotzero.models.model import DecoderBatch
from slotzero.models.rope import frequencies
from slotzero.models.weight_store import WeightStore
from slotzero.models.weights import load_weights
from slotzero.speculative.assistant import fit_assistant, load_assistant
from slotzero.speculative.model import ModelDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=4 if INTERPRETED else 7, ignore_eos=True)


@pytest.mark.parametrize("family", ["qwen3", "llama-bias"])
def test_equals_transformers(device, monkeypatch, few_programs, tmp_path, family):
    """There are chunked prompts, contexts that decode attention splits in two, and a padded
    batch."""
    if device.type == "cpu":
        monkeypatch.setattr("slotzero.executor.build.kernels_for", lambda *_: TritonKernels())
    torch.manual_seed(0)
    oracle = build(FAMILIES[family], tmp_path)
    settings = {"backend": "eager", "dtype": "float32", "kv_cache_memory": 1 << 24}
    traced = Traced(oracle.path, max_num_seqs=4, max_num_batched_tokens=48, **settings)
    prompts = prompts_of([64, 7, 33], oracle.vocab_size)
    for prompt, tokens, request_id in zip(
        prompts, traced.generate(prompts, GREEDY), traced.request_ids, strict=True
    ):
        expected, logits = oracle.generate(prompt["prompt_token_ids"], len(tokens), guess=tokens)
        assert tokens == expected
        got = torch.stack(traced.logits[request_id])
        assert (got - logits).abs().max() < 1e-4
    expect_scored(traced, oracle, prompts_of([20], oracle.vocab_size))
    assert traced.engine.worker.registry["kv_full"][:, 0].abs().max() == 0


@pytest.mark.skipif(INTERPRETED, reason="too much for the interpreter")
@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_equal_transformers(tmp_path, family):
    """Chunks end inside pages, and prefixes are found in the cache."""
    torch.manual_seed(0)
    oracle = build(FAMILIES[family], tmp_path)
    settings = {"backend": "eager", "dtype": "float32", "kv_cache_memory": 1 << 24}
    cut = {"max_num_seqs": 4, "max_num_batched_tokens": 37, "snapshot_interval": 16}
    traced = Traced(oracle.path, **settings, **cut)
    prompts = [*prompts_of([97, 1, 40], oracle.vocab_size), {"prompt_token_ids": [7, 8, 9] * 12}]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for _ in range(2):
        answers = traced.generate(prompts, params)
        for prompt, tokens, request_id in zip(prompts, answers, traced.request_ids, strict=True):
            expected, logits = oracle.generate(prompt["prompt_token_ids"], 24, guess=tokens)
            assert tokens == expected
            assert (torch.stack(traced.logits[request_id])[:24] - logits).abs().max() < 1e-4
    assert traced.engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 0


@pytest.mark.skipif(INTERPRETED, reason="too much for the interpreter")
@pytest.mark.parametrize("family", RECURRENT)
def test_drafts_of_recurrent_layers_change_nothing(family, monkeypatch):
    """Some of three drafts are wrong, at every position, while snapshots are taken."""
    settings = {"backend": "eager", "dtype": "float32", "kv_cache_memory": 1 << 24}
    settings |= {"max_num_seqs": 1, "snapshot_interval": 16, "skip_tokenizer_init": True}
    prompt = {"prompt_token_ids": [*range(20)]}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def answer(llm: LLM) -> list[int]:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return output.outputs[0].token_ids

    right = answer(LLM(f"tiny:{family}", show_progress=False, **settings))
    text = torch.tensor([*range(20), *right, *[0] * 20], dtype=torch.int32)

    def write(self, slots, positions, ids):
        guessed = text.to(positions.device)[positions.long()]
        wrong = (positions % 5 == 0) | (positions % 7 == 0)
        self.kernels.store_drafts(slots, positions, guessed + wrong.int(), self.tables.tokens)

    monkeypatch.setattr(ModelDrafter, "write", write)
    settings |= {"speculative": "draft", "speculative_model": "tiny:llama"}
    settings |= {"speculative_steps": 3, "speculative_adaptive": False, "show_progress": False}
    llm = LLM(f"tiny:{family}", **settings)
    # the second answer uses what the first left in the cache
    assert answer(llm) == right and answer(llm) == right
    stats = llm.engine.speculation
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8
    assert llm.engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 0


class Gemma4:
    """The tiny Gemma 4 and its assistant, which owns no KV, over a context of 28 tokens."""

    def __init__(self, kernels, device):
        torch.manual_seed(0)
        self.device = torch.device(device)
        registry = Registry(self.device)
        given = WeightStore(registry, kernels, torch.float32), lambda done, total: None
        target, assistant = (tiny_checkpoint(f"tiny:gemma4{end}") for end in ("", "-assistant"))
        model = parse_config(target.config)
        turns = {g.name: frequencies(g.rope).to(self.device) for g in model.groups}
        self.target = Decoder(model, load_weights(model, target, *given), turns, kernels, None)
        config = fit_assistant(assistant, model)
        self.assistant = load_assistant(config, model, assistant, *given, ALONE).decoder
        table, self.kv = self.ints([[0, 0, 0], [3, 1, 2]]), {}
        for group in model.groups:
            shape = len(group.layers), 4, 16, group.heads.num_kv_heads, group.heads.row_size
            self.kv[group.name] = PagedKv(torch.randn(shape).to(self.device), table)
        self.ids = torch.randint(256, (2, 48), dtype=torch.int32).to(self.device)
        self.begin = torch.randn(2, config.model.hidden_size).to(self.device)
        self.no_prompt = self.ints([0, 0])

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def forward(self, slots, positions, rows=None, span=0):
        tokens = Tokens(self.ints(slots), self.ints(positions))
        its_rows = rows and Rows(*(self.ints([value]) for value in rows), span=span)
        batch = DecoderBatch(tokens, self.ids, self.no_prompt, its_rows)
        return self.target.forward(batch, self.kv, PlainPieces()).x[tokens.slots > 0].cpu()

    def guess(self, slots, length):
        """Return the drafts of the assistant; the KV cache has all tokens except the newest."""
        slots, stands = self.ints(slots), self.ints(length)
        normed = self.assistant.forward_from(
            self.begin, Tokens(slots, (stands - 1).clamp_min(0)), Tokens(slots, stands),
            self.no_prompt, self.kv, PlainPieces(),
        )  # fmt: skip
        return normed.x[slots > 0].cpu()


def test_layers_that_own_no_kv_equal_the_reference(device, monkeypatch):
    """For Gemma 4, this runs a prompt chunk, a token, verified rows and a draft, past a window."""
    monkeypatch.setattr(decode, "cut_for", lambda rows: (4, 16))
    monkeypatch.setattr(verify, "cut_for", lambda rows, kv_heads, pairs: (2, 16, True))
    made = []
    for kernels, where in ((ReferenceKernels(), "cpu"), (TritonKernels(), device)):
        model = Gemma4(kernels, where)
        made.append(
            [
                model.forward([1, 1, 1, 0], [28, 29, 30, 0], rows=(1, 28, 3, 3)),
                model.forward([1, 0], [31, 0]),
                model.guess([1, 0], [32, 0]),
                model.forward([1, 1, 0], [32, 33, 0], rows=(1, 32, 3, 3), span=3),
                *(pages.pages.cpu() for pages in model.kv.values()),
            ]
        )
    for want, got in zip(*made, strict=True):
        assert torch.allclose(got, want, atol=1e-4)
