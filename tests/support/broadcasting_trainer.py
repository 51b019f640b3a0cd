"""A trainer that broadcasts the tensors of a .safetensors file to engines, over gloo.

    python broadcasting_trainer.py SIZE GROUP FILE CHUNK_BYTES

It prints the port of its group, of which it is rank 0, and builds the group as trainers do for
SGLang. With CHUNK_BYTES above 0, tensors are packed as vLLM packs them.
"""

import sys
from datetime import timedelta

import torch
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(seconds=300)


def joined(size: int, name: str) -> distributed.ProcessGroup:
    store = distributed.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    print(store.port, flush=True)
    group, _ = c10d._new_process_group_helper(
        size,
        0,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=TIMEOUT,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def packed(tensors: list[Tensor], chunk_bytes: int) -> list[Tensor]:
    """Join tensors until a chunk exceeds the size."""
    made: list[Tensor] = []
    parts: list[Tensor] = []
    for tensor in tensors:
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, parts)) > chunk_bytes:
            made.append(torch.cat(parts))
            parts = []
    return [*made, torch.cat(parts)] if parts else made


def main(size: str, name: str, file: str, chunk_bytes: str) -> None:
    tensors = list(load_file(file).values())
    group = joined(int(size), name)
    for tensor in packed(tensors, int(chunk_bytes)) if int(chunk_bytes) else tensors:
        distributed.broadcast(tensor, src=0, group=group)


if __name__ == "__main__":
    main(*sys.argv[1:])
