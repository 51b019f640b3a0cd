"""One request: its prompt and parameters, its output so far, and the slot and pages it holds.

It does not know tensors, text or other requests. Only the scheduler writes it; the engine reads it.
The rule is the order of its counts. With `tokens` = prompt, then output, then the samples of steps
that are already launched:

    tokens[0 : num_cached)             KV found in the prefix cache at the last admission
    tokens[0 : num_computed)           KV found, or computed by launched steps
    tokens[0 : num_paged)              have pages, or had pages that are no longer needed
    tokens[0 : target)                 known at the last admission; the first sample follows them
    tokens[0 : num_tokens)             committed: the host knows their ids
    tokens[num_tokens : num_known)     in flight: only the device knows their ids
    tokens[num_known : most_known)     in flight if drafts are accepted, which only the device knows

While it runs, num_cached <= num_computed <= num_known <= max_len and num_computed <= num_paged. If
num_known == max_len, the request is finished on the device, though maybe not yet on the host. If
only most_known >= max_len, it may be finished. After steps that verify drafts, num_computed is a
lower bound until the host has their results.
"""

import enum
import hashlib
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
    """Never None: the engine draws a seed if the request has none."""
    arrival: int
    """Number by which requests are queued; strictly increasing, and kept through preemption."""
    stop_ids: frozenset[int]
    """All tokens that end the answer, from end-of-sequence, ignore_eos and stop_token_ids."""
    max_len: int
    """Length of the prompt plus max_tokens, at most the context length. If a vector is wanted
    instead of an answer, length of the prompt plus 1, since one token is sampled and dropped."""
    grammar: Grammar | None = None
    """Grammar state after the committed tokens."""
    is_averaged: bool = False
    """Whether its vector is the mean of the hidden states of all its tokens."""

    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The requested stop token id or stop string that ended the answer; None for end-of-sequence.
    """

    dp_rank: int = 0
    """Index of the request's scheduler, which never changes."""
    slot: int = 0
    """0: no slot."""
    pages: list[list[int]] = field(default_factory=list)
    """By KV group, then by page of the sequence; 0 for a page before the window."""
    lookup: Lookup | None = None
    """Search in the prefix cache, while the request waits for pages."""
    num_paged: int = 0
    """Every group has pages up to this position, and keeps those that are still read."""
    num_computed: int = 0
    target: int = 0
    num_in_flight: int = 0
    """Number of launched steps that will each produce at least one token."""
    max_tokens_in_flight: int = 0
    """Maximum number of tokens that these steps will produce."""
    num_cached: int = 0
    num_found: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_behind: int = 0
    """Number of computed tokens that the drafter has not processed yet."""
    num_preemptions: int = 0
    saw_update: bool = False
    """Whether weights were updated after its first token: no single model gives this answer."""

    @property
    def speculates(self) -> bool:
        """Whether drafts are verified. Not with masks, because the host computes them."""
        return self.params.speculative and not self.is_masked

    @property
    def is_masked(self) -> bool:
        """Whether each sample needs a mask that follows from the previous sample, so that only one
        may be in flight."""
        return self.grammar is not None or bool(self.params.banned_sequences)

    @property
    def reads_cache(self) -> bool:
        """Whether it may reuse a cached prefix; the prefix is neither scored nor averaged."""
        is_scored = self.params.prompt_logprobs is not None and not self.output_token_ids
        return not (is_scored or self.is_averaged)

    def is_scored_at(self, position: int) -> bool:
        """Return whether the token after this position is one of the prompt and to be scored."""
        wanted = self.params.prompt_logprobs is not None and not self.output_token_ids
        return wanted and position < len(self.prompt_token_ids) - 1

    @property
    def awaits_mask(self) -> bool:
        """Whether the mask of the next token is still being computed."""
        return self.grammar is not None and not self.grammar.is_ready

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def prefix_ids(self) -> list[int]:
        """The tokens that are its key in the prefix cache. A cache salt changes the first one, so
        that only requests with the same salt share pages."""
        ids = self.all_token_ids
        if self.params.cache_salt:
            digest = hashlib.sha256(self.params.cache_salt.encode(errors="surrogatepass")).digest()
            ids[0] += (1 + int.from_bytes(digest[:8], "little")) << 32
        return ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that `min_tokens` or `banned_sequences` forbid as the next token."""
        is_early = len(self.output_token_ids) < self.params.min_tokens
        banned = self.params.banned_after(self.output_token_ids)
        return banned | self.stop_ids if is_early else banned

    @property
    def num_known(self) -> int:
        return min(self.num_tokens + self.num_in_flight, self.max_len)

    @property
    def most_known(self) -> int:
        return self.num_tokens + self.max_tokens_in_flight
