"""Dummy requests: put into slots and pages without the scheduler, for benchmarks and certification.

They hold slots and pages of the engine's own pools, and their tables are written like those of a
scheduled request; only their KV was never computed. The rule: the engine has no other requests, and
afterwards its slots are neutral, its pools full and its state unchanged.
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
        """Admit a request with this prompt and answer so far.

        The KV of its first `num_stored` tokens counts as stored; if it `resumes`, a snapshot of the
        state after them does too. It gets pages for `num_mtp_layers` more positions, for drafts.
        """
        engine, scheduler = self._engine, self._engine.schedulers[0]
        request = engine.validate(f"dummy-{len(self.requests)}", prompt, params)
        request.target = request.num_tokens
        request.output_token_ids += answer
        num_paged = min(request.num_tokens + num_mtp_layers, engine.limits.max_model_len)
        if scheduler.ledger.grow(request, num_paged, num_stored) is None:
            raise CapacityError(f"{request.id}: no KV pages left: raise --kv-cache-memory")
        if resumes:
            *_, (pool, _, interval) = scheduler.ledger.groups
            if not interval or num_stored % interval or not num_stored or not pool.num_free:
                raise ContractError(f"{request.id}: there is no snapshot after {num_stored} tokens")
            (request.pages[-1][num_stored // engine.limits.page_size - 1],) = pool.take(1)
        request.slot = scheduler.slots.take()
        self.requests.append(request)
        scheduler.writer.admitted(request, request.all_token_ids, num_stored, request.pages)
        return request

    def release(self) -> None:
        """Release all requests. Their num_computed is 0, so none enters the prefix cache."""
        scheduler = self._engine.schedulers[0]
        for request in reversed(self.requests):  # slots are then taken again in the same order
            scheduler.ledger.release(request)
            scheduler.slots.give_back(request.slot)
            scheduler.writer.released(request.slot)
        self.requests.clear()
        self._engine.worker.tables.apply()


@contextmanager
def dummy_requests(engine: Engine) -> Iterator[DummyRequests]:
    if engine.has_work:
        raise ContractError(
            "dummy requests need an idle engine: wait until all its requests have finished"
        )
    dummies = DummyRequests(engine)
    with engine.lock, torch.inference_mode():
        try:
            yield dummies
        finally:
            dummies.release()
