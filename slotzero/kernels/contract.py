"""The contract of a kernel set: what a step needs done, by whichever kernels the device has.

A layer is five calls: linear, attention, linear_add_norm, linear_gated, linear_add_norm; with
experts the last two are experts and add_norm. All are functions of their arguments. A token is
(slot, position); kernels read pages through the slot's row of its group's page table, drop every
write of slot 0 and give slot 0 zeros. What each call means is written down in composed.py and
composed_speculation.py, in plain torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slotzero.errors import ContractError
from slotzero.sampling.tables import Sampled, SamplingTables


class Tokens(NamedTuple):
    """The tokens of a step, [T] each; padding is slot 0 at position 0."""

    slots: Tensor
    positions: Tensor


class Rows(NamedTuple):
    """The rows of a step, [R] each: row r is tokens [ends[r] - counts[r], ends[r])."""

    slots: Tensor
    starts: Tensor  # the position of its first token
    counts: Tensor  # 0 for padding
    ends: Tensor
    span: int = 0  # tokens that every row takes up; 0: rows are ragged and packed


class Normed(NamedTuple):
    """Rows under RMSNorm: with the norm's weight applied, and the scale too unless it is late."""

    x: Tensor  # [rows, size]
    squares: Tensor | None
    """Late: [parts, rows]; the row is still to be divided by the root of their sum / size + eps."""

    def select(self, rows: Tensor) -> "Normed":
        return Normed(self.x[rows], None if self.squares is None else self.squares[:, rows])


class Angles(NamedTuple):
    """The rotation of each token's heads."""

    cos: Tensor  # [T, 1, head_dim / 2] float32
    sin: Tensor


Plan = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Heads:
    """The shape of attention in one group of layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    norm_eps: float
    scale: float
    window: int | None = None
    """A token sees so many keys, its own included; None: all of them."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    norms_whole: bool = False
    """Norms of queries and keys are over all heads of a token at once, not head by head."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of q, k and v in a joined row."""
        kv = self.num_kv_heads
        return self.num_heads * self.head_dim, kv * self.head_dim, kv * self.value_dim

    @property
    def out_size(self) -> int:
        return self.num_heads * self.value_dim


MAX_PLACES = 63
"""Of a tree: the bits of an int64 without its sign."""


class Branches(NamedTuple):
    """Tokens that stand in trees behind what their slots have stored, [T] each; slot 0: anything.

    Their positions are places: where they are stored, one after another, in whichever branch. A
    token at place p sees all keys before its base, and in [base, p] those that it is told to. A
    window reaches back from where it stands in its branch; it is longer than any branch.
    """

    bases: Tensor  # int32: the place where the token's tree begins
    seen: Tensor  # int64: bit i: the key at place base + i is seen; the token's own bit is set
    positions: Tensor  # int32: where it stands in its branch

    def check(self, tokens: Tokens, rows: Rows | None) -> None:
        if rows is None:
            raise ContractError("branches: a step without rows takes none; give its rows")
        dtypes = torch.int32, torch.int64, torch.int32
        for name, tensor, dtype in zip(self._fields, self, dtypes, strict=True):
            if tensor.dtype is not dtype or tensor.shape != tokens.slots.shape:
                raise ContractError(f"branches: {name} must be {dtype}, one of each token")


def standing(tokens: Tokens, branches: Branches | None) -> Tokens:
    """Where they stand in their text, rather than where they are stored."""
    return tokens if branches is None else Tokens(tokens.slots, branches.positions)


Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
"""Of gates. clamped_silu is gpt-oss's: (v + 1) g sigmoid(1.702 g), with g <= 7 and |v| <= 7."""


@dataclass(frozen=True)
class Experts:
    """How a token chooses among many small networks."""

    num_experts: int
    top_k: int
    inner_size: int
    activation: Activation
    is_sigmoid: bool
    """Scores are sigmoids of the router, chosen with a correction added; else the softmax of those
    chosen."""
    is_normed: bool = False
    """The chosen sigmoids are divided by their sum."""
    factor: float = 1.0
    num_groups: int = 1
    """Of experts; only the best `top_groups` of them are chosen from."""
    top_groups: int = 1


class ExpertWeights(NamedTuple):
    router: Tensor  # packed [experts, hidden]
    router_bias: Tensor | None
    correction: Tensor | None  # [experts] float32
    gate_up: Tensor  # [experts, packed [2 * inner, hidden]]: gates and then values
    gate_up_bias: Tensor | None
    down: Tensor  # [experts, packed [hidden, inner]]
    down_bias: Tensor | None


class Aims(NamedTuple):
    """Guesses that are to be made, one after another, [steps, R] each; zeros where none is."""

    slots: Tensor
    places: Tensor  # of the token that is computed for it, or of its pair
    after: Tensor  # the index of the token that is guessed


class Guesses(NamedTuple):
    """All that were made for trees, step after step, [R, M] each."""

    ids: Tensor
    scores: Tensor  # float32: log probabilities of a branch, added up; -inf: there is no such guess
    parents: Tensor  # which of these it follows; -1: the newest token


class Front(NamedTuple):
    """Guesses from which trees grow on, K of each row; those that are none are slot 0."""

    tokens: Tokens  # where they, or their pairs, are computed
    rows: Rows
    branches: Branches
    after: Tensor  # [T]: the index of the token that is guessed next
    origins: Tensor  # [T]: which row of the logits that they were chosen from
    nodes: Tensor  # [T]: which of the guesses
    scores: Tensor  # [T]


class Kernels(ABC):
    name: str

    @abstractmethod
    def prepare(self, rehearse: Callable[[], None]) -> None:
        """What `rehearse` runs will run again, and should not wait for a compiler then. It may be
        run now, over empty steps, and compute nonsense."""

    @abstractmethod
    def refuse(self, heads: Heads) -> None:
        """Raises UnsupportedModelError where no kernel of this set can attend in this shape."""

    @abstractmethod
    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The shape in which a weight [out_features, in_features] is stored."""

    @abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """[..., out_features, in_features] -> [..., *packed_shape]"""

    @abstractmethod
    def locate(
        self, slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
    ) -> None:
        """Of a step with one token a row: each token's slot, its position, which is the length of
        its slot, and the length after it."""

    @abstractmethod
    def plan(
        self,
        tokens: Tokens,
        rows: Rows | None,
        heads: Heads,
        branches: Branches | None = None,
    ) -> Plan:
        """What `attention` needs to know of a step, once for all layers.

        Without rows, every token is a row of its own: a decode step, which has no branches.
        """

    @abstractmethod
    def turn(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        """frequency [head_dim / 2], or [T, head_dim / 2] where tokens differ; factor is of cos and
        sin."""

    @abstractmethod
    def open(
        self,
        tokens: Tokens,
        table: Tensor,  # [slots + 1, max_len] token ids by position
        embedding: Tensor,  # packed [vocab, hidden]
        scale: float,  # of embeddings, rounded to their dtype
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        """Looks up and embeds every token -> what the first layer begins with, and its RMSNorm."""

    @abstractmethod
    def embedded(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of a packed weight [vocab, hidden]: ids [T] -> [T, hidden]"""

    @abstractmethod
    def open_pair(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: Tensor,
        embed_norm: Tensor | None,
        hidden: Tensor,  # [T, hidden]
        hidden_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Looks up and embeds every token, and puts a hidden state beside it, each under its
        RMSNorm if it has one -> [T, 2 * hidden]"""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Normed:
        """x [rows, size] under an RMSNorm; without a weight, itself."""

    @abstractmethod
    def settle(self, x: Normed, eps: float) -> Tensor:
        """The rows themselves, with the scale that was left to others."""

    @abstractmethod
    def linear(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
    ) -> Tensor:
        """x [rows, in_features] times a packed weight -> [rows, out_features]"""

    @abstractmethod
    def logits(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        slots: Tensor,
        softcap: float | None,
        out: Tensor,
    ) -> None:
        """x [rows, in_features] times a packed weight, into out; zeros for rows of slot 0"""

    @abstractmethod
    def linear_gated(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        activation: Activation,
    ) -> Tensor:
        """x times a packed weight of gates and then values -> activation(gate) * value"""

    @abstractmethod
    def linear_add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        after: Tensor | None,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        """`add_norm` of x times a packed weight"""

    @abstractmethod
    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        after: Tensor | None,  # the weight of an RMSNorm of x, before it is added
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        """residual + x, which may be written over `residual`, and its RMSNorm; without a norm,
        itself."""

    @abstractmethod
    def experts(
        self, x: Normed, eps: float, slots: Tensor, weights: ExpertWeights, shape: Experts
    ) -> Tensor:
        """Each token [T, hidden] through the experts that it chooses, their results weighted and
        added up. Tokens of slot 0 choose none and get zeros."""

    @abstractmethod
    def attention(
        self,
        joined: Tensor,  # [T, sum(heads.sizes)]: q, k and v of each token
        q_norm: Tensor | None,  # [head_dim], or of all heads
        k_norm: Tensor | None,
        sinks: Tensor
        | None,  # [heads]: a score that takes its share of the softmax and adds nothing
        angles: Angles,
        kv_pages: Tensor,  # [pages, page_size, kv_heads, head_dim + value_dim]: a key, its value
        page_table: Tensor,  # [slots + 1, pages_per_slot]
        plan: Plan,
        heads: Heads,
    ) -> Tensor:
        """Norms and rotates q and k, stores k and v at each token's position, and attends to the
        positions of its slot up to its own, the last `window` of them, or those of its branch
        -> [T, out_size]. Slot 0 stores nothing and gets zeros."""

    @abstractmethod
    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        """The next token of each row; see sampling/reference.py for its meaning."""

    @abstractmethod
    def advance(
        self,
        slots: Tensor,
        new_length: Tensor,
        target: Tensor,
        length: Tensor,
        tokens: Tensor,
        sampled: Tensor,
    ) -> None:
        """Closes the loop: each slot's length becomes new_length, and where that has reached the
        target, the sampled token is written there; elsewhere it becomes 0."""

    # Speculation. Every row of its steps has W tokens: row r has [r * W, (r + 1) * W). Those that
    # are not real are slot 0; of `Rows` they count, and what they are worth nobody asks. A slot
    # other than 0 has one row. What is [slots + 1] and not [R] is a table.

    @abstractmethod
    def locate_drafts(
        self,
        slots: Tensor,
        length: Tensor,
        limit: Tensor,  # tokens that a slot may have
        num_drafts: Tensor,
        drafted_at: Tensor,  # the length for which they are good
        tokens: Tokens,
        num_tried: Tensor,  # [R]
    ) -> tuple[Rows, Tensor]:
        """Who is verified: the newest token of each slot, and as many of its drafts as are good and
        as W and the limit have room for, `num_tried` in all -> the rows, and [T]: the length after
        each token. Where not even one more token may come, nobody is."""

    @abstractmethod
    def locate_new(
        self, slots: Tensor, length: Tensor, followed_to: Tensor, tokens: Tokens
    ) -> tuple[Rows, Tensor]:
        """What lies between where a slot was followed to and its length -> the rows, and [R]: which
        token is the last of each; the first one where there is none."""

    @abstractmethod
    def accept(
        self,
        slots: Tensor,
        num_tried: Tensor,  # [R], from locate_drafts
        sampled: Tensor,  # [R, W]: what follows each token
        tokens: Tensor,
        length: Tensor,
        num_verified: Tensor,  # [R]
    ) -> None:
        """A draft is right if it is what was sampled in its place, and so were all before it. What
        was sampled is written in the place of those, and once behind them; that many tokens are
        verified."""

    @abstractmethod
    def keep(
        self, slots: Tensor, counts: Tensor, x: Tensor, table: Tensor, path: Tensor | None = None
    ) -> None:
        """Of each row of x [R * W, size], the first `counts` [R] of `path` [R, W] go to the places
        of its slot in table [slots + 1, W or more, size]. Without a path, one after another."""

    @abstractmethod
    def keep_last(self, slots: Tensor, last: Tensor, x: Tensor, table: Tensor) -> None:
        """Of each row, x[last] goes to its slot in table [slots + 1, size]. Of slot 0 `last` is
        anything that x has."""

    @abstractmethod
    def keep_next(self, tokens: Tokens, followed_to: Tensor, x: Tensor, table: Tensor) -> None:
        """Of each token, one of a slot, x [T, size] goes to its slot in table [slots + 1, W, size],
        to as many places from the first as it stands behind where its slot was followed to."""

    @abstractmethod
    def follow(self, rows: Rows, tokens: Tokens, last: Tensor, followed_to: Tensor) -> None:
        """Each slot is followed to the end of its row, whose last token `last` [R] names."""

    @abstractmethod
    def fetch(self, slots: Tensor, table: Tensor) -> Tensor:
        """table [slots + 1, W, size] -> [R * W, size]"""

    @abstractmethod
    def allot(
        self,
        slots: Tensor,
        length: Tensor,
        limit: Tensor,
        paged: Tensor,  # positions that have pages
        speculates: Tensor,
        target: Tensor,
        most: int,
    ) -> tuple[Tensor, Tensor]:
        """-> [R]: the length of each slot, and how many drafts it gets: none if it wants none or is
        not sampled yet, and no more than can be verified."""

    @abstractmethod
    def aim(self, slots: Tensor, length: Tensor, num: Tensor, steps: int, behind: int) -> Aims:
        """The first `num` [R] of so many guesses of each slot. Who computes from the newest token
        is not behind; who computes from pairs is behind by 1. All are of lengths [R]."""

    @abstractmethod
    def note(self, slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor) -> None:
        """Writes a token of each slot in its place."""

    @abstractmethod
    def recall(
        self,
        slots: Tensor,
        length: Tensor,  # [R]
        num: Tensor,
        tokens: Tensor,
        steps: int,
        shortest: int,
        longest: int,
    ) -> Tensor:
        """Writes `num` [R] <= steps guesses behind the newest token of each slot: what followed
        where its newest tokens stood before, `longest` of them or fewer; the longest match wins,
        and of equals the latest -> [R]: num, or 0 where no match is `shortest`."""

    @abstractmethod
    def close_draft(
        self, slots: Tensor, length: Tensor, num: Tensor, num_drafts: Tensor, drafted_at: Tensor
    ) -> None:
        """Each slot has `num` [R] drafts that are good at `length` [R]."""

    # Trees. A tree of W nodes has the newest token for its root, node 0; a node's parent comes
    # before it, and children of one parent differ. Node i is stored at place length + i.

    @abstractmethod
    def branch(self, rows: Rows, tokens: Tokens, parents: Tensor) -> Branches:
        """Of rows of W nodes: parents [slots + 1, W or more]; what is there for the root is not
        read."""

    @abstractmethod
    def accept_tree(
        self,
        slots: Tensor,
        num_tried: Tensor,
        sampled: Tensor,  # [R, W]: what follows each node
        parents: Tensor,
        branches: Branches,
        tokens: Tensor,
        length: Tensor,
        num_verified: Tensor,
        path: Tensor,  # [R, W]
    ) -> None:
        """As `accept`: a node is right if it is what was sampled after its parent, and its parent
        is right. `path` begins with those that are, from the root on; then come zeros."""

    @abstractmethod
    def move_kv(
        self,
        slots: Tensor,
        length: Tensor,  # after accept_tree
        num_verified: Tensor,
        path: Tensor,
        kv_pages: Tensor,  # [layers, pages, page_size, kv_heads, size]
        page_table: Tensor,
    ) -> None:
        """What was stored for the nodes of a path goes where their tokens now stand."""

    @abstractmethod
    def sprout(
        self,
        slots: Tensor,  # [R]; 0: without a tree
        length: Tensor,  # [R]
        room: Tensor,  # [R]: places behind the newest token
        drawn: Sampled,  # of each row's newest token, or of its front
        front: Front | None,
        guesses: Guesses,
        step: int,
        topk: int,
        behind: int,  # as in `aim`
        tables: SamplingTables,
    ) -> Front:
        """Takes `topk` guesses after each token of the front: what was drawn, which counts like the
        likeliest, and the likeliest others. Of a request with penalties only the first, since what
        they count are tokens one after another. The best `topk` of this step are the next front:
        written behind the newest token, those of step s from place s * topk on, while there is
        room."""

    @abstractmethod
    def select(
        self,
        slots: Tensor,
        length: Tensor,
        room: Tensor,
        guesses: Guesses,
        most: int,
        tokens: Tensor,
        parents: Tensor,
    ) -> Tensor:
        """The best guesses of each row become its tree: their tokens and parents are written, in
        the order in which they were made -> [R]: how many, as `most` and room allow. Of equals the
        earlier is better, so that a parent is better than its children."""

    @abstractmethod
    def spread(self, logits: Tensor, draft_of: Tensor) -> Tensor:
        """[R, draft_vocab], and for each token which of those it is, [vocab] -> [R, vocab]; where
        it is none, -1, its logit is -inf."""


def kernels_for(device: torch.device) -> Kernels:
    """The fastest set that this device can run; the reference where there is no other."""
    if device.type == "cuda":
        from slotzero.kernels.triton.kernels import TritonKernels

        return TritonKernels()
    from slotzero.kernels.cpu import build

    if build.compiler() is None:
        from slotzero.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    from slotzero.kernels.cpu.kernels import CpuKernels

    return CpuKernels()
