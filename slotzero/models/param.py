"""One stacked weight, and which tensors of a checkpoint, or stretches of them, it is made of.

It knows names and shapes; what a model has of them, params.py says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint, or one for each layer and expert, and how its rows are used."""

    name: str  # with {expert} where every expert has its own
    rows: int  # output features; a vector has only these
    order: Sequence[int] | None = None  # the rows that we want, if not all as they come
    scale: float = 1.0
    shared: "Shared | None" = None
    column_scales: Sequence[float] | None = None
    whole: int | None = None  # rows in the checkpoint, where these are some of them
    first: int = 0  # of these

    @property
    def num_taken(self) -> int:
        return self.rows if self.order is None else len(self.order)


class Shared(NamedTuple):
    """One tensor that holds what all shared experts have for a source, rows or columns abreast."""

    name: str
    in_columns: bool = False


@dataclass(frozen=True)
class Param:
    """One stacked weight: the checkpoint's tensors that it joins, row upon row."""

    name: str  # of the stacked tensor
    field: str  # of LayerWeights or DecoderWeights
    sources: tuple[Source, ...]
    columns: int | None = None  # input features; None for a vector
    whole_columns: int | None = None  # in the checkpoint, where these are some of them
    first_column: int = 0
    layers: tuple[int, ...] | None = None  # None: not a weight of a layer
    experts: int | None = None
    num_shared: int = 0  # of the experts, the last
    whole_experts: int | None = None  # in the checkpoint, where these are some of them
    first_expert: int = 0
    is_packed: bool = True
    is_joint: bool = False
    """Each source holds all experts."""
    is_turned: bool = True  # of a matrix of such, input features come before output features
    offset: float = 0.0  # to be added to what is stored
    is_wide: bool = False  # float32, whatever the others are
    is_conv: bool = False  # stored with an axis of one between its rows and columns
    renames: tuple[tuple[str, str], ...] = ()
    """Of names: what a checkpoint writes for what most others do, in order."""

    @property
    def out_features(self) -> int:
        return sum(source.num_taken for source in self.sources)

    def stored(self, layer: int) -> Iterator["Stored"]:
        """What a checkpoint holds of it; `layer` counts for weights of a layer only."""
        prefix = "" if self.layers is None else f"model.layers.{layer}."
        for expert in range(self.experts or 1) if not self.is_joint else (None,):
            for source in self.sources:
                spans = self._spans(source)
                first = (self.experts or 0) - self.num_shared  # of those that are shared
                name = source.name.format(expert=self.first_expert + (expert or 0))
                if source.shared is not None and expert is not None and expert >= first:
                    name, axis = source.shared.name, int(source.shared.in_columns)
                    spans[axis] = spans[axis].within(expert - first, self.num_shared)
                if self.is_joint:
                    assert self.experts is not None
                    whole = self.whole_experts or self.experts
                    spans = [
                        Span(whole, self.first_expert, self.experts),
                        *(reversed(spans) if self.is_turned else spans),
                    ]
                yield Stored(self._renamed(prefix + name), tuple(spans), source)

    def _renamed(self, name: str) -> str:
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        return name

    def _spans(self, source: Source) -> "list[Span]":
        rows = Span(source.whole or source.rows, source.first, source.rows)
        if self.columns is None:
            return [rows]
        columns = Span(self.whole_columns or self.columns, self.first_column, self.columns)
        return [rows, Span(1, 0, 1), columns] if self.is_conv else [rows, columns]


class Span(NamedTuple):
    """What is read of one axis of a stored tensor."""

    whole: int
    first: int
    num: int

    def within(self, part: int, num_parts: int) -> "Span":
        """The same of one of equal parts that lie abreast."""
        return Span(self.whole * num_parts, part * self.whole + self.first, self.num)

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + self.num)


class Stored(NamedTuple):
    name: str
    spans: tuple[Span, ...]
    source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(span.whole for span in self.spans)


@dataclass
class LayerParams:
    """Makes params of the layers that it is for."""

    layers: tuple[int, ...]
    suffix: str = ""
    made: list[Param] = field(default_factory=list)

    def matrix(self, name: str, columns: int, *sources: Source, **more: Any) -> None:
        sources = tuple(named(source, ".weight") for source in sources)
        self.add(name, sources, columns=columns, **more)

    def bias(self, name: str, *sources: Source) -> None:
        self.add(name, tuple(named(source, ".bias") for source in sources))

    def norm(self, name: str, source: str, size: int, offset: float) -> None:
        self.add(name, (Source(f"{source}.weight", size),), offset=offset)

    def add(self, name: str, sources: tuple[Source, ...], **more: Any) -> None:
        self.made.append(Param(name + self.suffix, name, sources, layers=self.layers, **more))


def named(source: Source, ending: str) -> Source:
    shared = source.shared and source.shared._replace(name=source.shared.name + ending)
    return replace(source, name=source.name + ending, shared=shared)


def abreast(name: str, sizes: Sequence[int]) -> list[Source]:
    """Parts of one tensor, row upon row."""
    firsts = accumulate(sizes, initial=0)
    return [Source(name, n, whole=sum(sizes), first=i) for i, n in zip(firsts, sizes, strict=False)]
