"""The engine's settings. Each field is a flag of the command line, and its docstring the help text.

Names follow vLLM. The config has the values that the user gave and does not know the device; the
worker resolves None to what the machine and the model allow.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from slotzero.errors import ConfigError
from slotzero.tree_shape import TreeShape

DEFAULT_MODEL = "smollm2"
BACKENDS = ("auto", "eager", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
MODEL_IMPLS = ("auto", "slotzero", "transformers")
KV_CACHE_DTYPES = ("auto", "none", "fp8")
QUANTIZATIONS = ("auto", "none", "fp8", "int8", "int4")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
DRAFTERS = ("eagle", "eagle3", "mtp", "ngram", "draft")
MAX_STEPS = 15
MAX_TOPK = 8
SANITIZE_MODES = ("off", "sample", "full")
SCHEDULING_POLICIES = ("fcfs", "priority")
SANITIZE_ACTIONS = ("log", "raise", "fallback")
EXECUTORS = ("local", "ray")
GENERATION_CONFIGS = ("auto", "none")
POOLINGS = ("auto", "last", "mean")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, validated on creation."""

    model: str = DEFAULT_MODEL
    """A folder, a .gguf file, a Hugging Face hub id, tiny:FAMILY for a tiny random model, or the
    bundled smollm2."""
    load_format: str = "auto"
    """auto loads the checkpoint's weights; dummy uses random weights and needs config.json only."""
    model_impl: str = "auto"
    """Whose layers run: slotzero (this package's, for the families in docs/models.md), transformers
    (the bridge: the layers of transformers, for most other causal language models), or auto for
    slotzero where the family is supported, else transformers."""
    quantization: str = "auto"
    """Format of the model's weights in memory: auto keeps the checkpoint's, none unpacks quantised
    weights (whose inputs are then not rounded either). fp8 converts the linear layers of an
    unquantised checkpoint or a .gguf file while they load, with one scale per output feature, and
    rounds their inputs to fp8 as well; int8 (in groups of 128) and int4 (in groups of 32) leave the
    inputs alone. Draft models and heads are kept as stored."""
    generation_config: str = "auto"
    """Default temperature, top_k, top_p, min_p and repetition_penalty of requests to a server and
    of calls without parameters: auto takes them from the model's generation_config.json, none uses
    the engine's defaults. The commands chat and generate have their own defaults."""
    pooling: str = "auto"
    """Hidden states that become the embedding of a prompt: last (of its last token), mean (of all
    its tokens), or auto (as a sentence-transformers checkpoint configures, else last)."""
    score_tokens: str | None = None
    """For rerankers that answer in words, such as Qwen3-Reranker: the two answers, as in no,yes. A
    score is the probability of the second. Without it, scores are similarities of embeddings."""
    score_template: str | None = None
    """With --score-tokens: Jinja template that renders a query and a document as a prompt, a file
    or the text itself (default: that of Qwen3-Reranker)."""
    dtype: str = "auto"
    """Data type of unquantised weights and activations: auto is the checkpoint's dtype on a GPU
    (float16 for a large GGUF file), and float32 on a CPU."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache: fp8 (e4m3, with the checkpoint's scales or none) holds twice as
    many tokens as 16 bits; none is the same as dtype; auto is fp8 if the checkpoint's config asks
    for it, else none. A drafter's KV has the same type."""
    backend: str = "auto"
    """How steps run: cuda (CUDA graphs), cpu (recorded lists of operators), eager (nothing is
    recorded), or auto for the fastest one that this machine supports."""
    enforce_eager: bool = False
    """The same as --backend eager."""
    max_model_len: int | None = None
    """Maximum length of prompt plus answer in tokens; default: what the model and memory allow."""
    max_num_seqs: int | None = None
    """Maximum number of requests that run at once; default: 256 on a GPU, 16 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Maximum number of tokens per step; longer prompts are processed in chunks (chunked prefill).
    """
    scheduling_policy: str = "fcfs"
    """Order in which waiting requests begin: fcfs (first come, first served) or priority (those
    with a lower `priority` first; when the KV cache is full, those with the highest value wait)."""
    kv_cache_memory: int | None = None
    """Bytes for the KV cache (suffixes K, M, G); default: derived from free memory. On a CPU 1 GiB,
    or twice the weights or one request of full context if larger, at most a quarter of free memory.
    """
    sliding_kv_memory: int | None = None
    """Bytes of the KV cache for sliding-window layers; default: enough for the same number of
    requests of --expected-len tokens as in the other layers."""
    expected_len: int = 8192
    """Typical length of a request (prompt plus answer). It determines how the KV cache is split
    between layers with a sliding window and the others."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that the engine may use in total."""
    page_size: int = 16
    """Tokens per page of the KV cache, a power of two."""
    tensor_parallel_size: int = 1
    """Tensor parallelism: number of devices over which every layer is split. Each holds some of the
    attention heads and a slice of the MLPs."""
    enable_expert_parallel: bool = False
    """Expert parallelism: each device holds whole experts instead of a slice of every expert."""
    enable_dp_attention: bool = False
    """DP attention: each of the tensor_parallel_size devices has its own requests, up to
    max_num_seqs, and computes their attention alone; only MLPs and experts are split."""
    rank_timeout: float = 60.0
    """Seconds that one running device waits for another before the engine fails."""
    step_timeout: float | None = None
    """Seconds after which a step counts as hanging: it is reported in the log, with the stacks of
    all threads, and a server restarts the engine; 0 means no limit (default: 20 times the slowest
    step of the same sizes, at least 60, and 600 for the first one)."""
    nnodes: int = 1
    """Number of machines over which the devices are distributed evenly. Run the same command on all
    machines, with the same secret in SLOTZERO_KEY, and a different --node-rank on each."""
    node_rank: int = 0
    """Index of this machine. Machine 0 runs the server; the others only compute."""
    master_addr: str = "127.0.0.1"
    """Address at which the other machines reach machine 0."""
    master_port: int = 29500
    """Port at which the other machines reach machine 0."""
    node_timeout: float = 300.0
    """Seconds that machines wait for each other to start."""
    executor: str = "local"
    """Where engine processes run: local (this machine) or ray (the Ray cluster at RAY_ADDRESS, or
    one on this machine)."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of prompts and answers, and reuse it for prompts with the same prefix."""
    snapshot_interval: int = 256
    """For models with recurrent layers: number of tokens between two snapshots of the state for the
    prefix cache, a multiple of the page size."""
    deterministic: bool = False
    """Batch-invariant results: tokens and log probabilities of a request depend only on its own
    tokens, parameters and seed, to the bit, and not on the batch, chunked prefill, the prefix
    cache, preemption or drafts. On a GPU this uses other kernels; see docs/determinism.md."""
    logprobs_mode: str = "raw_logprobs"
    """Log probabilities of answers: raw_logprobs (from the model's logits) or processed_logprobs
    (of the sampled distribution, after mask, penalties, bias, temperature and filters). raw_logits
    and processed_logits return logits instead. Prompts are not sampled, so they always get
    raw_logprobs."""
    enable_return_routed_experts: bool = False
    """Return with every answer the experts that each MoE layer's router chose for each token of
    prompt and answer, for training with the same routing."""
    speculative: str | None = None
    """Drafter for speculative decoding, which does not change answers: eagle or eagle3 (a draft
    head), mtp (the model's own MTP layers, or its assistant), draft (a small model), or ngram
    (repetitions in the text so far)."""
    speculative_model: str | None = None
    """The draft head, draft model or assistant. smollm2 is a bundled eagle3 head, the default for
    that model."""
    speculative_steps: int = 4
    """Maximum number of draft tokens in sequence."""
    speculative_topk: int = 1
    """Number of alternatives after each draft token. Above 1 the drafts form a tree, whose most
    likely tokens are verified."""
    speculative_num_draft_tokens: int | None = None
    """Number of tokens of a draft tree that are verified at once, including the newest token;
    default: 1 + steps * topk, at most 63."""
    speculative_adaptive: bool = True
    """Draft fewer tokens, or none, while that is faster, based on recent acceptance and the number
    of running requests."""
    grammar_timeout: float = 5.0
    """Seconds to compile the grammar of a structured output; after that the request fails. Other
    requests continue meanwhile."""
    grammar_memory: int = 256 << 20
    """Maximum host memory in bytes for one grammar (suffixes K, M, G). Compiled grammars that no
    request uses are cached up to the same total."""
    lazy_recording: bool = False
    """Capture each step size when it is first needed instead of at start-up."""
    sanitize: str = "off"
    """Check live traffic: rerun steps eagerly and with unowned memory overwritten, recompute
    answers from their tokens alone, recount page owners, and compare. sample checks some steps,
    full checks all."""
    sanitize_every: int = 1000
    """With --sanitize sample: check one step in N, and one answer after each such step."""
    sanitize_action: str = "log"
    """What to do about a violation: log reports it and continues, raise stops the engine before a
    token leaves it, fallback runs eagerly from then on (after a wrong answer also without drafts
    and prefix cache)."""
    seed: int | None = None
    """Seed for requests without a seed, and for dummy weights; default: requests are sampled
    differently in every run, and dummy weights use 0."""
    chat_template: str | None = None
    """Chat template to use instead of the model's own: a file, or the Jinja text itself."""
    skip_tokenizer_init: bool = False
    """Do not load the tokenizer: requests and answers have token ids instead of text."""
    show_progress: bool = True
    """Show progress bars while loading and recording."""

    def __post_init__(self) -> None:
        for name in ("model", "chat_template"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name, kinds in _KINDS.items():
            _check_kind(name, kinds, getattr(self, name))
        for name, ok, rule in (
            ("backend", self.backend in BACKENDS, f"must be one of {', '.join(BACKENDS)}"),
            ("dtype", self.dtype in DTYPES, f"must be one of {', '.join(DTYPES)}"),
            (
                "kv_cache_dtype",
                self.kv_cache_dtype in KV_CACHE_DTYPES,
                f"must be one of {', '.join(KV_CACHE_DTYPES)}",
            ),
            ("load_format", self.load_format in LOAD_FORMATS, "must be auto or dummy"),
            (
                "logprobs_mode",
                self.logprobs_mode in LOGPROBS_MODES,
                f"must be one of {', '.join(LOGPROBS_MODES)}",
            ),
            (
                "model_impl",
                self.model_impl in MODEL_IMPLS,
                f"must be one of {', '.join(MODEL_IMPLS)}",
            ),
            (
                "quantization",
                self.quantization in QUANTIZATIONS,
                f"must be one of {', '.join(QUANTIZATIONS)}",
            ),
            (
                "generation_config",
                self.generation_config in GENERATION_CONFIGS,
                f"must be one of {', '.join(GENERATION_CONFIGS)}",
            ),
            (
                "pooling",
                self.pooling in POOLINGS,
                f"must be one of {', '.join(POOLINGS)}",
            ),
            ("max_model_len", _positive(self.max_model_len), "must be at least 1"),
            ("max_num_seqs", _positive(self.max_num_seqs), "must be at least 1"),
            (
                "max_num_batched_tokens",
                _positive(self.max_num_batched_tokens),
                "must be at least 1",
            ),
            (
                "scheduling_policy",
                self.scheduling_policy in SCHEDULING_POLICIES,
                f"must be one of {', '.join(SCHEDULING_POLICIES)}",
            ),
            ("kv_cache_memory", _positive(self.kv_cache_memory), "must be at least 1 byte"),
            ("sliding_kv_memory", _positive(self.sliding_kv_memory), "must be at least 1 byte"),
            ("expected_len", _positive(self.expected_len), "must be at least 1"),
            ("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "must be in (0, 1]"),
            (
                "sanitize",
                self.sanitize in SANITIZE_MODES,
                f"must be one of {', '.join(SANITIZE_MODES)}",
            ),
            ("sanitize_every", _positive(self.sanitize_every), "must be at least 1"),
            (
                "sanitize_action",
                self.sanitize_action in SANITIZE_ACTIONS,
                f"must be one of {', '.join(SANITIZE_ACTIONS)}",
            ),
            ("tensor_parallel_size", _positive(self.tensor_parallel_size), "must be at least 1"),
            ("rank_timeout", self.rank_timeout > 0, "must be above 0 seconds"),
            (
                "step_timeout",
                self.step_timeout is None or self.step_timeout >= 0,
                "must be at least 0 seconds",
            ),
            ("grammar_timeout", self.grammar_timeout > 0, "must be above 0 seconds"),
            ("grammar_memory", self.grammar_memory >= 1 << 20, "must be at least 1 MiB"),
            ("nnodes", _positive(self.nnodes), "must be at least 1"),
            ("node_rank", 0 <= self.node_rank < self.nnodes, f"must be below nnodes={self.nnodes}"),
            ("master_port", _in_range(self.master_port, (1 << 16) - 1), "must be 1 to 65535"),
            ("node_timeout", self.node_timeout > 0, "must be above 0 seconds"),
            ("executor", self.executor in EXECUTORS, f"must be one of {', '.join(EXECUTORS)}"),
            ("page_size", _power_of_two(self.page_size), "must be a power of two"),
            ("snapshot_interval", _positive(self.snapshot_interval), "must be at least 1"),
            (
                "speculative",
                self.speculative is None or self.speculative in DRAFTERS,
                f"must be one of {', '.join(DRAFTERS)}",
            ),
            (
                "speculative_steps",
                _in_range(self.speculative_steps, MAX_STEPS),
                f"must be 1 to {MAX_STEPS}",
            ),
            (
                "speculative_topk",
                _in_range(self.speculative_topk, MAX_TOPK),
                f"must be 1 to {MAX_TOPK}",
            ),
        ):
            if not ok:
                raise ConfigError(f"{name} {rule}, got {getattr(self, name)!r}")
        if self.enable_prefix_caching and self.snapshot_interval % self.page_size:
            raise ConfigError(
                f"snapshot_interval={self.snapshot_interval} is not a multiple of "
                f"page_size={self.page_size}: snapshots are taken at the end of a page"
            )
        drafters = ", ".join(DRAFTERS)
        self._check_details("speculative", None, f"set it to one of {drafters}")
        self._check_speculation()
        self._check_details("sanitize", "off", "set it to sample or full")
        self._check_nodes()
        self._check_scores()
        self._check_routed_experts()
        if self.enforce_eager and self.backend not in ("auto", "eager"):
            raise ConfigError(f"enforce_eager contradicts backend={self.backend!r}: drop one")

    def _check_details(self, name: str, off: str | None, remedy: str) -> None:
        """Raise on settings of a feature that is off: they would have no effect."""
        for field in fields(self):
            value, is_detail = getattr(self, field.name), field.name.startswith(f"{name}_")
            if getattr(self, name) == off and is_detail and value != field.default:
                raise ConfigError(f"{field.name}={value!r} has no effect without {name}: {remedy}")

    def _check_speculation(self) -> None:
        num = self.speculative_num_draft_tokens
        if self.speculative_topk == 1 and num not in (None, self.speculative_steps + 1):
            raise ConfigError(
                f"speculative_num_draft_tokens={num}: without a tree (speculative_topk=1) it must "
                f"be speculative_steps + 1 = {self.speculative_steps + 1}; drop it"
            )
        if self.tree is not None and self.speculative == "ngram":
            raise ConfigError("speculative_topk: the ngram drafter has no draft trees; drop it")

    def _check_scores(self) -> None:
        if self.score_template is not None and self.score_tokens is None:
            raise ConfigError(
                "score_template has no effect without score_tokens: set that to two tokens, such "
                "as no,yes"
            )
        if self.score_tokens is not None and self.pooling != "auto":
            raise ConfigError(
                f"pooling={self.pooling!r} has no effect with score_tokens: drop one of them"
            )

    def _check_nodes(self) -> None:
        if not self.node_rank and self.tensor_parallel_size % self.nnodes:  # node 0 decides
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: must be a multiple of "
                f"nnodes={self.nnodes}"
            )
        if self.nnodes > 1 and self.executor == "ray":
            raise ConfigError(f"nnodes={self.nnodes}: executor=ray chooses the nodes; drop it")

    def _check_routed_experts(self) -> None:
        for name, is_set, why in (
            ("enable_expert_parallel", self.enable_expert_parallel, "routes only its own tokens"),
            ("enable_dp_attention", self.enable_dp_attention, "routes tokens of all devices"),
            ("speculative_topk", self.speculative_topk > 1, "moves tokens after they are routed"),
        ):
            if self.enable_return_routed_experts and is_set:
                what = "a draft tree" if name == "speculative_topk" else "a device"
                raise ConfigError(
                    f"enable_return_routed_experts: with {name} {what} {why}; drop one of them"
                )

    @property
    def weights_seed(self) -> int:
        """Seed of dummy weights, the same in every rank, engine and run."""
        return 0 if self.seed is None else self.seed

    @property
    def ranks_per_node(self) -> int:
        return self.tensor_parallel_size // self.nnodes

    @property
    def tree(self) -> TreeShape | None:
        if self.speculative_topk == 1:
            return None
        return TreeShape.of(
            self.speculative_steps, self.speculative_topk, self.speculative_num_draft_tokens
        )


def refuse_ranks(settings: Mapping[str, Any], what: str) -> None:
    """Raise if a command that uses this process's device only is given several ranks."""
    size = settings.get("tensor_parallel_size", 1)
    if size != 1:
        raise ConfigError(f"tensor_parallel_size={size}: {what} supports one rank only; drop it")


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_KINDS = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(EngineConfig).items()}


def _check_kind(name: str, kinds: tuple[type, ...], value: object) -> None:
    accepted = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
        words = " or ".join(_WORDS[kind] for kind in kinds if kind in _WORDS)
        raise ConfigError(f"{name} must be {words}, got {value!r}")


def _in_range(value: int, most: int) -> bool:
    return 1 <= value <= most


def _positive(value: int | None) -> bool:
    return value is None or value >= 1


def _power_of_two(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0
