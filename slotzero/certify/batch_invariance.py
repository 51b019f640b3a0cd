"""S10, batch invariance: a request has the same tokens, log probabilities and vector alone and in
any batch, as deterministic mode promises.

Random requests are served one by one, without prefix cache and drafts. Then they are served in
rounds: together, in another order, arriving while others run, with prompts in other chunks,
preempted, with prefixes that earlier rounds have cached, and with drafts that are right or wrong.
Every token, log probability and vector must be equal to the bit.

The check does not know kernels. It works on one rank only, like the live sanitizer.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slotzero.certify.faults.case import swapped
from slotzero.certify.report import ENGINE, Violation
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.executor.results import RowLogprobs
from slotzero.models.pooling import Vector
from slotzero.runners.passes import LOGPROBS, SAMPLED
from slotzero.runners.pooler import POOLED as POOLED_VECTOR
from slotzero.sampling.params import POOLED, SamplingParams
from slotzero.speculative.widths import FixedWidth

NUM_REQUESTS = 6
ANSWER_LEN = 12
NUM_LETTERS = 3  # of a request whose tokens repeat
PREEMPTION_STEPS = 4  # between two preemptions
REQUESTS, INVARIANCE = "requests", "S10"


class RequestSpec(NamedTuple):
    prompt: list[int]
    params: SamplingParams


class ServedAnswer(NamedTuple):
    token_ids: list[int]
    logprobs: list[RowLogprobs]
    vector: Vector | None


class Round(NamedTuple):
    """How all requests are served together."""

    name: str
    is_reversed: bool = False
    """Requests arrive in the opposite order."""
    is_staggered: bool = False
    """Requests arrive while others run."""
    is_preempted: bool = False
    keeps_cache: bool = False
    """Prefixes that earlier rounds have cached are reused."""


ROUNDS = (
    Round("all at once"),
    Round("in another order, arriving one by one", is_reversed=True, is_staggered=True),
    Round("preempted", is_staggered=True, is_preempted=True),
    Round("with cached prefixes", keeps_cache=True),
    Round("preempted, with cached prefixes", is_reversed=True, is_preempted=True, keeps_cache=True),
)


def check_batch_invariance(
    engine: Engine,
    rounds: Sequence[Round] = ROUNDS,
    requests: Sequence[RequestSpec] | None = None,
    alone: Sequence[ServedAnswer] | None = None,
) -> list[Violation]:
    """Serve requests, by default random ones, alone and in every round. Return the first difference
    of each answer in each round. `alone`: the answers of another engine, if they are known."""
    requests, violations = requests or random_requests(engine), list[Violation]()
    alone = serve_alone(engine, requests) if alone is None else alone
    cache, rng = engine.schedulers[0].ledger.cache, random.Random(0)
    with _prepared(engine):
        for current in rounds:
            if not current.keeps_cache:
                cache.clear()
            order = range(len(requests))[:: -1 if current.is_reversed else 1]
            served = _serve(engine, [requests[i] for i in order], current, rng, f"{current.name} ")
            for i, answer in zip(order, served, strict=True):
                violations += _differences(i, current, answer, alone[i])
        cache.clear()
    return violations


def serve_alone(engine: Engine, requests: Sequence[RequestSpec]) -> list[ServedAnswer]:
    """Serve requests one by one, without cached prefixes and drafts."""
    cache, rng, answers = engine.schedulers[0].ledger.cache, random.Random(0), list[ServedAnswer]()
    with _prepared(engine):
        for i, (prompt, params) in enumerate(requests):
            cache.clear()
            request = RequestSpec(prompt, replace(params, speculative=False))
            answers += _serve(engine, [request], ROUNDS[0], rng, f"alone {i} ")
        cache.clear()
    return answers


@contextmanager
def _prepared(engine: Engine) -> Iterator[None]:
    """Detach the live checks. Verify as many drafts as possible."""
    with ExitStack() as stack:
        stack.enter_context(swapped(engine, "sanitizer", None))
        if engine.worker.cycles:
            width = FixedWidth(engine.limits.max_width)
            stack.enter_context(swapped(engine.draft_widths, "policy", width))
        yield


def random_requests(engine: Engine, num: int = NUM_REQUESTS) -> list[RequestSpec]:
    """Return requests of many lengths. Some share a prefix; some repeat and continue a few letters,
    so that an n-gram drafter has drafts, right and wrong ones; some prompts exceed a step's token
    budget, if the context allows. Of every third prompt a vector is wanted, too."""
    rng, limits = random.Random(0), engine.limits
    room = limits.max_model_len - ANSWER_LEN - 1
    longest = min(room, limits.max_num_batched_tokens + limits.page_size)
    letters = range(3, min(engine.worker.vocab_size, 200))
    few = letters[:NUM_LETTERS]
    shared = [rng.choice(letters) for _ in range(longest)]
    requests = []
    for i in range(num):
        size, bias = max(1, longest * (i + 1) // num), {}
        prompt = [rng.choice(letters) for _ in range(size)]
        if i % 3 == 0:
            prompt[: size // 2] = shared[: size // 2]
        elif i % 3 == 1:
            prompt, bias = [rng.choice(few) for _ in range(size)], dict.fromkeys(few, 100.0)
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=ANSWER_LEN, ignore_eos=True, logprobs=2,
            logit_bias=bias,
        )  # fmt: skip
        requests.append(RequestSpec(prompt, params))
        if i % 3 == 0:
            requests.append(RequestSpec(prompt, POOLED))
    return requests


def _serve(
    engine: Engine, requests: Sequence[RequestSpec], current: Round, rng: random.Random, name: str
) -> list[ServedAnswer]:
    """Serve requests to their ends, as the round says."""
    answers: list[RequestHandle] = []
    num_steps = 0
    while len(answers) < len(requests) or engine.has_work:
        while len(answers) < len(requests):
            answers.append(engine.add(f"{name}{len(answers)}", *requests[len(answers)]))
            if current.is_staggered and rng.random() < 0.5:
                break
        scheduler = engine.schedulers[0]
        if current.is_preempted and scheduler.num_running and num_steps % PREEMPTION_STEPS == 1:
            scheduler.preempt_last()
        engine.step()
        num_steps += 1
    return [ServedAnswer(answer.token_ids, answer.logprobs, answer.vector) for answer in answers]


def _differences(
    index: int, current: Round, answer: ServedAnswer, alone: ServedAnswer
) -> Iterator[Violation]:
    """Yield the first difference between an answer in a round and alone."""
    if alone.vector is not None and not _is_equal(alone.vector, answer.vector):
        found = f"a vector that differs from the one alone; {current.name}"
        yield Violation(INVARIANCE, ENGINE, f"request {index}", POOLED_VECTOR, found)
        return
    right = zip(alone.token_ids, alone.logprobs, strict=True)
    made = zip(answer.token_ids, answer.logprobs, strict=True)
    for position, ((token, logprob), (its_token, its_logprob)) in enumerate(
        zip(right, made, strict=True)
    ):
        if (token, logprob) == (its_token, its_logprob):
            continue
        tensor, got, expected = LOGPROBS, its_logprob.chosen, logprob.chosen
        if got == expected and its_token != token:
            tensor, got, expected = SAMPLED, its_token, token
        found = (
            f"{got!r} at position {position} of the answer where {expected!r} was expected, as "
            f"alone; {current.name}"
        )
        yield Violation(INVARIANCE, ENGINE, f"request {index}", tensor, found)
        return


def _is_equal(one: Vector, other: Vector | None) -> bool:
    return other is not None and np.array_equal(one, other)
