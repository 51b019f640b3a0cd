"""The sampling parameters of one request. Pure data: it does not know tensors or slots.

Field names and meanings follow vLLM's `SamplingParams`; other fields raise. A value that is not
supported raises an error here, with the field's name, before anything runs.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from slotzero.errors import RequestError
from slotzero.sampling.structured import StructuredOutputs, structured_outputs

MAX_LOGPROBS = 20
MAX_STOP_IDS = 32
MAX_LOGIT_BIAS = 300
MAX_BANNED_SEQUENCES = 128
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3  # within these, logits stay finite
MAX_N = 16384


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample the answers to a prompt, and where they end."""

    n: int = 1
    """Number of answers per prompt; answer i is sampled with seed + i."""
    temperature: float = 1.0
    """Divisor of the logits: 0 is greedy; lower values favour the most likely tokens."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 or -1 means all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this total probability."""
    min_p: float = 0.0
    """Exclude tokens whose probability is below this fraction of the most likely token's."""
    repetition_penalty: float = 1.0
    """Divisor of the logit (or factor, if it is negative) of every token in prompt and answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once per occurrence in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    banned_sequences: Sequence[Sequence[int]] = ()
    """Sequences of token ids that the answer must not contain: the last token of one is not chosen
    after the others."""
    seed: int | None = None
    """The same request with the same seed gives the same tokens, regardless of other requests."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate; None: until the context is full."""
    min_tokens: int = 0
    """Number of tokens to generate before an end-of-sequence or stop token may be chosen."""
    stop: str | Sequence[str] = ()
    """String that ends the answer and is not part of it; may be repeated."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer."""
    include_stop_str_in_output: bool = False
    """Include the stop string in the answer."""
    ignore_eos: bool = False
    """Do not stop at end-of-sequence tokens; generate max_tokens."""
    logprobs: int | None = None
    """Return the log probability of each chosen token and of the N most likely ones."""
    prompt_logprobs: int | None = None
    """Return the same for each token of the prompt but the first. Such a request does not begin
    after a cached prefix, because every token is computed for it."""
    pooled: bool = False
    """Return a vector instead of an answer; what `LLM.embed` and `LLM.score` set."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Return text; without it, only token ids are returned."""
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    """Structure that the answer must have. The answer ends with it, regardless of ignore_eos."""

    priority: int = 0
    """With --scheduling-policy priority, requests with a lower value are served first."""

    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes, so that none can find out by the time
    to the first token what another has asked."""

    speculative: bool = True
    """Whether the engine may use speculative decoding, if it is enabled; answers do not change."""

    def __post_init__(self) -> None:
        for name in _INTEGERS + _NUMBERS:
            _check_number(name, getattr(self, name), integer=name in _INTEGERS)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "must be true or false")
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if not all(isinstance(text, str) for text in stop):
            raise _refused("stop", self.stop, "must be a string or a list of strings")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids))
        for token in self.stop_token_ids:
            _check_number("stop_token_ids", token, integer=True)
        object.__setattr__(self, "logit_bias", _token_keys(self.logit_bias or {}))
        object.__setattr__(self, "banned_sequences", _sequences(self.banned_sequences))
        if not isinstance(self.cache_salt, str | None) or len(self.cache_salt or "") > 256:
            raise _refused("cache_salt", self.cache_salt, "must be a string of at most 256")
        structure = structured_outputs(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", structure)
        for name, ok, rule in self._rules():
            if not ok:
                raise _refused(name, getattr(self, name), rule)

    def ends_at(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """Return the tokens that end the answer and are not part of it."""
        ignores_eos = self.ignore_eos and self.structured_outputs is None
        return frozenset((*(() if ignores_eos else eos_token_ids), *self.stop_token_ids))

    def banned_after(self, output: Sequence[int]) -> frozenset[int]:
        """Return the tokens that would complete a banned sequence after these."""
        return frozenset(
            last
            for *rest, last in self.banned_sequences
            if list(output[max(0, len(output) - len(rest)) :]) == rest
        )

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        finite = math.isfinite
        return (
            ("n", 1 <= self.n <= MAX_N, f"must be between 1 and {MAX_N}"),
            (
                "temperature",
                finite(self.temperature) and self.temperature >= 0,
                "must be a finite number of at least 0 (0 is greedy)",
            ),
            ("top_k", self.top_k >= -1, "must be at least 1, or 0 or -1 to keep every token"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1 (1 keeps every token)"),
            ("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1 (0 keeps every token)"),
            (
                "repetition_penalty",
                MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
                f"must be between {MIN_REPETITION_PENALTY:g} and {MAX_REPETITION_PENALTY:g} "
                "(1 means no penalty)",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "must be between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "must be between -2 and 2"),
            (
                "logit_bias",
                len(self.logit_bias) <= MAX_LOGIT_BIAS
                and all(finite(v) for v in self.logit_bias.values()),
                f"must have at most {MAX_LOGIT_BIAS} token ids, with finite values",
            ),
            (
                "banned_sequences",
                len(self.banned_sequences) <= MAX_BANNED_SEQUENCES and all(self.banned_sequences),
                f"must have at most {MAX_BANNED_SEQUENCES} sequences, and none that is empty",
            ),
            (
                "max_tokens",
                self.max_tokens is None or self.max_tokens >= 1,
                "must be at least 1; leave it out to generate until the context is full",
            ),
            (
                "min_tokens",
                0 <= self.min_tokens <= (self.max_tokens or self.min_tokens),
                "must be at least 0"
                + ("" if self.max_tokens is None else f" and at most {self.max_tokens}, the limit"),
            ),
            (
                "seed",
                self.seed is None or -(2**63) <= self.seed < 2**63,
                "must be a signed 64-bit integer",
            ),
            (
                "priority",
                -(2**63) <= self.priority < 2**63,
                "must be a signed 64-bit integer",
            ),
            ("stop", all(self.stop), "must not contain an empty string"),
            (
                "stop",
                self.detokenize or not self.stop,
                "stop strings need detokenize=True; set that, or use stop_token_ids",
            ),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_IDS // 2,
                f"must have at most {MAX_STOP_IDS // 2} token ids",
            ),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"must be between 0 and {MAX_LOGPROBS}, or None",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"must be between 0 and {MAX_LOGPROBS}, or None",
            ),
            (
                "pooled",
                not (self.pooled and self._shapes_answer),
                "there is no answer, so n, stop, logprobs, prompt_logprobs, structured_outputs and "
                "banned_sequences must be left out",
            ),
        )

    @property
    def _shapes_answer(self) -> bool:
        """Whether there is a parameter without a meaning for a request that has no answer."""
        is_read = self.logprobs is not None or self.prompt_logprobs is not None
        has_form = self.structured_outputs is not None or bool(self.banned_sequences)
        return self.n != 1 or bool(self.stop) or is_read or has_form


MAX_INTEGER = 1 << 1000  # can still be converted to float
_INTEGERS = (
    "n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed", "priority",
)  # fmt: skip
_FLAGS = (
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "speculative",
    "pooled",
)  # fmt: skip
_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def _check_number(name: str, value: object, *, integer: bool) -> None:
    kinds = int if integer else (int, float)
    may_be_none = name in ("max_tokens", "logprobs", "prompt_logprobs", "seed")
    if isinstance(value, bool) or not (isinstance(value, kinds) or (value is None and may_be_none)):
        raise _refused(name, value, f"must be {'an integer' if integer else 'a number'}")
    if not integer and isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise _refused(name, value, "is too large")


def _items(name: str, values: Sequence[Any] | None) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, Sequence | set | frozenset):
        raise _refused(name, values, "must be a list")
    return tuple(values or ())


def _sequences(sequences: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    name = "banned_sequences"
    made = tuple(_items(name, sequence) for sequence in _items(name, sequences))
    for token in (token for sequence in made for token in sequence):
        _check_number(name, token, integer=True)
    return made


def _refused(name: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{name}={_short(value)}: {rule}", param=name)


def _short(value: object) -> str:
    shown = repr(dict(value)) if isinstance(value, Mapping) else repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _token_keys(bias: Mapping[int, float]) -> Mapping[int, float]:
    try:
        return MappingProxyType({_token(token): float(value) for token, value in bias.items()})
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise _refused("logit_bias", bias, "must map token ids (integers) to numbers") from None


def _token(key: int | str) -> int:
    """Convert a key of logit_bias to a token id; in JSON, keys are strings."""
    return int(key) if isinstance(key, str) else operator.index(key)


POOLED = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooled=True)
"""Parameters of a request for a vector."""
