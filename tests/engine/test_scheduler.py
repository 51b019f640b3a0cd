"""Tests of the scheduler, rule by rule, on the simulated device."""

from dataclasses import replace

import pytest
from simulated_device import VOCAB, Counting, World, make_world, rows_of

from slotzero.engine.dp_schedulers import DpSchedulers
from slotzero.errors import CapacityError, ConfigError, PoolError, RequestError
from slotzero.request import Request, RequestStatus
from slotzero.sampling.params import SamplingParams


def test_tokens_that_the_drafter_has_not_computed_are_not_found() -> None:
    """A prompt of one token is decoded, which a drafter does not follow."""
    world = make_world(page_size=1, windows=(None, None), ahead=1, most_behind=1)
    world.add([1], max_tokens=1)
    assert world.launch().is_decode
    world.commit()
    later = world.add([1, 2, 3], max_tokens=3)
    world.turn()
    assert later.num_cached == 0
    world.run_out()
    again = world.add([1, 2, 3], max_tokens=1)
    world.drain()
    assert again.num_cached == 2


def test_a_request_goes_to_the_rank_that_knows_its_prompt() -> None:
    worlds = [make_world(), make_world()]
    schedulers = DpSchedulers([world.scheduler for world in worlds])
    texts = [[7] * 200, [8] * 200, [7] * 200, [8] * 200, [9] * 200]
    requests = [
        Request(f"r{i}", text, SamplingParams(), 0, i, frozenset(), 201)
        for i, text in enumerate(texts)
    ]
    for scheduler in schedulers:
        scheduler.config = replace(scheduler.config, max_model_len=300)
    for request in requests:
        schedulers.add(request)
    first, second, *again, _ = [request.dp_rank for request in requests]
    assert {first, second} == {0, 1} and again == [first, second]
    assert schedulers.num_waiting == 5


# -- one rule at a time -------------------------------------------------------------------------


def test_a_lone_request_prefills_then_decodes_ahead_of_its_commits() -> None:
    world = make_world()
    request = world.add([1, 2, 3], max_tokens=3)
    step = world.launch()
    assert rows_of(step) == [("r0", 0, 3, True)]
    assert not step.is_decode
    assert (request.output_token_ids, request.num_in_flight, request.num_known) == ([], 1, 4)
    assert rows_of(world.launch()) == [("r0", 3, 1, True)]
    assert rows_of(world.launch()) == [("r0", 4, 1, True)]
    assert world.launch() is None  # its last token is in flight
    world.drain()
    assert request.finish_reason == "length"


def test_a_grammar_waits_only_for_its_own_sample() -> None:
    world = make_world(max_num_batched_tokens=8)
    world.add([1, 2], max_tokens=9, grammar=Counting(3))
    world.add([1], max_tokens=9)
    rows = [rows_of(world.turn()) for _ in range(4)]
    assert rows == [
        [("r0", 0, 2, True), ("r1", 0, 1, True)],
        [("r1", 1, 1, True)],
        [("r0", 2, 1, True), ("r1", 2, 1, True)],
        [("r1", 3, 1, True)],
    ]
    world.drain()


def test_a_long_prompt_is_chunked_behind_the_decodes() -> None:
    world = make_world(max_num_batched_tokens=6)
    world.add([1, 2])
    assert rows_of(world.turn()) == [("r0", 0, 2, True)]
    world.add([1] * 10)
    world.add([2])
    first, second, third = world.turn(), world.turn(), world.turn()
    assert rows_of(first) == [("r0", 2, 1, True), ("r1", 0, 5, False)]
    assert rows_of(second) == [("r0", 3, 1, True), ("r1", 5, 5, True)]
    assert rows_of(third) == [("r0", 4, 1, True), ("r1", 10, 1, True), ("r2", 0, 1, True)]
    assert not first.is_decode
    assert third.is_decode  # the prompt of r2 is one token, which is computed like any other token
    assert (first.num_rows, first.num_tokens) == (2, 6)
    world.drain()


def test_one_token_inside_a_prompt_is_not_a_decode() -> None:
    world = make_world(max_num_seqs=2, max_num_batched_tokens=2)
    world.add([1])
    world.turn()
    world.add([1, 2, 3])
    step = world.turn()
    assert rows_of(step) == [("r0", 1, 1, True), ("r1", 0, 1, False)]
    assert not step.is_decode
    world.drain()


def test_requests_wait_for_a_slot_in_order() -> None:
    world = make_world(max_num_seqs=2)
    for _ in range(4):
        world.add([1, 2], max_tokens=2)
    assert [shape[0] for shape in rows_of(world.turn())] == ["r0", "r1"]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 2)
    world.drain()


def test_the_second_of_two_equal_prompts_shares_only_in_a_later_step() -> None:
    world = make_world(max_num_batched_tokens=32)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first, twin = world.add(prompt), world.add(prompt)
    world.turn()
    assert (first.num_cached, twin.num_cached) == (0, 0)
    late = world.add(prompt)
    step = world.turn()
    assert late.num_cached == 4  # at least one of the 8 tokens is computed
    assert rows_of(step)[-1] == ("r2", 4, 4, True)
    assert late.pages[0][0] == first.pages[0][0] != twin.pages[0][0]
    world.drain()


def test_an_answer_is_found_by_the_next_turn_of_a_conversation() -> None:
    world = make_world()
    first = world.add([1, 2, 3], max_tokens=7)
    world.run_out()
    follow_up = world.add([*first.all_token_ids, 1, 2])
    world.turn()
    assert follow_up.num_cached == 8  # 9 of its 10 tokens were computed: two full pages
    world.drain()


def test_preemption_takes_the_youngest() -> None:
    world = make_world(num_pages=8, max_model_len=24, enable_prefix_caching=False)
    old, middle, young = (world.add([n, n, n], max_tokens=14) for n in range(3))
    while not world.scheduler.num_preemptions:
        world.turn()
    assert [r.status for r in (old, middle)] == [RequestStatus.RUNNING] * 2
    assert (young.status, young.slot, young.pages) == (RequestStatus.WAITING, 0, [])
    world.drain()
    assert old.num_preemptions == 0


def test_requests_begin_by_priority_then_by_arrival() -> None:
    world = make_world(max_num_seqs=1)
    running = world.add([1, 2], max_tokens=3, priority=9)
    world.turn()
    for priority in (2, 0, -1, 0):
        world.add([1, 2], max_tokens=1, priority=priority)
    begun = [running.id]
    while world.scheduler.has_work:
        begun += [row[0] for row in rows_of(world.turn()) if row[0] != begun[-1]]
    assert begun == ["r0", "r3", "r2", "r4", "r1"]  # the running one is not interrupted
    world.drain()


def test_preemption_takes_the_highest_priority_value() -> None:
    world = make_world(num_pages=8, max_model_len=24, enable_prefix_caching=False)
    first, low, last = (
        world.add([n, n, n], max_tokens=14, priority=priority)
        for n, priority in enumerate([0, 1, 0])
    )
    while not world.scheduler.num_preemptions:
        world.turn()
    assert [r.num_preemptions for r in (first, low, last)] == [0, 1, 0]
    world.drain()


def test_a_long_prompt_of_a_higher_priority_does_not_delay_decodes() -> None:
    world = make_world(max_num_batched_tokens=5)
    world.add([1, 2], max_tokens=9, priority=1)
    world.turn()
    world.add([1] * 9, max_tokens=2)
    assert rows_of(world.turn()) == [("r0", 2, 1, True), ("r1", 0, 4, False)]
    assert rows_of(world.turn()) == [("r0", 3, 1, True), ("r1", 4, 4, False)]
    world.drain()


def _preempt_youngest(world: World) -> Request:
    while not world.scheduler.num_preemptions:
        world.launch()
        if len(world.pending) > 1 and not world.scheduler.num_preemptions:
            world.commit()
    return next(request for request in world.requests if request.num_preemptions)


def test_a_preempted_request_waits_for_its_sample_in_flight() -> None:
    world = make_world(num_pages=7, max_model_len=20, enable_prefix_caching=False)
    old, young = world.add([1, 2, 3], max_tokens=17), world.add([2, 2], max_tokens=17)
    assert _preempt_youngest(world) is young
    assert young.num_in_flight == 1
    num_outputs = len(young.output_token_ids)
    world.scheduler.cancel(old)  # now all pages are free, but the young request must still wait:
    assert world.launch() is None
    while world.pending:
        world.commit()
    assert len(young.output_token_ids) == num_outputs + 1
    assert rows_of(world.launch()) == [("r1", 0, young.target, True)]
    assert young.target == 2 + num_outputs + 1
    world.drain()


def test_a_preempted_request_can_finish_while_it_waits() -> None:
    world = make_world(num_pages=7, max_model_len=20, enable_prefix_caching=False)
    world.add([1, 2, 3], max_tokens=17)
    young = world.add([2, 2], max_tokens=17)
    _preempt_youngest(world)
    young.max_len = young.num_known  # as if this had been its last token
    while world.pending:
        world.commit()
    assert (young.status, young.finish_reason) == (RequestStatus.FINISHED, "length")
    assert world.scheduler.num_waiting == 0
    world.drain()


def test_admission_leaves_one_page_for_each_running_request() -> None:
    world = make_world(num_pages=7, enable_prefix_caching=False)
    world.add([1, 2], max_tokens=1)
    world.add([1] * 17, max_tokens=1)
    assert [shape[0] for shape in rows_of(world.launch())] == ["r0"]  # 5 + 1 spare > 5 free
    world.commit()
    assert [shape[0] for shape in rows_of(world.launch())] == ["r1"]
    world.drain()


def test_tokens_after_the_end_are_discarded() -> None:
    world = make_world()
    request = world.add([1, 2], stop_ids=range(VOCAB))
    world.launch()
    world.launch()
    world.commit()
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert world.scheduler.slots.num_free == world.config.max_num_seqs
    rows, sampled = world.pending.popleft()
    assert world.scheduler.commit(rows, sampled) == []
    assert len(request.output_token_ids) == 1
    assert request.num_in_flight == 0


def test_a_requested_stop_token_is_the_stop_reason() -> None:
    world = make_world()
    request = world.add([1, 2], stop_ids=range(VOCAB))
    request.params = SamplingParams(stop_token_ids=list(range(VOCAB)))
    world.drain()
    assert request.stop_reason == request.output_token_ids[-1]


def test_stop_ids_wait_for_min_tokens() -> None:
    world = make_world()
    request = world.add([1, 2], max_tokens=9, stop_ids=range(VOCAB), min_tokens=4)
    world.drain()
    assert len(request.output_token_ids) == 4


def test_a_stop_string_ends_a_request_and_outranks_its_length() -> None:
    world = make_world()
    ended, full = world.add([1, 2]), world.add([1], max_tokens=1)
    world.turn()
    world.turn()
    assert full.finish_reason == "length"
    world.scheduler.finish(full, "stop", "END")
    world.scheduler.finish(ended, "stop", "END")
    assert (full.finish_reason, full.stop_reason) == ("stop", "END")
    assert (ended.finish_reason, ended.slot, ended.pages) == ("stop", 0, [])
    assert not world.scheduler.has_work
    world.scheduler.check()


def test_cancelling_reaches_a_request_in_every_state() -> None:
    world = make_world(max_num_seqs=1)
    running, waiting = world.add([1, 2]), world.add([1, 2])
    world.launch()
    world.scheduler.cancel(waiting)
    world.scheduler.cancel(running)  # its first sample is in flight
    assert not world.scheduler.has_work
    world.commit()
    assert running.output_token_ids == waiting.output_token_ids == []
    world.drain()


def test_impossible_requests_and_settings_are_refused() -> None:
    with pytest.raises(CapacityError, match="max_model_len=24 needs 6 pages of KV, there are 5"):
        make_world(num_pages=6)
    with pytest.raises(CapacityError, match="max_num_batched_tokens=16 needs 6 pages of KV, there"):
        make_world(num_pages=[7, 6], windows=[None, 5])
    with pytest.raises(CapacityError, match="there are 6; lower max_num_batched_tokens or"):
        make_world(num_pages=7, windows=[99])  # the window is longer than any request
    with pytest.raises(ConfigError, match="max_num_batched_tokens=3"):
        make_world(max_num_batched_tokens=3)
    with pytest.raises(ConfigError, match="page_size=0"):
        make_world(page_size=0)
    world = make_world()
    for prompt in ([], [1] * 24, [1] * 30):
        with pytest.raises(RequestError, match="does not fit max_model_len=24"):
            world.add(prompt)
    first = world.add([1])
    with pytest.raises(RequestError, match="r0: this id is in use"):
        world.scheduler.add(first)
    world.scheduler.cancel(first)
    with pytest.raises(RequestError, match="arrival 0 is not after 0"):
        world.scheduler.add(first)


def test_a_single_request_fits_the_smallest_pool() -> None:
    world = make_world(num_pages=7)
    request = world.add([1, 2, 3])
    world.add([1, 2, 3])
    world.drain()
    assert len(request.all_token_ids) == 24


@pytest.mark.parametrize("windows", [(None,), (None, 12)])
def test_a_prompt_that_waits_for_pages_is_not_looked_up_again(
    windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred of its pages are found, and the last ones are evicted while it waits."""
    world = make_world(
        windows=windows, num_pages=161, max_num_seqs=2, max_num_batched_tokens=600,
        max_model_len=600,
    )  # fmt: skip
    world.add([1] * 400, max_tokens=1)
    world.run_out()
    running = world.add([2] * 200, max_tokens=80)
    world.turn()
    ledger, num_keys = world.scheduler.ledger, [0]
    admit, make_keys = ledger.admit, ledger.cache._keys

    def counted_admit(*args, **more) -> bool:
        num_keys.append(0)
        return admit(*args, **more)

    def counted_keys(*args):
        for key in make_keys(*args):
            num_keys[-1] += 1
            yield key

    monkeypatch.setattr(ledger, "admit", counted_admit)
    monkeypatch.setattr(ledger.cache, "_keys", counted_keys)
    waiting = world.add([1] * 400 + [3] * 120, max_tokens=1)
    while running.status is RequestStatus.RUNNING:
        world.turn()
        assert waiting.status is RequestStatus.WAITING
    _, first, *later = num_keys
    assert first == 101  # the last one is not found
    # the last call counts the pages that it offers to the cache on release
    assert len(later) > 60 and sum(later[:-1]) == 0
    assert ledger.cache.stats.num_evicted_pages > 5
    world.turn()
    assert 0 < waiting.num_cached < 400
    world.drain()


# -- windows ------------------------------------------------------------------------------------


def _held(request: Request, group: int) -> list[int]:
    """Return the indices of the pages that the request owns."""
    return [i for i, page in enumerate(request.pages[group]) if page]


def test_a_window_releases_the_pages_it_has_passed() -> None:
    world = make_world(windows=[None, 6])
    request = world.add([1, 2], max_tokens=20)
    held = {}
    while world.turn() is not None:
        start = request.num_computed - 1
        held[start] = _held(request, 1)
        assert _held(request, 0) == list(range(start // 4 + 1))
    # the window is checked when the next page is needed: it reads from start - 5
    assert held[7] == [0, 1]
    assert held[8] == held[11] == [0, 1, 2]
    assert held[12] == held[15] == [1, 2, 3]
    assert held[16] == [2, 3, 4]
    world.drain()


def test_a_window_is_paged_chunk_by_chunk() -> None:
    world = make_world(windows=[None, 3], max_num_batched_tokens=9, num_pages=[40, 5])
    request = world.add([1] * 22, max_tokens=2)
    held = []
    while world.turn() is not None:
        held.append((request.num_computed, len(request.pages[0]), _held(request, 1)))
    assert held == [(9, 6, [0, 1, 2]), (18, 6, [1, 2, 3, 4]), (22, 6, [4, 5]), (23, 6, [5])]
    world.drain()


def test_after_its_prompt_a_request_keeps_a_window() -> None:
    world = make_world(windows=[5], max_num_batched_tokens=24, max_model_len=40)
    request = world.add([1] * 18, max_tokens=9)
    world.turn()
    assert _held(request, 0) == [0, 1, 2, 3, 4]
    world.turn()  # the fifth page is not full yet, but the first three are released already
    assert _held(request, 0) == [3, 4]
    world.drain()


def test_a_chunk_without_pages_sits_out_and_no_request_overtakes_it() -> None:
    world = make_world(windows=[8], num_pages=8, max_model_len=40, enable_prefix_caching=False)
    world.add([1] * 14, max_tokens=3)
    chunked, last = world.add([2] * 30, max_tokens=2), world.add([3], max_tokens=2)
    assert rows_of(world.turn()) == [("r0", 0, 14, True), ("r1", 0, 2, False)]
    # three pages are free: enough for the last request, which needs one and two spare, but the
    # chunk needs four
    assert rows_of(world.turn()) == [("r0", 14, 1, True)]
    assert world.scheduler.ledger.num_available == (3,)
    assert (chunked.status, last.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    assert rows_of(world.turn()) == [("r0", 15, 1, True)]
    while chunked.num_computed == 2:
        world.turn()
    assert (chunked.num_computed, chunked.num_preemptions) == (18, 0)
    world.drain()


def test_a_prompt_is_found_at_every_page_after_its_window_has_passed() -> None:
    world = make_world(windows=[None, 6], max_num_batched_tokens=32, max_model_len=40)
    world.add([1] * 17, max_tokens=12)
    world.run_out()
    for num_same, num_cached in [(6, 4), (11, 8), (17, 16)]:
        branch = world.add([1] * num_same + [3] * 4, max_tokens=1)
        world.turn()
        assert branch.num_cached == num_cached
        world.run_out()
    world.drain()


def test_a_prefix_is_found_only_where_its_window_is() -> None:
    world = make_world(windows=[None, 6], max_num_batched_tokens=32, max_model_len=40)
    first = world.add([1] * 17, max_tokens=12)
    world.run_out()
    cache = world.scheduler.ledger.cache
    assert cache.num_evictable(0) == cache.num_evictable(1) == 7
    cache.evict(1, 5)  # the window at the end of the conversation was used last
    follow_up = world.add([*first.all_token_ids, 3], max_tokens=1)
    world.turn()
    assert follow_up.num_cached == 28
    world.run_out()
    branch = world.add([1] * 17 + [3], max_tokens=1)
    world.turn()
    assert branch.num_cached == 0
    world.run_out()
    again = world.add([1] * 17 + [4], max_tokens=1)  # the branch has filled what was missing
    world.turn()
    assert again.num_cached == 16
    world.drain()


def test_both_halves_of_a_hybrid_can_run_out_first() -> None:
    """Preemption happens both when the full group and when the sliding group runs out of pages."""
    for num_pages in ([8, 40], [40, 10]):
        world = make_world(
            windows=[None, 12], num_pages=num_pages, max_num_batched_tokens=16,
            enable_prefix_caching=False,
        )  # fmt: skip
        old = world.add([0, 0, 0], max_tokens=14)
        for n in range(1, 4):
            world.add([n, n, n], max_tokens=14)
        world.drain()
        assert world.scheduler.num_preemptions > 0
        assert old.num_preemptions == 0


def test_a_failed_step_leaves_no_page_behind() -> None:
    world = make_world(windows=[None, 3], max_num_batched_tokens=8)
    world.add([1] * 20)
    world.launch()
    world.launch()
    world.scheduler.abandon()
    ledger = world.scheduler.ledger
    assert (ledger.num_used, ledger.num_cached) == ((0, 0), (0, 0))
    while world.pending:
        world.commit()
    world.drain()


def _share_a_page_to_be_written(world: World) -> None:
    (pool, *_), *_ = world.groups
    (old,), (young,) = (request.pages for request in world.requests)
    pool.release(young[-1])
    young[-1] = old[-1]
    pool.share(old[-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda world: setattr(world.requests[0], "slot", world.requests[1].slot),
        lambda world: world.scheduler.slots.take(),
        lambda world: world.requests[0].pages[0].pop(),
        lambda world: world.groups[0].pool.share(world.requests[0].pages[0][0]),
        lambda world: setattr(world.requests[0], "num_paged", 4),
        lambda world: setattr(world.requests[0], "num_paged", 99),
        lambda world: setattr(world.requests[0], "num_computed", 23),
        lambda world: setattr(world.requests[0], "target", 23),
        lambda world: setattr(world.requests[0], "arrival", 23),
        lambda world: setattr(world.requests[0], "status", RequestStatus.WAITING),
        lambda world: world.scheduler._running.remove(world.requests[1]),
        _share_a_page_to_be_written,
    ],
)
def test_check_finds_damage(damage) -> None:
    world = make_world()
    world.add([1, 2, 3, 4, 5])
    world.add([2, 2])
    world.turn()
    world.scheduler.check()
    damage(world)
    with pytest.raises(PoolError):
        world.scheduler.check()
