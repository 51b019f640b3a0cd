"""Tests of the EAGLE-3 trainer: fast passes against a slow chain, and that training succeeds."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from slotzero import LLM, SamplingParams
from slotzero.cli import main as cli
from slotzero.cli import train_eagle
from slotzero.errors import ConfigError, CorruptCheckpointError, UnsupportedModelError
from slotzero.training import data
from slotzero.training.acceptance import acceptance_len, num_accepted, walk
from slotzero.training.data import Answered, answers, frequent_ids, self_prompts
from slotzero.training.head import EagleHead, HeadConfig
from slotzero.training.loop import Budget, Report, rate, train
from slotzero.training.loss import PASS_DECAY, TargetTables, _SoftCrossEntropy, distil
from slotzero.training.samples import Sample, TrainingBatch, crop, pack, training_batches
from slotzero.training.save import load_head, save_head

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
HIDDEN, VOCAB = 24, 40
CONFIG = HeadConfig(
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    max_position_embeddings=64,
    feature_layers=(0, 1, 2),
)
NAMES = {
    "fc.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "norm.weight",
}


def make_head(d2t: Tensor | None = None) -> EagleHead:
    config = CONFIG if d2t is None else replace(CONFIG, draft_vocab_size=len(d2t))
    head = EagleHead(config, d2t)
    for weight in head.parameters():  # norms that are all ones would hide a missing norm
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.25)
    return head


def make_tables() -> tuple[Tensor, Tensor]:
    return torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)


def make_sample(num: int, first: int) -> Sample:
    tokens = torch.randint(0, VOCAB, (num,))
    return Sample(tokens, torch.randn(num, 3 * HIDDEN), torch.randn(num, HIDDEN), first)


class SlowChain:
    """The head at inference: one position at a time, over a growing list of keys."""

    def __init__(self, head: EagleHead, embedding: Tensor, lm_head: Tensor) -> None:
        self._weights = head.state_dict()
        self._embedding, self._lm_head = embedding, lm_head
        self._ids = head.draft_ids
        self._keys: list[tuple[Tensor, Tensor]] = []

    def draft(self, sample: Sample, start: int, fed: list[int] | None, count: int) -> list[Tensor]:
        """Return the logits of `count` drafts after token start + 1.

        The chain is fed the tokens `fed`, or its own drafts if `fed` is None.
        """
        self._keys.clear()
        for i in range(start + 1):
            hidden = self._weights["fc.weight"] @ sample.features[i]
            hidden = self._location(hidden, int(sample.tokens[i + 1]))
        made = [self._logits(hidden)]
        while len(made) < count:
            token = self.token(made[-1]) if fed is None else fed[len(made) - 1]
            hidden = self._location(hidden, token)
            made.append(self._logits(hidden))
        return made

    def token(self, logits: Tensor) -> int:
        best = int(logits.argmax())
        return best if self._ids is None else int(self._ids[best])

    def _location(self, hidden: Tensor, token: int) -> Tensor:
        w, position = self._weights, len(self._keys)
        fed = self._norm(self._embedding[token], "midlayer.input_layernorm")
        both = torch.cat((fed, self._norm(hidden, "midlayer.hidden_norm")))
        q, k, v = (w[f"midlayer.self_attn.{name}_proj.weight"] @ both for name in "qkv")
        q, k, v = (x.view(-1, CONFIG.head_dim) for x in (q, k, v))
        self._keys.append((self._turn(k, position), v))
        outs = []
        for h, query in enumerate(self._turn(q, position)):
            of = h // (CONFIG.num_attention_heads // CONFIG.num_key_value_heads)
            scores = torch.stack([query @ key[of] for key, _ in self._keys])
            weights = (scores / CONFIG.head_dim**0.5).softmax(0)
            values = torch.stack([value[of] for _, value in self._keys])
            outs.append(weights @ values)
        hidden = hidden + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(outs)
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (w[f"midlayer.mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        return hidden + w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def _turn(self, x: Tensor, position: int) -> Tensor:
        turned, half = x.clone(), CONFIG.head_dim // 2
        for j in range(half):
            angle = torch.tensor(position * CONFIG.rope_theta ** (-2 * j / CONFIG.head_dim))
            low, high = x[:, j], x[:, j + half]
            turned[:, j] = low * angle.cos() - high * angle.sin()
            turned[:, j + half] = high * angle.cos() + low * angle.sin()
        return turned

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean() + CONFIG.rms_norm_eps).rsqrt()
        return x * scale * self._weights[f"{name}.weight"]

    def _logits(self, hidden: Tensor) -> Tensor:
        rows = self._lm_head if self._ids is None else self._lm_head[self._ids]
        return rows @ self._norm(hidden, "norm")


# Passes


@torch.no_grad()
def test_unrolled_passes_equal_a_chain_that_runs_position_by_position() -> None:
    head, (embedding, lm_head), num_passes = make_head(), make_tables(), 5
    sample = make_sample(num=14, first=4)
    unrolled = list(head.unroll(embedding, sample.tokens[None], sample.features[None], num_passes))
    slow = SlowChain(head, embedding, lm_head)
    compared = 0
    for start in range(13):
        fed = sample.tokens[start + 2 :].tolist()
        expected = slow.draft(sample, start, fed, min(num_passes, len(fed) + 1))
        for s, logits in enumerate(expected):
            torch.testing.assert_close(lm_head @ unrolled[s][0, start], logits, rtol=0, atol=1e-4)
            compared += 1
    assert compared == 9 * 5 + 4 + 3 + 2 + 1


@torch.no_grad()
def test_a_longer_neighbour_changes_nothing() -> None:
    head, (embedding, _) = make_head(), make_tables()
    short, long = make_sample(9, 3), make_sample(15, 3)
    alone, both = pack([short], CPU), pack([short, long], CPU)
    pairs = zip(
        head.unroll(embedding, alone.tokens, alone.features, 4),
        head.unroll(embedding, both.tokens, both.features, 4),
        strict=True,
    )
    for s, (one, two) in enumerate(pairs):
        rows = 9 - s - 1  # the rows that are fed a token of the sequence
        torch.testing.assert_close(one[0, :rows], two[0, :rows])


# Loss


def test_loss_and_gradient_equal_plain_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotzero.training.loss._MAX_LOGITS", 3 * VOCAB)
    hidden, final = torch.randn(10, HIDDEN), torch.randn(10, HIDDEN)
    rows, weights = torch.randn(VOCAB, HIDDEN), torch.rand(10)
    fast, slow = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    losses, hits = _SoftCrossEntropy.apply(fast, final, rows)
    expected = F.cross_entropy(slow @ rows.T, (final @ rows.T).softmax(-1), reduction="none")
    torch.testing.assert_close(losses, expected)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(fast.grad, slow.grad)
    assert hits.tolist() == ((hidden @ rows.T).argmax(-1) == (final @ rows.T).argmax(-1)).tolist()


def slow_loss(
    head: EagleHead, tables: tuple[Tensor, Tensor], samples: list[Sample], num_passes: int
) -> tuple[float, list[int]]:
    """Compute the loss position by position; return it and the counted drafts of each pass."""
    slow, ids = SlowChain(head, *tables), head.draft_ids
    losses: list[list[Tensor]] = [[] for _ in range(num_passes)]
    for sample in samples:
        for start in range(len(sample.tokens) - 2):
            fed = sample.tokens[start + 2 :].tolist()
            made = slow.draft(sample, start, fed, min(num_passes, len(fed)))
            for s, logits in enumerate(made):
                theirs = tables[1] @ sample.final[start + s + 1]
                if start + s + 2 < sample.first:
                    continue
                if ids is not None:
                    if int(sample.tokens[start + s + 2]) not in ids.tolist():
                        continue
                    theirs = theirs[ids]
                losses[s].append(F.cross_entropy(logits, theirs.softmax(0)))
    weights = [PASS_DECAY**s for s in range(num_passes)]
    means = [torch.stack(one).mean().item() for one in losses]
    mean = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    return mean, [len(one) for one in losses]


@pytest.mark.parametrize("size", [None, 25])
def test_loss_counts_answers_inside_the_sequence_and_the_draft_vocabulary(size: int | None) -> None:
    d2t = None if size is None else torch.randperm(VOCAB)[:size].sort().values - torch.arange(size)
    head, tables = make_head(d2t), make_tables()
    samples = [make_sample(12, 5), make_sample(8, 1), make_sample(9, 8)]
    with torch.no_grad():
        loss, _, counts = distil(head, TargetTables(head, *tables), pack(samples, CPU), 4)
        expected, expected_counts = slow_loss(head, tables, samples, 4)
    assert counts == expected_counts
    assert size is not None or counts == [7 + 6 + 1, 7 + 5 + 1, 7 + 4 + 1, 7 + 3 + 1]
    assert loss.item() == pytest.approx(expected, abs=1e-4)


def test_masked_positions_affect_neither_loss_nor_gradient() -> None:
    head, tables = make_head(), make_tables()
    sample = make_sample(10, 6)
    batch = pack([sample, make_sample(14, 13)], CPU)
    spoilt = TrainingBatch(*(tensor.clone() for tensor in batch))
    spoilt.final[0, :5] = spoilt.final[0, 9:] = 1e4  # token 6 is predicted by the state at 5
    spoilt.features[0, 8:] = spoilt.features[1, 12:] = 1e4  # no chain begins that late
    spoilt.tokens[0, 10:] = 7
    found = []
    for one in (batch, spoilt):
        head.zero_grad()
        loss = distil(head, TargetTables(head, *tables), one, 3).loss
        loss.backward()
        found.append([loss.detach(), *(weight.grad.clone() for weight in head.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found[0][1].abs().sum() > 0


# Samples


def test_every_sample_is_in_each_round_within_the_tokens_of_a_batch() -> None:
    samples = [make_sample(num, 2) for num in [5, 9, 30, 7, 12, 6, 21, 8]]
    batches = training_batches(samples, batch_tokens=40, max_len=16, seed=1, device=CPU)
    for _ in range(2):
        firsts: list[int] = []
        while len(firsts) < len(samples):
            batch = next(batches)
            assert batch.tokens.numel() <= 40
            assert batch.tokens.shape[1] <= 16
            firsts += batch.tokens[:, 0].tolist()
        assert len(firsts) == len(samples)


def test_a_crop_is_a_window_with_answer_tokens() -> None:
    rng = random.Random(0)
    starts = set()
    for _ in range(200):
        sample = make_sample(rng.randint(3, 60), 1)
        sample = sample._replace(first=rng.randint(1, len(sample.tokens) - 1))
        sample = sample._replace(tokens=torch.arange(len(sample.tokens)))
        cut = crop(sample, 12, rng)
        start = int(cut.tokens[0])
        starts.add(start)
        assert cut.tokens.tolist() == list(range(start, start + min(12, len(sample.tokens))))
        assert torch.equal(cut.features, sample.features[start : start + 12])
        assert torch.equal(cut.final, sample.final[start : start + 12])
        assert cut.first == max(sample.first - start, 0) < len(cut.tokens)
    assert len(starts) > 10


# Acceptance


@torch.no_grad()
@pytest.mark.parametrize("size", [None, 30])
def test_acceptance_equals_decoding_with_the_head_step_by_step(size: int | None) -> None:
    d2t = None if size is None else torch.arange(size) // 4  # leaves out every fifth id
    head, tables = make_head(d2t), make_tables()
    slow, num_drafts = SlowChain(head, *tables), 4
    samples = []
    for num, first in ((20, 4), (13, 1), (16, 14)):
        sample = make_sample(num, first)
        for place in range(first + 1, num):  # three of four tokens are what a chain would draft
            if random.random() < 0.75:
                start = max(place - 2 - random.randint(0, 2), 0)
                chain = slow.draft(sample, start, None, place - start - 1)
                sample.tokens[place] = slow.token(chain[-1])
        samples.append(sample)
    emitted = []
    for sample in samples:
        place = sample.first - 1
        while place + 2 < len(sample.tokens):
            drafts = [slow.token(one) for one in slow.draft(sample, place, None, num_drafts)]
            true = sample.tokens[place + 2 :].tolist()
            accepted = 0
            while accepted < min(num_drafts, len(true)) and drafts[accepted] == true[accepted]:
                accepted += 1
            emitted.append(accepted + 1)
            place += accepted + 1
    assert len(set(emitted)) > 1
    target = TargetTables(head, *tables)
    for batch_tokens in (16, 1000):
        measured = acceptance_len(head, target, samples, num_drafts, batch_tokens)
        assert measured == pytest.approx(sum(emitted) / len(emitted))


def test_the_walk_skips_accepted_tokens() -> None:
    #        first token of the answer is token 3: place 2 drafts tokens 4, 5, ...
    assert walk([9, 9, 2, 9, 9, 0, 1, 9, 0], first=3, num_tokens=10) == [3, 1, 2]
    assert walk([0, 0, 0], first=1, num_tokens=3) == [1]
    assert walk([0, 0, 0], first=2, num_tokens=3) == []


@torch.no_grad()
def test_a_wrong_draft_ends_its_chain() -> None:
    head, tables = make_head(), make_tables()
    sample = make_sample(12, 1)
    drafts = SlowChain(head, *tables)
    made = [drafts.token(logits) for logits in drafts.draft(sample, 3, None, 4)]
    for wrong in range(4):
        sample.tokens[5:9] = torch.tensor(made)
        sample.tokens[5 + wrong] = (made[wrong] + 1) % VOCAB
        counted = num_accepted(head, TargetTables(head, *tables), pack([sample], CPU), 4)
        assert counted[0, 3] == wrong


# Training


def make_language(num: int, seed: int, vocab: int = 12) -> tuple[HeadConfig, Tensor, list[Sample]]:
    """Make four languages, each a cycle through all tokens; the features tell the language."""
    shared, rng = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    table = 2 * torch.randn(vocab, HIDDEN, generator=shared)
    follows = torch.empty(4, vocab, dtype=torch.int64)
    for cycle in follows:
        order = torch.randperm(vocab, generator=shared)
        cycle[order] = order.roll(-1)
    codes = torch.randn(4, 3 * HIDDEN, generator=shared)
    samples = []
    for _ in range(num):
        which, token = (int(torch.randint(0, high, (), generator=rng)) for high in (4, vocab))
        tokens = [token]
        for _ in range(15):
            tokens.append(int(follows[which, tokens[-1]]))
        ids = torch.tensor(tokens)
        features = codes[which] + 0.3 * torch.randn(16, 3 * HIDDEN, generator=rng)
        samples.append(Sample(ids, features, table[follows[which, ids]], 3))
    config = replace(CONFIG, vocab_size=vocab, draft_vocab_size=vocab)
    return config, table, samples


@pytest.mark.parametrize("is_partial", [False, True])
def test_training_makes_drafts_right(is_partial: bool) -> None:
    config, table, samples = make_language(64, seed=1)
    _, _, held_out = make_language(16, seed=2)
    d2t = None
    if is_partial:
        d2t = torch.tensor([1] * 10)  # tokens 0 and 11 are never drafted
        config = replace(config, draft_vocab_size=10)
    head, seen = EagleHead(config, d2t), []
    before = acceptance_len(head, TargetTables(head, table, table), held_out, 4, 512)
    reports = train(
        head,
        table,
        table,
        samples,
        held_out,
        max_steps=60,
        batch_tokens=256,
        num_passes=4,
        lr=3e-2,
        report_every=25,
        show_progress=False,
        report=seen.append,
    )
    assert [report.step for report in reports] == [25, 50, 60]
    assert reports == seen
    last = reports[-1]
    assert before < 1.5
    assert last.loss < 0.5 * reports[0].loss
    assert len(last.accuracy) == 4
    assert min(last.accuracy) > 0.9
    assert last.acceptance_len > (2.5 if is_partial else 3.5)
    assert table.grad is None
    after = acceptance_len(head, TargetTables(head, table, table), held_out, 4, 64)
    assert after == pytest.approx(last.acceptance_len)


def short_training(**settings: object) -> list[Report]:
    config, table, samples = make_language(6, seed=1)
    torch.manual_seed(0)
    head = EagleHead(config)
    given = {"max_steps": 2, "batch_tokens": 48, "show_progress": False, **settings}
    return train(head, table, table, samples, samples[:2], **given)


def test_training_is_repeatable_and_has_its_own_seed() -> None:
    first, again, other = (short_training(seed=seed)[-1].loss for seed in (1, 1, 2))
    assert first == again != other


def test_a_time_limit_ends_training_and_the_rate_follows_the_tighter_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    steps, minutes, both = Budget(10, None), Budget(None, 2.0), Budget(10, 2.0)
    now = 30.0
    assert (steps.used(4), minutes.used(4), both.used(4), both.used(1)) == (0.4, 0.25, 0.4, 0.25)
    now = 120.0
    assert minutes.used(0) == both.used(1) == 1.0
    monkeypatch.undo()
    assert short_training(max_steps=None, max_minutes=1e-6)[-1].step == 1


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [rate(i / 1000) for i in range(1000)]
    top = rates.index(max(rates))
    assert min(rates) >= 0.02 and rates[0] == rates[-1] == 0.02
    assert 20 < top < 40 and max(rates) > 0.98
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_samples_in_half_precision_train_a_float32_head() -> None:
    config, table, samples = make_language(6, seed=1)
    table = table.half()
    samples = [Sample(t, f.half(), final.half(), i) for t, f, final, i in samples]
    head = EagleHead(config).half()
    train(head, table, table, samples, samples, max_steps=2, show_progress=False)
    assert {weight.dtype for weight in head.parameters()} == {torch.float32}


# Folder


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [None, 12])
def test_a_saved_head_has_the_hubs_layout_and_can_be_loaded(
    tmp_path: Path, dtype: str, size: int | None
) -> None:
    d2t = None if size is None else torch.full((size,), 5)
    head = make_head(d2t)
    save_head(head, tmp_path / "head", dtype)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert set(stored) == NAMES | ({"d2t"} if size else set())
    assert {t.dtype for name, t in stored.items() if name != "d2t"} == {getattr(torch, dtype)}
    assert size is None or (stored["d2t"].dtype == torch.int64 and torch.equal(stored["d2t"], d2t))
    assert stored["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * HIDDEN)
    assert stored["midlayer.self_attn.k_proj.weight"].shape == (16, 2 * HIDDEN)
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "vocab_size": VOCAB,
        "draft_vocab_size": size or VOCAB,
        "max_position_embeddings": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "dtype": dtype,
    }
    back = load_head(tmp_path / "head")
    assert back.config == head.config
    for name, weight in back.state_dict().items():
        rounded = head.state_dict()[name]
        rounded = rounded if name == "d2t" else rounded.to(getattr(torch, dtype)).float()
        assert weight.dtype == rounded.dtype and torch.equal(weight, rounded)


def test_a_broken_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="nowhere"):
        load_head(tmp_path / "nowhere")
    head = make_head()
    with pytest.raises(ConfigError, match="dtype must be one of float16"):
        save_head(head, tmp_path, "int8")
    save_head(head, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for broken in (
        {name: t for name, t in stored.items() if name != "fc.weight"},
        {**stored, "fc.weight": stored["fc.weight"][:, 1:].contiguous()},
    ):
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(CorruptCheckpointError, match=r"fc\.weight"):
            load_head(tmp_path)


# Text


def test_frequent_ids_are_the_most_frequent_in_answers_in_order() -> None:
    sequences = [Answered([9, 9, 9, 7, 3, 7], 3), Answered([9, 5, 3, 7, 11], 1)]
    d2t = frequent_ids(sequences, 3)
    assert (d2t + torch.arange(3)).tolist() == [3, 5, 7]
    assert (frequent_ids(sequences, 6) + torch.arange(6)).tolist() == [0, 1, 3, 5, 7, 11]
    assert d2t.dtype == torch.int64
    head = make_head(d2t)
    target = TargetTables(head, *make_tables())
    assert target.drafted(target.lm_head[[3, 5, 7]] * 9).tolist() == [3, 5, 7]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny:llama", backend="eager", show_progress=False)


def test_the_model_writes_its_own_prompts(llm: LLM) -> None:
    prompts = self_prompts(llm, 5, seed=3, max_tokens=16, show_progress=False)
    begin, end = [256, *b"user: "], [257, *b"assistant: "]
    assert len({tuple(prompt) for prompt in prompts}) == 5
    for prompt in prompts:
        assert prompt[: len(begin)] == begin
        assert prompt[-len(end) :] == end
        assert len(begin) + len(end) < len(prompt) <= 256
    assert prompts == self_prompts(llm, 5, seed=3, max_tokens=16, show_progress=False)
    assert prompts != self_prompts(llm, 5, seed=4, max_tokens=16, show_progress=False)


def test_a_message_is_requested_once_and_never_empty(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["a", " ", "a", "b ", "", "c"])
    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "decode", lambda ids: next(texts))
    prompts = self_prompts(llm, 3, max_tokens=4, show_progress=False)
    monkeypatch.undo()
    assert [tokenizer.decode(prompt) for prompt in prompts] == [
        f"user: {text}assistant: " for text in "abc"
    ]
    monkeypatch.setattr(tokenizer, "decode", lambda ids: "always the same")
    with pytest.raises(ConfigError, match="1 different user messages in 3 tries"):
        self_prompts(llm, 2, max_tokens=4, show_progress=False)


def test_a_template_may_end_a_turn_in_plain_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.get_tokenizer()
    template = "{{ bos_token }}[INST] {{ messages[0]['content'] }} [/INST]"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert data._user_turn(tokenizer) == ([256, *b"[INST] "], [], "[/INST]")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ bos_token }}hello")
    with pytest.raises(UnsupportedModelError, match="the beginning of a user's turn"):
        self_prompts(llm, 1, show_progress=False)


def test_prompts_are_noise_without_a_template(llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr(llm.engine, "tokenizer", None)
    prompts = self_prompts(llm, 20, seed=1)
    assert len(prompts) == 20
    assert all(4 <= len(prompt) <= 32 and max(prompt) < 259 for prompt in prompts)
    assert prompts == self_prompts(llm, 20, seed=1) != self_prompts(llm, 20, seed=2)


def test_answers_follow_their_prompts_at_their_temperatures(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_MAX_GROUP", 2)
    prompts = [[256, *b"once"], [256, *b"upon"], [256, *b"a time"]]
    mixed = answers(llm, prompts, (0.0, 1.0), 6, show_progress=False)
    greedy = answers(llm, prompts, (0.0,), 6, show_progress=False)
    for made in (mixed, greedy):
        for prompt, (tokens, first) in zip(prompts, made, strict=True):
            assert tokens[:first] == prompt
            assert first < len(tokens) <= first + 6
    assert mixed[::2] == greedy[::2]
    assert mixed[1] != greedy[1]


# Refusals


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.tensor([0, VOCAB]), f"token id {VOCAB + 1} is not in the vocabulary of {VOCAB}"),
        (torch.tensor([-1, 0]), "token id -1 is not in the vocabulary"),
        (torch.tensor([3, 2]), "two draft indices to one token id"),
        (torch.tensor([0.0, 1.0]), r"d2t is int64 \[2\], got torch.float32"),
    ],
)
def test_a_bad_draft_vocabulary_is_refused(d2t: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EagleHead(replace(CONFIG, draft_vocab_size=2), d2t)


def test_a_draft_vocabulary_without_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size 2 needs d2t"):
        EagleHead(replace(CONFIG, draft_vocab_size=2))
    with pytest.raises(ConfigError, match="a draft vocabulary of 4 from 0 sequences"):
        frequent_ids([], 4)


GOOD = make_sample(6, 2)


@pytest.mark.parametrize(
    ("samples", "held_out", "message"),
    [
        ([], [GOOD], "no samples"),
        ([GOOD], [], "no held_out"),
        ([GOOD, make_sample(2, 1)], [GOOD], r"samples\[1\] has 2 tokens: at least 3"),
        (
            [GOOD._replace(features=GOOD.features[:, 1:])],
            [GOOD],
            r"samples\[0\].features is \[6, 72\], got \[6, 71\]",
        ),
        ([GOOD], [GOOD._replace(final=GOOD.final[1:])], r"held_out\[0\].final is \[6, 24\]"),
        ([GOOD._replace(first=6)], [GOOD], r"samples\[0\].first must be 1 to 5, got 6"),
        ([GOOD], [GOOD._replace(first=5)], "held_out: no answer has two tokens"),
    ],
)
def test_bad_samples_are_refused(
    samples: list[Sample], held_out: list[Sample], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_head(), *make_tables(), samples, held_out, max_steps=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no limit of training"),
        ({"max_steps": 0}, "max_steps must be above 0"),
        ({"max_minutes": -1.0}, "max_minutes must be above 0"),
        ({"max_steps": 1, "max_len": 2}, "max_len must be at least 3"),
        ({"max_steps": 1, "num_passes": 0}, "num_passes must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_head(), *make_tables(), [GOOD], [GOOD], **settings)


def test_an_lm_head_of_another_size_is_refused() -> None:
    embedding, lm_head = make_tables()
    with pytest.raises(ConfigError, match=r"lm_head is \[40, 24\], got \[39, 24\]"):
        train(make_head(), embedding, lm_head[1:], [GOOD], [GOOD], max_steps=1)


# The command


TINY = ["tiny:smollm2", "--backend", "eager", "--no-show-progress"]
SHORT = ["--num-sequences", "3", "--max-tokens", "6", "--steps", "3", "--report-every", "2"]


def command(words: list[str]) -> int:
    try:
        return cli.main(["train-eagle", *words])
    except SystemExit as end:
        return int(end.code or 0)


def write_lines(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines))
    return file


def line(tokens: list[int], first: int, held_out: bool = False) -> str:
    return json.dumps({"tokens": tokens, "first": first, "held_out": held_out})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write two answers for training and one for evaluation."""
    ids = list(range(30))
    lines = line(ids, 9), line(ids[::-1], 5), line(ids[4:], 6, held_out=True)
    return write_lines(tmp_path / "text.jsonl", *lines)


def test_the_command_writes_a_working_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "deep" / "head", tmp_path / "text.jsonl"
    words = ["--out", str(out), "--text", str(file), "--max-model-len", "192"]
    assert command([*TINY, *words, *SHORT]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["out"] == str(out)
    assert [report["step"] for report in told["reports"]] == [2, 3]
    assert all(1 <= report["acceptance_len"] <= 5 for report in told["reports"])
    written, greedy = data.read_text(file, 259)
    assert (len(written), len(greedy)) == (3, 1)
    assert all(1 <= len(tokens) - first <= 6 for tokens, first in written + greedy)
    guessing, plain = (
        LLM("tiny:smollm2", backend="eager", show_progress=False, **more)
        for more in ({"speculative": "eagle3", "speculative_model": str(out)}, {})
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answer, expected = (
        one.generate("hello", params, use_tqdm=False)[0].outputs[0].token_ids
        for one in (guessing, plain)
    )
    assert answer == expected
    assert guessing.engine.speculation is not None
    assert guessing.engine.speculation.num_draft_tokens > 0


def test_the_command_trains_on_existing_text(tmp_path: Path, text: Path) -> None:
    before = text.read_text()
    words = ["--out", str(tmp_path / "head"), "--text", str(text), "--layers", "2,0,1"]
    words += ["--draft-vocab", "259", "--steps", "1", "--minutes", "1"]
    assert command([*TINY, *words]) == 0
    assert text.read_text() == before
    head = load_head(tmp_path / "head")
    assert head.config.feature_layers == (2, 0, 1)
    assert head.draft_ids is not None and head.draft_ids.tolist() == list(range(259))


def test_answers_are_cut_at_the_end_of_the_context(tmp_path: Path, text: Path) -> None:
    words = ["--out", str(tmp_path / "head"), "--text", str(text), "--steps", "1"]
    assert command([*TINY, *words, "--max-model-len", "30"]) == 0
    assert data.cut([Answered([1] * 9, 4), Answered([1] * 9, 6), Answered([1, 2], 1)], 6) == [
        Answered([1] * 6, 4)
    ]


def test_a_small_model_writes_messages_that_fit(llm: LLM) -> None:
    prompts = self_prompts(llm, 3, show_progress=False)
    assert len(prompts) == 3
    assert max(map(len, prompts)) <= llm.engine.limits.max_model_len // 2


@pytest.mark.parametrize("num_layers", [3, 4, 5, 6, 7, 30])
def test_default_layers_differ(num_layers: int) -> None:
    early, middle, late = train_eagle._default_layers(num_layers)
    assert 0 <= early < middle < late < num_layers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no limit of training: give --minutes or --steps"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--minutes", "0"], "--minutes must be above 0, got 0"),
        (["--minutes", "nan"], "--minutes must be above 0, got nan"),
        (["--steps", "1", "--minutes", "-1"], "--minutes must be above 0, got -1"),
        (["--steps", "1", "--num-sequences", "1"], "--num-sequences must be at least 2, got 1"),
        (["--steps", "1", "--max-tokens", "1"], "--max-tokens must be at least 2, got 1"),
        (["--steps", "1", "--draft-vocab", "0"], "--draft-vocab must be at least 1, got 0"),
        (["--steps", "1", "--draft-vocab", "260"], "--draft-vocab 260: the model has 259 tokens"),
        (["--steps", "1", "--batch-tokens", "0"], "--batch-tokens must be at least 1, got 0"),
        (["--steps", "1", "--report-every", "0"], "--report-every must be at least 1, got 0"),
        (["--steps", "1", "--learning-rate", "-1"], "--learning-rate must be above 0, got -1"),
        (["--steps", "1", "--learning-rate", "inf"], "--learning-rate must be above 0, got inf"),
        (["--steps", "1", "--layers", "0,1"], "'0,1' is not three layers such as 2,15,27"),
        (["--steps", "1", "--layers", "0,1,3"], "--layers 0,1,3: give three different layers"),
        (["--steps", "1", "--layers", "0,1,1"], "--layers 0,1,1: give three different layers"),
        (["--steps", "1", "--model", "tiny:llama"], "two models"),
        (
            ["--steps", "1", "--enable-prefix-caching"],
            "--enable-prefix-caching: there are no hidden states",
        ),
        (["--steps", "1", "--no-lazy-recording"], "--no-lazy-recording: hidden states"),
        (
            ["--steps", "1", "--speculative", "ngram"],
            "--speculative: training uses the model without a drafter",
        ),
        (["--steps", "1", "--text", "no/such/text"], "--text no/such/text: give a file in an"),
        (["--steps", "1", "--text", "/"], "--text /: give a file in an existing folder"),
    ],
)
def test_the_command_refuses_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert command([*TINY, "--out", str(tmp_path / "head"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "head" / "config.json").exists()


def test_a_model_of_two_layers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tiny:llama", *TINY[1:], "--out", str(tmp_path / "head"), *SHORT]
    assert command(words) == 2
    assert "the model has 2 layers, and a head needs three" in capsys.readouterr().err


def test_a_folder_for_the_head_is_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    for words, message in (
        ([], "the following arguments are required: --out"),
        (
            ["--out", str(tmp_path / "file")],
            "file: the folder cannot be created (File exists), choose another",
        ),
        (
            ["--out", str(tmp_path / "file" / "head")],
            "head: the folder cannot be created (Not a directory)",
        ),
        (["--out", str(tmp_path / "made")], "made: the folder already has a head, choose another"),
    ):
        assert command([*TINY, *words, *SHORT]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "made" / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no answer to train on"),
        ([line([1, 2, 3], 1)], "no answer to evaluate on has at most 511 tokens"),
        ([line([1, 2, 3], 1), "{"], "line 2: not an answer: JSONDecodeError"),
        ([line([1, 2, 3], 1), '{"tokens": [1, 2]}'], "line 2: not an answer: KeyError('first')"),
        ([line([1, 2, 3], 3)], "line 1: first is 3 of 3 tokens"),
        ([line([1, 2, 3], 0)], "line 1: first is 0 of 3 tokens"),
        ([line([1, 2, 259], 1)], "line 1: token id 259 is not in the vocabulary of 259"),
    ],
)
def test_invalid_text_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], message: str
) -> None:
    file = write_lines(tmp_path / "text.jsonl", *lines)
    words = ["--out", str(tmp_path / "head"), "--text", str(file), "--steps", "1"]
    assert command([*TINY, *words]) == 2
    told = capsys.readouterr().err
    assert str(file) in told and message in told
    file.write_bytes(b"\xff\xfe\x00")
    assert command([*TINY, *words]) == 2
    assert "line 1: not an answer: " in capsys.readouterr().err
