"""How much quantised weights or an FP8 KV cache change a model's predictions.

The quantised model and the same model as reference predict every token of the same windows of text,
window by window. The reference's KV cache is not quantised. This module does not know how weights
or keys and values are quantised.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slotzero.bench import hardware
from slotzero.bench.prose import PYTHON_TEXT, cut, read_text
from slotzero.bench.report import title
from slotzero.bench.scorer import Scorer
from slotzero.bench.sheets import Report, Sheet, rounded
from slotzero.checkpoint.source import checkpoint_of
from slotzero.config import EngineConfig, refuse_ranks
from slotzero.errors import ConfigError
from slotzero.executor.limits import choose_backend
from slotzero.models.implementation import parse_model
from slotzero.pools.budget import show
from slotzero.system.progress import scoring_bar

CONTEXT = 512
MAX_TOKENS = 4096
# Settings with which hidden states cannot be kept: the setting, the value it must have, and why.
_FIXED = (
    ("enable_prefix_caching", False, "there are no hidden states for cached tokens"),
    ("speculative", None, "predictions are those of the model without a drafter"),
    ("sanitize", "off", "checked steps run twice"),
    ("lazy_recording", True, "hidden states are kept by steps that are not recorded before"),
    ("max_num_seqs", 1, "windows run one at a time"),
    ("max_model_len", None, "--context sets it"),
)


@dataclass(frozen=True)
class AccuracySpec:
    reference: str = "none"
    """`quantization` of the model that is compared with."""
    text: Path | None = None
    context: int | None = None
    """Tokens per window; None: CONTEXT, or fewer if the model's limit is lower."""
    max_tokens: int = MAX_TOKENS


@dataclass
class Tally:
    """Sums over all predicted tokens."""

    num_tokens: int = 0
    reference_loss: float = 0.0  # negative log probabilities
    quantized_loss: float = 0.0
    divergence: float = 0.0
    largest_divergence: float = 0.0
    num_same_top: int = 0
    largest_difference: float = 0.0

    def add(self, reference: Tensor, quantized: Tensor, following: Tensor) -> None:
        """Add positions: the logits [positions, vocab] of both, and the token that follows each."""
        # double: a small divergence is a difference of log probabilities that are almost equal
        reference, quantized = reference.double(), quantized.double()
        expected, got = reference.log_softmax(-1), quantized.log_softmax(-1)
        divergence = (expected.exp() * (expected - got)).sum(-1)
        chosen = following.to(expected.device)[:, None]
        self.num_tokens += len(reference)
        self.reference_loss -= float(expected.gather(-1, chosen).sum())
        self.quantized_loss -= float(got.gather(-1, chosen).sum())
        self.divergence += float(divergence.sum())
        self.largest_divergence = max(self.largest_divergence, float(divergence.max()))
        self.num_same_top += int((reference.argmax(-1) == quantized.argmax(-1)).sum())
        difference = float((reference - quantized).abs().max())
        self.largest_difference = max(self.largest_difference, difference)

    def report(self) -> Report:
        num = self.num_tokens
        reference, quantized = (
            math.exp(loss / num) for loss in (self.reference_loss, self.quantized_loss)
        )
        return {
            "tokens": num,
            "perplexity": {
                "reference": rounded(reference),
                "quantized": rounded(quantized),
                "change": rounded(quantized / reference - 1),
            },
            "kl_divergence": {
                "mean": rounded(self.divergence / num),
                "max": rounded(self.largest_divergence),
            },
            "same_top_token": rounded(self.num_same_top / num),
            "largest_logit_difference": rounded(self.largest_difference),
        }


def run_accuracy(model: str, settings: Mapping[str, Any], spec: AccuracySpec) -> Report:
    _refuse_unusable(settings)
    config = EngineConfig(model=model, **settings)
    choose_backend(config)  # refuses a backend before anything is loaded
    checkpoint = checkpoint_of(config)
    parsed = parse_model(checkpoint.config, config.model_impl)
    asks = config.kv_cache_dtype == "auto" and parsed.quantization.asks_for_fp8_cache
    if config.quantization == spec.reference and config.kv_cache_dtype != "fp8" and not asks:
        raise ConfigError(
            f"--quantization {spec.reference} is the reference too: choose --quantization fp8, "
            "int8, int4 or auto, another --reference-quantization, or --kv-cache-dtype fp8"
        )
    context = _context(spec.context, parsed.max_position)
    text, source = read_text(spec.text), str(spec.text or PYTHON_TEXT)
    windows = cut(checkpoint.tokenizer(), text, context, spec.max_tokens, f"text {source}")
    config = replace(config, **_small(context))
    plain = replace(config, quantization=spec.reference, kv_cache_dtype="none")
    reference, quantized = Scorer(plain), Scorer(config)
    tally = compare(reference, quantized, windows, config.show_progress)
    return {
        **_setting(model, reference, quantized),
        "quantization": config.quantization,
        "reference_quantization": spec.reference,
        "text": source,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "context": context,
        "windows": len(windows),
        **tally.report(),
    }


def compare(
    reference: Scorer,
    quantized: Scorer,
    windows: Sequence[Sequence[int]],
    show_progress: bool = False,
) -> Tally:
    tally = Tally()
    with scoring_bar(show_progress, len(windows)) as advance:
        for window in windows:
            start = 1
            for both in zip(reference.logits(window), quantized.logits(window), strict=True):
                end = start + len(both[0])
                tally.add(*both, torch.tensor(window[start:end]))
                start = end
            advance(1)
    return tally


def sheets(report: Report) -> list[Sheet]:
    perplexity, divergence = report["perplexity"], report["kl_divergence"]
    reference, quantized = report["reference_quantization"], report["quantization"]
    weights, cache = report["weight_bytes"], report["kv_cache_dtype"]
    rows = [
        ("hardware", f"{report['hardware']} ({report['device']}, {report['dtype']})"),
        ("backend", f"{report['backend']}, {report['kernels']} kernels"),
        ("quantization", f"{quantized}, compared with {reference}"),
        ("weights", f"{show(weights['quantized'])}, reference {show(weights['reference'])}"),
        ("KV cache", f"{cache['quantized']}, reference {cache['reference']}"),
        ("text", f"{report['text']}, {report['windows']} windows of {report['context']} tokens"),
        ("predicted", f"{report['tokens']:,} tokens"),
        (
            "perplexity",
            f"{perplexity['quantized']:,g}, reference {perplexity['reference']:,g} "
            f"({perplexity['change']:+.2%})",
        ),
        ("KL divergence", f"mean {divergence['mean']:.3g}, max {divergence['max']:.3g} nats"),
        ("same top token", f"{report['same_top_token']:.2%} of positions"),
        ("logits", f"largest difference {report['largest_logit_difference']:.3g}"),
    ]
    return [Sheet(title(report), rows)]


def _refuse_unusable(settings: Mapping[str, Any]) -> None:
    refuse_ranks(settings, "bench accuracy")
    for name, value, why in _FIXED:
        if settings.get(name, value) != value:
            raise ConfigError(f"{name}={settings[name]!r}: {why}; drop it")


def _context(wanted: int | None, max_position: int) -> int:
    """Return the tokens per window, which leave room for the token that every request samples."""
    most = max_position - 1
    if wanted is None:
        return min(CONTEXT, most)
    if not 2 <= wanted <= most:
        raise ConfigError(f"--context {wanted}: must be 2 to {most} for this model")
    return wanted


def _small(context: int) -> Mapping[str, Any]:
    """Return settings of an engine that runs one window at a time, so that two fit."""
    return {
        "enable_prefix_caching": False,
        "lazy_recording": True,
        "max_model_len": context + 1,
        "max_num_seqs": 1,
        "skip_tokenizer_init": True,
    }


def _setting(model: str, reference: Scorer, quantized: Scorer) -> Report:
    limits, worker = quantized.engine.limits, quantized.engine.worker
    return {
        "benchmark": "accuracy",
        "model": model,
        "backend": limits.backend,
        "device": limits.device,
        "hardware": hardware.describe(worker.registry.device),
        "kernels": worker.kernels.name,
        "dtype": limits.dtype,
        "weight_bytes": {
            "reference": reference.engine.worker.weight_bytes,
            "quantized": worker.weight_bytes,
        },
        "kv_cache_dtype": {
            "reference": reference.engine.limits.kv_cache_dtype,
            "quantized": limits.kv_cache_dtype,
        },
        "versions": hardware.versions(),
    }
