"""How many tokens a second, when all requests of a workload arrive at once.

So the time to the first token includes waiting for a place in the batch.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.bench.report import Report, make_report
from slotzero.bench.session import Session
from slotzero.bench.workloads import WorkloadSpec


def run_throughput(model: str, settings: Mapping[str, Any], spec: WorkloadSpec) -> Report:
    session = Session(model, settings)
    workload = session.draw(spec)
    session.warm_up(workload)
    run = session.measure(workload)
    return make_report("throughput", spec.name, session, workload, [run])
