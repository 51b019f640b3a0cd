"""What the server tells those who watch it: Prometheus, and the page at `/`.

METRICS is the one table: what is exported, docs/metrics.md and the tests are made from it. Names
are vLLM's where it has one. What happens over HTTP is told to `Metrics`; what the engine does is
read from its last report when somebody asks. It knows no routes and sends nothing.

Rule: a counter never falls, though the engine's process may be replaced by one that counts from 0.

    python -m slotzero.server.metrics > docs/metrics.md
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from slotzero.server.messages import SpeculationReport, Stats


class Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric("slotzero_num_requests_running", "gauge", ("engine",), "Requests that hold a slot."),
    Metric(
        "slotzero_num_requests_waiting", "gauge", ("engine",),
        "Requests that wait for a slot or pages.",
    ),
    Metric(
        "slotzero_time_to_first_token_seconds", "histogram", (),
        "From a request's arrival to its first token.",
    ),
    Metric(
        "slotzero_time_per_output_token_seconds", "histogram", (),
        "Between one token of an answer and the next.",
    ),
    Metric(
        "slotzero_e2e_request_latency_seconds", "histogram", (),
        "From a request's arrival to its last token.",
    ),
    Metric("slotzero_request_prompt_tokens", "histogram", (), "Tokens of a finished prompt."),
    Metric("slotzero_request_generation_tokens", "histogram", (), "Tokens of a finished answer."),
    Metric(
        "slotzero_kv_cache_usage_perc", "gauge", ("engine",),
        "Share of KV pages that requests hold, 0 to 1; what only the prefix cache holds is free.",
    ),
    Metric(
        "slotzero_prefix_cache_queries_total", "counter", ("engine",),
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    Metric(
        "slotzero_prefix_cache_hits_total", "counter", ("engine",),
        "Prompt tokens that were found in the prefix cache.",
    ),
    Metric(
        "slotzero_num_preemptions_total", "counter", ("engine",),
        "Requests that lost their slot and pages to an older one, and are computed again.",
    ),
    Metric("slotzero_prompt_tokens_total", "counter", ("engine",), "Prompt tokens taken in."),
    Metric("slotzero_generation_tokens_total", "counter", ("engine",), "Tokens generated."),
    Metric(
        "slotzero_request_success_total", "counter", ("finished_reason",),
        "Requests that ended, by how: stop, length or abort.",
    ),
    Metric(
        "slotzero_spec_decode_num_drafts_total", "counter", ("engine",),
        "Rows of steps that had drafts to verify.",
    ),
    Metric(
        "slotzero_spec_decode_num_draft_tokens_total", "counter", ("engine",),
        "Tokens that were drafted and verified.",
    ),
    Metric(
        "slotzero_spec_decode_num_accepted_tokens_total", "counter", ("engine",),
        "Drafted tokens that were accepted.",
    ),
    Metric(
        "slotzero_spec_decode_num_accepted_tokens_per_pos_total", "counter", ("engine", "position"),
        "Drafted tokens that were accepted, by their position in the draft, from 0.",
    ),
    Metric("slotzero_requests_total", "counter", (), "Requests over HTTP that were well formed."),
    Metric("slotzero_steps_total", "counter", ("engine",), "Steps of the engine."),
    Metric(
        "slotzero_replays_total", "counter", ("engine", "runner", "size"),
        "Steps that replayed a recording, by its size.",
    ),
    Metric(
        "slotzero_real_tokens_total", "counter", ("engine", "runner"),
        "Tokens of a batch that belong to a request.",
    ),
    Metric(
        "slotzero_padded_tokens_total", "counter", ("engine", "runner"),
        "Tokens of slot 0 that fill a batch up to its size.",
    ),
    Metric(
        "slotzero_eager_steps_total", "counter", ("engine", "reason"),
        "Steps that ran kernel by kernel, by why.",
    ),
    Metric(
        "slotzero_spec_decode_width", "gauge", ("engine",),
        "Tokens of a row in the last step that could have had drafts; 1: it had none.",
    ),
    Metric(
        "slotzero_spec_decode_steps_total", "counter", ("engine", "width"),
        "Steps that could have had drafts, by the tokens of a row.",
    ),
    Metric(
        "slotzero_recording_seconds", "gauge", ("engine",),
        "What recording all sizes took when the engine's process started.",
    ),
    Metric(
        "slotzero_certified", "gauge", ("engine", "size"),
        "1: the size was recorded, passed its proof and replays. 0: it should, but runs eagerly."
        " Sizes that are eager by design are left out.",
    ),
    Metric(
        "slotzero_sanitizer_steps_watched_total", "counter", ("engine",),
        "Steps that the sanitizer ran twice and compared.",
    ),
    Metric(
        "slotzero_sanitizer_violations_total", "counter", ("engine",),
        "Violations that the sanitizer found on live traffic.",
    ),
    Metric(
        "slotzero_engine_up", "gauge", ("engine",),
        "1 while it takes requests; 0 while it loads, restarts or does not respond.",
    ),
    Metric(
        "slotzero_engine_restarts_total", "counter", ("engine",),
        "Processes of the engine that died and were replaced.",
    ),
    Metric(
        "slotzero_http_refused_total", "counter", ("status",),
        "Requests that were refused, by HTTP status.",
    ),
)  # fmt: skip

_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

BUCKETS: dict[str, tuple[float, ...]] = {
    "slotzero_time_to_first_token_seconds": (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0, 160.0,
    ),
    "slotzero_time_per_output_token_seconds": (
        0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
        0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
    ),
    "slotzero_e2e_request_latency_seconds": (
        0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
        40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    ),
    "slotzero_request_prompt_tokens": _TOKENS,
    "slotzero_request_generation_tokens": _TOKENS,
}  # fmt: skip

_BY_NAME = {metric.name: metric for metric in METRICS}
FINISH_REASONS = ("stop", "length", "abort")
WINDOW = 1000  # latencies that percentiles are taken of, the latest ones

Labels = tuple[str, ...]  # values of a metric's labels, without which engine it is
Values = dict[Labels, float]

_COUNTERS: dict[str, Callable[[Stats], Values]] = {
    "slotzero_prefix_cache_queries_total": lambda s: {(): s.prefix_asked_tokens},
    "slotzero_prefix_cache_hits_total": lambda s: {(): s.prefix_hit_tokens},
    "slotzero_num_preemptions_total": lambda s: {(): s.preemptions},
    "slotzero_prompt_tokens_total": lambda s: {(): s.prompt_tokens},
    "slotzero_generation_tokens_total": lambda s: {(): s.generated_tokens},
    "slotzero_steps_total": lambda s: {(): s.steps},
    "slotzero_replays_total": lambda s: {(runner_of(k), k): n for k, n in s.replays.items()},
    "slotzero_real_tokens_total": lambda s: _by_name(s.real_tokens),
    "slotzero_padded_tokens_total": lambda s: _by_name(s.padded_tokens),
    "slotzero_eager_steps_total": lambda s: _by_name(s.eager),
    "slotzero_sanitizer_steps_watched_total": lambda s: {(): s.steps_watched},
    "slotzero_sanitizer_violations_total": lambda s: {(): s.violations},
}

# without samples where speculation is off
_SPECULATION: dict[str, Callable[[SpeculationReport], Values]] = {
    "slotzero_spec_decode_num_drafts_total": lambda s: {(): s.drafts},
    "slotzero_spec_decode_num_draft_tokens_total": lambda s: {(): s.draft_tokens},
    "slotzero_spec_decode_num_accepted_tokens_total": lambda s: {(): s.accepted_tokens},
    "slotzero_spec_decode_num_accepted_tokens_per_pos_total": lambda s: {
        (str(i),): n for i, n in enumerate(s.accepted_per_pos)
    },
    "slotzero_spec_decode_steps_total": lambda s: {(str(w),): n for w, n in s.steps.items()},
}


def runner_of(size: str) -> str:
    """ "decode" of "decode[8]"."""
    return size.partition("[")[0]


def _by_name(values: Mapping[str, float]) -> Values:
    return {(name,): value for name, value in values.items()}


class Watched(Protocol):
    """An engine's client, as far as it is known here. It may also have `generation: int`, which
    counts the processes that were replaced: 0 for the first."""

    @property
    def state(self) -> str:
        """ "ready" while the engine takes requests."""

    @property
    def info(self) -> Mapping[str, Any]:
        """Of EngineReady; empty until then."""

    @property
    def stats(self) -> Stats | None:
        """The last report of this process; None until its first."""


class WatchedFleet(Watched, Protocol):
    """Engines as one: the state of the best, what all of them report together."""

    @property
    def replicas(self) -> Sequence[Watched]: ...


class Metrics:
    def __init__(self, client: WatchedFleet) -> None:
        # without it, every counter and histogram has a series beside it that nobody asked for
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._client = client
        self._registry = CollectorRegistry()
        self._registry.register(_Engines(client.replicas))
        self._arrived = self._counter("slotzero_requests_total")
        self._ended = self._counter("slotzero_request_success_total")
        self._refused = self._counter("slotzero_http_refused_total")
        for reason in FINISH_REASONS:
            self._ended.labels(reason)
        self._ttft = self._histogram("slotzero_time_to_first_token_seconds")
        self._tpot = self._histogram("slotzero_time_per_output_token_seconds")
        self._e2e = self._histogram("slotzero_e2e_request_latency_seconds")
        self._prompt = self._histogram("slotzero_request_prompt_tokens")
        self._answer = self._histogram("slotzero_request_generation_tokens")
        self._recent = {name: deque[float](maxlen=WINDOW) for name in ("ttft", "tpot", "e2e")}

    def arrived(self) -> None:
        self._arrived.inc()

    def first_token(self, seconds: float) -> None:
        """`seconds` after its request arrived."""
        self._ttft.observe(seconds)
        self._recent["ttft"].append(seconds)

    def token(self, seconds: float) -> None:
        """`seconds` after the one before it."""
        self._tpot.observe(seconds)
        self._recent["tpot"].append(seconds)

    def finished(
        self, reason: str, seconds: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """`seconds` after the request arrived."""
        self._ended.labels(reason).inc()
        self._e2e.observe(seconds)
        self._recent["e2e"].append(seconds)
        self._prompt.observe(prompt_tokens)
        self._answer.observe(generated_tokens)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """What GET /metrics answers: body and content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def live(self) -> dict[str, Any]:
        """What GET /live sends every second, as an object for JSON."""
        stats = self._client.stats
        return {
            "state": self._client.state,
            "info": self._client.info or None,
            "stats": None if stats is None else _as_json(stats),
            "latency": {name: percentiles(recent) for name, recent in self._recent.items()},
        }

    def _counter(self, name: str) -> Counter:
        metric = _BY_NAME[name]
        return Counter(name, metric.help, metric.labels, registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        return Histogram(name, _BY_NAME[name].help, registry=self._registry, buckets=BUCKETS[name])


def _as_json(stats: Stats) -> dict[str, Any]:
    values = msgspec.structs.asdict(stats)
    return {name: msgspec.to_builtins(value, str_keys=True) for name, value in values.items()}


def percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """The smallest value that p percent do not exceed; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{p}": ordered[-(-len(ordered) * p // 100) - 1] for p in (50, 90, 99)}


class _Engines(Collector):
    """The engines' own numbers, read when Prometheus asks."""

    def __init__(self, engines: Sequence[Watched]) -> None:
        self._engines = [(engine, _Totals()) for engine in engines]

    def describe(self) -> Iterable[Family]:
        return [_family(name) for name, metric in _BY_NAME.items() if "engine" in metric.labels]

    def collect(self) -> Iterable[Family]:
        found: defaultdict[str, Values] = defaultdict(dict)
        for i, (engine, totals) in enumerate(self._engines):
            for name, values in _values(engine, totals).items():
                found[name] |= {(str(i), *labels): value for labels, value in values.items()}
        return [_family(name, values) for name, values in found.items()]


def _values(engine: Watched, totals: "_Totals") -> dict[str, Values]:
    stats, info = engine.stats, engine.info
    generation = getattr(engine, "generation", 0)
    return totals.follow(generation, stats) | {
        "slotzero_num_requests_running": {(): stats.running if stats else 0},
        "slotzero_num_requests_waiting": {(): stats.waiting if stats else 0},
        "slotzero_kv_cache_usage_perc": {
            (): stats.pages_used / stats.pages if stats and stats.pages else 0
        },
        "slotzero_recording_seconds": {(): info["recording_seconds"] if info else 0},
        "slotzero_certified": _by_name(certified(info, stats)),
        "slotzero_engine_up": {(): engine.state == "ready"},
        "slotzero_engine_restarts_total": {(): generation},
        "slotzero_spec_decode_width": _width(stats),
    }


class _Totals:
    """Counters of processes that come and go, as counters that only grow."""

    # shown = base, of processes that are gone + last, the latest report of this one
    def __init__(self) -> None:
        self._generation = 0
        self._base: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._last: dict[tuple[str, Labels], float] = {}

    def follow(self, generation: int, stats: Stats | None) -> dict[str, Values]:
        if generation != self._generation:
            self._fold(list(self._last))
            self._generation = generation
        now = {} if stats is None else _counters(stats)
        # a value that fell is of another process too, even if nobody said so
        self._fold([series for series, value in now.items() if value < self._last.get(series, 0)])
        self._last |= now
        return self._shown()

    def _fold(self, gone: Iterable[tuple[str, Labels]]) -> None:
        for series in gone:
            self._base[series] += self._last.pop(series)

    def _shown(self) -> dict[str, Values]:
        shown: dict[str, Values] = {name: {} for name in (*_COUNTERS, *_SPECULATION)}
        shown |= {name: {(): 0} for name in _COUNTERS if _BY_NAME[name].labels == ("engine",)}
        for name, labels in (*self._base, *self._last):
            series = name, labels
            shown[name][labels] = self._base.get(series, 0) + self._last.get(series, 0)
        return shown


def _counters(stats: Stats) -> dict[tuple[str, Labels], float]:
    found = {name: read(stats) for name, read in _COUNTERS.items()}
    if stats.speculation is not None:
        found |= {name: read(stats.speculation) for name, read in _SPECULATION.items()}
    return {
        (name, labels): value for name, values in found.items() for labels, value in values.items()
    }


def _width(stats: Stats | None) -> Values:
    return {} if stats is None or stats.speculation is None else {(): stats.speculation.width}


def certified(info: Mapping[str, Any] | None, stats: Stats | None) -> dict[str, bool]:
    """Of each size that was to replay: does it? Sizes may be recorded, or fall back, later."""
    found = {}
    for records in (info or {}).get("sizes", {}).values():
        for record in records:
            if record["backend"] != "eager" or record["failure"]:
                found[record["key"]] = not record["failure"]
    if stats is not None:
        found |= {size: True for size in stats.replays if size not in found}
        found |= dict.fromkeys(stats.failed_sizes, False)
    return found


def _family(name: str, values: Values | None = None) -> Family:
    metric = _BY_NAME[name]
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(name, metric.help, labels=metric.labels)
    for labels, value in (values or {}).items():
        family.add_metric(labels, float(value))
    return family


_DOCUMENT = """\
# Metrics

`GET /metrics` answers in Prometheus' text format. Names are vLLM's, with our prefix, where vLLM has
such a metric; from `slotzero_requests_total` on they are ours. This page is made by
`python -m slotzero.server.metrics`.

| metric | kind | labels | what it says |
|---|---|---|---|
{rows}

`engine` is an engine's number, from 0; there is one for each of `--data-parallel-size`. What has no
such label is of the server as a whole.

A size is written as everywhere else: `decode[8]` is 8 rows of one token, `prefill[64t x 4r]` is 64
tokens in 4 rows. Counters go on where they were when the engine's process is replaced; what it
counted after the last scrape is lost. While an engine is not there, its gauges are 0. Metrics of
speculative decoding have no samples where it is off.

## Some questions

| question | in PromQL |
|---|---|
| tokens per second | `sum(rate(slotzero_generation_tokens_total[1m]))` |
| engines that serve | `sum(slotzero_engine_up)` |
| time to first token, 99th percentile | {p99} |
| share of work that is padding | {padding} |
| prefix hit rate | {hits} |
| tokens per step of a row with drafts | {accepted} |
| is a size not replaying that should? | `slotzero_certified == 0` |
| did a check fail on live traffic? | `increase(slotzero_sanitizer_violations_total[1h]) > 0` |
"""

_P99 = "`histogram_quantile(0.99, rate(slotzero_time_to_first_token_seconds_bucket[5m]))`"
_PADDING = (
    "`rate(slotzero_padded_tokens_total[5m])"
    " / (rate(slotzero_padded_tokens_total[5m]) + rate(slotzero_real_tokens_total[5m]))`"
)
_HITS = (
    "`sum(rate(slotzero_prefix_cache_hits_total[5m]))"
    " / sum(rate(slotzero_prefix_cache_queries_total[5m]))`"
)
_ACCEPTED = (
    "`1 + sum(rate(slotzero_spec_decode_num_accepted_tokens_total[5m]))"
    " / sum(rate(slotzero_spec_decode_num_drafts_total[5m]))`"
)


def document() -> str:
    """docs/metrics.md."""
    rows = "\n".join(
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, kind, labels, text in METRICS
    )
    return _DOCUMENT.format(rows=rows, p99=_P99, padding=_PADDING, hits=_HITS, accepted=_ACCEPTED)


if __name__ == "__main__":
    print(document(), end="")
