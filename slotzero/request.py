"""One request: its prompt and parameters, its output so far, and the slot and pages it holds.

It does not know tensors, text or its neighbours. The scheduler is its only writer; the engine reads
it. The rule it keeps is the order of its counts. With `tokens` = prompt, then output, then the
samples that steps already launched will bring:

    tokens[0 : num_cached)             KV found in the prefix cache at the last admission
    tokens[0 : num_computed)           KV computed by launched steps, or found
    tokens[0 : num_paged)              have pages, or had them and need them no more
    tokens[0 : target)                 known at the last admission; the first sample follows them
    tokens[0 : num_tokens)             committed: the host knows their ids
    tokens[num_tokens : num_known)     in flight: only the device knows their ids
    tokens[num_known : most_known)     in flight if drafts are right: only the device knows if

While it runs, num_cached <= num_computed <= num_known <= max_len and num_computed <= num_paged. It
is done on the device, if not yet on the host, when num_known == max_len; between there and
most_known >= max_len, it may be. Where drafts were verified, num_computed is the least it can be
until the host knows.
"""

import enum
from dataclasses import dataclass, field
from typing import Literal

from slotzero.grammars.grammar import Grammar
from slotzero.pools.prefix import Lookup
from slotzero.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Holds no slot and no pages. A preempted request may still have a sample in flight."""
    RUNNING = enum.auto()
    """Holds one slot, and in every KV group the pages of the positions that are still read."""
    FINISHED = enum.auto()
    """Holds nothing; tokens that arrive late are discarded."""


@dataclass(slots=True, eq=False)  # two requests with equal fields are still two requests
class Request:
    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Resolved: the sampler never sees None."""
    arrival: int
    """Its place in the queue; strictly growing, kept through preemption."""
    stop_ids: frozenset[int]
    """Resolved from end-of-sequence, ignore_eos and stop_token_ids."""
    max_len: int
    """Prompt plus max_tokens, clipped to the context."""
    grammar: Grammar | None = None
    """Grammar state after the committed tokens. With a grammar, the next sample needs the mask
    after the last one, so no other sample may be in flight."""

    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that was asked for and met; None for end-of-sequence."""

    dp_rank: int = 0
    """Index of its scheduler, which never changes."""
    slot: int = 0
    """0: none."""
    pages: list[list[int]] = field(default_factory=list)
    """By KV group, then by page of the sequence. 0 where a window has passed the page."""
    lookup: Lookup | None = None
    """Its search in the prefix cache, while it waits for pages."""
    num_paged: int = 0
    """Up to this position every group has its pages, and keeps them."""
    num_computed: int = 0
    target: int = 0
    num_in_flight: int = 0
    """Steps that were launched and will bring a token."""
    most_in_flight: int = 0
    """Maximum number of tokens that they will bring."""
    num_cached: int = 0
    num_found: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_behind: int = 0
    """Computed tokens that the drafter has not processed yet."""
    num_preemptions: int = 0

    @property
    def speculates(self) -> bool:
        """Whether drafts are verified; not with a grammar, whose masks the host computes."""
        return self.params.speculative and self.grammar is None

    @property
    def awaits_mask(self) -> bool:
        """Whether the tokens that its grammar allows next are still being computed."""
        return self.grammar is not None and not self.grammar.is_ready

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that `min_tokens` forbids as the next token."""
        is_early = len(self.output_token_ids) < self.params.min_tokens
        return self.stop_ids if is_early else frozenset()

    @property
    def num_known(self) -> int:
        return min(self.num_tokens + self.num_in_flight, self.max_len)

    @property
    def most_known(self) -> int:
        return self.num_tokens + self.most_in_flight
