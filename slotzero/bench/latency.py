"""Latency of one request, or of a batch of equal ones, measured repeatedly."""

from collections.abc import Mapping
from typing import Any

from slotzero.bench.report import make_report
from slotzero.bench.session import BenchSession
from slotzero.bench.sheets import Report
from slotzero.bench.workloads import WorkloadSpec


def run_latency(
    model: str, settings: Mapping[str, Any], spec: WorkloadSpec, num_repeats: int
) -> Report:
    session = BenchSession(model, settings)
    workload = session.draw(spec)
    session.warm_up(workload)
    runs = [session.measure(workload) for _ in range(num_repeats)]
    return make_report("latency", spec.name, session, workload, runs) | {"repeats": num_repeats}
