"""What requests ask of sampling, as the tables that a step reads."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slotzero.sampling.params import SamplingParams
from slotzero.sampling.tables import SAMPLING_TABLES, SamplingTables, encode


class Asking(Protocol):
    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_len: int
    stop_ids: Sequence[int]


def tables_of(requests: Sequence[Asking], max_len: int = 8) -> SamplingTables:
    """Request i lives in slot i + 1. Past a request's tokens the table holds token 0, as poison."""
    slots = len(requests)
    columns = {
        spec.name: torch.full(spec.shape(slots), spec.neutral, dtype=getattr(torch, spec.dtype))
        for spec in SAMPLING_TABLES
    }
    tokens = torch.zeros(slots + 1, max_len, dtype=torch.int32)
    for slot, request in enumerate(requests, start=1):
        row = encode(request.params, request.seed, request.prompt_len, request.stop_ids)
        for name, values in row.items():
            columns[name][slot] = torch.tensor(values).view(columns[name][slot].shape)
        tokens[slot, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
    return SamplingTables(tokens=tokens, **columns)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
