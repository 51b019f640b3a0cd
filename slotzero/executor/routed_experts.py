"""The experts that the target's routers chose for the tokens of each request.

They are stored beside the KV, in pages of the same numbers. So they follow the rules of the KV
cache: a cached prefix has those of the request that computed it, a preempted request stores them
again, and a rejected draft is overwritten. This module does not know requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.graph import Registry
from slotzero.kernels.types import PagedKv
from slotzero.models.config import ModelConfig
from slotzero.models.model import ModelShape
from slotzero.models.routing import CHOSEN_EXPERTS


@dataclass(frozen=True)
class RoutedExperts:
    group: int
    """Index of the KV group whose pages are used."""
    kv: PagedKv  # pages [MoE layers, pages, page_size, 1, top_k] int16

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Return the experts of all tokens of these pages, [tokens, MoE layers, top_k].

        It waits for the device: the pages may have another owner after the next step.
        """
        stored: Tensor = self.kv.pages
        index = torch.tensor(pages, dtype=torch.int64, device=stored.device)
        by_layer = stored.index_select(1, index).flatten(1, 3)
        made: np.ndarray = by_layer.transpose(0, 1).contiguous().cpu().numpy()
        return made


def routed_experts(
    model: ModelShape, registry: Registry, kv: Mapping[str, PagedKv], page_tables: Sequence[str]
) -> RoutedExperts:
    """Register the pages; raise for a model that has no experts or no KV of all tokens.

    `page_tables` are the names of the KV groups' tables, in order.
    """
    setting = "enable_return_routed_experts"
    if not isinstance(model, ModelConfig) or model.experts is None:
        raise UnsupportedModelError(
            f"{setting}: this model has no experts that Slotzero routes; drop the setting"
        )
    whole = [group.name for group in model.groups if group.heads.window is None]
    if not whole:
        raise UnsupportedModelError(
            f"{setting}: every layer of this model forgets tokens outside its window, and experts "
            "are stored beside the KV; drop the setting"
        )
    names = [group.name for group in model.groups]
    group, like = names.index(whole[0]), kv[whole[0]]
    _, num_pages, page_size = like.pages.shape[:3]
    num_layers = sum(layer.moe is not None for layer in model.layers)
    shape = (num_layers, num_pages, page_size, 1, model.experts.top_k)  # as of one KV head
    pages = torch.zeros(shape, dtype=torch.int16, device=registry.device)
    through = page_tables[group]
    registry.table(CHOSEN_EXPERTS, pages, axis=1, through=through)
    return RoutedExperts(group, PagedKv(pages, like.page_table))
