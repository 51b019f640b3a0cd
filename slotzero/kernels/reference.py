"""The slow reference of every kernel, in plain torch, against which the fast ones are tested.

It also serves requests, slowly, on machines without a C++ compiler.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.attention_plans import TorchPlan
from slotzero.kernels.float8_kv import from_codes, to_codes, value_scale
from slotzero.kernels.quantized import dequantise, embed_rows, select_expert, unpack_rows
from slotzero.kernels.torch_ops import TorchKernels
from slotzero.kernels.types import Branches, Heads, PagedKv, Tokens
from slotzero.kernels.weights import DenseWeight, LinearWeight, QuantizedWeight
from slotzero.sampling import reference
from slotzero.sampling.tables import Sampled, SamplingTables
from slotzero.tree_shape import MAX_PLACES

EVERYTHING = Heads(1, 1, 1, 1, 0.0, 1.0)  # without a window


class ReferenceKernels(TorchKernels):
    name = "reference"

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (out_features, in_features)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def dense_product(self, x: Tensor, weight: DenseWeight) -> Tensor:
        return F.linear(x, weight.data, weight.bias)

    def quantized_product(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        rows = unpack_rows(weight)
        bias = None if weight.bias is None else weight.bias.float()
        return F.linear(x.float(), dequantise(rows, weight.format), bias).to(x.dtype)

    def grouped_product(self, x: Tensor, weights: LinearWeight, starts: Tensor) -> Tensor:
        # The host reads where each expert starts: for eager use only, like attend.
        out = x.new_zeros(len(x), weights.out_features)
        for i, (start, end) in enumerate(pairwise(starts.tolist())):
            out[start:end] = self.product(x[start:end], select_expert(weights, i))
        return out

    def embed_ids(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        if isinstance(weight, DenseWeight):
            return F.embedding(ids, weight.data)
        assert isinstance(weight, QuantizedWeight)
        return embed_rows(ids, weight)

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        kv: PagedKv,
        tokens: Tokens,
    ) -> None:
        (slots, positions), page_size = tokens, kv.pages.shape[1]
        real = slots > 0  # a data-dependent shape: this reference is for eager use only
        slots, positions = slots[real], positions[real]
        pages = kv.page_table[slots, positions // page_size]
        if kv.scales is not None:
            k, v = to_codes(k, kv.scales[0]), to_codes(v, kv.scales[1])
        kv.pages[pages, positions % page_size] = torch.cat((k, v), dim=-1)[real]

    def attend(
        self,
        q: Tensor,
        sinks: Tensor | None,
        kv: PagedKv,
        plan: TorchPlan,
        heads: Heads,
    ) -> Tensor:
        (slots, positions), branches, taken = plan
        # One token at a time keeps memory small; the host read is why this is for eager use only.
        parts = [q.new_zeros(heads.num_heads, heads.value_dim)] * len(q)
        for t, position in enumerate(positions.tolist()):
            if slots[t] > 0:
                seen = _seen(t, position, branches, heads)
                if taken is not None:
                    seen = seen[taken[t, seen].bool()]
                stored = kv._replace(page_table=kv.page_table[slots[t]])
                parts[t] = self._attend_one(q[t], sinks, stored, seen.to(q.device), heads)
        return torch.stack(parts)

    def select_keys(
        self, q: Tensor, weights: Tensor, kv: PagedKv, plan: TorchPlan, top_k: int
    ) -> Tensor:
        (slots, positions), branches, _ = plan
        page_size = kv.pages.shape[1]
        taken = q.new_zeros(len(q), kv.page_table.shape[1] * page_size, dtype=torch.uint8)
        for t, position in enumerate(positions.tolist()):
            if slots[t] == 0:
                continue
            seen = _seen(t, position, branches, EVERYTHING).to(q.device)
            pages = kv.page_table[slots[t], seen // page_size]
            keys = kv.pages[pages, seen % page_size, 0, : q.shape[-1]].float()
            scores = torch.relu(q[t].float() @ keys.T)  # [heads, context]
            score = (weights[t].float()[:, None] * scores).sum(0)
            best = score.argsort(descending=True, stable=True)[:top_k]
            taken[t, seen[best]] = 1
        return taken

    def _attend_one(
        self,
        q: Tensor,
        sinks: Tensor | None,
        kv: PagedKv,
        seen: Tensor,
        heads: Heads,
    ) -> Tensor:
        """Attend with q [heads, head_dim] to the given positions of the slot with these pages."""
        page_size = kv.pages.shape[1]
        stored = kv.pages[kv.page_table[seen // page_size], seen % page_size]
        stored = stored.repeat_interleave(heads.num_heads // heads.num_kv_heads, dim=1)
        k, v = stored[..., : heads.head_dim], stored[..., -heads.value_dim :]  # [context, heads, .]
        dtype = q.dtype
        if kv.scales is not None:  # numbers that no 16-bit type holds exactly
            q = q.float()
            k = from_codes(k, kv.scales[0])
            v = from_codes(v, value_scale(kv.scales, heads))
        scores = torch.einsum("hd,chd->hc", q, k).float() * heads.scale
        if heads.softcap is not None:
            scores = heads.softcap * (scores / heads.softcap).tanh()
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None].float()), dim=-1)
        weights = scores.softmax(-1)[:, : len(seen)].to(v.dtype)
        return torch.einsum("hc,chd->hd", weights, v).to(dtype)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        chosen = reference.sample(logits.float(), slots, positions, tables)
        for target, values in zip(out, chosen, strict=True):
            target.copy_(values)


def _seen(t: int, position: int, branches: Branches | None, heads: Heads) -> Tensor:
    """Return the positions that a token sees."""
    if branches is None:
        return torch.arange(heads.first_key(position), position + 1)
    base, bits, stands = (int(part[t]) for part in branches)
    return _branch(position, base, bits, stands, heads)


def _branch(place: int, base: int, seen: int, position: int, heads: Heads) -> Tensor:
    places = range(base, min(place + 1, base + MAX_PLACES))
    told = [place for place in places if seen >> (place - base) & 1]
    return torch.tensor([*range(heads.first_key(position), base), *told])
