"""Messages from rank 0 to the other ranks, which run the same steps in the same order.

A step is the writes to the tables, the slots that run, and the graphs that are replayed. Ranks that
share attention sample as rank 0 does, from the same logits, so no token is sent to them or back.
With DP attention, a rank is sent the rows of its own requests only, and sends back their samples.
"""

from dataclasses import dataclass

import numpy as np

from slotzero.graph import GraphKey


@dataclass(frozen=True)
class Orders:
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
    """Replay a graph over empty rows, so that rank 0 can measure how long it takes."""

    key: GraphKey


Message = Orders | Timing
