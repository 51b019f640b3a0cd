"""Our attention behind the attention interface of transformers.

A layer of transformers calls the interface with queries, keys and values [1, heads, tokens, size],
which are rotated already, and with the settings of its attention as keyword arguments. Which pages
they belong to is not among them: every module of a bridged layer has a `Hook` that knows.

The rule: every setting is honoured or refused by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slotzero.errors import ContractError, UnsupportedModelError
from slotzero.kernels.types import Heads

HOOK = "_slotzero_hook"
_WITHOUT_EFFECT = frozenset(
    ("position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
     "cache_position", "output_router_logits", "position_embeddings", "logits_to_keep")
)  # fmt: skip
"""Arguments that change no result: positions are rotated in already, and there is no cache of
transformers'."""


class AttentionCall(NamedTuple):
    """One call of the attention interface."""

    query: Tensor  # [1, heads, T, head_dim]
    key: Tensor  # [1, kv_heads, T, head_dim]
    value: Tensor  # [1, kv_heads, T, value_dim]
    mask: Tensor | None
    sinks: Tensor | None
    settings: "Settings"

    @property
    def qkv(self) -> Tensor:
        """Queries, keys and values of each token side by side, in the type of the values."""
        sides = (x.to(self.value.dtype) for x in (self.query, self.key, self.value))
        return torch.cat([x[0].transpose(0, 1).flatten(1) for x in sides], dim=-1)

    def heads(self, window: int | None) -> Heads:
        """Return the shape of this attention; `window` follows from the layer's mask."""
        (_, num_heads, _, head_dim), (_, num_kv_heads, _, value_dim) = (
            self.query.shape, self.value.shape,
        )  # fmt: skip
        return Heads(
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            norm_eps=0.0,
            scale=self.settings.scale,
            window=window,
            softcap=self.settings.softcap,
        )


class Settings(NamedTuple):
    scale: float
    softcap: float | None
    window: int | None
    """What the call says; the mask decides."""


class Hook(ABC):
    """Receives the attention calls of one layer's modules."""

    @abstractmethod
    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Return [T, heads, value_dim]."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it -> [1, T, heads, value_dim]."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    _refuse(module, query, {"dropout": dropout, **others}, is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    settings = Settings(scale, softcap or None, sliding_window or None)
    call = AttentionCall(query, key, value, attention_mask, s_aux, settings)
    hook = getattr(module, HOOK, None)
    if hook is None:
        raise ContractError(f"{type(module).__name__} attends outside of a bridged layer")
    return hook.attend(module, call)[None], None


def mark_mask(**given: Any) -> Tensor:
    """Stand for a mask: keep the function that says which key a query sees."""
    marker = torch.empty(1, 1, given["q_length"], given["kv_length"], device=given["device"])
    marker.mask_function = given["mask_function"]  # type: ignore[attr-defined]
    return marker


def window_of(seen: Any, max_position: int) -> int | None:
    """Return the sliding window of a mask function, or None if it sees all earlier keys; raise
    ValueError on any other mask.

    It is tried at the last position, and then at every position around the window found there.
    """
    keys = torch.arange(max_position)
    last = max_position - 1
    size = int(_row(seen, last, keys).sum())
    tried = {0, 1, size - 2, size - 1, size, size + 1, last // 2, last}
    for position in sorted(tried.intersection(range(max_position))):
        wanted = (keys <= position) & (keys > position - size)
        if not torch.equal(_row(seen, position, keys), wanted):
            raise ValueError(f"at position {position} it is neither causal nor a sliding window")
    return None if size == max_position else size


def _row(seen: Any, position: int, keys: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    row = seen(zero, zero, torch.full_like(keys, position), keys)
    return torch.as_tensor(row).expand(keys.shape)


def attach_hook(layer: nn.Module, hook: Hook) -> None:
    """Give every module of a layer its hook."""
    for module in layer.modules():
        setattr(module, HOOK, hook)


def _refuse(module: nn.Module, query: Tensor, others: Mapping[str, Any], is_causal: bool) -> None:
    name = type(module).__name__
    if not is_causal:
        raise UnsupportedModelError(f"{name}: attention that is not causal is not supported")
    if query.shape[0] != 1:
        raise UnsupportedModelError(f"{name}: it splits the tokens of a step into batches")
    for argument, value in others.items():
        is_given = isinstance(value, Tensor) or value not in (None, False, 0.0)
        if is_given and argument not in _WITHOUT_EFFECT:
            raise UnsupportedModelError(
                f"{name}: its attention takes {argument!r}, which the bridge to transformers does "
                "not implement, and ignoring it would change results"
            )
