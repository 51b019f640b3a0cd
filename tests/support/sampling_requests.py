"""Sampling tables of a step, built from the parameters of its requests."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from slotzero.sampling.params import SamplingParams
from slotzero.sampling.tables import SAMPLING_TABLES, SamplingTables, encode, mask_tables

MAX_VOCAB = 151_936


class SamplingRequest(Protocol):
    """A request as the sampler sees it: parameters, seed, tokens and grammar mask."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_len: int
    stop_ids: Sequence[int]
    allowed: Collection[int] | None
    """The tokens that a grammar allows, or None without a grammar."""
    logprobs_mode: str


def tables_of(requests: Sequence[SamplingRequest], max_len: int = 8) -> SamplingTables:
    """Return the sampling tables in which request i has slot i + 1.

    Past a request's tokens, the table holds token 0 as poison.
    """
    slots = len(requests)
    columns = {
        spec.name: torch.full(spec.shape(slots), spec.neutral, dtype=getattr(torch, spec.dtype))
        for spec in (*SAMPLING_TABLES, *mask_tables(MAX_VOCAB))
    }
    tokens = torch.zeros(slots + 1, max_len, dtype=torch.int32)
    for slot, request in enumerate(requests, start=1):
        about = request.prompt_len, request.stop_ids, request.logprobs_mode
        row = encode(request.params, request.seed, *about)
        for name, values in row.items():
            columns[name][slot] = torch.tensor(values).view(columns[name][slot].shape)
        if request.allowed is not None:
            columns["is_masked"][slot] = 1
            columns["allowed"][slot] = mask_of(request.allowed)
        else:
            columns["allowed"][slot] = 0  # poison: it is not read
        tokens[slot, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
    return SamplingTables(tokens=tokens, **columns)


def mask_of(allowed: Collection[int]) -> Tensor:
    """Return a mask of int32 words in which bit i % 32 of word i // 32 is token i: [words]."""
    bits = torch.zeros(MAX_VOCAB, dtype=torch.int64)
    bits[list(allowed)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(-1)
    return words.to(torch.uint32).view(torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
