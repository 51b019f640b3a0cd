"""Actors: stand-ins as a step of a runner may find them, of every kind in turn.

It knows requests, and what each runner looks at in the row of a slot. It writes slot tables; what
else a step reads is set where the scene is.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slotzero.engine import Engine
from slotzero.errors import RequestError
from slotzero.graph import Runner
from slotzero.request import Request
from slotzero.sampling.params import SamplingParams
from slotzero.sanitizer.reach import has, is_drafter
from slotzero.sanitizer.scene import kind_of
from slotzero.speculative.drafter import (
    DRAFTED_AT,
    LIMIT,
    NUM_DRAFTS,
    NUM_NEW,
    PAGED,
    SPECULATES,
)
from slotzero.speculative.eagle import HIDDEN
from slotzero.speculative.passes import DRAFT, EXTEND, FEATURES, VERIFY
from slotzero.standins import StandIns

MOST_STORED = 37  # tokens of a stand-in before the step: two pages and a bit
WIDE_WINDOW = 64  # tokens; wider ones are not filled
LEAST_DRAFTED = 8  # tokens before a guess, so that it can be what followed before
PERIOD = 3  # tokens, where they repeat
SURE = 1e4  # a bias that decides
_ASKS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.9, "logprobs": 2, "top_k": 20, "top_p": 0.9, "seed": 11},
    {"temperature": 1.3, "min_p": 0.05, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.2, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 7: -2.0}, "min_tokens": 3},
)
READ, WRITTEN = range(1, 1), range(1)  # the one column of a table


class Actor(NamedTuple):
    request: Request
    looks: Mapping[str, range]
    """By table, columns or positions of KV: what lies before the range is read, what is in it is
    written and not read before, what lies behind it is nobody's. A table that is not here is not
    looked at, if it holds KV or is one of speculation."""


class Plan(NamedTuple):
    """What is particular about a row that verifies drafts."""

    num_drafts: int
    num_right: int
    room: int | None = None  # tokens that may still come; None: enough
    is_stale: bool = False
    speculates: bool = True


class Cast:
    """Admits actors for the steps of one runner."""

    def __init__(self, engine: Engine, runner: Runner, ins: StandIns, rng: random.Random) -> None:
        self._engine, self._runner, self._ins, self._rng = engine, runner, ins, rng
        self._width = runner.spec.width
        self._tables, self._vocab = engine.worker.tables, engine.worker.vocab_size
        pages = [f"kv_{group}" for group in engine.limits.windows]
        self._kv = [name for name in pages if not is_drafter(name)]
        self._drafter_kv = [name for name in pages if is_drafter(name)]
        self._has_hidden = has(engine.worker.registry, HIDDEN)

    def admit(self, count: int) -> Actor:
        """`count` of its tokens are next, where a row may have any number."""
        of_kind = {VERIFY: self._verifies, EXTEND: self._extends, DRAFT: self._drafts}
        index, admit = len(self._ins.requests), of_kind.get(kind_of(self._runner))
        actor = self._computes(count) if admit is None else admit(index)
        if index % 2:
            self._constrain(actor.request.slot)
        return actor

    def _computes(self, count: int) -> Actor:
        """One in three that computes many tokens has one more after those, and does not sample."""
        start = self._length(count)
        more = self._rng.choice((0, 0, 1)) if count > 1 else 0
        tokens = self._random(start + count + more)
        request = self._ins.admit(tokens, self._params(), start)
        self._leave(request)
        looks = {"tokens": range(len(tokens), len(tokens) + 1 - more)}
        looks |= dict.fromkeys(self._kv, range(start, start + count))
        if self._runner.spec.rows is not None:  # the drafter follows
            looks |= dict.fromkeys(self._drafter_kv, range(start, start + count))
            looks[HIDDEN] = WRITTEN
        return Actor(request, looks)

    def _verifies(self, index: int) -> Actor:
        most, widest = self._width - 1, self._engine.limits.max_width - 1
        plans = (
            Plan(widest, widest),
            Plan(most, most, room=0),
            Plan(most, most // 2),
            Plan(0, 0, speculates=False),
            Plan(most, most, is_stale=True),
            Plan(most, most, room=2),
            Plan(most, 0),
        )
        return self._verifying(plans[index % len(plans)])

    def _verifying(self, plan: Plan) -> Actor:
        """Whether a draft is right, a bias decides."""
        length = self._length(self._engine.limits.max_width, least=1)
        right, wrong = (self._token(first) for first in (2, 3))
        request = self._answering(
            self._random(length + 1), length, room=plan.room, speculative=plan.speculates,
            logit_bias={wrong: -SURE} | ({right: SURE} if plan.num_right else {}),
        )  # fmt: skip
        drafts = [right] * plan.num_right + [wrong] * (plan.num_drafts - plan.num_right)
        self._leave(request, num_drafts=len(drafts))
        self._tables.stage(DRAFTED_AT, request.slot, [length - plan.is_stale])
        self._tables.stage("tokens", request.slot, drafts, first=length + 1)
        room = self._width if plan.room is None else plan.room
        count = min(1 if plan.is_stale else len(drafts) + 1, room)
        num = min(plan.num_right + 1, count)
        looks = {NUM_NEW: WRITTEN, LIMIT: READ, DRAFTED_AT: READ, FEATURES: range(num)}
        if not plan.is_stale:
            looks[NUM_DRAFTS] = READ
        if count:
            looks |= dict.fromkeys(self._kv, range(length, length + count))
            known = length + count  # the next one is written if all drafts are right
            looks["tokens"] = range(known, known + (num == count))
        return Actor(request, looks)

    def _extends(self, index: int) -> Actor:
        num = (self._width, 0, 1, self._width // 2 + 1)[index % 4]
        length = self._length(self._width, least=max(num, 1))
        request = self._answering(self._random(length + 1), length, num_stored=length - num)
        self._leave(request, num_new=num)
        self._tables.stage("length", request.slot, [length])
        looks = {NUM_NEW: READ}
        if num:
            looks |= {"tokens": range(length + 1, length + 1), FEATURES: range(num, num)}
            looks |= dict.fromkeys(self._drafter_kv, range(length - num, length))
            looks[HIDDEN] = WRITTEN
        return Actor(request, looks)

    def _drafts(self, index: int) -> Actor:
        """Its own wish, its pages, its limit or its prompt may keep it from drafting."""
        case = ("all", "wish", "pages", "limit", "prompt", "unlike")[index % 6]
        length = self._length(self._width, least=LEAST_DRAFTED)
        if case == "pages":
            length += -(length + 2) % self._engine.limits.page_size  # one position is left
        num_known = length + (2 if case == "prompt" else 1)
        tokens = self._unlike(num_known) if case == "unlike" else self._random(PERIOD) * num_known
        request = self._answering(
            tokens[:num_known], length, room=2 if case == "limit" else None,
            num_ahead=0 if case == "pages" else self._width, speculative=case != "wish",
        )  # fmt: skip
        self._leave(request)
        looks = {NUM_DRAFTS: WRITTEN, DRAFTED_AT: WRITTEN}
        looks |= dict.fromkeys((LIMIT, PAGED, SPECULATES), READ)
        num = self._num_drafts(request, length)
        if num:
            last = length + num - self._has_hidden  # of which the first guess is made
            looks |= dict.fromkeys(self._drafter_kv, range(length, last))
            if case == "unlike" and not self._drafter_kv:
                num = 0  # nothing was said before that could be said again
            looks |= {"tokens": range(length + 1, length + 1 + num), HIDDEN: READ}
        return Actor(request, looks)

    def _num_drafts(self, request: Request, length: int) -> int:
        if not request.speculates or request.target > length:
            return 0
        paged = min(map(len, request.pages)) * self._engine.limits.page_size
        return max(0, min(self._width - 1, request.max_len - length - 2, paged - length - 1))

    def _answering(
        self,
        tokens: Sequence[int],
        length: int,
        *,
        room: int | None = None,
        num_stored: int | None = None,
        num_ahead: int | None = None,
        **asks: Any,
    ) -> Request:
        """What follows the first `length` tokens is its answer; if two do, it is still prompt."""
        if length + self._width >= self._engine.limits.max_model_len:
            raise RequestError(
                f"the context has no room for {self._width} tokens after {length}: "
                "raise --max-model-len"
            )
        prompt_len = len(tokens)
        if prompt_len == length + 1:
            prompt_len = self._rng.randint(max(1, length - 1), length)
        asks["max_tokens"] = None
        if room is not None:
            asks |= {"max_tokens": length + 1 + room - prompt_len, "min_tokens": 0}
        return self._ins.admit(
            tokens[:prompt_len],
            self._params(**asks),
            length if num_stored is None else num_stored,
            answer=tokens[prompt_len:],
            num_ahead=self._width if num_ahead is None else num_ahead,
        )

    def _leave(self, request: Request, **known: int) -> None:
        """What steps before, or the slot's last owner, have left where the host writes nothing."""
        if self._engine.worker.cycles:
            for name in (NUM_NEW, NUM_DRAFTS):
                left = known.get(name, self._rng.randint(1, self._width))
                self._tables.stage(name, request.slot, [left])

    def _constrain(self, slot: int) -> None:
        """As a grammar would that allows every other token."""
        self._tables.stage("is_masked", slot, [1])
        self._tables.stage("allowed", slot, [0x55555555] * self._tables["allowed"].shape[1])

    def _params(self, **more: Any) -> SamplingParams:
        asks = _ASKS[len(self._ins.requests) % len(_ASKS)]
        return SamplingParams(**{**asks, **more, "detokenize": False})

    def _length(self, reach: int, least: int = 0) -> int:
        """The first has as much as there may be."""
        room = self._engine.limits.max_model_len - reach - 2
        most = max(least, min(self._most_stored(), room))
        return self._rng.randint(least, most) if self._ins.requests else most

    def _most_stored(self) -> int:
        """Enough that pages fall out of a window, unless it is wide."""
        limits = self._engine.limits
        narrow = [w for w in limits.windows.values() if w is not None and w <= WIDE_WINDOW]
        return max([MOST_STORED, *(window + 2 * limits.page_size for window in narrow)])

    def _token(self, first: int) -> int:
        """The first of every other one that does not end an answer."""
        ids = range(first, self._vocab, 2)
        return next(i for i in ids if i not in self._engine.eos_token_ids)

    def _random(self, num: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(num)]

    def _unlike(self, num: int) -> list[int]:
        """No two are the same."""
        return self._rng.sample(range(self._vocab), num)
