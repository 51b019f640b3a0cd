"""Tokens per second when all requests of a workload arrive at once.

The time to the first token therefore includes waiting for a slot.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.bench.profile import profile_decode
from slotzero.bench.report import make_report
from slotzero.bench.session import BenchSession
from slotzero.bench.sheets import Report
from slotzero.bench.workloads import WorkloadSpec
from slotzero.config import EngineConfig
from slotzero.errors import ConfigError
from slotzero.executor.limits import choose_backend


def run_throughput(
    model: str, settings: Mapping[str, Any], spec: WorkloadSpec, profile: bool = False
) -> Report:
    device, _ = choose_backend(EngineConfig(model=model, **settings))
    if profile and device.type != "cuda":
        raise ConfigError(f"--profile needs a GPU, and this runs on {device}: drop it")
    session = BenchSession(model, settings)
    workload = session.draw(spec)
    session.warm_up(workload)
    run = session.measure(workload)
    report = make_report("throughput", spec.name, session, workload, [run])
    if profile:
        report["profile"] = profile_decode(session.engine, workload)
    return report
