"""Tests of S11: rings of copies over a simulated device that is late."""

from collections.abc import Iterator

import pytest
import torch

from slotzero.certify.late_device import SCHEDULES, LateDevice, copied, late_copies
from slotzero.certify.late_faults import LATE_FAULTS, mutate_copies
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.graph import TensorKind
from slotzero.graph.transfer import DEPTH, DownloadRing, UploadRing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield Engine(
        EngineConfig(
            model="tiny:llama",
            backend="eager",
            skip_tokenizer_init=True,
            show_progress=False,
            lazy_recording=True,
            kv_cache_memory=1 << 20,
            max_num_seqs=2,
        )
    )


def test_the_rings_are_right_on_every_schedule(engine):
    assert [str(violation) for violation in late_copies(engine.worker)] == []
    names = {entry.name for entry in copied(engine.worker)}
    assert {"slots", "counts", "sampled", "logprobs", "scores"} <= names
    assert "logits" not in names


def test_every_fault_of_a_copy_is_named(engine):
    mutants = mutate_copies(engine)
    assert [str(m) for m in mutants if m.caught_by != "S11" or m.named != (m.tensor,)] == []
    tried = {(m.tensor, m.fault) for m in mutants}
    for entry in copied(engine.worker):
        faults = {fault.name for fault in LATE_FAULTS if entry.kind in fault.kinds}
        assert {fault for name, fault in tried if name == entry.name} == faults
    assert {n for m in mutants if m.tensor == "slots" for n in m.numbers} >= {"vLLM 25279"}
    assert copied(engine.worker)[0].kind is TensorKind.PUBLISHED
    assert [*late_copies(engine.worker)] == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_late_device_does_its_work_in_order(schedule):
    device, target, seen = LateDevice(*schedule), torch.zeros(2, dtype=torch.int32), []
    ring = UploadRing(target, device)
    for step in range(DEPTH + 2):
        ring.upload([step], 9)
        device.do(lambda: seen.append(target.tolist()))
    assert len(seen) == (1 if schedule[0] else DEPTH + 2)  # the ring waited for its oldest copies
    device.finish()
    assert seen == [[step, 9] for step in range(DEPTH + 2)]


def test_results_leave_beside_later_work():
    device, source = LateDevice(runs_late=False, sends_late=True), torch.zeros(1)
    ring = DownloadRing([source], copies=device)
    device.do(lambda: source.fill_(1))
    coming = ring.download([1])
    device.do(lambda: source.fill_(2))
    (values,) = coming.wait()
    assert source.item() == 2
    assert values.item() == 1
