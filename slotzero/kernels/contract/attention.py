"""The attention part of a kernel set."""

from abc import ABC, abstractmethod

from torch import Tensor

from slotzero.kernels.attention_plans import AttentionPlan
from slotzero.kernels.types import (
    Angles,
    Branches,
    Heads,
    IndexInputs,
    MlaWeights,
    PagedKv,
    QkNorms,
    Rows,
    Tokens,
)


class AttentionKernels(ABC):
    @property
    @abstractmethod
    def has_float8_kv(self) -> bool:
        """Whether attention over a KV cache in FP8 works on this machine."""

    @abstractmethod
    def refuse(self, heads: Heads, float8_kv: bool = False) -> None:
        """Raise UnsupportedModelError if no kernel of this set supports the shape, or none supports
        it with a KV cache in FP8."""

    @abstractmethod
    def plan(
        self, tokens: Tokens, rows: Rows | None, heads: Heads, branches: Branches | None = None
    ) -> AttentionPlan:
        """Derive what `attention` or `mla_attention` needs, once for all layers of a step.

        Without rows, every token is a row of its own: a decode step, which has no branches.
        """

    @abstractmethod
    def rope_angles(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        """Return cos and sin of the tokens' rotations, multiplied by factor.

        frequency is [head_dim / 2], or [T, head_dim / 2] where tokens differ. Pairs of frequency 0
        are not rotated, and not multiplied either.
        """

    @abstractmethod
    def rotate_heads(
        self,
        qkv: Tensor,  # [T, sum(heads.sizes)]
        norms: QkNorms,  # [head_dim] each
        q_angles: Angles,
        k_angles: Angles,
        heads: Heads,
    ) -> Tensor:
        """Rotate queries and keys, then norm each head; copy values -> [T, sum(heads.sizes)].

        For layers whose norms come after the rotation, or whose queries have other angles than
        their keys. `attention` then takes the result without norms, and angles that do not rotate.
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
        """Norm and rotate q and k, store k and v in the KV cache, and attend -> [T, out_size].

        A token attends to the positions of its slot up to its own: all of them, the last `window`,
        those of its chunk, or those of its branch. Slot 0 stores nothing and gets zeros. Heads with
        `stores=False` have queries alone; an earlier layer has stored the keys and values.
        """

    @abstractmethod
    def mla_attention(
        self,
        q: Tensor,  # [T, heads * (nope_dim + rope_dim)]
        k: Tensor,  # [T, rope_dim + latent], before norm and rope
        weights: MlaWeights,
        angles: Angles,  # for rope_dim
        kv: PagedKv,
        plan: AttentionPlan,
        heads: Heads,
        index: IndexInputs | None = None,  # if heads.mla.index is given
    ) -> Tensor:
        """Norm the latent, rotate q and k, store the row and attend -> [T, out_size].

        The nope part of a head's query times up_k is compared with the stored latents; the weighted
        sum of latents times up_v is the head's result. With an indexer, a token attends to the keys
        that it selects; of equal scores, to the earlier ones. It rotates the first rope_dim values
        of q and k.
        """
