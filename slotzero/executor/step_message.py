"""Messages from rank 0 to the other ranks, which run the same steps in the same order.

A message has the writes to the tables, the slots that run, and the graphs to replay. Ranks that
share attention heads sample the same tokens as rank 0, from the same logits, so no tokens are sent.
With DP attention, a rank receives only the rows of its own requests, and sends their samples back.
"""

from dataclasses import dataclass

import numpy as np

from slotzero.graph import GraphKey


@dataclass(frozen=True)
class Orders:
    """One step of one DP rank."""

    writes: np.ndarray | None  # [2, n] int32: words of the tables and their values
    slots: list[int]
    counts: list[int]
    num_tokens: int  # on the largest DP rank
    num_rows: int
    launches: list[GraphKey]
    width: int
    with_logprobs: bool


@dataclass(frozen=True)
class Timing:
    """Replay of a graph over empty rows, with which rank 0 measures how long it takes."""

    key: GraphKey


Message = Orders | Timing
