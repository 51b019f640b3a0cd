"""Cost of a decode step by batch size and by context length, beside the bandwidth limit.

The bandwidth model reads all weights once and the KV cache of every row at the measured bandwidth.
The difference to the measured time is what better kernels could gain.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slotzero.bench.graphs import host_and_replay
from slotzero.bench.plot import Panel, Series, draw
from slotzero.bench.report import setting, setting_rows, title
from slotzero.bench.rows import refusal, standing
from slotzero.bench.session import BenchSession
from slotzero.bench.sheets import Report, Sheet, rounded
from slotzero.config import refuse_ranks
from slotzero.errors import CapacityError
from slotzero.graph import NoCaptureSize

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (128, 512, 2048, 8192, 32768, 65536)
CONTEXT_BATCHES = (1, 8, 64)

Place = tuple[int, int]  # rows, context of each


def run_cost(model: str, settings: Mapping[str, Any], context: int, repeats: int) -> Report:
    refuse_ranks(settings, "bench cost")
    session = BenchSession(model, settings)
    limits = session.engine.limits
    # room for the next token and a last one
    contexts = [c for c in CONTEXTS if c + 2 <= limits.max_model_len]
    places = {
        "against_batch": [(rows, context) for rows in BATCHES if rows <= limits.max_num_seqs],
        "against_context": [
            (rows, c) for rows in CONTEXT_BATCHES if rows <= limits.max_num_seqs for c in contexts
        ],
    }
    report = setting("cost", session) | {"context": context, "repeats": repeats}
    left_out: dict[Place, str] = {}
    for name, wanted in places.items():
        reasons = {place: _refusal(session, *place) for place in wanted}
        left_out |= {place: no.reason for place, no in reasons.items() if no is not None}
        report[name] = [
            _measure(session, *place, repeats) for place, no in reasons.items() if no is None
        ]
    if not report["against_batch"]:
        raise CapacityError(left_out[1, context])
    return report | {
        "left_out": [{"rows": r, "context": c, "reason": why} for (r, c), why in left_out.items()]
    }


def sheets(report: Report) -> list[Sheet]:
    bandwidth = f"{report['read_bandwidth_gb_per_second']:,.1f} GB/s"
    header = ("rows", "context", "measured ms", "bandwidth ms", "measured / bandwidth")
    shown = [Sheet(title(report), [*setting_rows(report), ("bandwidth", bandwidth)])]
    for name in ("against_batch", "against_context"):
        lines = [
            (
                str(point["rows"]),
                f"{point['context']:,}",
                f"{point['ms']:.3f}",
                f"{point['bandwidth_ms']:.3f}",
                f"{point['ms'] / point['bandwidth_ms']:.2f}",
            )
            for point in report[name]
        ]
        shown.append(Sheet(f"a decode step {name.replace('_', ' the ')}", lines, header))
    if report["left_out"]:
        shown.append(Sheet("left out", [_why(place) for place in report["left_out"]]))
    return shown


def write_plot(report: Report, path: Path) -> None:
    points = report["against_context"]
    by_context = [
        _series(f"batch {rows}", [point for point in points if point["rows"] == rows], "context")
        for rows in dict.fromkeys(point["rows"] for point in points)
    ]
    by_batch = _series("", report["against_batch"], "rows")
    panels = [Panel(f"batch, each row with {report['context']} tokens stored", [by_batch])]
    if by_context:
        panels.append(Panel("tokens stored in each row", by_context))
    shown = "one decode step: points as measured, lines as the bandwidth allows"
    model = Path(report["model"]).name
    path.write_text(draw(f"{model}, {report['hardware']}, {shown}", "ms", panels))


def _refusal(session: BenchSession, rows: int, context: int) -> NoCaptureSize | None:
    key = session.engine.worker.decode.pick(rows, rows)
    return key if isinstance(key, NoCaptureSize) else refusal(session.engine, key, context)


def _measure(session: BenchSession, rows: int, context: int, repeats: int) -> Mapping[str, Any]:
    """Measure one point. Every power of two below max_num_seqs is a size, so no row is padding."""
    engine = session.engine
    decode = engine.worker.decode
    key = decode.pick(rows, rows)
    assert not isinstance(key, NoCaptureSize)
    with standing(engine, decode, key, context) as stood:
        _, seconds = host_and_replay(session, stood, repeats)
    least = session.least_seconds([context] * rows)
    return {
        "rows": rows,
        "context": context,
        "ms": rounded(1000 * seconds),
        "bandwidth_ms": rounded(1000 * least),
    }


def _series(name: str, points: Iterable[Mapping[str, Any]], x: str) -> Series:
    return Series(
        name,
        [(point[x], point["ms"]) for point in points],
        [(point[x], point["bandwidth_ms"]) for point in points],
    )


def _why(place: Mapping[str, Any]) -> tuple[str, str]:
    return f"{place['rows']} x {place['context']:,}", place["reason"]
