"""Requests that stand in: put into slots and pages by hand, for measuring and for proving.

They hold slots and pages of the engine's own pools and are written as those of
a scheduled request are; only their KV was never computed. The rule: the engine has no other
requests, and afterwards the slots are neutral, the pools are full and the engine is as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slotzero.engine.engine import Engine
from slotzero.errors import CapacityError, ContractError
from slotzero.request import Request
from slotzero.sampling.params import SamplingParams


class DummyRequests:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: list[Request] = []

    def admit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        num_stored: int,
        answer: Sequence[int] = (),
        num_mtp_layers: int = 0,
        resumes: bool = False,
    ) -> Request:
        """All of the prompt is known, and what there is of an answer; the KV of the first tokens is
        said to be stored, and if it resumes, a snapshot of the state behind them. It has pages for
        so many more positions, for drafts."""
        engine, lane = self._engine, self._engine.lanes[0]
        request = engine.validate(f"dummy-{len(self.requests)}", prompt, params)
        request.target = request.num_tokens
        request.output_token_ids += answer
        num_paged = min(request.num_tokens + num_mtp_layers, engine.limits.max_model_len)
        if lane.ledger.grow(request, num_paged, num_stored) is None:
            raise CapacityError(f"{request.id}: no KV pages left: raise --kv-cache-memory")
        if resumes:
            *_, (pool, _, interval) = lane.ledger.groups
            if not interval or num_stored % interval or not num_stored or not pool.num_free:
                raise ContractError(f"{request.id}: no snapshot stands after {num_stored} tokens")
            (request.pages[-1][num_stored // engine.limits.page_size - 1],) = pool.take(1)
        request.slot = lane.slots.take()
        self.requests.append(request)
        lane.writer.admitted(request, request.all_token_ids, num_stored, request.pages)
        return request

    def release(self) -> None:
        """Their num_computed was always 0, so nothing of them enters the prefix cache."""
        lane = self._engine.lanes[0]
        for request in reversed(self.requests):  # slots are then handed out again in this order
            lane.ledger.release(request)
            lane.slots.give_back(request.slot)
            lane.writer.released(request.slot)
        self.requests.clear()
        self._engine.worker.tables.apply()


@contextmanager
def dummy_requests(engine: Engine) -> Iterator[DummyRequests]:
    if engine.has_work:
        raise ContractError("stand-ins need an engine without requests: let it finish first")
    dummies = DummyRequests(engine)
    with engine.lock, torch.inference_mode():
        try:
            yield dummies
        finally:
            dummies.release()
