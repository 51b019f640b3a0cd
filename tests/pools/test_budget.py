"""Tests of the KV budget on a CPU by default."""

import torch

from slotzero.pools.budget import CPU_BYTES, Demand, GroupShape, moderate

SHAPE = GroupShape("full", 10, 16, 4, 128, torch.float32)  # 20 KiB for each token
GIB = 1 << 30


def test_a_kv_cache_is_moderate() -> None:
    short = Demand(16, 512, 8192, limit=2048)
    assert moderate([SHAPE], 100 * GIB, short, 90 << 20) == CPU_BYTES
    assert moderate([SHAPE], 100 * GIB, short, 4 * GIB) == 8 * GIB  # twice the weights
    assert moderate([SHAPE], GIB // 2, short, 4 * GIB) == GIB // 2  # what there is
    long = Demand(16, 512, 8192, limit=1 << 18)
    whole = (SHAPE.needed(1 << 18, 512) + 1) * SHAPE.num_bytes
    assert moderate([SHAPE], 100 * GIB, long, 90 << 20) == whole > 5 * GIB
    assert moderate([SHAPE], 100 * GIB, Demand(16, 512, 8192, 4096, 1 << 18), 0) == CPU_BYTES
