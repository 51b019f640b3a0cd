"""Communication cost of ranks on one CPU: gloo's collectives, and the message that carries a step.

`python benchmarks/scaling.py --measure` runs it. The ranks share the CPU's cores, so this measures
no speed-up: it gives an upper bound for what communication adds to a step, and says nothing about
NCCL. Each result has the shortest and the median time, which differ with the load on the cores. A
message is timed from before it is sent until its answer, one byte, has arrived.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing

from slotzero.bench.hardware import describe, versions
from slotzero.distributed.ranks import Ranks
from slotzero.executor.rank_group import Rendezvous
from slotzero.executor.step_message import StepMessage
from slotzero.graph import GraphKey

SIZES, ROWS, HIDDEN = (2, 4), (1, 64, 256), 4096
REPEATS, WARM_UPS, PATIENCE = 40, 5, 60.0


def measure() -> dict[str, Any]:
    device = torch.device("cpu")
    report: dict[str, Any] = {"hardware": describe(device), "cores": os.cpu_count()}
    report |= {"versions": versions(), "hidden": HIDDEN, "repeats": REPEATS}
    report["collectives"] = [line for size in SIZES for line in _collectives(size)]
    report["messages"] = _messages()
    print("| ranks | rows | " + " | ".join(CALLS) + " |\n|---|---|" + "---|" * len(CALLS))
    for line in report["collectives"]:
        cells = " | ".join(_shown(line[name]) for name in CALLS)
        print(f"| {line['ranks']} | {line['rows']} | {cells} |")
    print("\n| rows | bytes | round trip |\n|---|---|---|")
    for line in report["messages"]:
        print(f"| {line['rows']} | {line['bytes']:,} | {_shown(line['both'])} |")
    return report


def _calls(ranks: Ranks, rows: int) -> Mapping[str, Callable[[], Tensor]]:
    """Return the collectives by name, over the hidden states of `rows` tokens of all ranks."""
    whole, share = torch.ones(rows, HIDDEN), -(-rows // ranks.size)
    own, each = torch.ones(share, HIDDEN), torch.ones(ranks.size, share, HIDDEN)
    padded = torch.ones(share * ranks.size, HIDDEN)
    return {
        "all-reduce": lambda: ranks.sum(whole),
        "all-gather": lambda: ranks.gather(own),
        "reduce-scatter": lambda: ranks.scatter_sum(padded),
        "all-to-all": lambda: ranks.exchange(each),
    }


CALLS = tuple(_calls(Ranks(), 1))


def _collectives(size: int) -> list[dict[str, Any]]:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Rendezvous(size, f"file://{folder}/store", PATIENCE)
        others = [
            spawning.Process(target=_take_part, args=(meeting, rank, theirs), daemon=True)
            for rank in range(size)
        ]
        for process in others:
            process.start()
        if not ours.poll(PATIENCE):
            raise TimeoutError(f"{size} ranks did not finish measuring within {PATIENCE:g} s")
        lines: list[dict[str, Any]] = ours.recv()
        for process in others:
            process.join()
    return lines


def _take_part(meeting: Rendezvous, rank: int, connection: "Connection[Any, Any]") -> None:
    torch.set_num_threads(1)
    ranks, lines = meeting.join(rank, torch.device("cpu")), []
    for rows in ROWS:
        took = {name: _timed(call) for name, call in _calls(ranks, rows).items()}
        lines.append({"ranks": meeting.size, "rows": rows, **took})
    if rank == 0:
        connection.send(lines)
    torch.distributed.destroy_process_group()


def _messages() -> list[dict[str, Any]]:
    """Time the messages of a decode step in which every row gets a page."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    other = spawning.Process(target=_answer, args=(theirs,), daemon=True)
    other.start()
    lines = []
    for rows in ROWS:
        message = message_of(rows)

        def there_and_back(message: StepMessage = message) -> None:
            ours.send(message)
            ours.recv_bytes()

        size = len(ForkingPickler.dumps(message))
        lines.append({"rows": rows, "bytes": size, "both": _timed(there_and_back)})
    ours.send(None)
    other.join()
    return lines


def message_of(rows: int) -> StepMessage:
    words = np.arange(2 * rows, dtype=np.int32).reshape(2, rows)
    slots, key = list(range(1, rows + 1)), GraphKey("decode", rows, rows)
    return StepMessage(words, slots, [1] * rows, rows, rows, [key], 1, False)


def _answer(connection: "Connection[Any, Any]") -> None:
    while connection.recv() is not None:
        connection.send_bytes(b"1")


def _timed(call: Callable[[], Any]) -> list[float]:
    """Return the shortest and the median time, in microseconds."""
    took = [1e6 * _seconds(call) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
    return [round(min(took)), round(statistics.median(took))]


def _shown(timed: Sequence[float]) -> str:
    return " / ".join(f"{value:,}" for value in timed)


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
