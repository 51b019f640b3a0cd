"""The contract of a kernel set, by subject: the operations that a step consists of.

A dense layer is five calls: linear, attention, linear_add_norm, linear_gated, linear_add_norm. A
layer with experts calls route, experts and add_norm instead of the last two. All operations are
functions of their arguments. A token is (slot, position); kernels find its KV through the slot's
row of the page table, drop every write of slot 0 and return zeros for it. kernels/torch_*.py define
what each operation means, in plain torch.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from slotzero.kernels.contract.attention import AttentionKernels
from slotzero.kernels.contract.linear import LinearKernels
from slotzero.kernels.contract.moe import MoeKernels
from slotzero.kernels.contract.recurrent import RecurrentKernels
from slotzero.kernels.contract.sampling import SamplingKernels
from slotzero.kernels.contract.speculation import SpeculationKernels


class Kernels(
    AttentionKernels,
    LinearKernels,
    MoeKernels,
    RecurrentKernels,
    SamplingKernels,
    SpeculationKernels,
):
    """A kernel set."""

    name: str
    is_batch_invariant = False
    """The result of a row has the same bits alone and at any place in any batch, and that of a
    token the same in a prompt, among drafts and in a decode step."""

    @abstractmethod
    def prepare(self, rehearse: Callable[[], None]) -> None:
        """Compile what `rehearse` launches, so that no later launch waits for a compiler.

        `rehearse` may be called, over empty steps, and its results are discarded.
        """

    @abstractmethod
    def workspace(self) -> Mapping[str, Tensor]:
        """Return by name the kernel set's own buffers that a captured graph uses. Every step leaves
        them unchanged."""


def kernels_for(device: torch.device, is_deterministic: bool = False) -> Kernels:
    """Return the fastest kernel set that the device supports, or the fastest that is
    batch-invariant; the reference if there is none."""
    if device.type == "cuda" and is_deterministic:
        from slotzero.kernels.triton.deterministic import DeterministicKernels

        return DeterministicKernels()
    if device.type == "cuda":
        from slotzero.kernels.triton.kernels import TritonKernels

        return TritonKernels()
    from slotzero.kernels.cpu import build

    if build.compiler() is None:
        from slotzero.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    from slotzero.kernels.cpu.kernels import CpuKernels

    return CpuKernels()
