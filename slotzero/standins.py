"""Requests that stand in: put into slots and pages by hand, for measuring and for proving.

They hold slots and pages of the engine's own pools and are written through the worker, as those of
a scheduled request are; only their KV was never computed. The rule: the engine has no other
requests, and afterwards the slots are neutral, the pools are full and the engine is as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from slotzero.engine import Engine
from slotzero.errors import CapacityError, ContractError
from slotzero.request import Request
from slotzero.sampling.params import SamplingParams


class StandIns:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: list[Request] = []

    def admit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        num_stored: int,
        answer: Sequence[int] = (),
        num_ahead: int = 0,
    ) -> Request:
        """All of the prompt is known, and what there is of an answer; the KV of the first tokens is
        said to be stored. It has pages for so many more positions, for drafts."""
        engine, scheduler = self._engine, self._engine.scheduler
        request = engine.validate(f"stand-in-{len(self.requests)}", prompt, params)
        request.target = request.num_tokens
        request.output_token_ids += answer
        num_paged = min(request.num_tokens + num_ahead, engine.limits.max_model_len)
        if scheduler.ledger.grow(request, num_paged, num_stored) is None:
            raise CapacityError(f"{request.id}: no KV pages left: raise --kv-cache-memory")
        request.slot = scheduler.slots.take()
        self.requests.append(request)
        engine.worker.admitted(request, request.all_token_ids, num_stored, request.pages)
        return request

    def release(self) -> None:
        """Their num_computed was always 0, so nothing of them enters the prefix cache."""
        engine = self._engine
        for request in reversed(self.requests):  # slots are then handed out again in this order
            engine.scheduler.ledger.release(request)
            engine.scheduler.slots.give_back(request.slot)
            engine.worker.released(request.slot)
        self.requests.clear()
        engine.worker.tables.apply()


@contextmanager
def stand_ins(engine: Engine) -> Iterator[StandIns]:
    if engine.has_work:
        raise ContractError("stand-ins need an engine without requests: let it finish first")
    ins = StandIns(engine)
    with engine.lock, torch.inference_mode():
        try:
            yield ins
        finally:
            ins.release()
