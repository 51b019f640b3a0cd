"""Autotuning of matrix products: the fastest candidate per shape, timed once and stored on disk.

A choice is looked up by key. Earlier results of this machine are in the cache folder; results for
known cards ship with the package (tuned.json); anything else is timed at first use, over copies of
the weight that together exceed the L2 cache, as a chain in a CUDA graph, as it will run. Few
candidates are timed, since each has to be compiled first: those that were fastest for similar
shapes.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from slotzero.system.cache_dir import cache_dir

HERE = Path(__file__).parent
SHIPPED = HERE / "tuned.json"
SOURCES = (  # files whose change invalidates earlier timings
    *(
        HERE / f"{name}.py"
        for name in (
            "linear",
            "linear_tma",
            "library",
            "epilogue",
            "operands",
            "products",
            "tiles",
            "elementwise",
        )
    ),
    HERE.parent / "launch.py",
)
COLD_BYTES = 256 << 20  # several times the L2 cache of a card
LEAST_CALLS, MOST_COPIES = 8, 64
NEIGHBOURS = 3  # similar shapes whose fastest candidates are timed
REPEATS = 5

Run = Callable[[str, Tensor], object]  # runs a candidate, with a copy of the weight


class Choices:
    """Names of candidates by key, as in tuned.json."""

    def __init__(self) -> None:
        self._file = cache_dir() / f"tuned-{_version()}.json"
        self._shipped, self._tried = _read(SHIPPED), _read(self._file)
        self._chosen: dict[str, str] = {}

    def known(self, key: str, candidates: Sequence[str]) -> str | None:
        for names in (self._chosen, self._tried, self._shipped):
            if key in names:
                return names[key] if names[key] in candidates else None
        return None

    def likely(self, key: str, candidates: Sequence[str]) -> list[str]:
        """Return the first candidate and those that the shipped choices have for similar shapes.

        Choices for this card are preferred. Without any, return all candidates. The result is
        constant within a process.
        """
        card, kind, shape, rows = key.rsplit("/", 3)
        near: list[tuple[bool, float, str]] = []
        for other, name in self._shipped.items():
            its_card, *its_kind, its_shape, its_rows = other.rsplit("/", 3)
            if (its_kind, its_rows) == ([kind], rows) and name in candidates:
                near.append((its_card != card, _distance(shape, its_shape), name))
        names = {name for _, _, name in sorted(near)[:NEIGHBOURS]}
        return [c for i, c in enumerate(candidates) if i == 0 or c in names or not names]

    def choose(self, names: Mapping[str, str]) -> None:
        """Use these names from now on in this process; they are not stored."""
        self._chosen.update(names)

    def find(self, key: str, candidates: Sequence[str], weight: Tensor, run: Run) -> str:
        """Time all candidates and store the fastest. Must not be called during graph capture."""
        copies = -(-COLD_BYTES // (weight.numel() * weight.itemsize))
        weights = [weight, *(weight.clone() for _ in range(min(copies, MOST_COPIES) - 1))]
        calls = [weights[i % len(weights)] for i in range(max(len(weights), LEAST_CALLS))]
        seconds = {name: _seconds(partial(run, name), calls) for name in candidates}
        best = min(seconds, key=seconds.__getitem__)
        self._remember(key, best)
        return best

    def _remember(self, key: str, name: str) -> None:
        self._tried[key] = name
        with contextlib.suppress(OSError):  # an unwritable folder: timed again next time
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._file.parent, suffix=".json", delete=False
            ) as draft:
                json.dump(self._tried, draft, indent=1, sort_keys=True)
            os.replace(draft.name, self._file)


def _distance(one: str, other: str) -> float:
    """Return by how many doublings two shapes, such as "4096x1024", differ."""
    sizes = zip(one.split("x"), other.split("x"), strict=True)
    return sum(abs(math.log2(int(a) / int(b))) for a, b in sizes)


def _version() -> str:
    """Return a hash of the kernels and their compiler; stored choices are valid for one hash."""
    digest = hashlib.sha256(triton.__version__.encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _read(file: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(file.read_text())
        if isinstance(known, dict):
            return known
    return {}


def _seconds(run: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    try:
        run(weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in weights:
                run(weight)
    except torch.OutOfMemoryError:
        raise  # not a property of the tile
    except Exception:  # the tile does not fit this card
        return float("inf")
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
