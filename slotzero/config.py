"""The engine's settings. The field is the flag: names are vLLM's, help is the field's docstring.

It holds what the user asked for and knows no device; the worker turns None into what this machine
and model allow.
"""

import os
from dataclasses import dataclass, fields

from slotzero.errors import ConfigError
from slotzero.speculative.shape import TreeShape

DEFAULT_MODEL = "smollm2"
BACKENDS = ("auto", "eager", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
DRAFTERS = ("eagle", "eagle3", "mtp", "ngram", "draft")
MAX_STEPS = 15
MAX_TOPK = 8
SANITIZE_MODES = ("off", "sample", "full")
SANITIZE_ACTIONS = ("log", "raise", "fallback")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: str = DEFAULT_MODEL
    """A folder, a .gguf file, a hub id, tiny:FAMILY, or smollm2 (embedded)."""
    load_format: str = "auto"
    """auto, or dummy for random weights from config.json alone."""
    dtype: str = "auto"
    """Of weights and KV: auto is the checkpoint's on a GPU (float16 if quantised and large), else
    float32."""
    backend: str = "auto"
    """How repeated passes run: cuda, cpu, eager, or auto for the best this machine has."""
    enforce_eager: bool = False
    """The same as --backend eager."""
    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens; default: what model and memory allow."""
    max_num_seqs: int | None = None
    """Most requests that run at once; default 256 on a GPU, 16 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; longer prompts are prefilled in chunks."""
    kv_cache_memory: int | None = None
    """Bytes for KV pages (suffixes K, M, G); default: from free memory."""
    sliding_kv_memory: int | None = None
    """Of those, bytes for sliding-window layers; default: such that they and the other layers run
    out at the same number of requests of --expected-len."""
    expected_len: int = 8192
    """Tokens of a usual request, prompt and answer, by which KV memory is split between kinds of
    layers."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that the engine may use in all."""
    page_size: int = 16
    """Tokens in a KV page: a power of two."""
    enable_prefix_caching: bool = True
    """Keep the KV of prompts and answers, and reuse it where another prompt begins alike."""
    speculative: str | None = None
    """Guess tokens ahead and verify many at once, which changes no answer: eagle and eagle3 (a
    head), mtp (layers of the model
    itself, or its assistant), draft (a small model), ngram (what followed before)."""
    speculative_model: str | None = None
    """The head, the draft model or the assistant; of eagle3, smollm2 is an embedded head, the
    default for that model."""
    speculative_steps: int = 4
    """Guesses in a row, at most."""
    speculative_topk: int = 1
    """Guesses side by side after each token; above 1 they form a tree, of which the best are
    verified."""
    speculative_num_draft_tokens: int | None = None
    """Of a tree: tokens that are verified at once, the newest one among them; default: 1 + steps *
    topk, at most 63."""
    speculative_adaptive: bool = True
    """Guess fewer, or none, while that is faster: by what was right lately and by how many run."""
    lazy_recording: bool = False
    """Record a size when it is first needed rather than at start."""
    sanitize: str = "off"
    """Run steps twice, eagerly and over spoilt memory, and compare: sample is one in many, full is
    every step."""
    sanitize_every: int = 1000
    """With --sanitize sample: one step in so many."""
    sanitize_action: str = "log"
    """What a violation leads to: log reports it and goes on, raise stops the engine before a token
    leaves it, fallback runs eagerly from then on."""
    seed: int = 0
    """Of requests that bring no seed of their own, and of dummy weights."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out."""
    show_progress: bool = True
    """Progress bars while loading and recording."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", os.fspath(self.model))
        for name, ok, rule in (
            ("backend", self.backend in BACKENDS, f"is one of {', '.join(BACKENDS)}"),
            ("dtype", self.dtype in DTYPES, f"is one of {', '.join(DTYPES)}"),
            ("load_format", self.load_format in LOAD_FORMATS, "is auto or dummy"),
            ("max_model_len", _positive(self.max_model_len), "is at least 1"),
            ("max_num_seqs", _positive(self.max_num_seqs), "is at least 1"),
            ("max_num_batched_tokens", _positive(self.max_num_batched_tokens), "is at least 1"),
            ("kv_cache_memory", _positive(self.kv_cache_memory), "is a size in bytes"),
            ("sliding_kv_memory", _positive(self.sliding_kv_memory), "is a size in bytes"),
            ("expected_len", _positive(self.expected_len), "is at least 1"),
            ("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "is in (0, 1]"),
            ("sanitize", self.sanitize in SANITIZE_MODES, f"is one of {', '.join(SANITIZE_MODES)}"),
            ("sanitize_every", _positive(self.sanitize_every), "is at least 1"),
            (
                "sanitize_action",
                self.sanitize_action in SANITIZE_ACTIONS,
                f"is one of {', '.join(SANITIZE_ACTIONS)}",
            ),
            ("page_size", _power_of_two(self.page_size), "is a power of two"),
            (
                "speculative",
                self.speculative is None or self.speculative in DRAFTERS,
                f"is one of {', '.join(DRAFTERS)}",
            ),
            (
                "speculative_steps",
                _in_range(self.speculative_steps, MAX_STEPS),
                f"is 1 to {MAX_STEPS}",
            ),
            ("speculative_topk", _in_range(self.speculative_topk, MAX_TOPK), f"is 1 to {MAX_TOPK}"),
        ):
            if not ok:
                raise ConfigError(f"{name} {rule}, got {getattr(self, name)!r}")
        self._check_speculation()
        if self.enforce_eager and self.backend not in ("auto", "eager"):
            raise ConfigError(f"enforce_eager contradicts backend={self.backend!r}: drop one")

    def _check_speculation(self) -> None:
        for field in fields(self):
            value, is_detail = getattr(self, field.name), field.name.startswith("speculative_")
            if self.speculative is None and is_detail and value != field.default:
                raise ConfigError(
                    f"{field.name}={value!r} without speculative: "
                    f"say which kind it is, one of {', '.join(DRAFTERS)}"
                )
        num = self.speculative_num_draft_tokens
        if self.speculative_topk == 1 and num not in (None, self.speculative_steps + 1):
            raise ConfigError(
                f"speculative_num_draft_tokens={num}: without a tree (speculative_topk=1) "
                f"speculative_steps={self.speculative_steps} decides, and verifies "
                f"{self.speculative_steps + 1}"
            )
        if self.tree is not None and self.speculative == "ngram":
            raise ConfigError("speculative_topk: an ngram drafter guesses one way, drop it")

    @property
    def tree(self) -> TreeShape | None:
        if self.speculative_topk == 1:
            return None
        return TreeShape.of(
            self.speculative_steps, self.speculative_topk, self.speculative_num_draft_tokens
        )


def _in_range(value: int, most: int) -> bool:
    return isinstance(value, int) and 1 <= value <= most


def _positive(value: int | None) -> bool:
    return value is None or (isinstance(value, int) and value >= 1)


def _power_of_two(value: int) -> bool:
    return isinstance(value, int) and value >= 1 and value & (value - 1) == 0
