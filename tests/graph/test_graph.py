"""Tests of the graph core with a toy model, a running sum per slot, on every available backend."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotzero.errors import ContractError, RecordingError
from slotzero.graph import (
    Backend,
    GraphKey,
    Ladder,
    NoCaptureSize,
    Registry,
    Runner,
    RunnerSpec,
    TensorKind,
)
from slotzero.graph.backend import EagerBackend, backend_for
from slotzero.graph.transfer import DEPTH, DownloadRing, UploadRing

CPU = torch.device("cpu")


class Toy:
    """Toy model: sums[slot] += 2 * gain for every published slot; `seen` is the previous sum."""

    def __init__(self, backend: Backend, device: torch.device = CPU, maximum: int = 6) -> None:
        self.registry = r = Registry(device)
        self.sums = r.table("sums", torch.zeros(9, dtype=torch.float32, device=device))
        self.slots = r.published("slots", maximum, pad=0, reason="slot 0 keeps nothing")
        self.seen = r.output("seen", (maximum,), torch.float32)
        self.gain = r.constant("gain", torch.full((1,), 1.5, device=device))
        spec = RunnerSpec("toy", Ladder.up_to(maximum), None, ("slots",), self.function, ("seen",))
        self.runner = Runner(spec, r, backend)

    def function(self, key: GraphKey, pieces) -> None:
        slots = self.slots[: key.rows]
        before = self.sums[slots]
        self.seen[: key.rows].copy_(before)
        after = pieces(_double_add, before, self.gain)
        self.sums.index_put_((slots,), torch.where(slots > 0, after, before))

    def step(self, slots: list[int]) -> list[float]:
        key = self.runner.pick(len(slots), len(slots))
        self.runner.prepare(key)
        self.registry.begin_step()
        self.registry.publish("slots", slots)
        self.runner.run(key, len(slots))
        return self.seen[: len(slots)].tolist()


def _double_add(values, gain):
    return values + 2 * gain


@pytest.fixture(params=["eager", "cpu"])
def toy(request) -> Toy:
    return Toy(backend_for(request.param, CPU))


def test_replay_reads_and_writes_by_slot(toy):
    assert toy.step([3, 5, 1]) == [0, 0, 0]
    assert toy.step([5, 2]) == [3, 0]
    assert toy.step([5]) == [6]
    assert toy.sums.tolist() == [0, 3, 3, 3, 0, 9, 0, 0, 0]


def test_publishing_pads_to_capacity_not_to_the_size(toy):
    toy.step([1, 2, 3, 4, 5, 6])
    toy.registry.begin_step()
    toy.registry.publish("slots", [7])
    assert toy.slots.tolist() == [7, 0, 0, 0, 0, 0]


def test_a_small_step_after_a_big_one_changes_only_its_own_slots(toy):
    toy.step([1, 2, 3, 4, 5, 6])
    before = toy.sums.clone()
    toy.step([8, 7, 6])
    changed = (toy.sums != before).nonzero().flatten().tolist()
    assert changed == [6, 7, 8]


def test_recording_changes_no_slot(toy):
    toy.sums[1:] = 4.0
    toy.sums[0] = 0.0
    for key in toy.runner.all_keys():
        toy.runner.record(key)
    assert toy.sums.tolist() == [0.0] + [4.0] * 8


def test_every_size_is_recorded_largest_first_with_time_and_bytes(toy):
    keys = list(toy.runner.all_keys())
    assert [key.rows for key in keys] == [6, 4, 2, 1]
    records = [toy.runner.record(key) for key in keys]
    assert all(r.seconds >= 0 and r.num_bytes >= 0 and not r.failure for r in records)


def test_a_missing_publish_is_named(toy):
    toy.step([1])
    toy.registry.begin_step()
    with pytest.raises(ContractError, match=r"'slots' was not published in step"):
        toy.runner.run(GraphKey("toy", 1, 1), 1)


@pytest.mark.parametrize(
    ("tensor", "replace", "aspect"),
    [
        ("gain", lambda t: torch.full((1,), 9.0), "address"),
        ("sums", lambda t: t.clone(), "address"),
        ("seen", lambda t: t[:3], "shape"),
        ("sums", lambda t: torch.zeros(18)[::2], "address"),
        ("sums", lambda t: t.view(torch.int32), "dtype"),
    ],
)
def test_a_replaced_tensor_is_named_with_what_changed(toy, tensor, replace, aspect):
    toy.step([1])
    registered = toy.registry[tensor]
    registered.data = replace(registered.data)
    with pytest.raises(ContractError, match=rf"'{tensor}': its {aspect} was"):
        toy.step([1])


def test_a_changed_stride_is_named(toy):
    toy.step([1])
    toy.seen.as_strided_((6,), (0,))
    with pytest.raises(ContractError, match="'seen': its stride was"):
        toy.step([1])


def test_no_tensor_is_added_after_the_first_recording(toy):
    toy.step([1])
    with pytest.raises(ContractError, match="'late': registered after"):
        toy.registry.output("late", (1,), torch.float32)


def test_a_key_of_another_runner_or_with_too_few_tokens_is_refused(toy):
    toy.step([1, 2])
    with pytest.raises(ContractError, match="dispatched to runner toy"):
        toy.runner.run(GraphKey("other", 2, 2), 2)
    with pytest.raises(ContractError, match="dispatched with 3 tokens"):
        toy.runner.run(GraphKey("toy", 2, 2), 3)
    with pytest.raises(ContractError, match="never recorded"):
        toy.runner.run(GraphKey("toy", 6, 6), 3)


def test_a_step_that_is_too_large_gets_a_reason(toy):
    refusal = toy.runner.pick(7, 7)
    assert isinstance(refusal, NoCaptureSize)
    assert "toy" in refusal.reason and "7 is above the largest size 6" in refusal.reason


def test_the_registry_knows_five_kinds_and_their_rules():
    registry = Registry(CPU)
    with pytest.raises(ContractError, match="needs its reason"):
        registry.published("slots", 4, pad=0, reason="")
    with pytest.raises(TypeError):
        registry.published("slots", 4)  # a pad value is mandatory
    table = registry.table("length", torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ContractError, match="'length' is registered twice"):
        registry.table("length", table)
    with pytest.raises(ContractError, match="'nobody' is not registered"):
        registry["nobody"]
    with pytest.raises(ContractError, match="table tensor 'length' cannot be published"):
        registry.publish("length", [1])
    registry.published("counts", 2, pad=0, reason="an empty row")
    with pytest.raises(ContractError, match="'counts': 3 values for 2"):
        registry.publish("counts", [1, 2, 3])
    assert {kind.value for kind in TensorKind} == {
        "table", "published", "derived", "output", "constant",
    }  # fmt: skip


class BrokenBackend(Backend):
    """A backend that cannot record size 4."""

    name = "broken"

    def record(self, function):
        probe = Probe()
        function(probe)
        if probe.rows == 4:
            raise RecordingError("size 4 is cursed")
        return EagerBackend().record(function)


class Probe:
    rows = 0

    def __call__(self, function, *tensors):
        self.rows = tensors[0].shape[0]
        return function(*tensors)


def test_a_size_that_fails_is_served_eagerly_with_a_reason():
    toy = Toy(BrokenBackend())
    with pytest.warns(UserWarning, match=r"toy\[4\] could not be recorded and runs eagerly"):
        records = {key.rows: toy.runner.record(key) for key in toy.runner.all_keys()}
    assert records[4].failure == "size 4 is cursed" and records[4].backend == "eager"
    assert all(not record.failure for rows, record in records.items() if rows != 4)
    assert toy.step([1, 2, 3]) == [0, 0, 0]
    assert toy.sums[1:4].tolist() == [3, 3, 3]
    assert toy.runner.counts.eager == {"size 4 is cursed": 1}
    assert toy.step([1, 2]) == [3, 3]
    assert toy.runner.counts.replays == 1


class FlawedBackend(EagerBackend):
    """A backend that records the function with one fault."""

    name = "flawed"

    def __init__(self, wrong) -> None:
        self._wrong = wrong

    def record(self, function):
        return super().record(lambda pieces: (function(pieces), self._wrong()))


@pytest.mark.parametrize("tensor", ["seen", "sums", "twice"])
def test_a_flawed_recording_does_not_serve(tensor):
    toy = Toy(FlawedBackend(lambda: wrong[tensor]()))
    twice = toy.registry.derived("twice", (6,), torch.int32)
    rewrite = toy.function
    toy.runner.spec = replace(
        toy.runner.spec,
        function=lambda key, pieces: (
            rewrite(key, pieces),
            twice[: key.rows - (tensor == "twice")].fill_(2),  # the fault may be one row too few
        ),
        writes=("seen", "twice"),
    )
    wrong = {
        "seen": lambda: toy.seen[1].fill_(7),
        "sums": lambda: toy.sums[0].add_(1),
        "twice": lambda: None,
    }
    with pytest.warns(UserWarning, match=f"failed its check and runs eagerly: .*{tensor!r}"):
        record = toy.runner.record(GraphKey("toy", 4, 4))
    assert record.backend == "eager" and tensor in record.failure
    toy.sums.zero_()
    assert toy.step([3, 5, 1]) == [0, 0, 0]
    assert sum(toy.runner.counts.eager.values()) == 1


def test_a_sound_recording_passes_its_proof():
    toy = Toy(FlawedBackend(lambda: None))
    assert toy.runner.record(GraphKey("toy", 4, 4)).backend == "flawed"
    assert toy.step([3, 5, 1]) == [0, 0, 0]
    assert toy.runner.counts.replays == 1


def test_padding_is_counted(toy):
    toy.step([1, 2, 3])
    assert (toy.runner.counts.real_tokens, toy.runner.counts.padded_tokens) == (3, 1)


@given(
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True),
)
def test_every_recorded_size_can_be_picked_and_no_other(tokens, rows):
    ladders = Ladder(tuple(sorted(tokens))), Ladder(tuple(sorted(rows)))
    registry = Registry(torch.device("cpu"))
    runner = Runner(
        RunnerSpec("any", *ladders, (), lambda key, pieces: None, ()), registry, EagerBackend()
    )
    picked = {
        runner.pick(num_tokens, num_rows)
        for num_tokens in range(1, max(tokens) + 1)
        for num_rows in range(1, min(num_tokens, max(rows)) + 1)  # a row has at least one token
    }
    assert picked == set(runner.all_keys())


def test_unchanged_values_are_not_uploaded_again():
    target = torch.zeros(4, dtype=torch.int32)
    ring = UploadRing(target)
    ring.upload([3, 1], pad=9)
    assert target.tolist() == [3, 1, 9, 9]
    target.fill_(7)
    ring.upload((3, 1), pad=9)
    assert target.tolist() == [7] * 4
    ring.upload([3], pad=9)
    assert target.tolist() == [3, 9, 9, 9]


def test_results_arrive_in_order_and_are_not_kept():
    source = torch.zeros(5, dtype=torch.int32)
    ring = DownloadRing([source, source])
    downloads = []
    for step in range(DEPTH + 1):
        source.fill_(step)
        downloads.append(ring.download([3]))
    for step, download in enumerate(downloads[1:], start=1):
        (values,) = download.wait()
        assert values.tolist() == [step] * 3
    with pytest.raises(ContractError, match="too late"):
        downloads[0].wait()
