"""Parameters: which tensors of a checkpoint, or parts of them, make up one weight.

A block lists its parameters by the fields of its weights. Parameters are names and shapes without
values: real checkpoints are validated against them, and random checkpoints are created from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple, Union

from slotzero.quantization.method import WeightPart


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint (one per layer, one per expert), and which of its rows are used.

    Rows are output features; a vector has rows only. If `whole` is given, the tensor has `whole`
    rows, and the source is rows [first, first + rows) of it.
    """

    name: str  # without the layer's prefix; contains {expert} if every expert has its own tensor
    rows: int
    order: Sequence[int] | None = None  # rows to take, in this order; None: all, as stored
    scale: float = 1.0
    shared: "SharedExperts | None" = None
    column_scales: Sequence[float] | None = None
    whole: int | None = None
    first: int = 0
    ones: tuple[int, int] = (0, 0)
    """Numbers of axes of size 1 that are stored before and after the others."""

    @property
    def num_taken(self) -> int:
        """Number of rows that the source contributes to the weight."""
        return self.rows if self.order is None else len(self.order)

    def scaled(self, scale: float) -> "Source":
        return replace(self, scale=self.scale * scale)

    def ending(self, suffix: str) -> "Source":
        """Return the source with a suffix (".weight", ".bias") added to its tensor names."""
        shared = self.shared and self.shared._replace(name=self.shared.name + suffix)
        return replace(self, name=self.name + suffix, shared=shared)


class SharedExperts(NamedTuple):
    """One tensor with the rows (or columns) of a source for all shared experts, side by side."""

    name: str
    in_columns: bool = False


@dataclass(frozen=True)
class Param:
    """One weight: tensors of a checkpoint, concatenated along their rows."""

    sources: tuple[Source, ...]
    columns: int | None = None  # input features; None for a vector
    whole_columns: int | None = None  # columns in the checkpoint, if a rank reads only some
    first_column: int = 0
    experts: int | None = None
    num_shared: int = 0  # the last `num_shared` of the experts are shared experts
    whole_experts: int | None = None  # experts in the checkpoint, if a rank reads only some
    first_expert: int = 0
    is_packed: bool = True  # matrices only: stored in the kernels' packed layout
    is_joint: bool = False
    """Each source is one tensor with all experts, instead of one tensor per expert."""
    is_transposed: bool = True  # joint matrices: input features come before output features
    offset: float = 0.0  # added to the stored values
    is_float32: bool = False  # kept in float32, regardless of the model's dtype
    is_conv: bool = False  # stored with an axis of size 1 between rows and columns
    starts_at_one: bool = False  # in random weights: filled with ones instead of drawn
    summed_over: Literal["attention", "mlp"] | None = None
    """For the bias of a row-parallel linear layer: the ranks whose results are summed. Only one of
    them adds the bias."""
    num_ones: int = 0
    """Instead of sources: the length of a vector of ones, which no checkpoint stores."""
    is_sensitive: bool = False
    """A router, an embedding or a vocabulary head: it keeps its type when weights are converted
    while they load."""

    @property
    def out_features(self) -> int:
        return self.num_ones or sum(source.num_taken for source in self.sources)

    @property
    def of_all_ranks(self) -> "Param":
        """The parameter with the experts of all ranks."""
        experts = self.whole_experts or self.experts
        return replace(self, experts=experts, whole_experts=None, first_expert=0)

    def stored(self, prefix: str) -> Iterator["Stored"]:
        """Yield the checkpoint's tensors for this parameter in one layer."""
        for expert in range(self.experts or 1) if not self.is_joint else (None,):
            for source in self.sources:
                spans = self._spans(source)
                num_routed = (self.experts or 0) - self.num_shared
                name = source.name.format(expert=self.first_expert + (expert or 0))
                if source.shared is not None and expert is not None and expert >= num_routed:
                    name, axis = source.shared.name, int(source.shared.in_columns)
                    spans[axis] = spans[axis].within(expert - num_routed, self.num_shared)
                if self.is_joint:
                    assert self.experts is not None
                    whole = self.whole_experts or self.experts
                    spans = [
                        Span(whole, self.first_expert, self.experts),
                        *(reversed(spans) if self.is_transposed else spans),
                    ]
                yield Stored(prefix + name, tuple(spans), source, self.is_joint, self.is_transposed)

    def _spans(self, source: Source) -> "list[Span]":
        rows = Span(source.whole or source.rows, source.first, source.rows)
        if self.columns is None:
            return [rows]
        columns = Span(self.whole_columns or self.columns, self.first_column, self.columns)
        return [rows, Span(1, 0, 1), columns] if self.is_conv else [rows, columns]


class LinearParam(NamedTuple):
    """The parameters of a LinearWeight."""

    weight: Param
    bias: Param | None


Params = Mapping[str, Union[Param, LinearParam, "Params", None]]
"""Parameters by field of a block's weights, nested like the weights; None: the field is None."""


class Span(NamedTuple):
    """The part of one axis of a stored tensor that is read."""

    whole: int
    first: int
    num: int

    def within(self, part: int, num_parts: int) -> "Span":
        """Return this span within the `part`th of `num_parts` equal parts of a larger axis."""
        return Span(self.whole * num_parts, part * self.whole + self.first, self.num)

    @property
    def slice(self) -> slice:
        return slice(self.first, self.first + self.num)


class Stored(NamedTuple):
    """A tensor of a checkpoint, and the part of it that is read."""

    name: str
    spans: tuple[Span, ...]
    source: Source
    is_joint: bool
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        before, after = self.source.ones
        return (1,) * before + tuple(span.whole for span in self.spans) + (1,) * after

    @property
    def module(self) -> str:
        return module_of(self.name)

    @property
    def is_matrix(self) -> bool:
        return len(self.spans) == 2 + self.is_joint

    @property
    def part(self) -> tuple[WeightPart, slice]:
        """Return the part of a weight that is read, and its columns."""
        experts = self.spans[0] if self.is_joint else None
        rows, columns = self.spans[-2:]
        if self.is_joint and self.is_transposed:
            rows, columns = columns, rows
        part = WeightPart(
            rows.slice,
            (rows.whole, columns.whole),
            None if experts is None else experts.slice,
            0 if experts is None else experts.whole,
        )
        return part, columns.slice


def module_of(tensor: str) -> str:
    """Return the name of the module whose weight has this name."""
    return tensor.removesuffix(".weight")


def linear(
    columns: int,
    *sources: Source,
    biases: Sequence[Source] = (),
    summed_over: Literal["attention", "mlp"] | None = None,
    is_sensitive: bool = False,
) -> LinearParam:
    """Return the parameters of a linear layer; without `biases`, it has no bias."""
    named = tuple(source.ending(".weight") for source in sources)
    weight = Param(named, columns, is_sensitive=is_sensitive)
    if not biases:
        return LinearParam(weight, None)
    bias = Param(tuple(source.ending(".bias") for source in biases), summed_over=summed_over)
    return LinearParam(weight, bias)


def norm(name: str, size: int, offset: float = 0.0) -> Param:
    return Param((Source(f"{name}.weight", size),), offset=offset, starts_at_one=True)


def vector(name: str, size: int, **more: object) -> Param:
    return Param((Source(name, size),), **more)  # type: ignore[arg-type]


def side_by_side(name: str, sizes: Sequence[int]) -> list[Source]:
    """Return sources for the consecutive blocks of rows, of these sizes, of one tensor."""
    firsts = accumulate(sizes, initial=0)
    return [Source(name, n, whole=sum(sizes), first=i) for i, n in zip(firsts, sizes, strict=False)]
