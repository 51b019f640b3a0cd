"""The mixture-of-experts part of a kernel set."""

from abc import ABC, abstractmethod

from torch import Tensor

from slotzero.kernels.types import Experts, ExpertWeights, Normed, Routed


class MoeKernels(ABC):
    @abstractmethod
    def route(
        self,
        x: Normed,  # [T, hidden]
        slots: Tensor,
        weights: ExpertWeights,
        shape: Experts,
        by: Normed | None = None,
    ) -> Routed:
        """Assign experts to each token; the router reads `by` instead of x if it is given. Tokens
        of slot 0 get none."""

    @abstractmethod
    def experts(
        self, routed: Routed, weights: ExpertWeights, shape: Experts, starts: Tensor
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [T, hidden].

        Writes starts [experts + 1], int32, for the experts whose weights are given: sorted by
        expert, the choices of expert e are [starts[e], starts[e + 1]).
        """
