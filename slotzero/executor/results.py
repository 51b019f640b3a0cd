"""Results of a launched step, as the engine reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slotzero.graph.transfer import PendingTensors
from slotzero.models.pooling import Vector
from slotzero.runners.passes import SAMPLED
from slotzero.runners.pooler import POOLED
from slotzero.runners.prompt_scores import SCORE_TOP_IDS, SCORES
from slotzero.speculative.passes import NUM_CONFIRMED, PATH, VERIFIED, VERIFY_LEN


@dataclass(frozen=True)
class RowLogprobs:
    chosen: float
    top_ids: list[int]
    top_values: list[float]


class Results:
    """Sampled tokens of one step; reading them waits for the device."""

    def __init__(self, download: PendingTensors, names: Sequence[str], width: int) -> None:
        """Wrap a download; `names` are its tensors in order, the last of which may be missing."""
        self._download, self._names, self._width = download, names, width

    def wait(self) -> None:
        self._download.wait()

    def tokens(self) -> list[list[int]]:
        """Return the new tokens of each row."""
        if self._width == 1:
            return [[token] for token in self._part(SAMPLED)]
        sampled, counts = self._part(VERIFIED), self._part(NUM_CONFIRMED)
        return [[sampled[i] for i in self._chosen(row)[:num]] for row, num in enumerate(counts)]

    def drafts(self) -> list[tuple[int, int]]:
        """Return for each row how many drafts were verified, and how many were accepted."""
        pairs = zip(self._part(VERIFY_LEN), self._part(NUM_CONFIRMED), strict=True)
        return [(max(n - 1, 0), max(right - 1, 0)) for n, right in pairs]

    def logprobs(self, row: int) -> list[RowLogprobs]:
        """Return the log probabilities of a row: first of its new tokens, then of rejected ones."""
        *_, chosen, ids, values = self._download.wait()
        return [
            RowLogprobs(chosen[i].item(), ids[i].tolist(), values[i].tolist())
            for i in self._chosen(row)
        ]

    def scores(self, first: int, num: int, num_top: int) -> list[RowLogprobs]:
        """Return the log probabilities of the tokens after `num` tokens of the step."""
        part, downloaded = slice(first, first + num), self._download.wait()
        values = downloaded[self._names.index(SCORES)][part, : 1 + num_top].tolist()
        ids = downloaded[self._names.index(SCORE_TOP_IDS)][part, :num_top].tolist()
        return [
            RowLogprobs(chosen, top_ids, top_values)
            for (chosen, *top_values), top_ids in zip(values, ids, strict=True)
        ]

    def vector(self, row: int) -> Vector:
        """Return the vector of a row's prompt."""
        vector: Vector = self._download.wait()[self._names.index(POOLED)][row].numpy().copy()
        return vector

    def _chosen(self, row: int) -> list[int]:
        """Return the indices of the row's samples: accepted ones first, then rejected ones."""
        first = row * self._width
        nodes = range(self._width) if self._paths is None else self._paths[row]
        return [first + node for node in nodes]

    @cached_property
    def _paths(self) -> list[list[int]] | None:
        """Nodes of each row's draft tree, accepted path first; None if drafts are not a tree."""
        return self._part(PATH) if PATH in self._names else None

    def _part(self, name: str) -> list[Any]:
        return self._download.wait()[self._names.index(name)].tolist()
