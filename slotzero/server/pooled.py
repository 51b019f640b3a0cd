"""The vectors of the prompts of one HTTP request, from their submission to the last vector.

This module knows the engine's client, not HTTP. The rule: when the reader stops, for whatever
reason, no request stays in the engine.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slotzero.errors import DeadlineError, EngineDiedError, RequestError, RequestRefusedError
from slotzero.models.pooling import Vector
from slotzero.server.app_state import AppState
from slotzero.server.replies import CachedTokens
from slotzero.server.status import status_of
from slotzero.server.vector_replies import VectorUsage

MOST_OPEN = 128  # requests of one HTTP request that are in the engine at once


@dataclass(frozen=True)
class PooledPrompt:
    vector: Vector
    num_tokens: int
    num_cached: int


async def pooled(
    state: AppState, prompts: Sequence[list[int]], cache_salt: str | None, param: str
) -> list[PooledPrompt]:
    """Return the vectors of prompts in their order. `param`: the client's name of the prompts."""
    state.metrics.arrived()
    state.client.admit()
    timeout = state.settings.request_timeout
    params: dict[str, Any] = {"pooled": True, "temperature": 0.0, "max_tokens": 1}
    if cache_salt is not None:
        params["cache_salt"] = cache_salt
    name, room = uuid.uuid4().hex, asyncio.Semaphore(MOST_OPEN)

    async def one(index: int, prompt: list[int]) -> PooledPrompt:
        async with room:
            return await _pooled(state, f"{name}-{index}", prompt, params, param)

    tasks = [asyncio.create_task(one(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        async with asyncio.timeout(timeout):
            return await asyncio.gather(*tasks)
    except TimeoutError:
        raise DeadlineError(
            f"the vectors were not complete within {timeout:g} s (--request-timeout)"
        ) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage(prompts: Sequence[PooledPrompt]) -> VectorUsage:
    num_tokens = sum(prompt.num_tokens for prompt in prompts)
    cached = CachedTokens(cached_tokens=sum(prompt.num_cached for prompt in prompts))
    return VectorUsage(
        prompt_tokens=num_tokens, total_tokens=num_tokens, prompt_tokens_details=cached
    )


async def _pooled(
    state: AppState, request_id: str, prompt: list[int], params: dict[str, Any], param: str
) -> PooledPrompt:
    began, reason = time.monotonic(), "abort"
    stream = state.client.submit(request_id, prompt, params)
    try:
        async for delta in stream:
            if delta.vector:
                reason = delta.finish_reason or reason
                vector = np.frombuffer(delta.vector, "<f4")
                return PooledPrompt(vector, len(prompt), delta.num_cached)
        raise EngineDiedError("the engine aborted this request: send it again")
    except Exception as error:  # counted as a refusal
        reason = ""
        if isinstance(error, RequestRefusedError) and status_of(error).code == 400:
            refusal = RequestError(error.message, error.param, error.label)
            raise refusal.renamed({"prompt": param}) from None
        raise
    finally:
        await stream.aclose()
        if reason:
            state.metrics.finished(reason, time.monotonic() - began, len(prompt), 0)
