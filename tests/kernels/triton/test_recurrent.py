"""Tests of recurrent kernels against plain torch: all kinds of steps, over invalid states."""

from dataclasses import replace
from random import Random

import pytest
import torch
from recurrence import KINDS, Mixer, Pair, Step, there

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.recurrent import chunks as recurrent_chunks
from slotzero.kernels.types_recurrent import Scan

NEAR = 1e-4
of_kinds = pytest.mark.parametrize("shape", KINDS, ids=lambda shape: shape.kind)
PROMPTS = Step([(1, 0, 2), (4, 0, 1), (5, 0, 17)], pad_rows=1, pad_tokens=3)


@of_kinds
def test_texts_continue_from_step_to_step(device, shape):
    """Prompts begin in slots that hold old states, and continue beside single tokens."""
    pair = Pair(device, shape, NEAR)
    pair.run(
        PROMPTS,
        Step([(3, 0, 18), (5, 17, 15), (4, 1, 1)], pad_rows=1),
        Step([(1, 2, 1), (0, 0, 1), (3, 18, 1)], span=None, pad_rows=1),
        Step([(3, 19, 30)]),
    )


@of_kinds
def test_half_precision(device, half, shape):
    pair = Pair(device, shape.every(32), 0.01, dtype=half, state_dtype=half)
    assert recurrent_chunks.cut_for(pair.card.shape, half).size == 32
    pair.keep(2, 0, 1)
    pair.run(
        Step([(2, 0, 40), (1, 0, 3)], pad_tokens=1),
        Step([(1, 3, 1), (2, 40, 1)], span=None),
    )
    pair.verify(Step([(2, 41, 3), (1, 4, 2)], span=3), [2, 1])


@of_kinds
@pytest.mark.parametrize("span", [1, 4])
def test_drafts_leave_a_trail_and_its_accepted_part_is_kept(device, shape, span):
    pair = Pair(device, shape, NEAR)
    pair.run(PROMPTS)
    step = Step([(1, 2, 1), (5, 17, span), (3, 0, 0), (4, 1, span)], span=span, pad_rows=1)
    pair.verify(step, [1, span, 0, max(span - 1, 1)])
    pair.run(Step([(1, 3, 1), (4, 1 + max(span - 1, 1), 1)], span=None))


@of_kinds
def test_a_row_of_drafts_without_a_trail_ends_with_its_last_real_token(device, shape):
    pair = Pair(device, shape, NEAR)
    pair.run(
        PROMPTS,
        Step([(1, 2, 1), (5, 17, 4), (3, 0, 0)], span=4, pad_rows=1),
        Step([(1, 3, 1), (5, 21, 1)], span=1),
    )


@of_kinds
def test_snapshots_are_taken_and_restored(device, shape):
    """Slot 1 takes snapshots in prompts, token by token, and among drafts; slot 3 starts from them,
    and unused snapshots are NaN."""
    i, shape = 8, shape.every(8)
    assert recurrent_chunks.cut_for(shape, torch.float32)[:2] == (8, 16)
    pair = Pair(device, shape, NEAR)
    for number, row in enumerate([7, 0, 3, 9]):
        pair.keep(1, number, row)
    pair.run(
        Step([(2, 0, 5), (1, 0, i + 1)], pad_rows=1, pad_tokens=2),
        Step([(1, i + 1, 2 * i - 2), (2, 5, 1)]),
        Step([(2, 6, 1), (1, 3 * i - 1, 1)], span=None),
        Step([(1, 3 * i, i - 2), (2, 7, i - 7)]),
    )
    pair.verify(Step([(2, i, 3), (1, 4 * i - 2, 3)], span=3), [1, 2])
    assert not pair.card.states.conv_kept[[3, 7, 9]].isnan().any()
    pair.keep(3, 0, 7)
    pair.keep(4, 2, 3)
    pair.keep(5, 3, 9)
    pair.run(Step([(3, i, 2), (1, 4 * i, 3)]), Step([(0, 0, 1), (4, 3 * i, 1)], span=None))
    pair.verify(Step([(5, 4 * i, 2)], span=2), [2])


@of_kinds
def test_a_text_may_repeat_itself(device, shape, monkeypatch):
    """The hardest chunk of a delta rule has equal keys, strengths of almost 1, and no decay; the
    hardest one of Mamba has much decay at once."""
    monkeypatch.setattr(recurrent_chunks, "WIDE_CHUNK", 64)
    pair = Pair(device, shape, NEAR if shape.is_delta else 10 * NEAR)  # exp of large sums
    for mixer in (pair.card, pair.reference):
        mixer.texts[2] = mixer.texts[2, :1]
        mixer.texts[2, :, -shape.num_heads :] = 6.0
        mixer.heads[0] = -9.0 if shape.is_delta else 4.0
    pair.run(Step([(2, 0, 70)]), Step([(2, 70, 4)]))


def test_a_convolution_wider_than_the_kernels_support_is_refused(device):
    mixer = Mixer(TritonKernels(), replace(KINDS[0], conv_width=5), device)
    with pytest.raises(UnsupportedModelError, match=r"over 5 tokens.*--backend cpu"):
        mixer.run(PROMPTS)


@pytest.mark.parametrize("kind", ["mamba", "delta"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 2), (4, 3, 2, 5, 2)])
def test_small_mixers(device, kind, sizes):
    """The mixers have one head of size 1, or groups of heads."""
    pair = Pair(device, Scan(kind, *sizes), NEAR)
    pair.run(Step([(2, 0, 3)], pad_tokens=1), Step([(2, 3, 1)], span=None))


def copies(mixer: Mixer, shape: Scan, device, half) -> Mixer:
    other = Mixer(TritonKernels(), shape, device, dtype=half)
    for mine, theirs in zip(there(other.states), there(mixer.states), strict=True):
        mine.copy_(theirs)
    return other


@of_kinds
def test_a_row_has_the_same_bits_in_every_step(device, half, shape):
    """This holds in any order, beside any rows, with any padding, in every kind of step. A single
    token has the bits of a decode step."""
    shape = replace(shape, interval=32)
    begun = Mixer(TritonKernels(), shape, device, dtype=half)
    begun.states.rows[1] = torch.arange(16) % 3
    begun.run(Step([(1, 0, 30), (2, 0, 2)]))
    rows = [(1, 30, 5), (2, 2, 1), (3, 0, 34)]
    singles, drafts = [(1, 30, 1), (2, 2, 1), (3, 0, 1)], [(1, 30, 3), (2, 2, 2), (3, 0, 1)]
    alone = {}
    for given, span in ((rows, 0), (singles, None), (drafts, 3)):
        ways = [
            Step(given, span), Step(given[::-1], span, pad_rows=1, pad_tokens=0 if span else 9),
            Step(given[:1], span),
        ]  # fmt: skip
        found = {}
        for step in ways:
            mixer = copies(begun, shape, device, half)
            out = mixer.verify(step)[0] if span else mixer.run(step)
            for slot, start, count in step.rows:
                at = step.places().index((slot, start))
                left = [part[slot] for part in there(mixer.states[:2])]
                bits = [part.cpu().clone() for part in (out[at : at + count], *left)]
                wanted = found.setdefault(slot, bits)
                assert not bits[0].isnan().any()
                assert all(map(same_bits, bits, wanted))
                if count == 1:
                    assert same_bits(bits[0], alone.setdefault(slot, bits[0]))


@pytest.mark.skipif(INTERPRETED, reason="records a CUDA graph")
@of_kinds
def test_a_recorded_step_takes_any_rows(device, half, shape):
    """All grids follow from padded sizes, so the host reads no value."""
    first = Step([(1, 0, 20), (2, 0, 1)], pad_rows=2, pad_tokens=3)
    other = Step([(4, 0, 1), (3, 0, 2), (1, 0, 16)], pad_rows=1, pad_tokens=5)
    recorded, eager = (Mixer(TritonKernels(), shape, device, dtype=half) for _ in range(2))
    buffers = recorded.given(first)
    x, tokens, rows = buffers
    replay = record(lambda: recorded.mix(*buffers)[1])
    for state, begun in zip(there(recorded.states[:2]), there(eager.states[:2]), strict=True):
        state.copy_(begun)  # NaN included, with the same bits
    new_x, new_tokens, new_rows = recorded.given(other)
    x.copy_(new_x)
    for buffer, new in zip((*tokens, *rows[:4]), (*new_tokens, *new_rows[:4]), strict=True):
        buffer.copy_(new)
    assert same_bits(replay().cpu(), eager.run(other))
    for state, wanted in zip(there(recorded.states[:2]), there(eager.states[:2]), strict=True):
        assert same_bits(state.cpu(), wanted.cpu())


def record(call):
    """Capture a call, and return a function that replays it and returns its result."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay():
        graph.replay()
        return out

    return replay


def same_bits(one, other) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("is_half", [True, False])
@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize(("size", "group", "of_weight"), [(96, 96, 96), (96, 24, 96), (96, 24, 24)])
def test_gates_and_norms(device, half, is_half, gates_first, size, group, of_weight):
    """Inputs are slices of wider rows."""
    dtype = half if is_half else torch.float32
    wide, weight = torch.randn(5, 2 * size + 7).to(dtype), torch.randn(of_weight).to(dtype)
    x, gates = wide[:, :size], wide[:, size + 3 : 2 * size + 3]
    near = 2 * torch.finfo(dtype).eps
    for by in (weight, None):
        group = 0 if by is None else group  # not used
        want = ReferenceKernels().gate_norm(x, gates, by, 1e-6, group, gates_first)
        moved = wide.to(device)
        got = TritonKernels().gate_norm(
            moved[:, :size], moved[:, size + 3 : 2 * size + 3],
            None if by is None else by.to(device), 1e-6, group, gates_first,
        )  # fmt: skip
        assert got.dtype is dtype
        assert torch.allclose(got.cpu(), want, atol=2 * near, rtol=2 * near)


def test_every_grid_has_room_for_all_chunks():
    random = Random(1)
    for _ in range(200):
        rows = [
            (random.randint(0, 200), random.randint(1, 150)) for _ in range(random.randint(1, 9))
        ]
        given = Step([(1, *row) for row in rows]).row_table()
        for dtype in (torch.float32, torch.bfloat16):
            cut = recurrent_chunks.cut_for(KINDS[0], dtype)
            each = ((start + n - 1) // cut.size - start // cut.size + 1 for start, n in rows)
            assert sum(each) <= cut.num_chunks(sum(n for _, n in rows), given)


def test_a_gpu_with_less_memory_reads_one_chunk_at_a_time(monkeypatch):
    large = Scan("mamba", 48, 64, 1, 256, 4)
    assert recurrent_chunks.cut_for(large, torch.bfloat16).stages == 2
    monkeypatch.setattr(recurrent_chunks, "shared_memory", lambda: 99 << 10)
    assert recurrent_chunks.cut_for(large, torch.bfloat16).stages == 1


LARGE = {
    "Falcon-H1": Scan("mamba", 8, 64, 1, 256, 4),
    "Nemotron-H": Scan("mamba", 16, 64, 8, 128, 4),
    "Qwen3-Next": Scan("delta", 8, 128, 4, 128, 4),
}


@pytest.mark.skipif(INTERPRETED, reason="too much for the interpreter")
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("interval", [0, 48, 128])
def test_shapes_of_models(device, half, shape, interval):
    pair = Pair(device, shape.every(interval), 0.02, dtype=half)
    for number in range(400 // interval if interval else 0):
        pair.keep(2, number, number % 12 + 1)
    pair.run(
        Step([(2, 0, 300), (1, 0, 130), (4, 0, 1)], pad_rows=3, pad_tokens=50),
        Step([(2, 300, 90), (1, 130, 1)], pad_rows=1),
        Step([(2, 390, 1), (0, 0, 1), (1, 131, 1)], span=None, pad_rows=1),
    )
    pair.verify(Step([(2, 391, 4), (1, 132, 3)], span=4, pad_rows=2), [3, 3])
