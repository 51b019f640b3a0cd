"""Tests of `slotzero bench`: workloads, counts, traces, plots, and a last line that is JSON."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotzero.bench import hardware, profile
from slotzero.bench.clock import WARM_UPS, device_seconds, host_seconds
from slotzero.bench.graphs import choose_keys
from slotzero.bench.intervals import busy_and_gaps
from slotzero.bench.plot import Panel, Series, draw
from slotzero.bench.report import summary
from slotzero.bench.rows import refusal, standing
from slotzero.bench.session import BenchSession
from slotzero.bench.sheets import Sheet, print_sheets
from slotzero.bench.timeline import Timeline
from slotzero.bench.workloads import WORKLOADS, fixed, fixed_spec, mixed
from slotzero.cli import bench as command
from slotzero.cli.main import main
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import CapacityError, ContractError
from slotzero.graph import GraphKey
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.tables import SAMPLING_TABLES, mask_tables

pytestmark = pytest.mark.slow

TINY = ["tiny:llama", "--backend", "eager"]
QWEN = ["tiny:qwen3", "--backend", "eager"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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


# Workloads: the expected numbers come from the script that measures the other engines.


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
    assert [spec.num_requests for spec in WORKLOADS.values()] == [1, 8, 64, 256, 256, 64]
    assert WORKLOADS["b8"].draw(49152) == fixed(8, 128, 512)  # a larger vocabulary changes nothing
    assert WORKLOADS["mixed"].draw(32000) == mixed()
    assert max(map(max, WORKLOADS["mixed"].draw(259).prompts)) == 258
    assert WORKLOADS["b1"].draw(259).longest == 640
    assert WORKLOADS["prefill"].draw(32000) == fixed(64, 2048, 1, seed=7)


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
    assert report["versions"]["torch"] == version("torch")


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
        (["throughput", *TINY, "--workload", "b1", "--profile"], "--profile"),
        (["latency", *TINY, "--profile"], "--profile"),
        (["graphs", *QWEN, "--input-len", "3"], "--input-len"),
        (["graphs", *QWEN, "--sizes", "1", "--all-sizes"], "--all-sizes"),
        (["graphs", *QWEN, "--sizes", "1,3"], "3 rows run at 4"),
        (["graphs", *QWEN, "--sizes", "99"], "--max-num-seqs"),
        (["cost", *QWEN, "--sizes", "1"], "--sizes"),
        (["cost", *QWEN, "--plot", "cost.png"], ".svg"),
        (["cost", *QWEN, "--plot", "/no/such/folder/cost.svg"], "--plot"),
    ],
)
def test_an_impossible_measurement_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], names: str
) -> None:
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slotzero: error: ")
    assert captured.err.count("\n") == 1
    assert names in captured.err


@pytest.mark.parametrize(
    ("words", "remedies"),
    [
        (["graphs", "--context", "511"], ["lower --context\n"]),
        (["graphs", "--max-model-len", "99", "--context", "98"], ["--context", "--max-model-len"]),
        (["graphs", "--kv-cache-memory", "1M", "--sizes", "16"], ["400 KV pages", "--context"]),
        (["cost", "--context", "511"], ["lower --context\n"]),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str], words: list[str], remedies: list[str]
) -> None:
    assert main(["bench", words[0], *QWEN, *words[1:]]) == 4
    shown = capsys.readouterr().err
    assert all(remedy in shown for remedy in remedies)


def test_a_table_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A table keeps its full width even if the output has only 80 columns, as in a log."""
    numbers = [f"{i}234.567" for i in range(15)]
    header = [f"column {i}" for i in range(15)]
    print_sheets({"a": 1}, [Sheet("wide", [numbers], header), Sheet("narrow", [["a", "b"]])])
    *shown, last = capsys.readouterr().out.splitlines()
    assert last == '{"a": 1}'
    (row,) = [line for line in shown if numbers[0] in line]
    assert all(number in row for number in numbers)
    assert all(name in "".join(shown) for name in header)


@pytest.mark.parametrize(
    "words",
    [["speed"], [], ["throughput", "--input-len", "0"], ["graphs", "--sizes", "1,x"]],
)
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
    session = BenchSession("tiny:llama", {"backend": "eager", "show_progress": False})
    workload = session.draw(fixed_spec(2, 10, 4))
    # three decoded tokens attend to 11, 12 and 13 tokens; 2 layers of K and V, 2 heads of 16 floats
    kv_bytes = 2 * (11 + 12 + 13) * (2 * 2 * 2 * 16 * 4)
    worker = session.engine.worker
    embedding = worker.registry["weight.embedding"]
    weights = worker.weight_bytes - embedding.numel() * 4  # not tied: a lookup, not a product
    assert session.bytes_read(workload, num_steps=5) == 5 * weights + kv_bytes


def test_counts_start_after_the_warm_up() -> None:
    session = BenchSession("tiny:llama", {"backend": "eager", "show_progress": False})
    workload = session.draw(fixed_spec(2, 10, 4))
    session.warm_up(workload)
    assert all(c.real_tokens == 0 and not c.eager for c in session.counts().values())
    session.measure(workload)
    assert session.counts()["prefill"].real_tokens == 20
    assert session.counts()["decode"].real_tokens == 6


# Rows that are measured without requests


def make_engine(**settings: object) -> Engine:
    settings = {"backend": "eager", "max_num_seqs": 8, **settings}
    model = "tiny:qwen3"
    return Engine(
        EngineConfig(model=model, skip_tokenizer_init=True, show_progress=False, **settings)
    )


def generate(engine: Engine, num_prompts: int = 3) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = fixed(num_prompts, 40, 12, vocab_size=259).prompts
    answers = [engine.add(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    return [answer.token_ids for answer in answers]


def assert_neutral(engine: Engine) -> None:
    tables = engine.worker.tables
    for name in ("length", "target", "page_table"):
        assert tables[name].abs().max() == 0, name
    for spec in (*SAMPLING_TABLES, *mask_tables(1)):
        assert (tables[spec.name] == spec.neutral).all(), spec.name


def test_rows_occupy_real_slots_and_return_them() -> None:
    engine = make_engine()
    worker = engine.worker
    key = GraphKey("decode", 4, 4)
    with standing(engine, worker.decode, key, context=100) as rows:
        assert [row.slot for row in rows.step.rows] == [1, 2, 3, 4]
        assert worker.tables.length.tolist() == [0, 101, 101, 101, 101, 0, 0, 0, 0]
        rows.rewind()
        assert worker.tables.length.tolist() == [0, 100, 100, 100, 100, 0, 0, 0, 0]
        pages = worker.tables["page_table"][1:5, :7]  # 101 tokens in pages of 16
        assert len(pages.unique()) == 4 * 7 and 0 not in pages
        rows.replay()
        rows.rewind()
        rows.eager()
        assert worker.tables.length.tolist() == [0, 101, 101, 101, 101, 0, 0, 0, 0]
        stored = worker.registry["kv_full"][:, pages.flatten().long()]
        assert stored.isfinite().all() and stored.abs().max() > 0
    assert worker.decode.counts.padded_tokens == 0
    assert worker.registry["kv_full"][:, 0].abs().max() == 0


def test_replay_and_eager_see_the_same_rows() -> None:
    engine = make_engine(backend="cpu", max_num_seqs=2, lazy_recording=True)
    worker = engine.worker
    with standing(engine, worker.decode, GraphKey("decode", 2, 2), context=50) as rows:
        rows.rewind()
        rows.replay()
        replayed = worker.registry["logits"].clone()
        rows.rewind()
        rows.eager()
        assert replayed.abs().max() > 0
        assert (worker.registry["logits"] - replayed).abs().max() < 1e-4
    assert worker.decode.records[GraphKey("decode", 2, 2)].backend == "cpu"


@pytest.mark.parametrize(("tokens", "num_rows"), [(64, 8), (16, 1), (16, 8)])
def test_prefill_rows_are_chunks(tokens: int, num_rows: int) -> None:
    engine = make_engine()
    runner = engine.worker.prefills[0]
    key = runner.pick(tokens, num_rows)
    assert isinstance(key, GraphKey)
    with standing(engine, runner, key, context=30) as rows:
        assert rows.step.num_tokens == tokens
        assert not rows.step.is_decode
        assert runner.counts.real_tokens == tokens and runner.counts.padded_tokens == 0
        lengths = [30 + row.count for row in rows.step.rows]
        assert engine.worker.tables.length.tolist()[1 : num_rows + 1] == lengths
    assert_neutral(engine)
    engine.check()


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_the_engine_is_unchanged_afterwards(enable_prefix_caching: bool) -> None:
    engine = make_engine(enable_prefix_caching=enable_prefix_caching)
    before = generate(engine)
    num_cached = engine.schedulers[0].ledger.num_cached
    assert any(num_cached) is enable_prefix_caching
    for rows in (8, 2):
        key = GraphKey("decode", rows, rows)
        with standing(engine, engine.worker.decode, key, context=200) as stood:
            stood.rewind()
            stood.replay()
    engine.check()
    assert_neutral(engine)
    assert engine.schedulers[0].ledger.num_cached == num_cached
    assert generate(engine) == before


def test_rows_that_fail_are_removed() -> None:
    engine = make_engine()
    decode = engine.worker.decode
    with pytest.raises(ZeroDivisionError), standing(engine, decode, GraphKey("decode", 8, 8), 20):
        raise ZeroDivisionError
    engine.check()
    assert_neutral(engine)


def test_rows_are_refused_beside_requests() -> None:
    engine = make_engine()
    engine.add("busy", [1, 2, 3], SamplingParams(max_tokens=3))
    with pytest.raises(ContractError, match="wait until all its requests"):
        refusal(engine, GraphKey("decode", 1, 1), 20)


# Graphs


def test_graphs_end_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "60", "--repeats", "2", "--max-num-seqs", "9"]
    report = run(capsys, "graphs", *QWEN, *words)
    assert (report["benchmark"], report["context"], report["repeats"]) == ("graphs", 60, 2)
    assert [graph["key"] for graph in report["graphs"]] == ["decode[1]", "decode[8]"]
    for graph in report["graphs"]:
        assert min(graph["replay_ms"], graph["eager_ms"], graph["host_ms"]) > 0
        assert 0 < graph["share_of_bandwidth_limit"] < 1
        assert (graph["recorded_by"], graph["failure"], graph["bytes"]) == ("eager", "", 0)


def test_graphs_of_a_recorded_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "cpu", "--context", "60", "--repeats", "2", "--max-num-seqs", "1"]
    report = run(capsys, "graphs", "tiny:qwen3", *words)
    (graph,) = report["graphs"]
    assert (graph["key"], graph["recorded_by"]) == ("decode[1]", "cpu")
    assert graph["record_seconds"] > 0


def test_sizes_are_chosen() -> None:
    worker = make_engine(max_num_seqs=70, lazy_recording=True).worker
    assert [key.rows for _, key in choose_keys(worker)] == [1, 8, 64]
    assert [key.rows for _, key in choose_keys(worker, sizes=(2, 70))] == [2, 70]
    assert [key.rows for _, key in choose_keys(worker, all_sizes=True)][:5] == [1, 2, 4, 8, 16]
    assert len(choose_keys(worker, all_sizes=True)) == len(worker.recorded_keys)


def test_the_limit_is_counted_by_hand() -> None:
    session = BenchSession("tiny:qwen3", {"backend": "eager", "show_progress": False})
    worker = session.engine.worker
    weights = worker.weight_bytes - worker.registry["weight.embedding"].numel() * 4
    kv_bytes = 100 * (3 * 2 * 2 * 32 * 4)  # 3 layers of K and V, 2 heads of 32 floats
    expected = (weights + kv_bytes) / session.read_bandwidth
    assert session.least_seconds([60, 40]) == pytest.approx(expected)
    sliding = BenchSession("tiny:olmo3", {"backend": "eager", "show_progress": False})
    kv_bytes = (100 + 3 * 24) * 2 * 4 * 16 * 4  # one full layer, three that see 24 tokens
    more = sliding.least_seconds([100]) - sliding.least_seconds([])
    assert more == pytest.approx(kv_bytes / sliding.read_bandwidth)
    recurrent = BenchSession("tiny:falcon-h1", {"backend": "eager", "show_progress": False})
    state = 3 * (108 * 3 + 6 * 10 * 12) * 4  # three layers: 3 inputs of each channel, and heads
    kv_bytes = 100 * 3 * 2 * 2 * 16 * 4
    more = recurrent.least_seconds([100]) - recurrent.least_seconds([])
    assert more == pytest.approx((2 * state + kv_bytes) / recurrent.read_bandwidth)


def test_of_embeddings_for_each_layer_a_few_rows_are_read() -> None:
    session = BenchSession("tiny:gemma4", {"backend": "eager", "show_progress": False})
    worker = session.engine.worker
    embedding = worker.weights.layer_embedding
    assert embedding is not None
    expected = worker.weight_bytes - embedding.embedding.data.nbytes
    assert session.least_seconds([]) * session.read_bandwidth == pytest.approx(expected)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("model", ["tiny:gpt-oss", "tiny:deepseek-v3"])
def test_only_chosen_experts_are_read(model: str, quantization: str) -> None:
    settings = {"backend": "eager", "show_progress": False, "quantization": quantization}
    session = BenchSession(model, settings)
    worker, shape = session.engine.worker, session.engine.worker.model.experts
    assert shape is not None
    fields = [""] if quantization == "auto" else [".codes", ".scales"]
    names = [f"weight.moe.{name}{field}" for name in ("gate_up", "down") for field in fields]
    one = sum(worker.registry[name][:, 0].nbytes for name in names)

    def experts_read(rows: int) -> float:
        unread = session.least_seconds([0] * rows) - session.least_seconds([0] * 10_000)
        return shape.num_experts + unread * session.read_bandwidth / one

    assert experts_read(0) == pytest.approx(0, abs=1e-6)
    assert experts_read(1) == pytest.approx(shape.top_k, rel=1e-4)
    assert shape.top_k < experts_read(2) < min(2 * shape.top_k, shape.num_experts)


def test_the_median_of_timed_calls_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock advances by the duration of a call, and by a second in code that is not
    timed."""
    costs = [90.0] * WARM_UPS + [5.0, 1.0, 30.0]
    now = 0.0

    def call() -> None:
        nonlocal now
        now += costs.pop(0)

    def before() -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr("slotzero.bench.clock.time.perf_counter", lambda: now)
    assert host_seconds(call, before, repeats=3) == 5.0
    assert not costs


def test_a_gpu_is_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device runs everything in order, and only the time between two events counts."""
    costs = [90.0] * WARM_UPS + [5.0, 1.0, 30.0]
    log: list[str] = []
    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now

        def elapsed_time(self, end: "Event") -> float:
            return 1000 * (end.at - self.at)

    def call() -> None:
        nonlocal now
        log.append("call")
        now += costs.pop(0)

    def before() -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(f"sleep {cycles}"))
    seconds = device_seconds(call, before, 3, torch.device("cuda"), lead=0.25)
    assert seconds == 5.0
    warm_ups = ["call"] * WARM_UPS
    assert log == [*warm_ups, "wait", "sleep 500000000", "call", "call", "call", "wait"]


# Cost


def test_cost_ends_in_json_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "cost.svg"
    words = ["--max-num-seqs", "8", "--repeats", "1", "--context", "60", "--plot", str(plot)]
    # 24 KiB a page, so 63 pages: not the 72 that 8 rows of 129 tokens need
    report = run(capsys, "cost", *QWEN, *words, "--kv-cache-memory", "1536K")
    assert [(p["rows"], p["context"]) for p in report["against_batch"]] == [
        (1, 60), (2, 60), (4, 60), (8, 60),
    ]  # fmt: skip
    assert [(p["rows"], p["context"]) for p in report["against_context"]] == [(1, 128)]
    assert [(p["rows"], p["context"]) for p in report["left_out"]] == [(8, 128)]
    assert "--kv-cache-memory" in report["left_out"][0]["reason"]
    assert all(p["ms"] > p["bandwidth_ms"] > 0 for p in report["against_batch"])
    circles = ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) == 5


def test_a_plot_puts_points_where_they_belong() -> None:
    points = [(1, 0.5), (16, 2.0), (256, 8.0)]
    panel = Panel("a < b", [Series("one", points, points), Series("two", points[:1], points[:1])])
    root = ElementTree.fromstring(draw("a title", "ms", [panel, panel]))
    tag = "{http://www.w3.org/2000/svg}"
    circles = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in root.iter(f"{tag}circle")]
    assert len(circles) == 2 * 4
    (x0, y0), (x1, y1), (x2, y2) = circles[:3]
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.2)  # equal factors
    assert x0 < x1 and y0 > y1
    words = [text.text for text in root.iter(f"{tag}text")]
    assert {"a title", "ms", "a < b", "one", "two", "16", "0.5", "10"} <= set(words)
    lines = [line.get("points", "") for line in root.iter(f"{tag}polyline")]
    assert lines[0] == " ".join(f"{x},{y}" for x, y in circles[:3])


# The profile


def test_overlaps_are_busy_once() -> None:
    assert busy_and_gaps([]) == (0, [])
    assert busy_and_gaps([(5, 9)]) == (4, [])
    assert busy_and_gaps([(8, 12), (0, 5), (3, 6), (4, 5), (20, 20)]) == (10, [(6, 8), (12, 20)])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=12))
def test_busy_time_is_what_a_recount_finds(drawn: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in drawn]
    busy, gaps = busy_and_gaps(intervals)
    first, last = min(start for start, _ in intervals), max(end for _, end in intervals)
    covered = [any(a <= t < b for a, b in intervals) for t in range(first, last)]
    assert busy == sum(covered)
    in_gaps = {t for start, end in gaps for t in range(start, end)}
    assert in_gaps == {
        t for t, is_busy in zip(range(first, last), covered, strict=True) if not is_busy
    }
    assert busy + sum(end - start for start, end in gaps) == last - first
    assert gaps == sorted(gaps)


def test_a_trace_is_summed_up(tmp_path: Path) -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7}

    path = tmp_path / "trace.json"
    events = [
        event("cuda_runtime", "cudaGraphLaunch", 0.0, 900.0),
        event("gpu_user_annotation", "ProfilerStep#1", 0.0, 900.0),
        event("kernel", "linear", 1000000000000.0, 0.3),  # from a step before the profiled ones
        event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", 1e12 + 0.3, 0.2),
        event("kernel", "linear", 1000000000000.5, 4.0),
        event("kernel", "attend", 1000000000003.5, 2.0),  # begins before linear has ended
        event("gpu_memcpy", "Memcpy DtoH", 1000000000007.5, 1.0),
        event("kernel", "linear", 1000000000009.5, 0.5),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    traced = profile.read_trace(path)
    assert len(traced) == 6
    report = profile.summarize(profile.after_mark(traced), num_steps=2)
    # busy for 5 + 1 + 0.5 of 9.5 microseconds
    assert (report["span_ms"], report["busy_ms"]) == (0.0095, 0.0065)
    assert report["idle_share"] == pytest.approx(3 / 9.5, rel=1e-4)
    assert report["longest_gap_ms"] == 0.002
    assert report["events_per_step"] == 2
    linear, *others = report["kernels"]
    assert linear == {"name": "linear", "ms_per_step": 0.00225, "count_per_step": 1.0}
    assert [kernel["name"] for kernel in others] == ["attend", "Memcpy DtoH"]
    shown = dict(profile.profile_rows({"steps": 2, "rows": 4, **report}))
    assert "31.6% of 2 steps of 4 rows, 0.005 ms each" in shown["device idle"]
    assert shown["costliest"].startswith("0.0022 ms a step, 1 times: linear\n")


def test_a_trace_without_kernels_says_so() -> None:
    assert profile.after_mark([profile.DeviceEvent("linear", 1, 2)]) == []
    with pytest.raises(CapacityError, match="no kernels"):
        profile.summarize([], num_steps=2)


def test_a_profile_is_of_the_steps_after_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU operators stand in for kernels, and a rare operator for the mark."""
    cpu = SimpleNamespace(CUDA=torch.profiler.ProfilerActivity.CPU)
    monkeypatch.setattr(torch.profiler, "ProfilerActivity", cpu)
    monkeypatch.setattr(profile, "_DEVICE_CATEGORIES", ("cpu_op",))
    monkeypatch.setattr(profile, "_MARK", "aten::erfinv")
    # all of them, since the costliest differ by machine
    monkeypatch.setattr(profile, "NUM_COSTLIEST", 1000)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: torch.erfinv(torch.zeros(1)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine = make_engine()
    report = profile.profile_decode(engine, fixed(4, 10, 1, vocab_size=259))
    assert (report["steps"], report["rows"]) == (64, 4)
    assert 0 < report["busy_ms"] <= report["span_ms"]
    assert 0 <= report["idle_share"] < 1
    counts = {kernel["name"]: kernel["count_per_step"] for kernel in report["kernels"]}
    assert counts["slotzero::attend"] == 3  # one in each layer, in each step
    assert not engine.has_work


def test_every_row_decodes_in_every_profiled_step() -> None:
    engine = make_engine(max_num_batched_tokens=32)  # so that prompts come in chunks
    prompts = fixed(5, 40, 1, vocab_size=259).prompts
    with profile.decoding(engine, prompts):
        assert [len(engine.step()) for _ in range(profile.NUM_STEPS)] == [5] * profile.NUM_STEPS
    assert engine.schedulers.num_preemptions == 0
    assert not engine.has_work
    engine.check()
    generate(engine)


def test_more_profiled_steps_than_the_context_holds_are_refused() -> None:
    engine = make_engine(max_model_len=64)
    prompts = fixed(2, 40, 1, vocab_size=259).prompts
    with (
        pytest.raises(CapacityError, match="--max-model-len"),
        profile.decoding(engine, prompts),
    ):
        for _ in range(profile.NUM_STEPS):
            engine.step()
    assert not engine.has_work
    engine.check()


# On a GPU


@pytest.mark.gpu
@needs_gpu
def test_graphs_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kv-cache-memory", "64M", "--max-num-seqs", "8", "--context", "60"]
    report = run(capsys, "graphs", "tiny:qwen3", "--backend", "cuda", *words)
    runners = [graph["runner"] for graph in report["graphs"]]
    assert runners == ["decode"] * 2 + ["prefill"] * 3
    assert all(graph["recorded_by"] == "cuda" for graph in report["graphs"])
    assert all(graph["replay_ms"] < graph["eager_ms"] for graph in report["graphs"])


@pytest.mark.gpu
@needs_gpu
def test_a_profile_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--profile", "--num-prompts", "4", "--input-len", "9", "--output-len", "20"]
    report = run(capsys, "throughput", "tiny:qwen3", "--backend", "cuda", *words)
    profile = report["profile"]
    assert (profile["steps"], profile["rows"]) == (64, 4), profile
    assert 0 <= profile["idle_share"] < 1
    assert profile["busy_ms"] <= profile["span_ms"]
    assert 1 <= len(profile["kernels"]) <= 10


# The machine


def test_bandwidth_is_plausible() -> None:
    assert 1e8 < hardware.read_bandwidth(torch.device("cpu")) < 1e13


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["software"]["python"] == sys.version.split()[0]
    assert facts["software"]["torch"] == version("torch")
    assert facts["machine"]["cores"] >= 1
    assert facts["engine"]["backend"] in ("cpu", "cuda", "eager")
    assert facts["engine"]["because"]
    assert facts["cache"]["size_bytes"] >= 0


def test_doctor_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("backend", "gguf", "memory available", "because", "deterministic"):
        assert word in shown
