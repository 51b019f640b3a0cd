"""How many KV pages this machine can hold: from free memory, or from an explicit size."""

from dataclasses import dataclass

import torch

from slotzero.errors import CapacityError

CPU_SHARE = 0.25  # of the memory that is available: the rest belongs to the user's machine
CUDA_RESERVE = 2 << 30  # graphs, workspaces and activations


@dataclass(frozen=True)
class PageShape:
    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        values = 2 * self.num_layers * self.page_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize


def free_bytes(device: torch.device, utilization: float) -> int:
    """What KV may take: on a GPU, `utilization` of the card less what is used already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - int(total * (1 - utilization)) - CUDA_RESERVE)
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return int(available * 1024 * CPU_SHARE)


def count_pages(
    shape: PageShape, budget: int, max_num_seqs: int, max_model_len: int | None, limit: int
) -> tuple[int, int]:
    """-> (pages, context length).

    Page 0 is reserved. A request of the whole context always fits. A context that was not asked
    for shrinks to what fits; one that was asked for and does not fit is an error.
    """
    fitting = budget // shape.num_bytes - 1
    wanted_len = max_model_len or limit
    pages_per_slot = -(-wanted_len // shape.page_size)
    if fitting < pages_per_slot:
        need = (pages_per_slot + 1) * shape.num_bytes
        if max_model_len is not None or fitting < 1:
            raise CapacityError(
                f"a KV budget of {show(budget)} does not hold one request of {wanted_len} tokens, "
                f"which needs {show(need)}: raise --kv-cache-memory or lower --max-model-len "
                f"(at most {max(fitting, 0) * shape.page_size})"
            )
        wanted_len = fitting * shape.page_size
        pages_per_slot = fitting
    return min(fitting, pages_per_slot * max_num_seqs) + 1, wanted_len


def show(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
