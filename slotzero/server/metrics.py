"""Metrics for Prometheus and for the page at `/`.

METRICS is the one table: the exported metrics, docs/metrics.md and the tests are made from it.
Names are vLLM's where vLLM has the metric. `Metrics` is called for every HTTP event; the engine's
numbers are read from its latest report on each scrape. This module knows no routes and sends
nothing.

The rule: a counter never falls, although a restarted engine process counts from 0.

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
        "Requests that wait for a slot or KV pages.",
    ),
    Metric(
        "slotzero_time_to_first_token_seconds", "histogram", (),
        "Time from a request's arrival to its first token.",
    ),
    Metric(
        "slotzero_time_per_output_token_seconds", "histogram", (),
        "Time between two consecutive tokens of an answer.",
    ),
    Metric(
        "slotzero_e2e_request_latency_seconds", "histogram", (),
        "Time from a request's arrival to its last token.",
    ),
    Metric(
        "slotzero_request_prompt_tokens", "histogram", (), "Prompt tokens per finished request."
    ),
    Metric(
        "slotzero_request_generation_tokens", "histogram", (),
        "Generated tokens per finished request.",
    ),
    Metric(
        "slotzero_kv_cache_usage_perc", "gauge", ("engine",),
        "Fraction of KV pages that requests hold, 0 to 1; pages that only the prefix cache holds"
        " count as free.",
    ),
    Metric(
        "slotzero_kv_cache_tokens", "gauge", ("engine", "dtype"),
        "Tokens for which the KV cache has room, with the data type of their keys and values.",
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
        "Preemptions: a request lost its slot and pages to an older one and is recomputed later.",
    ),
    Metric("slotzero_prompt_tokens_total", "counter", ("engine",), "Prompt tokens processed."),
    Metric("slotzero_generation_tokens_total", "counter", ("engine",), "Tokens generated."),
    Metric(
        "slotzero_request_success_total", "counter", ("finished_reason",),
        "Finished requests by finish reason: stop, length or abort.",
    ),
    Metric(
        "slotzero_spec_decode_num_drafts_total", "counter", ("engine",),
        "Batch rows with drafts to verify.",
    ),
    Metric(
        "slotzero_spec_decode_num_draft_tokens_total", "counter", ("engine",),
        "Draft tokens that were verified.",
    ),
    Metric(
        "slotzero_spec_decode_num_accepted_tokens_total", "counter", ("engine",),
        "Draft tokens that were accepted.",
    ),
    Metric(
        "slotzero_spec_decode_num_accepted_tokens_per_pos_total", "counter", ("engine", "position"),
        "Draft tokens that were accepted, by position in the draft, from 0.",
    ),
    Metric("slotzero_requests_total", "counter", (), "Valid HTTP generation requests."),
    Metric("slotzero_steps_total", "counter", ("engine",), "Engine steps."),
    Metric(
        "slotzero_replays_total", "counter", ("engine", "runner", "size"),
        "Steps that replayed a captured size.",
    ),
    Metric(
        "slotzero_real_tokens_total", "counter", ("engine", "runner"),
        "Tokens in batches that belong to a request.",
    ),
    Metric(
        "slotzero_padded_tokens_total", "counter", ("engine", "runner"),
        "Padding tokens that fill batches up to a captured size.",
    ),
    Metric(
        "slotzero_eager_steps_total", "counter", ("engine", "reason"),
        "Steps that ran eagerly, without a captured size, by reason.",
    ),
    Metric(
        "slotzero_spec_decode_width", "gauge", ("engine",),
        "Tokens per row in the latest step that could have had drafts; 1 means without drafts.",
    ),
    Metric(
        "slotzero_spec_decode_steps_total", "counter", ("engine", "width"),
        "Steps that could have had drafts, by tokens per row.",
    ),
    Metric(
        "slotzero_recording_seconds", "gauge", ("engine",),
        "Time to capture all sizes at the start of the engine's process.",
    ),
    Metric(
        "slotzero_certified", "gauge", ("engine", "size"),
        "1: the size is captured, passed its check and is replayed; 0: it should be, but runs"
        " eagerly. Sizes that are eager by design are not exported.",
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
        "1 while the engine accepts requests; 0 while it loads, restarts or is unresponsive.",
    ),
    Metric(
        "slotzero_engine_restarts_total", "counter", ("engine",),
        "Restarts of the engine's process.",
    ),
    Metric(
        "slotzero_engine_paused", "gauge", ("engine",),
        "1 while an administrator has paused generation.",
    ),
    Metric(
        "slotzero_engine_asleep", "gauge", ("engine",),
        "1 from /sleep until everything was woken up.",
    ),
    Metric(
        "slotzero_asleep_bytes", "gauge", ("engine",),
        "Memory that /sleep gave back to the operating system.",
    ),
    Metric(
        "slotzero_http_refused_total", "counter", ("status",),
        "Refused requests by HTTP status.",
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
WINDOW = 1000  # number of latest latencies for percentiles

Labels = tuple[str, ...]  # values of a metric's labels other than `engine`
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

# no samples if speculation is off
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
    """Return "decode" for "decode[8]"."""
    return size.partition("[")[0]


def _by_name(values: Mapping[str, float]) -> Values:
    return {(name,): value for name, value in values.items()}


class Watched(Protocol):
    """The part of EngineClient that is used here. It may also have `generation: int`, the number of
    processes that were replaced."""

    @property
    def state(self) -> str:
        """The engine's state; "ready" while it accepts requests."""

    @property
    def info(self) -> Mapping[str, Any]:
        """The information in EngineReady; empty until it arrives."""

    @property
    def stats(self) -> Stats | None:
        """The latest report of this process; None before the first."""


class WatchedFleet(Watched, Protocol):
    """All engines as one: the state of the best, and the sum of their statistics."""

    @property
    def replicas(self) -> Sequence[Watched]: ...


class Metrics:
    def __init__(self, client: WatchedFleet) -> None:
        # otherwise every counter and histogram has an additional _created series
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
        """Record a first token, `seconds` after its request arrived."""
        self._ttft.observe(seconds)
        self._recent["ttft"].append(seconds)

    def token(self, seconds: float) -> None:
        """Record a further token, `seconds` after the one before it."""
        self._tpot.observe(seconds)
        self._recent["tpot"].append(seconds)

    def finished(
        self, reason: str, seconds: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """Record a finished request, `seconds` after it arrived."""
        self._ended.labels(reason).inc()
        self._e2e.observe(seconds)
        self._recent["e2e"].append(seconds)
        self._prompt.observe(prompt_tokens)
        self._answer.observe(generated_tokens)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def render(self) -> tuple[bytes, str]:
        """Return the body and content type of GET /metrics."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def live(self) -> dict[str, Any]:
        """Return what GET /live sends every second, as an object for JSON."""
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
    """Return p50, p90 and p99, each the smallest value that p percent do not exceed; None for no
    values."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{p}": ordered[-(-len(ordered) * p // 100) - 1] for p in (50, 90, 99)}


class _Engines(Collector):
    """The engines' own numbers, read on each scrape."""

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
        "slotzero_engine_paused": {(): stats.paused if stats else 0},
        "slotzero_engine_asleep": {(): stats.asleep if stats else 0},
        "slotzero_asleep_bytes": {(): stats.bytes_given_back if stats else 0},
        "slotzero_kv_cache_tokens": _kv_tokens(info),
        "slotzero_recording_seconds": {(): info["recording_seconds"] if info else 0},
        "slotzero_certified": _by_name(certified(info, stats)),
        "slotzero_engine_up": {(): engine.state == "ready"},
        "slotzero_engine_restarts_total": {(): generation},
        "slotzero_spec_decode_width": _width(stats),
    }


class _Totals:
    """Counters across restarts of an engine's process, which only grow."""

    # exported value = base, of earlier processes + last, the latest report of this process
    def __init__(self) -> None:
        self._generation = 0
        self._base: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._last: dict[tuple[str, Labels], float] = {}

    def follow(self, generation: int, stats: Stats | None) -> dict[str, Values]:
        if generation != self._generation:
            self._fold(list(self._last))
            self._generation = generation
        now = {} if stats is None else _counters(stats)
        # a value that fell also belongs to a new process, even without a new generation
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


def _kv_tokens(info: Mapping[str, Any] | None) -> Values:
    return {(info["kv_cache"]["dtype"],): info["kv_cache"]["tokens"]} if info else {}


def _width(stats: Stats | None) -> Values:
    return {} if stats is None or stats.speculation is None else {(): stats.speculation.width}


def certified(info: Mapping[str, Any] | None, stats: Stats | None) -> dict[str, bool]:
    """Return, for each size that should be replayed, whether it is. Sizes may be recorded, or fall
    back to eager, later."""
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

`GET /metrics` returns metrics in Prometheus' text format. Metrics that vLLM also has use vLLM's
names with the prefix `slotzero_`; those from `slotzero_requests_total` on exist only in Slotzero.
This page is generated by `python -m slotzero.server.metrics`.

| metric | kind | labels | meaning |
|---|---|---|---|
{rows}

`engine` is the index of an engine, from 0 to `--data-parallel-size` - 1. Metrics without this label
describe the server as a whole.

Size `decode[8]` has 8 rows of one token, `prefill[64t x 4r]` has 64 tokens in 4 rows. Counters
continue when the engine's process is restarted, without the counts since the last scrape.
While an engine is down, its gauges are 0. Metrics of speculative decoding have no samples while it
is off.

## Example queries

| question | PromQL |
|---|---|
| tokens per second | `sum(rate(slotzero_generation_tokens_total[1m]))` |
| engines that accept requests | `sum(slotzero_engine_up)` |
| time to first token, 99th percentile | {p99} |
| fraction of tokens that are padding | {padding} |
| prefix cache hit rate | {hits} |
| tokens per step of a row with drafts | {accepted} |
| sizes that run eagerly but should be replayed | `slotzero_certified == 0` |
| sanitizer violations on live traffic | `increase(slotzero_sanitizer_violations_total[1h]) > 0` |
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
    """Return the text of docs/metrics.md."""
    rows = "\n".join(
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, kind, labels, text in METRICS
    )
    return _DOCUMENT.format(rows=rows, p99=_P99, padding=_PADDING, hits=_HITS, accepted=_ACCEPTED)


if __name__ == "__main__":
    print(document(), end="")
