"""Choosing the next token with one kernel call: `reference.sample`, compiled for the CPU.

Importing this module builds (once) and loads the kernel library. It owns no rule of its own: what
a row yields is defined by `reference.py`, and `tests/test_sampling.py` holds the two together.
Tensors must be contiguous and of the declared types; the kernel refuses others by name.
"""

import torch
from torch import Tensor

from slotzero.kernels.cpu.build import load
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled, SamplingTables


def _trace(*_: Tensor) -> None:
    """Nothing to infer: the outputs are allocated by the caller."""


load()
torch.library.register_fake("slotzero::sample", _trace)


def sample(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables) -> Sampled:
    rows = logits.shape[0]
    sampled = Sampled(
        tokens=logits.new_empty(rows, dtype=torch.int32),
        logprobs=logits.new_empty(rows, dtype=torch.float32),
        top_ids=logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.int32),
        top_logprobs=logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.float32),
    )
    torch.ops.slotzero.sample(logits, slots, positions, *tables, *sampled)
    return sampled
