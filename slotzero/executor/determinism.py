"""Deterministic mode: refusal of what cannot keep its promise, and whether the promise holds.

The promise: the tokens and log probabilities of a request depend on its own tokens, parameters and
seed alone, to the bit. docs/determinism.md says why each part keeps it.
"""

import torch

from slotzero.config import EngineConfig
from slotzero.distributed.ranks import Ranks
from slotzero.errors import ConfigError, UnsupportedModelError
from slotzero.kernels.contract import Kernels
from slotzero.models.bridge.config import BridgedConfig
from slotzero.models.model import ModelShape


def refuse_dependence(
    config: EngineConfig, model: ModelShape, kernels: Kernels, device: torch.device
) -> None:
    """Raise if results of deterministic mode would depend on the batch."""
    if not config.deterministic:
        return
    if isinstance(model, BridgedConfig):
        raise UnsupportedModelError(
            f"deterministic: the layers of transformers, over which {model.architecture} runs, sum "
            "in an order that depends on the batch; drop --deterministic"
        )
    if not kernels.is_batch_invariant:
        raise ConfigError(
            f"deterministic: the kernel set {kernels.name!r} sums in an order that depends on the "
            "batch; install a C++ compiler"
        )
    if config.enable_expert_parallel:
        raise ConfigError(
            "deterministic: with enable_expert_parallel the order in which experts are added "
            "depends on a token's place in the batch; drop one of them"
        )
    is_split = config.tensor_parallel_size > 1 and device.type == "cuda"
    has_wide_norms = any(heads.norms_whole for group in model.groups for heads in group.shapes)
    if is_split and (model.recurrent is not None or has_wide_norms):
        raise UnsupportedModelError(
            f"deterministic: tensor_parallel_size={config.tensor_parallel_size} would split norms "
            "over channels of all devices, whose order of summation depends on the batch; use one "
            "device, or drop --deterministic"
        )


def is_deterministic(is_batch_invariant: bool, ranks: Ranks) -> bool:
    """Return whether the promise holds: with these kernels, and between these ranks. Two ranks add
    the same two numbers in any order."""
    return is_batch_invariant and not ranks.expert_parallel and (ranks.size <= 2 or ranks.in_order)
