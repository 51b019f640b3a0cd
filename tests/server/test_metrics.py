"""Tests of the metrics: every one is exported and follows the engine, and no counter falls."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_server import FAILED, fake_info, fake_stats
from prometheus_client.parser import text_string_to_metric_families

from slotzero.errors import CapacityError, InvalidInputError, ModelError, outcome_of
from slotzero.server.messages import Frames, FromEngine, SpeculationReport, Stats, frame
from slotzero.server.metrics import BUCKETS, METRICS, Metrics, certified, document, percentiles
from slotzero.server.process import speculation_of
from slotzero.server.settings import ServerSettings
from slotzero.speculative.widths import SpeculationStats

ROOT = Path(__file__).parents[2]
NOTHING = Stats(0, 0, 32, 0, 0, 2048, 0, 0, 0, 0, 0, 0, {}, {}, {}, {}, {}, 0, 0)
SPECULATING = msgspec.structs.replace(
    NOTHING, speculation=SpeculationReport(3, 10, 30, 16, [9, 7, 0], {1: 5, 3: 8})
)


class FakeClient:
    def __init__(self, stats: Stats | None = None, info: Mapping[str, Any] | None = None) -> None:
        self.stats, self.info = stats, info
        self.state = "loading" if stats is None else "ready"
        self.generation = 0

    @property
    def replicas(self) -> "list[FakeClient]":
        return [self]


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(metrics: Metrics) -> Samples:
    """Return every sample by name and labels; raise if the page is invalid."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    labels = {"engine": "0"} | labels
    return read(metrics).get((name, tuple(sorted(labels.items()))))


@pytest.mark.parametrize(
    "client",
    [FakeClient(), FakeClient(fake_stats(60, True), fake_info(True)), FakeClient(SPECULATING)],
)
def test_every_metric_of_the_table_is_exported_and_no_other(client: FakeClient) -> None:
    body, _ = Metrics(client).render()
    families = list(text_string_to_metric_families(body.decode()))
    found = {
        (f.name + "_total" if f.type == "counter" else f.name, f.type, f.documentation)
        for f in families
    }
    assert found == {(m.name, m.kind, m.help) for m in METRICS}
    labels = {m.name: set(m.labels) for m in METRICS}
    for family in families:
        for sample in family.samples:
            name = re.sub(r"_(bucket|count|sum)$", "", sample.name)
            assert set(sample.labels) - {"le"} == labels[name]


def test_names_are_unique_and_kinds_are_known() -> None:
    assert len({m.name for m in METRICS}) == len(METRICS)
    for name, kind, _, text in METRICS:
        assert name.startswith("slotzero_")
        assert kind in ("counter", "gauge", "histogram")
        assert name.endswith("_total") == (kind == "counter")
        assert (name in BUCKETS) == (kind == "histogram")
        assert text.endswith(".") and "\n" not in text


def test_values_follow_the_engine() -> None:
    stats = fake_stats(60, True)
    client = FakeClient(stats, fake_info(True))
    metrics = Metrics(client)
    for name, expected in {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.pages_used / stats.pages,
        "prefix_cache_queries_total": stats.prefix_asked_tokens,
        "prefix_cache_hits_total": stats.prefix_hit_tokens,
        "num_preemptions_total": stats.preemptions,
        "prompt_tokens_total": stats.prompt_tokens,
        "generation_tokens_total": stats.generated_tokens,
        "steps_total": stats.steps,
        "recording_seconds": 6.41,
        "sanitizer_steps_watched_total": stats.steps_watched,
        "sanitizer_violations_total": stats.violations,
        "engine_up": 1,
        "engine_restarts_total": 0,
    }.items():
        assert value(metrics, f"slotzero_{name}") == expected, name
    for size, n in stats.replays.items():
        runner = size.partition("[")[0]
        assert value(metrics, "slotzero_replays_total", runner=runner, size=size) == n
    for runner in ("decode", "prefill"):
        real = value(metrics, "slotzero_real_tokens_total", runner=runner)
        padded = value(metrics, "slotzero_padded_tokens_total", runner=runner)
        assert (real, padded) == (stats.real_tokens[runner], stats.padded_tokens[runner])
    assert value(metrics, "slotzero_eager_steps_total", reason=FAILED) == stats.eager[FAILED]
    assert value(metrics, "slotzero_certified", size="decode[24]") == 0
    assert value(metrics, "slotzero_certified", size="prefill[64t x 4r]") == 1

    client.stats = msgspec.structs.replace(stats, running=2, generated_tokens=10**6)
    assert value(metrics, "slotzero_num_requests_running") == 2
    assert value(metrics, "slotzero_generation_tokens_total") == 10**6


def told_of_speculation(metrics: Metrics) -> dict[str, float]:
    """Return the speculation metrics by name, without the common prefix, and by their own label."""
    return {
        " ".join([name.removeprefix("slotzero_spec_decode_"), *(v for _, v in labels[1:])]): n
        for (name, labels), n in read(metrics).items()
        if name.startswith("slotzero_spec_decode_")
    }


def test_speculation_metrics_exist_only_with_speculation() -> None:
    client = FakeClient()
    metrics = Metrics(client)
    assert told_of_speculation(metrics) == {}
    client.stats = NOTHING
    assert told_of_speculation(metrics) == {}
    client.stats = SPECULATING
    told = {
        "num_drafts_total": 10,
        "num_draft_tokens_total": 30,
        "num_accepted_tokens_total": 16,
        "num_accepted_tokens_per_pos_total 0": 9,
        "num_accepted_tokens_per_pos_total 1": 7,
        "num_accepted_tokens_per_pos_total 2": 0,
        "steps_total 1": 5,
        "steps_total 3": 8,
        "width": 3,
    }
    assert told_of_speculation(metrics) == told

    client.stats, client.generation = None, 1  # a new process: counters stay, gauges disappear
    del told["width"]
    assert told_of_speculation(metrics) == told
    client.stats = SPECULATING
    assert told_of_speculation(metrics) == {name: 2 * n for name, n in told.items()} | {"width": 3}


def test_speculation_crosses_the_socket_and_reaches_the_page() -> None:
    for stats in (NOTHING, SPECULATING):
        assert Frames(FromEngine).feed(frame(stats)) == [stats]
    live = json.loads(json.dumps(Metrics(FakeClient(SPECULATING)).live()))
    assert live["stats"]["speculation"] == {
        "width": 3,
        "drafts": 10,
        "draft_tokens": 30,
        "accepted_tokens": 16,
        "accepted_per_pos": [9, 7, 0],
        "steps": {"1": 5, "3": 8},
    }


def test_the_engine_sends_its_own_counts() -> None:
    stats = SpeculationStats(4)
    stats.add_step(3)
    stats.add(2, 1)
    stats.add(0, 0)
    sent = speculation_of(stats)
    assert sent == SpeculationReport(3, 1, 2, 1, [1, 0], {3: 1})
    stats.add(2, 2)
    assert sent == SpeculationReport(3, 1, 2, 1, [1, 0], {3: 1}), "the report must be a copy"
    assert speculation_of(None) is None


def test_http_events_are_counted() -> None:
    metrics = Metrics(FakeClient())
    for _ in range(3):
        metrics.arrived()
    metrics.first_token(0.2)
    metrics.token(0.01)
    metrics.token(0.03)
    metrics.finished("stop", 0.5, 7, 3)
    metrics.refused(429)
    metrics.refused(429)
    samples = read(metrics)

    def at(name: str, **labels: str) -> float:
        return samples[f"slotzero_{name}", tuple(sorted(labels.items()))]

    assert at("requests_total") == 3
    assert at("time_to_first_token_seconds_count") == 1
    assert at("time_per_output_token_seconds_count") == 2
    assert at("time_per_output_token_seconds_sum") == pytest.approx(0.04)
    assert at("time_per_output_token_seconds_bucket", le="0.01") == 1
    assert at("e2e_request_latency_seconds_sum") == 0.5
    assert at("request_prompt_tokens_sum") == 7
    assert at("request_generation_tokens_bucket", le="2.0") == 0
    assert at("request_generation_tokens_bucket", le="5.0") == 1
    assert at("request_success_total", finished_reason="stop") == 1
    assert at("request_success_total", finished_reason="length") == 0
    assert at("http_refused_total", status="429") == 2


def test_metrics_without_an_engine() -> None:
    metrics = Metrics(FakeClient())
    assert value(metrics, "slotzero_engine_up") == 0
    assert value(metrics, "slotzero_num_requests_running") == 0
    assert value(metrics, "slotzero_generation_tokens_total") == 0
    assert metrics.live() == {
        "state": "loading",
        "info": None,
        "stats": None,
        "latency": {"ttft": None, "tpot": None, "e2e": None},
    }


def test_counters_continue_after_a_restart() -> None:
    old = msgspec.structs.replace(NOTHING, generated_tokens=100, replays={"decode[8]": 40})
    client = FakeClient(old)
    metrics = Metrics(client)
    replays = {"runner": "decode", "size": "decode[8]"}
    assert value(metrics, "slotzero_replays_total", **replays) == 40

    client.stats, client.state, client.generation = None, "restarting", 1
    assert value(metrics, "slotzero_engine_up") == 0
    assert value(metrics, "slotzero_engine_restarts_total") == 1
    assert value(metrics, "slotzero_generation_tokens_total") == 100
    assert value(metrics, "slotzero_replays_total", **replays) == 40

    # more than the old process had counted: only the generation distinguishes them
    client.stats = msgspec.structs.replace(NOTHING, generated_tokens=250)
    assert value(metrics, "slotzero_generation_tokens_total") == 350
    assert value(metrics, "slotzero_replays_total", **replays) == 40


def test_a_client_that_does_not_count_its_processes() -> None:
    class Plain:
        state, info, stats = "ready", None, msgspec.structs.replace(NOTHING, steps=5)

    class Fleet(Plain):
        replicas = (Plain(),)

    metrics = Metrics(Fleet())
    assert value(metrics, "slotzero_engine_restarts_total") == 0
    Plain.stats = msgspec.structs.replace(NOTHING, steps=2)
    assert value(metrics, "slotzero_steps_total") == 7


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.sampled_from("ab")), max_size=10))
def test_counters_never_fall(reports: list[tuple[bool, int, str]]) -> None:
    """This holds for any reports, and whether or not a new process is announced."""
    client = FakeClient()
    metrics = Metrics(client)
    before: Samples = {}
    for is_new, n, reason in reports:
        client.generation += is_new
        told = SpeculationReport(n, n, n, n, [n] * (n % 3), {n: n}) if n % 2 else None
        client.stats = msgspec.structs.replace(
            NOTHING, steps=n, eager={reason: n}, speculation=told
        )
        now = read(metrics)
        counters = {key: n for key, n in now.items() if key[0].endswith("_total")}
        assert before.keys() <= counters.keys()
        assert all(counters[key] >= n for key, n in before.items())
        before = counters


def test_engines_have_separate_samples() -> None:
    class Fleet(FakeClient):
        replicas = (
            FakeClient(msgspec.structs.replace(NOTHING, steps=5, eager={"x": 2})),
            FakeClient(msgspec.structs.replace(NOTHING, steps=7)),
            FakeClient(),
        )

    metrics = Metrics(Fleet())

    def each(name: str, **labels: str) -> list[float | None]:
        return [value(metrics, f"slotzero_{name}", engine=str(i), **labels) for i in range(3)]

    assert each("engine_up") == [1, 1, 0]
    assert each("steps_total") == [5, 7, 0]
    assert each("eager_steps_total", reason="x") == [2, None, None]
    Fleet.replicas[0].stats, Fleet.replicas[0].generation = NOTHING, 1
    Fleet.replicas[1].stats = msgspec.structs.replace(NOTHING, steps=8)
    assert each("steps_total") == [5, 8, 0], "only one engine was replaced"
    assert each("engine_restarts_total") == [1, 0, 0]


def test_certified_skips_sizes_that_are_eager_by_design() -> None:
    assert certified(None, None) == {}
    cpu = fake_info(has_gpu=False)
    assert all(size.startswith("decode[") for size in certified(cpu, None))
    assert all(certified(cpu, None).values())
    later = msgspec.structs.replace(
        NOTHING, replays={"decode[64]": 1}, failed_sizes={"decode[8]": "a violation"}
    )
    found = certified(cpu, later)
    assert found["decode[64]"], "the size was captured at first use"
    assert not found["decode[8]"], "the size fell back later"


def test_a_label_may_hold_anything() -> None:
    reason = 'a "quoted"\nreason \\ and more'
    metrics = Metrics(FakeClient(msgspec.structs.replace(NOTHING, eager={reason: 3})))
    assert value(metrics, "slotzero_eager_steps_total", reason=reason) == 3


def test_live_has_the_fields_that_the_page_reads() -> None:
    stats, info = fake_stats(60, False), fake_info(False)
    metrics = Metrics(FakeClient(stats, info))
    for i in range(1, 101):
        metrics.first_token(i / 100)
    live = metrics.live()
    assert live["state"] == "ready"
    assert live["info"] == info
    assert live["stats"] == {name: getattr(stats, name) for name in Stats.__struct_fields__}
    assert live["latency"]["ttft"] == {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    assert live["latency"]["tpot"] is None


def test_percentiles_of_few() -> None:
    assert percentiles([]) is None
    assert percentiles([2.0]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0}


# Documents and deployment


def metric_names(text: str) -> set[str]:
    """Return the metric names in a text, without the suffixes of histograms."""
    found = set(re.findall(r"\bslotzero_[a-z0-9_]+", text))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in found}


@pytest.mark.slow
def test_the_document_equals_the_output_of_the_module() -> None:
    command = [sys.executable, "-m", "slotzero.server.metrics"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert printed == document()
    assert (ROOT / "docs" / "metrics.md").read_text() == printed, f"run: {' '.join(command[1:])}"


def test_the_document_names_the_metrics_and_no_others() -> None:
    assert metric_names(document()) == {m.name for m in METRICS}


DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())


def test_the_dashboard_shows_every_metric_and_no_others() -> None:
    asked = " ".join(q["expr"] for panel in DASHBOARD["panels"] for q in panel.get("targets", ()))
    assert metric_names(asked) == {m.name for m in METRICS}
    assert metric_names(json.dumps(DASHBOARD)) == {m.name for m in METRICS}


def test_the_dashboard_groups_by_labels_that_exist() -> None:
    known = {label for m in METRICS for label in m.labels} | {"le", "instance"}
    for panel in DASHBOARD["panels"]:
        for query in panel.get("targets", ()):
            grouped = re.findall(r"by \((\w+)\)", query["expr"])
            shown = re.findall(r"\{\{(\w+)\}\}", query["legendFormat"])
            assert {*grouped, *shown} <= known, panel["title"]
            assert query["expr"].count("(") == query["expr"].count(")")


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_prometheus_scrapes_where_the_server_listens() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (job,) = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    server = ServerSettings()
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"{server.host}:{server.port}"]}]


def test_the_unit_waits_for_running_answers_and_gives_up_on_wrong_settings() -> None:
    lines = (ROOT / "deploy" / "slotzero.service").read_text().splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    assert float(unit["TimeoutStopSec"]) > ServerSettings().grace
    for wanted in ("DynamicUser", "NoNewPrivileges"):
        assert unit[wanted] == "yes"
    assert unit["ProtectSystem"] == "strict"
    assert unit["Restart"] == "on-failure"
    hopeless = {
        outcome_of(error).exit_code for error in (InvalidInputError, ModelError, CapacityError)
    }
    assert set(map(int, unit["RestartPreventExitStatus"].split())) == hopeless


def test_the_image_does_not_run_as_root_and_has_a_health_check() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text()
    port = ServerSettings().port
    assert re.search(r"^USER slotzero$", lines, re.MULTILINE)
    assert f"http://127.0.0.1:{port}/health" in lines
    assert f"EXPOSE {port}" in lines
    for copied in re.findall(r"^COPY (.+) \S+$", lines, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())
    extras = re.search(r"'\.\[([a-z,]+)\]'", lines)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras and set(extras[1].split(",")) <= declared["optional-dependencies"].keys()
