"""Cost and benefit of each recording: time and memory to make it, and the time of a step replayed,
eager, and as the host issues it.

One size is measured at a time, full of real rows whose length stays fixed. The rule: all three
times are of the same function over the same rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slotzero.bench.clock import device_seconds, host_seconds, train_seconds, wait
from slotzero.bench.report import setting, setting_rows, title
from slotzero.bench.rows import StandingRows, refusal, standing
from slotzero.bench.session import BenchSession
from slotzero.bench.sheets import Report, Sheet, rounded
from slotzero.config import refuse_ranks
from slotzero.errors import CapacityError, ConfigError
from slotzero.executor.worker import Worker
from slotzero.graph import GraphKey, NoCaptureSize, Runner
from slotzero.pools.budget import show

DECODE_SIZES = (1, 8, 64, 256)  # measured if they are recorded
PREFILL_SIZES = (64, 512, 2048)
ROUNDS = 5

Recorded = tuple[Runner, GraphKey]


def run_graphs(
    model: str,
    settings: Mapping[str, Any],
    sizes: Sequence[int],
    all_sizes: bool,
    context: int,
    repeats: int,
) -> Report:
    refuse_ranks(settings, "bench graphs")
    session = BenchSession(model, settings)
    keys = choose_keys(session.engine.worker, sizes, all_sizes)
    for _, key in keys:  # all of them, before the first is measured
        reason = refusal(session.engine, key, context)
        if reason is not None:
            raise CapacityError(reason.reason)
    graphs = [_measure(session, runner, key, context, repeats) for runner, key in keys]
    report = setting("graphs", session)
    return report | {"context": context, "repeats": repeats, "graphs": graphs}


def choose_keys(
    worker: Worker, sizes: Sequence[int] = (), all_sizes: bool = False
) -> list[Recorded]:
    """Return the sizes to measure, decode before prefill, small before large; by default a few of
    each."""
    every = sorted(
        worker.recorded_keys,
        key=lambda pair: (pair[0] is not worker.decode, pair[1].tokens, pair[1].rows),
    )
    if all_sizes:
        return every
    decode = {key.rows: (runner, key) for runner, key in every if runner is worker.decode}
    for size in sizes:
        if size not in decode:
            raise ConfigError(f"--sizes {size}: {_why_not(worker.decode, size)}")
    if sizes:
        return [decode[size] for size in sizes]
    chosen = [decode[size] for size in DECODE_SIZES if size in decode]
    prefill = [pair for pair in every if pair[0] is not worker.decode]
    for tokens in PREFILL_SIZES:
        chosen += [pair for pair in prefill if pair[1].tokens == tokens][:1]  # with the fewest rows
    return chosen


def host_and_replay(session: BenchSession, rows: StandingRows, repeats: int) -> tuple[float, float]:
    """Return the seconds that the host takes to issue a step, and the device to replay it."""
    device = session.engine.worker.registry.device

    def settle() -> None:
        rows.rewind()
        wait(device)  # so that no call waits for a full queue

    host = host_seconds(rows.issue, settle, repeats)
    lead = 2 * repeats * host
    return host, device_seconds(rows.replay, rows.rewind, repeats, device, lead)


def checks_cost(rows: StandingRows, repeats: int, device: torch.device) -> tuple[float, float]:
    """Return the host's seconds for the checks of every replay, and by how much they lengthen a
    step, measured by alternating steps with and without them."""
    host = host_seconds(rows.check, lambda: None, repeats)
    checked, unchecked = [], []
    for _ in range(ROUNDS):
        unchecked.append(train_seconds(rows.unchecked, rows.rewind, repeats, device))
        checked.append(train_seconds(rows.replay, rows.rewind, repeats, device))
    return host, min(checked) / min(unchecked) - 1


def sheets(report: Report) -> list[Sheet]:
    bandwidth = f"{report['read_bandwidth_gb_per_second']:,.1f} GB/s"
    lines = [
        (
            graph["key"] + (" (eager)" if graph["failure"] else ""),
            f"{graph['record_seconds']:.2f}",
            show(graph["bytes"]),
            f"{graph['replay_ms']:.3f}",
            f"{graph['eager_ms']:.3f}",
            f"{graph['host_ms']:.3f}",
            f"{graph['checks_ms']:.3f}",
            f"{graph['checks_share']:+.1%}",
            f"{graph['share_of_bandwidth_limit']:.1%}",
        )
        for graph in report["graphs"]
    ]
    header = (
        "recording", "record s", "held", "replay ms", "eager ms", "host ms", "checks ms", "checked",
        "of limit",
    )  # fmt: skip
    stored = f"{report['context']} tokens stored in each row, median of {report['repeats']}"
    return [
        Sheet(title(report), [*setting_rows(report), ("bandwidth", bandwidth), ("rows", stored)]),
        Sheet("", lines, header),
    ]


def _why_not(decode: Runner, size: int) -> str:
    picked = decode.spec.ladder.pick(size)
    if isinstance(picked, NoCaptureSize):
        return f"{picked.reason}: raise --max-num-seqs"
    return f"decode is not recorded at this size, {size} rows run at {picked}: choose that"


def _measure(
    session: BenchSession, runner: Runner, key: GraphKey, context: int, repeats: int
) -> Mapping[str, Any]:
    device = session.engine.worker.registry.device
    with standing(session.engine, runner, key, context) as rows:
        host, replay = host_and_replay(session, rows, repeats)
        eager = device_seconds(rows.eager, rows.rewind, repeats, device)
        checks, share = checks_cost(rows, repeats, device)
        least = session.least_seconds([context] * rows.step.num_rows)
    record = runner.records[key]
    return {
        "key": str(key),
        "runner": key.runner,
        "tokens": key.tokens,
        "rows": key.rows,
        "recorded_by": record.backend,
        "failure": record.failure,
        "record_seconds": rounded(record.seconds),
        "bytes": record.num_bytes,
        "replay_ms": rounded(1000 * replay),
        "eager_ms": rounded(1000 * eager),
        "host_ms": rounded(1000 * host),
        "checks_ms": rounded(1000 * checks),
        "checks_share": rounded(share),
        "share_of_bandwidth_limit": rounded(least / replay),
    }
