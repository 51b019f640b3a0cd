"""The benchmark: the same prompts for every engine, honest counts, and a last line that is JSON."""

import json
import sys

import pytest
import torch

from slotzero.bench import hardware
from slotzero.bench.report import summary
from slotzero.bench.session import Session
from slotzero.bench.timeline import Timeline
from slotzero.bench.workloads import WORKLOADS, fixed, fixed_spec, mixed
from slotzero.cli import bench as command
from slotzero.cli.main import main

TINY = ["tiny:llama", "--backend", "eager"]
KEYS = {
    "model",
    "workload",
    "backend",
    "device",
    "hardware",
    "tokens_per_second",
    "requests",
    "time_to_first_token",
    "time_per_token",
    "padding_waste",
    "replays",
    "eager_fallbacks",
    "share_of_bandwidth_limit",
    "startup_seconds",
    "versions",
}


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_CPU_READ_BYTES", 8 << 20)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["bench", *words]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) > 10
    return json.loads(last)


# Workloads: these numbers were drawn by the script that other engines are measured with.


def test_fixed_workloads_are_frozen() -> None:
    workload = fixed(8, 128, 512)
    assert workload.prompts[0][:4] == [27680, 12633, 24846, 29181]
    assert workload.prompts[-1][-4:] == [10987, 15521, 31497, 9598]
    assert [len(prompt) for prompt in workload.prompts] == [128] * 8
    assert workload.output_lens == [512] * 8
    small = [[226, 108, 204, 237, 117], [20, 76, 257, 140, 134], [113, 245, 210, 222, 87]]
    assert fixed(3, 5, 7, vocab_size=259).prompts == small


def test_the_mixed_workload_is_frozen() -> None:
    workload = mixed()
    assert [len(prompt) for prompt in workload.prompts[:3]] == [964, 839, 537]
    assert workload.prompts[0][:4] == [12633, 24846, 29181, 13791]
    assert workload.prompts[-1][-4:] == [4301, 30843, 18127, 8426]
    assert sum(map(len, workload.prompts)) == 150732
    assert workload.output_lens[:3] == [262, 805, 802]
    assert (workload.output_lens[-1], sum(workload.output_lens)) == (1014, 142115)


def test_workloads_by_name() -> None:
    assert tuple(WORKLOADS) == command.WORKLOAD_NAMES
    assert [spec.num_requests for spec in WORKLOADS.values()] == [1, 8, 64, 256, 256]
    assert WORKLOADS["b8"].draw(49152) == fixed(8, 128, 512)  # a larger vocabulary changes nothing
    assert WORKLOADS["mixed"].draw(32000) == mixed()
    assert max(map(max, WORKLOADS["mixed"].draw(259).prompts)) == 258
    assert WORKLOADS["b1"].draw(259).longest == 640


def test_clipping_shortens_answers_only() -> None:
    workload = mixed(num_requests=4, shortest=2, longest=30)
    clipped = workload.clipped(10)
    assert clipped.prompts == workload.prompts
    assert clipped.output_lens == [min(n, 10) for n in workload.output_lens]


# The command


def test_throughput_ends_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "5", "--input-len", "9", "--output-len", "20"]
    report = run(capsys, "throughput", *TINY, *words, "--max-num-seqs", "8")
    assert report.keys() >= KEYS
    assert report["requests"] == 5
    assert report["input_tokens"] == 5 * 9
    assert report["output_tokens"] == 5 * 20
    assert report["tokens_per_second"] == pytest.approx(100 / report["seconds"], rel=1e-3)
    assert report["padding_waste"] == {"decode": 0.375, "prefill": pytest.approx(3 / 48)}
    assert (report["replays"], report["preemptions"]) == (0, 0)
    # the first token comes from the prefill, the other 19 are decoded
    assert report["eager_fallbacks"] == {"eager backend": 19, "prefill is not recorded": 1}
    assert report["steps"] == 20
    assert 0 < report["share_of_bandwidth_limit"] < 1
    for name in ("time_to_first_token", "time_per_token"):
        assert 0 < report[name]["p50"] <= report[name]["p99"]
    assert report["versions"]["torch"] == torch.__version__


def test_dummy_weights_need_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3"]
    report = run(capsys, "throughput", *TINY, *words, "--load-format", "dummy")
    assert report["output_tokens"] == 6


def test_latency_ends_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input-len", "8", "--output-len", "6", "--repeats", "3", "--batch-size", "2"]
    report = run(capsys, "latency", *TINY, *words)
    assert report.keys() >= KEYS
    assert (report["requests"], report["repeats"]) == (6, 3)
    assert report["output_tokens"] == 3 * 2 * 6
    assert report["request_latency"]["p50"] > report["time_to_first_token"]["p50"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["throughput", *TINY], "640"),  # b8 needs more context than the tiny model has
        (["throughput", *TINY, "--workload", "b8", "--input-len", "3"], "--workload"),
        (["throughput", *TINY, "--repeats", "3"], "--repeats"),
        (["latency", *TINY, "--workload", "b8"], "--workload"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], names: str
) -> None:
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slotzero: error: ")
    assert captured.err.count("\n") == 1
    assert names in captured.err


@pytest.mark.parametrize("words", [["speed"], [], ["throughput", "--input-len", "0"]])
def test_bad_flags_are_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words])
    assert "error: " in capsys.readouterr().err


# Arithmetic


def test_summary_is_in_milliseconds() -> None:
    assert summary([0.001, 0.002, 0.003]) == {"mean": 2.0, "p50": 2.0, "p99": 2.98}
    assert summary([]) == {"mean": None, "p50": None, "p99": None}


def test_gaps_are_within_a_request() -> None:
    timeline = Timeline(1.0, 4, [[0.25, 0.5, 1.0], [0.5]])
    assert timeline.gaps() == [0.25, 0.5]
    assert timeline.first_tokens() == [0.25, 0.5]
    assert timeline.last_tokens() == [1.0, 0.5]
    assert timeline.num_tokens == 4


def test_bytes_read_are_counted_by_hand() -> None:
    session = Session("tiny:llama", {"backend": "eager", "show_progress": False})
    workload = session.draw(fixed_spec(2, 10, 4))
    # three decoded tokens each attend to 11, 12 and 13; 2 layers of K and V, 2 heads of 16 floats
    kv_bytes = 2 * (11 + 12 + 13) * (2 * 2 * 2 * 16 * 4)
    worker = session.engine.worker
    embedding = worker.registry["weight.embedding"]
    weights = worker.weight_bytes - embedding.numel() * 4  # not tied: a lookup, not a product
    assert session.bytes_read(workload, num_steps=5) == 5 * weights + kv_bytes


def test_counts_start_after_the_warm_up() -> None:
    session = Session("tiny:llama", {"backend": "eager", "show_progress": False})
    workload = session.draw(fixed_spec(2, 10, 4))
    session.warm_up(workload)
    assert all(c.real_tokens == 0 and not c.eager for c in session.counts().values())
    session.measure(workload)
    assert session.counts()["prefill"].real_tokens == 20
    assert session.counts()["decode"].real_tokens == 6


# The machine


def test_bandwidth_is_plausible() -> None:
    assert 1e8 < hardware.read_bandwidth(torch.device("cpu")) < 1e13


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["software"]["python"] == sys.version.split()[0]
    assert facts["software"]["torch"] == torch.__version__
    assert facts["machine"]["cores"] >= 1
    assert facts["engine"]["backend"] in ("cpu", "cuda", "eager")
    assert facts["engine"]["because"]
    assert facts["cache"]["size_bytes"] >= 0


def test_doctor_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("backend", "gguf", "memory available", "because"):
        assert word in shown
