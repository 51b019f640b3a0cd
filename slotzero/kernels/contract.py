"""The contract of a kernel set: what a step needs done, by whichever kernels the device has.

A layer is five calls: linear, attention, linear_add_norm, linear_gated, linear_add_norm; with
experts the last two are choose, experts and add_norm, and what is for this layer alone is mixed in
by linear, gate and linear_add_norm. All are functions of their arguments. A token is
(slot, position); kernels read pages through the slot's row of its group's page table, drop every
write of slot 0 and give slot 0 zeros. What only speculation or recurrent layers need is in
contract_speculation.py and contract_recurrent.py. What each call means is written down in
torch_ops.py and the files beside it, in plain torch.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slotzero.kernels.attention_plans import AttentionPlan
from slotzero.kernels.contract_recurrent import RecurrentKernels
from slotzero.kernels.contract_speculation import SpeculationKernels
from slotzero.kernels.types import (
    Activation,
    Angles,
    Branches,
    Experts,
    ExpertWeights,
    Heads,
    LinearWeight,
    MlaWeights,
    Normed,
    PagedKv,
    PairNorms,
    QkNorms,
    ResidualNorms,
    Routed,
    Rows,
    Tokens,
)
from slotzero.sampling.tables import Sampled, SamplingTables


class Kernels(SpeculationKernels, RecurrentKernels):
    name: str
    is_batch_invariant = False
    """A row's result is the same to the bit alone, in every batch and at every place in it."""

    @abstractmethod
    def prepare(self, rehearse: Callable[[], None]) -> None:
        """What `rehearse` runs will run again, and should not wait for a compiler then. It may be
        run now, over empty steps, and compute nonsense."""

    @abstractmethod
    def refuse(self, heads: Heads) -> None:
        """Raises UnsupportedModelError where no kernel of this set can attend in this shape."""

    @abstractmethod
    def held(self) -> Mapping[str, Tensor]:
        """By name, memory of their own that a recording sees. Every step leaves it as it was."""

    @abstractmethod
    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The shape in which a weight [out_features, in_features] is stored."""

    @abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """[..., out_features, in_features] -> [..., *packed_shape]"""

    @abstractmethod
    def decode_positions(
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
    ) -> AttentionPlan:
        """What `attention` needs to know of a step, once for all layers.

        Without rows, every token is a row of its own: a decode step, which has no branches.
        """

    @abstractmethod
    def rope_angles(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        """frequency [head_dim / 2], or [T, head_dim / 2] where tokens differ; factor is of cos and
        sin."""

    @abstractmethod
    def embed(
        self,
        tokens: Tokens,
        table: Tensor,  # [slots + 1, max_len] token ids by position
        embedding: LinearWeight,  # [vocab, hidden]
        scale: float,  # of embeddings, rounded to their dtype
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        """Looks up and embeds every token -> what the first layer begins with, and its RMSNorm."""

    @abstractmethod
    def embed_ids(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        """Return rows of a weight [vocab, hidden]: ids [T] -> [T, hidden]."""

    @abstractmethod
    def embed_pair(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: LinearWeight,
        hidden: Tensor,  # [T, hidden]
        norms: PairNorms,
    ) -> Tensor:
        """Looks up and embeds every token, and puts a hidden state beside it, each under its
        RMSNorm if it has one -> [T, 2 * hidden]"""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Normed:
        """x [rows, size], a part of wider rows maybe, under an RMSNorm; without one, itself."""

    @abstractmethod
    def apply_norm(self, x: Normed) -> Tensor:
        """The rows themselves, with the scale that was left to others."""

    @abstractmethod
    def linear(self, x: Normed, weight: LinearWeight) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]"""

    @abstractmethod
    def logits(
        self, x: Normed, weight: LinearWeight, slots: Tensor, softcap: float | None, out: Tensor
    ) -> None:
        """Write `linear` of x into out; zeros for rows of slot 0. The weight has no bias."""

    @abstractmethod
    def linear_gated(self, x: Normed, weight: LinearWeight, activation: Activation) -> Tensor:
        """`gate` of `linear`: the weight has the features of the gates and then those of the
        values."""

    @abstractmethod
    def gate(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        """activation(gates) * values, [rows, size] each; a row's gate may be one, expanded"""

    @abstractmethod
    def linear_add_norm(
        self, x: Tensor, weight: LinearWeight, residual: Tensor, norms: ResidualNorms
    ) -> tuple[Tensor, Normed]:
        """`add_norm` of `linear`."""

    @abstractmethod
    def add_norm(self, x: Tensor, residual: Tensor, norms: ResidualNorms) -> tuple[Tensor, Normed]:
        """Return residual + x, which may be written over `residual`, and its RMSNorm."""

    @abstractmethod
    def route(
        self,
        x: Normed,
        slots: Tensor,
        weights: ExpertWeights,
        shape: Experts,
        by: Normed | None = None,
    ) -> Routed:
        """Assign experts to each token [T, hidden]; the router reads `by` instead of x if it is
        given. Tokens of slot 0 get none."""

    @abstractmethod
    def experts(
        self,
        routed: Routed,
        weights: ExpertWeights,
        shape: Experts,
        starts: Tensor,  # [experts + 1] int32, of the experts whose weights are given
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [T, hidden].

        Writes `starts`: sorted by expert, the choices of expert e are [starts[e], starts[e + 1]).
        """

    @abstractmethod
    def attention(
        self,
        qkv: Tensor,  # [T, sum(heads.sizes)]: q, k and v of each token
        norms: QkNorms,
        sinks: Tensor | None,  # [heads]: scores that take part in the softmax and add no value
        angles: Angles,
        kv: PagedKv,
        plan: AttentionPlan,
        heads: Heads,
    ) -> Tensor:
        """Norms and rotates q and k, stores k and v at each token's position, and attends to the
        positions of its slot up to its own, the last `window` of them, or those of its branch
        -> [T, out_size]. Slot 0 stores nothing and gets zeros. Heads that do not store have queries
        alone, and find their own position stored."""

    @abstractmethod
    def mla_attention(
        self,
        q: Tensor,  # [T, heads * (nope_dim + rope_dim)]
        k: Tensor,  # [T, rope_dim + latent], before norm and rope
        weights: MlaWeights,
        angles: Angles,  # of rope_dim
        kv: PagedKv,
        plan: AttentionPlan,
        heads: Heads,
    ) -> Tensor:
        """`attention` of latent heads: norms the latent, turns what is turned, stores the row and
        attends -> [T, out_size]. A head's query times up_k is compared with latents; what it gets
        of them, times up_v, is its result."""

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
