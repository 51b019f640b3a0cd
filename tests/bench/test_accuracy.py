"""Tests of `slotzero bench accuracy`: windows of text, sums, transformers' perplexity, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotzero.bench.accuracy import Tally, compare
from slotzero.bench.prose import cut, python_text, windows
from slotzero.bench.scorer import Scorer
from slotzero.cli.main import main
from slotzero.config import EngineConfig
from slotzero.errors import ConfigError
from slotzero.quantization.quantization import Quantization
from slotzero.text.tokenizer import Tokenizer

TINY = ["tiny:llama", "--backend", "eager"]
SHORT = ["--context", "64", "--max-tokens", "150"]


def scorer(model: str, **settings: Any) -> Scorer:
    defaults = {
        "backend": "eager",
        "enable_prefix_caching": False,
        "lazy_recording": True,
        "max_num_seqs": 1,
        "show_progress": False,
        "skip_tokenizer_init": True,
    }
    return Scorer(EngineConfig(model=model, **{**defaults, **settings}))


def some_windows(vocab_size: int, lengths: tuple[int, ...] = (100, 40, 2)) -> list[list[int]]:
    return [torch.randint(vocab_size, (length,)).tolist() for length in lengths]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "accuracy", *words]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) > 8
    return json.loads(last)


# Text and windows


@given(
    num_tokens=st.integers(2, 200),
    context=st.integers(2, 50),
    max_tokens=st.integers(1, 250),
    has_bos=st.booleans(),
)
def test_every_token_is_predicted_once_and_in_order(
    num_tokens: int, context: int, max_tokens: int, has_bos: bool
) -> None:
    tokens = list(range(num_tokens))
    made = windows(tokens, [-1] if has_bos else [], context, max_tokens)
    predicted = [token for window in made for token in window[1:]]
    first = 0 if has_bos else 1  # without a BOS token nothing predicts the first
    assert predicted == tokens[first : first + max_tokens]
    assert all(2 <= len(window) <= context for window in made)
    assert all(len(window) == context for window in made[:-1])
    begins = [-1] * len(made) if has_bos else [window[1] - 1 for window in made]
    assert [window[0] for window in made] == begins


def test_a_window_begins_with_the_tokenizers_bos() -> None:
    made = cut(Tokenizer.bytes_tokenizer(), "abcdefgh", 4, 100, "text")
    assert made == [[256, *b"abc"], [256, *b"def"], [256, *b"gh"]]


def test_a_text_of_less_than_a_window_is_refused() -> None:
    tokenizer = Tokenizer.bytes_tokenizer()
    assert len(cut(tokenizer, "abc", 4, 100, "text")) == 1
    with pytest.raises(ConfigError, match="3 tokens are too few for one window of 5"):
        cut(tokenizer, "abc", 5, 100, "text")


def test_the_default_text_is_prose() -> None:
    paragraphs = python_text().split("\n\n")
    assert sum(map(len, paragraphs)) > 50_000
    assert all(part[0].isalpha() and part.endswith(".") for part in paragraphs)
    assert len(set(paragraphs)) == len(paragraphs)


# Sums


def test_sums_are_those_of_a_calculation_by_hand() -> None:
    tally = Tally()
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()
    quantized = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]).log()
    for i, token in enumerate([0, 2]):  # in two parts
        tally.add(reference[i : i + 1], quantized[i : i + 1], torch.tensor([token]))
    report = tally.report()
    divergence = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert report["tokens"] == 2
    assert report["perplexity"]["reference"] == pytest.approx((0.5 * 0.6) ** -0.5, rel=1e-4)
    assert report["perplexity"]["quantized"] == pytest.approx((0.25 * 0.6) ** -0.5, rel=1e-4)
    assert report["perplexity"]["change"] == pytest.approx(2**0.5 - 1, rel=1e-4)
    assert report["kl_divergence"]["mean"] == pytest.approx(divergence / 2, rel=1e-4)
    assert report["kl_divergence"]["max"] == pytest.approx(divergence, rel=1e-4)
    assert report["same_top_token"] == 0.5
    assert report["largest_logit_difference"] == pytest.approx(math.log(2), rel=1e-4)


def test_a_constant_added_to_all_logits_changes_no_prediction() -> None:
    tally, logits = Tally(), torch.randn(5, 11)
    tally.add(logits, logits + 3, torch.arange(5))
    report = tally.report()
    assert abs(report["kl_divergence"]["mean"]) < 1e-6
    assert abs(report["perplexity"]["change"]) < 1e-6
    assert report["largest_logit_difference"] == pytest.approx(3, rel=1e-4)


# Models


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon-h1"])
@pytest.mark.parametrize("max_num_batched_tokens", [512, 16])
def test_perplexity_is_that_of_transformers(oracles, family, max_num_batched_tokens) -> None:
    """Also if a window is computed in several chunks."""
    oracle = oracles(family)
    engine = scorer(oracle.path, max_num_batched_tokens=max_num_batched_tokens)
    made = some_windows(oracle.vocab_size)
    loss, num_tokens = 0.0, 0
    for window in made:
        with torch.no_grad():
            expected = oracle.model(torch.tensor([window]), use_cache=False).logits[0, :-1].float()
        got = torch.cat(list(engine.logits(window)))
        assert (got - expected).abs().max() < 1e-4
        following = torch.tensor(window[1:])
        loss += torch.nn.functional.cross_entropy(expected, following, reduction="sum").item()
        num_tokens += len(following)
    report = compare(engine, engine, made).report()
    assert report["tokens"] == num_tokens == 99 + 39 + 1
    assert report["perplexity"]["reference"] == pytest.approx(math.exp(loss / num_tokens), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny:llama", "tiny:deepseek-v3", "tiny:qwen3-next"])
def test_a_model_predicts_as_itself(model: str) -> None:
    one, other = scorer(model), scorer(model, quantization="none")
    report = compare(one, other, some_windows(one.engine.worker.vocab_size)).report()
    assert report["kl_divergence"] == {"mean": 0, "max": 0}
    assert report["perplexity"]["change"] == 0
    assert (report["same_top_token"], report["largest_logit_difference"]) == (1, 0)


@pytest.mark.slow
def test_fewer_bits_diverge_more() -> None:
    reference = scorer("tiny:llama")
    made = some_windows(reference.engine.worker.vocab_size)
    int8, fp8, int4 = (
        compare(reference, scorer("tiny:llama", quantization=name), made).report()
        for name in ("int8", "fp8", "int4")
    )
    means = [each["kl_divergence"]["mean"] for each in (int8, fp8, int4)]
    assert 0 < means[0] < means[1] < means[2]
    assert int8["same_top_token"] > int4["same_top_token"]
    assert int8["largest_logit_difference"] < int4["largest_logit_difference"]


@pytest.mark.slow
def test_an_fp8_kv_cache_is_compared_with_a_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, *TINY, *SHORT, "--quantization", "none", "--kv-cache-dtype", "fp8")
    assert report["kv_cache_dtype"] == {"reference": "float32", "quantized": "fp8"}
    assert report["weight_bytes"]["reference"] == report["weight_bytes"]["quantized"]
    assert 0 < report["kl_divergence"]["mean"] < 0.1


@pytest.mark.slow
def test_a_checkpoint_that_asks_for_an_fp8_cache_is_compared(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Quantization, "asks_for_fp8_cache", True)
    report = run(capsys, *TINY, *SHORT, "--quantization", "none")
    assert report["kv_cache_dtype"] == {"reference": "float32", "quantized": "fp8"}


def test_the_swapped_models_have_swapped_perplexities() -> None:
    plain, coarse = scorer("tiny:llama"), scorer("tiny:llama", quantization="int4")
    made = some_windows(259)
    one, other = compare(plain, coarse, made).report(), compare(coarse, plain, made).report()
    assert one["perplexity"]["reference"] == other["perplexity"]["quantized"]
    assert one["perplexity"]["quantized"] == other["perplexity"]["reference"]
    assert one["kl_divergence"]["mean"] != other["kl_divergence"]["mean"]


# The command


@pytest.mark.slow
def test_accuracy_ends_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, *TINY, *SHORT, "--quantization", "int8")
    assert (report["benchmark"], report["model"]) == ("accuracy", "tiny:llama")
    assert (report["quantization"], report["reference_quantization"]) == ("int8", "none")
    assert (report["tokens"], report["windows"], report["context"]) == (150, 3, 64)
    assert 0 < report["kl_divergence"]["mean"] <= report["kl_divergence"]["max"] < 0.2
    assert 0.9 < report["same_top_token"] <= 1
    assert report["perplexity"]["reference"] > 1
    assert report["weight_bytes"]["quantized"] < report["weight_bytes"]["reference"]
    assert report["text"] == "pydoc_data.topics"
    assert report["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_another_text_and_another_reference(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    words = ["--text", str(text), "--quantization", "none", "--reference-quantization", "auto"]
    report = run(capsys, *TINY, "--context", "16", *words)
    assert report["text"] == str(text)
    assert report["tokens"] == len(text.read_text())  # one per byte
    assert report["kl_divergence"] == {"mean": 0, "max": 0}  # neither is quantised


@pytest.mark.slow
def test_a_recording_backend_scores_as_the_eager_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "--quantization", "int4"]
    eager, recorded = (
        run(capsys, "tiny:llama", "--backend", backend, *words) for backend in ("eager", "cpu")
    )
    assert recorded["kl_divergence"]["mean"] == pytest.approx(
        eager["kl_divergence"]["mean"], rel=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--quantization", "none"], "--reference-quantization"),
        (["--reference-quantization", "auto"], "--quantization fp8"),
        (["--quantization", "int3"], "quantization"),
        (["--quantization", "int8", "--context", "512"], "must be 2 to 511"),
        (["--quantization", "int8", "--context", "1"], "must be 2 to 511"),
        (["--quantization", "int8", "--text", "/no/such/file"], "--text /no/such/file"),
        (["--quantization", "int8", "--text", "SHORT"], "too few"),
        (["--quantization", "int8", "--text", "BINARY"], "not UTF-8"),
        (["--quantization", "int8", "--tensor-parallel-size", "2"], "one rank only"),
        (["--quantization", "int8", "--speculative", "ngram"], "speculative='ngram'"),
        (["--quantization", "int8", "--enable-prefix-caching"], "enable_prefix_caching=True"),
        (["--quantization", "int8", "--sanitize", "full"], "sanitize='full'"),
        (["--quantization", "int8", "--max-model-len", "99"], "max_model_len=99"),
        (["--quantization", "int8", "--num-prompts", "9"], "--num-prompts"),
    ],
)
def test_an_impossible_comparison_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], names: str
) -> None:
    files = {"SHORT": tmp_path / "short", "BINARY": tmp_path / "binary"}
    files["SHORT"].write_text("too short")
    files["BINARY"].write_bytes(b"\xff" * 999)
    words = [str(files.get(word, word)) for word in words]
    assert main(["bench", "accuracy", *TINY, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slotzero: error: ")
    assert captured.err.count("\n") == 1
    assert names in captured.err


@pytest.mark.slow
def test_a_model_without_tokenizer_is_refused(oracles, capsys) -> None:
    model = oracles("llama").path
    words = [model, "--backend", "eager", "--quantization", "int8"]
    assert main(["bench", "accuracy", *words]) == 3
    assert "tokenizer.json is missing" in capsys.readouterr().err
