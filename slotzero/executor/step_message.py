"""What rank 0 tells the others. It plans; they do the same on their parts, in the same order.

A step is what changed in the tables, who runs, and which recordings are replayed. Ranks that share
attention sample as rank 0 does, from the same logits, so no token is ever sent to them or back.
Those that have requests of their own are told of these alone, and send what they sampled.
"""

from dataclasses import dataclass

import numpy as np

from slotzero.graph import GraphKey


@dataclass(frozen=True)
class Orders:
    writes: np.ndarray | None  # [2, n] int32: words of the tables and their values
    slots: list[int]
    counts: list[int]
    num_tokens: int  # of the lane that has most
    num_rows: int
    launches: list[GraphKey]
    width: int
    with_logprobs: bool


@dataclass(frozen=True)
class Timing:
    """Replay a recording over nobody, for rank 0 to see how long it takes."""

    key: GraphKey


Message = Orders | Timing
