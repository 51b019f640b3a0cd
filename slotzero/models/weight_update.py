"""Weight updates: a running model gets new values, at the addresses that its recordings know.

An update is checked as a whole before the first value changes. This module knows which tensors of a
checkpoint make up which weights, from the sets that loading has left in the weight store. It does
not know requests, caches, or how other ranks receive the tensors.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, final

from torch import Tensor

from slotzero.errors import ModelError, WeightUpdateError
from slotzero.kernels.contract import Kernels
from slotzero.models.checkpoint import Checkpoint, Part, part_of
from slotzero.models.config import ModelConfig
from slotzero.models.param import Stored
from slotzero.models.reading import (
    INPUT_SCALE,
    Filling,
    check_stored,
    fillings,
    read_together,
    stored_names,
)
from slotzero.models.stacks import StackedParam
from slotzero.models.weight_store import WeightSet, WeightStore
from slotzero.models.weights import expected_names, refuse_extra
from slotzero.quantization.method import CACHE_SCALES, TensorSource

ScaleReader = Callable[[TensorSource], Mapping[str, Tensor]]


@final
class WeightUpdater:
    """The weights of one rank that an update replaces."""

    def __init__(
        self,
        config: ModelConfig,
        store: WeightStore,
        scales: Mapping[str, Tensor],
        read_scales: ScaleReader,
    ) -> None:
        """`config` is the whole model's. `scales` are those of its KV cache, by KV group;
        `read_scales` reads them from a checkpoint."""
        self._config, self._kernels = config, store.kernels
        self._sets = [_given_plain(weights) for weights in store.sets]
        self._scales, self._read_scales = scales, read_scales

    def check(self, given: Checkpoint, is_partial: bool = False) -> list[str]:
        """Raise WeightUpdateError unless the model can take these weights; return the names of the
        tensors that it reads, in an order in which each weight is complete early.

        With `is_partial`, weights of which no tensor is given keep their values.
        """
        self._refuse_formats(is_partial)
        there = set(given.names())
        names: dict[str, None] = {}
        try:
            refuse_extra(self._config, given, self._sets[0].quantization)
            for weights in self._sets:
                for stacked, stored in _wanted(weights, there, is_partial):
                    for one in stored:
                        check_stored(stacked, one, given, weights.quantization)
                        read = stored_names(stacked, one, weights.quantization)
                        names |= dict.fromkeys(name for name in read if name in there)
            scales = [name for name in there if name.endswith(CACHE_SCALES)]
            if scales:
                self._read_scales(given)
        except ModelError as error:
            raise WeightUpdateError(f"{error} (the old weights are kept)") from error
        return [*names, *sorted(scales)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that an update of all weights fills."""
        for weights in self._sets:
            if not weights.is_optional:
                yield from weights.tensors.values()

    def begin(self, names: Collection[str]) -> "Refill":
        """Begin an update that was checked. From here on, an error leaves a mixture."""
        wanted, parts = set(names), list[_Unfilled]()
        for weights in self._sets:
            found = []
            for filling in fillings(weights.params, weights.tensors, weights.quantization):
                needed = {name for name, _ in filling.names()} & wanted
                if needed:
                    found.append(_Unfilled(filling, needed))
            for name, tensor in weights.tensors.items():
                if found and name.endswith(INPUT_SCALE):
                    tensor.zero_()  # then the largest of several is stored
            parts += found
        return Refill(parts, wanted, self._kernels, self._put_scales)

    def _refuse_formats(self, is_partial: bool) -> None:
        weights = self._sets[0]
        stored = weights.quantization.stored
        if stored is not None and stored.name == "gguf":
            raise WeightUpdateError(
                "the weights are packed as in their .gguf file: start the engine with quantization "
                "none, int8 or int4 (or from another checkpoint) to update them"
            )
        if is_partial and any(stacked.has_input_scale for stacked in weights.whole):
            raise WeightUpdateError(
                "experts share the scale of their inputs in this checkpoint: give all weights"
            )

    def _put_scales(self, source: TensorSource) -> None:
        for group, scales in self._read_scales(source).items():
            if group in self._scales:
                self._scales[group].copy_(scales)


class _Unfilled(NamedTuple):
    """Weights that wait for tensors."""

    filling: Filling
    missing: set[str]


@final
class Refill:
    """An update in progress: tensors arrive one by one, and go when no weight needs them."""

    def __init__(
        self,
        parts: Sequence[_Unfilled],
        names: Collection[str],
        kernels: Kernels,
        put_scales: Callable[[TensorSource], None],
    ) -> None:
        self._kernels, self._put_scales = kernels, put_scales
        self._parts: dict[str, list[_Unfilled]] = {}
        for part in parts:
            for name in part.missing:
                self._parts.setdefault(name, []).append(part)
        self._held = _Held()
        self._scales = [name for name in names if name.endswith(CACHE_SCALES)]

    def give(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, and fill the weights that are complete with it."""
        if name not in self._parts and name not in self._scales:
            return  # of an expert on another rank
        self._held.tensors[name] = tensor
        for part in tuple(self._parts.get(name, ())):
            part.missing.discard(name)
            if not part.missing:
                part.filling.fill(self._held, self._kernels)
                self._let_go(part)

    def finish(self) -> None:
        if self._scales:
            self._put_scales(self._held)

    def _let_go(self, part: _Unfilled) -> None:
        for name, _ in part.filling.names():
            users = self._parts.get(name, [])
            if part in users:
                users.remove(part)
            if not users:
                self._held.tensors.pop(name, None)


@final
class _Held:
    """Tensors that weights wait for."""

    name = "weight update"

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def read_part(self, name: str, *wanted: slice) -> Part:
        return part_of(self.tensors[name], *wanted)


def _given_plain(weights: WeightSet) -> WeightSet:
    """Return the set as an update fills it: what a .gguf file had packed comes as plain numbers,
    unless it is packed in memory too."""
    how = weights.quantization
    if how.stored is None or how.stored.name != "gguf" or not (how.unpacks or how.online):
        return weights
    return replace(weights, quantization=replace(how, stored=None))


def _wanted(
    weights: WeightSet, there: Collection[str], is_partial: bool
) -> Iterator[tuple[StackedParam, list[Stored]]]:
    """Yield the weights that an update replaces, with what they are made of."""
    expected, _ = expected_names(weights.whole, weights.quantization)
    if weights.is_optional and expected.isdisjoint(there):
        return
    for stacked in weights.whole:
        for _, _, stored in read_together(stacked):
            needed = [
                name
                for one in stored
                for name, must in stored_names(stacked, one, weights.quantization).items()
                if must
            ]
            missing = [name for name in needed if name not in there]
            if not missing:
                yield stacked, stored
            elif not is_partial:
                raise WeightUpdateError(
                    f"tensor {missing[0]} is missing: give all tensors of the model, or allow a "
                    "partial update (the old weights are kept)"
                )
            elif len(missing) < len(needed):
                raise WeightUpdateError(
                    f"tensor {missing[0]} is missing: it is stored with others that are given, "
                    "give all of them (the old weights are kept)"
                )
