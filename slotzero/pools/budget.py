"""Number of KV pages that fit into memory, and their split between KV groups.

Whole groups keep the pages of all positions. Windowed groups keep only pages that the window
covers, and more while a chunk of a prompt is computed. The split lets both kinds run out at the
same number of requests of the expected length; the remainder goes to the whole groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slotzero.errors import CapacityError
from slotzero.system.memory import memory

CPU_SHARE = 0.25  # fraction of the available memory; the rest is left to other programs
CPU_BYTES = 1 << 30  # on a CPU, enough unless weights or contexts are larger
CUDA_RESERVE = 2 << 30  # graphs, workspaces and activations


@dataclass(frozen=True)
class GroupShape:
    """Shape of the pages of one KV group."""

    name: str
    num_layers: int
    page_size: int
    num_kv_heads: int
    width: int  # of a key and its value
    dtype: torch.dtype
    window: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of one page."""
        values = self.num_layers * self.page_size * self.num_kv_heads * self.width
        return values * self.dtype.itemsize

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def held(self, num_tokens: int) -> int:
        """Return the pages that a decoding request of this length holds."""
        if self.window is None:
            return self.pages_for(num_tokens)
        return min(self.pages_for(num_tokens), self.pages_for(self.window - 1) + 1)

    def needed(self, num_tokens: int, chunk: int) -> int:
        """Return the maximum number of pages that a request of this length holds at any time."""
        if self.window is None:
            return self.pages_for(num_tokens)
        return self.pages_for(min(num_tokens, self.window - 1 + chunk)) + 1


@dataclass(frozen=True)
class Demand:
    """Requests that the KV cache of an engine has to hold."""

    max_num_seqs: int
    chunk: int  # maximum number of tokens in a step
    expected_len: int
    max_model_len: int | None = None  # None: as long as fits, up to `limit`
    limit: int = 0


def free_bytes(device: torch.device, utilization: float) -> int:
    """Return the bytes for KV: on a GPU, `utilization` of its memory minus the memory in use."""
    return kv_bytes_beside(0, device, utilization)


def kv_bytes_beside(num_bytes: int, device: torch.device, utilization: float) -> int:
    """Return the bytes for KV once that many more bytes are in use."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - int(total * (1 - utilization)) - CUDA_RESERVE - num_bytes)
    return max(0, int((memory().available - num_bytes) * CPU_SHARE))


def refuse_beyond(num_bytes: int, device: torch.device, what: str, remedy: str) -> None:
    """Raise if an allocation does not fit into the CPU's memory.

    An allocation on a GPU fails by itself, but Linux overcommits memory of the CPU.
    """
    if device.type == "cpu" and num_bytes > (available := memory().available):
        raise CapacityError(
            f"{what} need {show(num_bytes)} of memory, but only {show(available)} are free: "
            f"{remedy}"
        )


def split(
    shapes: Sequence[GroupShape], budget: int, demand: Demand, sliding_budget: int | None = None
) -> tuple[dict[str, int], int]:
    """Return the number of pages of each group, page 0 included, and the context length.

    One request of the full context length always fits. If no context length is requested, it
    shrinks until this is true; a requested one that does not fit raises CapacityError.
    """
    length = _fitting_len(shapes, budget, demand)
    pages = {s.name: s.needed(length, demand.chunk) for s in shapes}
    most = {s.name: _most(s, length, demand) for s in shapes}
    spent = sum(s.num_bytes for s in shapes)  # page 0 of each
    expected = min(demand.expected_len, length)
    for num in range(1, demand.max_num_seqs + 1):
        wanted = {
            s.name: max(
                pages[s.name], min(most[s.name], num * s.held(expected) + _extra(s, demand))
            )
            for s in shapes
        }
        if spent + sum(wanted[s.name] * s.num_bytes for s in shapes) > budget:
            break
        pages = wanted
    if sliding_budget is not None:
        pages |= {s.name: _requested(s, sliding_budget, length, demand) for s in shapes if s.window}
    for s in sorted(shapes, key=lambda s: s.window is not None):  # whole groups first
        same = [o for o in shapes if s.window is None and o.window is None] or [s]
        others = sum(pages[o.name] * o.num_bytes for o in shapes if o not in same)
        fitting = (budget - spent - others) // sum(o.num_bytes for o in same)
        if s.window is None or sliding_budget is None:
            pages[s.name] = min(max(pages[s.name], fitting), most[s.name])
        if fitting < pages[s.name]:
            raise CapacityError(
                f"the KV budget of {show(budget)} is too small for {s.name} layers, because other "
                f"layers use {show(others)}: raise --kv-cache-memory or lower --sliding-kv-memory"
            )
    return {name: num + 1 for name, num in pages.items()}, length


def moderate(
    shapes: Sequence[GroupShape], available: int, demand: Demand, weight_bytes: int
) -> int:
    """Return the budget on a CPU by default: 1 GiB, or twice the weights or one request of the full
    context length if those are larger; at most what is available."""
    return min(available, max(CPU_BYTES, 2 * weight_bytes, _needed(shapes, demand)))


def _needed(shapes: Sequence[GroupShape], demand: Demand) -> int:
    """Return the bytes for one request of the full context length."""
    length = demand.max_model_len or demand.limit
    return sum((s.needed(length, demand.chunk) + 1) * s.num_bytes for s in shapes)


def _fitting_len(shapes: Sequence[GroupShape], budget: int, demand: Demand) -> int:
    def need(num_tokens: int) -> int:
        return sum((s.needed(num_tokens, demand.chunk) + 1) * s.num_bytes for s in shapes)

    wanted = demand.max_model_len or demand.limit
    if need(wanted) <= budget:
        return wanted
    page_size = shapes[0].page_size
    low, high = 0, -(-wanted // page_size)  # pages that fit, pages that do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle * page_size) <= budget else (low, middle)
    if demand.max_model_len is not None or low < 1:
        windows = [
            f"a window of {s.window} and a step of {demand.chunk}" for s in shapes if s.window
        ]
        holds = f" (including {windows[0]} tokens)" if windows else ""
        lower = [f"--max-model-len (at most {low * page_size})"] if low else []
        lower += ["--max-num-batched-tokens"] if windows else []
        remedy = f" or lower {' or '.join(lower)}" if lower else ""
        raise CapacityError(
            f"a KV budget of {show(budget)} is too small for one request of {wanted} tokens, "
            f"which needs {show(need(wanted))}{holds}: raise --kv-cache-memory{remedy}"
        )
    return low * page_size


def _most(shape: GroupShape, length: int, demand: Demand) -> int:
    """Return the maximum number of pages that can be held at once."""
    most = demand.max_num_seqs * shape.held(length) + _extra(shape, demand)
    return max(shape.needed(length, demand.chunk), most)


def _extra(shape: GroupShape, demand: Demand) -> int:
    """Return the pages for the step's own tokens, in addition to those of decoding requests."""
    return 0 if shape.window is None else shape.pages_for(demand.chunk) + 1


def _requested(shape: GroupShape, budget: int, length: int, demand: Demand) -> int:
    """Return the pages that fit into the budget of --sliding-kv-memory."""
    num, needed = budget // shape.num_bytes - 1, shape.needed(length, demand.chunk)
    if num < needed:
        raise CapacityError(
            f"--sliding-kv-memory={show(budget)} is too small for a window of {shape.window} and a "
            f"step of {demand.chunk} tokens: use at least {show((needed + 1) * shape.num_bytes)}"
        )
    return num


def show(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
