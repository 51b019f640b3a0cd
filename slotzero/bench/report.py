"""Results as a table and as one line of JSON.

This module does not measure. The rule: the last line of standard output is the JSON, and it
contains everything that the table shows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slotzero.bench import hardware
from slotzero.bench.profile import profile_rows
from slotzero.bench.session import BenchSession
from slotzero.bench.sheets import Report, Sheet, print_sheets, rounded
from slotzero.bench.timeline import Timeline
from slotzero.bench.workloads import Workload
from slotzero.pools.budget import show


def make_report(
    benchmark: str, name: str, session: BenchSession, workload: Workload, runs: Sequence[Timeline]
) -> Report:
    """Return the report of one or more runs of the same workload."""
    counts = session.counts()
    seconds = sum(run.seconds for run in runs)
    num_tokens = sum(run.num_tokens for run in runs)
    num_bytes = sum(session.bytes_read(workload, run.num_steps) for run in runs)
    return {
        **setting(benchmark, session),
        "workload": name,
        "requests": len(workload.prompts) * len(runs),
        "input_tokens": sum(map(len, workload.prompts)) * len(runs),
        "output_tokens": num_tokens,
        "seconds": rounded(seconds),
        "steps": sum(run.num_steps for run in runs),
        "tokens_per_second": rounded(num_tokens / seconds),
        "time_to_first_token": summary([t for run in runs for t in run.first_tokens()]),
        "time_per_token": summary([t for run in runs for t in run.gaps()]),
        "request_latency": summary([t for run in runs for t in run.last_tokens()]),
        "padding_waste": {
            runner: _share(c.padded_tokens, c.real_tokens + c.padded_tokens)
            for runner, c in counts.items()
            if c.real_tokens
        },
        "replays": sum(c.replays for c in counts.values()),
        "eager_fallbacks": dict(sum((c.eager for c in counts.values()), Counter[str]())),
        "preemptions": session.num_preemptions,
        "share_of_bandwidth_limit": rounded(num_bytes / seconds / session.read_bandwidth),
    }


def setting(benchmark: str, session: BenchSession) -> Report:
    """Return the fields that begin every report: what was measured, and on which machine."""
    limits = session.engine.limits
    return {
        "benchmark": benchmark,
        "model": session.model,
        "backend": limits.backend,
        "device": limits.device,
        "hardware": session.hardware,
        "kernels": session.engine.worker.kernels.name,
        "dtype": limits.dtype,
        "max_num_seqs": limits.max_num_seqs * len(session.engine.schedulers),
        "kv": session.engine.worker.kv,
        "read_bandwidth_gb_per_second": rounded(session.read_bandwidth / 1e9),
        "startup_seconds": {
            "load": rounded(session.load_seconds),
            "record": rounded(session.record_seconds),
        },
        "versions": hardware.versions(),
    }


def summary(seconds: Sequence[float]) -> Mapping[str, float | None]:
    """Return a summary in milliseconds; all values are None if there are no times."""
    import numpy as np

    if not seconds:
        return {"mean": None, "p50": None, "p99": None}
    p50, p99 = np.percentile(seconds, [50, 99])
    mean = sum(seconds) / len(seconds)
    return {
        name: rounded(1000 * float(value))
        for name, value in (("mean", mean), ("p50", p50), ("p99", p99))
    }


def print_report(report: Report) -> None:
    workload = f"workload {report['workload']}"
    print_sheets(report, [Sheet(f"{title(report)}, {workload}", rows(report))])


def title(report: Report) -> str:
    return f"{report['benchmark']} of {report['model']}"


def setting_rows(report: Report) -> list[tuple[str, str]]:
    startup, device = report["startup_seconds"], report["device"]
    return [
        ("hardware", f"{report['hardware']} ({device}, {report['dtype']})"),
        ("backend", f"{report['backend']}, {report['kernels']} kernels"),
        ("KV", ", ".join(_kv_row(name, group) for name, group in report["kv"].items())),
        ("start-up", f"load {startup['load']:.1f} s, record {startup['record']:.1f} s"),
    ]


def _kv_row(name: str, group: Mapping[str, Any]) -> str:
    seen = f" (window {group['window']:,})" if group["window"] else ""
    return f"{name}{seen}: {group['pages']:,} pages, {show(group['bytes'])}"


def rows(report: Report) -> list[tuple[str, str]]:
    waste = ", ".join(f"{runner} {share:.1%}" for runner, share in report["padding_waste"].items())
    eager = ", ".join(f"{count} ({why})" for why, count in report["eager_fallbacks"].items())
    return [
        *setting_rows(report),
        ("requests", f"{report['requests']}, at most {report['max_num_seqs']} at once"),
        ("tokens", f"{report['input_tokens']} in, {report['output_tokens']} out"),
        ("output", f"{report['tokens_per_second']:,.1f} tokens/s over {report['seconds']:.2f} s"),
        ("first token", _milliseconds(report["time_to_first_token"])),
        ("between tokens", _milliseconds(report["time_per_token"])),
        ("whole request", _milliseconds(report["request_latency"])),
        ("padding", waste),
        ("steps", f"{report['steps']}: {report['replays']} replayed"),
        ("eager", eager or "none"),
        ("preemptions", str(report["preemptions"])),
        (
            "bandwidth",
            f"{report['share_of_bandwidth_limit']:.1%} of "
            f"{report['read_bandwidth_gb_per_second']:,.1f} GB/s",
        ),
        *profile_rows(report.get("profile")),
    ]


def _milliseconds(values: Mapping[str, float | None]) -> str:
    shown = [f"{name} {value:.2f}" for name, value in values.items() if value is not None]
    return f"{', '.join(shown)} ms" if shown else "none"


def _share(part: int, whole: int) -> float:
    return rounded(part / whole) if whole else 0.0
