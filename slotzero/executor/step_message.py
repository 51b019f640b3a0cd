"""Messages from rank 0 to the other ranks, which run the same steps in the same order.

The message of a step has the writes to the tables, the slots that run, and the graphs to replay.
With tensor-parallel attention all ranks sample the same tokens from the same logits, so no tokens
are sent. With DP attention, a rank receives only the rows of its own requests, and sends their
samples back.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from slotzero.graph import GraphKey


@dataclass(frozen=True)
class StepMessage:
    """One step, for one DP rank."""

    writes: np.ndarray | None  # [2, n] int32: words of the tables and their values
    slots: list[int]
    counts: list[int]
    num_tokens: int  # on the largest DP rank
    num_rows: int
    launches: list[GraphKey]
    width: int
    with_logprobs: bool
    is_scored: bool = False
    is_pooled: bool = False


@dataclass(frozen=True)
class Timing:
    """A replay over an empty step, so that rank 0 can measure how long it takes."""

    key: GraphKey


class SentTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Update:
    """New weights, which rank 0 broadcasts after this message, one tensor after another."""

    tensors: list[SentTensor]


Message = StepMessage | Timing | Update
