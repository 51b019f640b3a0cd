"""Stacked parameters: layers with equal blocks keep their weights in one tensor, [layers, ...].

Stacking keeps the registry short, so that checking all fingerprints on every replay stays cheap.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.errors import ConfigError, UnsupportedModelError
from slotzero.kernels.weights import (
    DenseWeight,
    JoinedWeight,
    LinearWeight,
    QuantizedWeight,
    WeightFormat,
)
from slotzero.models.blocks.block import FLAG, Block
from slotzero.models.config import ModelConfig
from slotzero.models.layer import DecoderLayer
from slotzero.models.param import (
    LinearParam,
    Param,
    Params,
    Source,
    Stored,
    linear,
    module_of,
    norm,
)
from slotzero.quantization.quantization import Quantization, fit

Formats = tuple[WeightFormat | None, ...]
"""The formats of a linear weight's sources; None: a source is not quantised."""


class StackedParam(NamedTuple):
    """One parameter of all layers of a stack, which becomes one tensor of the registry, or several
    if it is quantised."""

    name: str
    param: Param
    prefixes: tuple[str, ...] | None  # of the layers in the checkpoint; None: outside the layers
    format: WeightFormat | None = None

    @property
    def has_input_scale(self) -> bool:
        """Whether the checkpoint has a static scale for the weight's input."""
        return self.format is not None and self.format.activations == "float8_static"

    def stored(self) -> Iterator[Stored]:
        """Yield every tensor of a checkpoint that the parameter is read from."""
        for prefix in self.prefixes or ("",):
            yield from self.param.stored(prefix)


@dataclass(frozen=True)
class Stack:
    """The layers that have one equal block, or (`layers` is None) a block outside the layers."""

    name: str
    block: Block
    layers: tuple[int, ...] | None
    prefixes: tuple[str, ...] | None
    formats: tuple[Formats, ...] = ()
    """The formats of each linear weight of the block."""

    def params(self) -> list[StackedParam]:
        found: list[StackedParam] = []
        formats = iter(self.formats)
        for name, value in _flatten(self.name, self.block.params()):
            if isinstance(value, Param):
                found.append(StackedParam(name, value, self.prefixes))
                continue
            found += split_param(name, value.weight, next(formats, ()), self.prefixes)
            if value.bias is not None:
                found.append(StackedParam(f"{name}.bias", value.bias, self.prefixes))
        return found

    def shard(self, ranks: Ranks) -> "Stack":
        return replace(self, block=self.block.shard(ranks)) if ranks.is_distributed else self

    def weights(self, tensors: Mapping[str, Tensor], index: int | None, dtype: torch.dtype) -> Any:
        """Return the weights of the stack's `index`th layer; `index` is None outside the layers."""

        def get(name: str) -> Tensor:
            return tensors[name] if index is None else tensors[name][index]

        formats = iter(self.formats)

        def linear_weight(name: str, given: LinearParam) -> LinearWeight:
            return assemble_linear(name, given, next(formats, ()), get, dtype)

        return _assemble(
            self.block.weights_type, self.name, self.block.params(), get, linear_weight
        )


class LayerStacks(NamedTuple):
    """The stacks of several layers."""

    stacks: tuple[Stack, ...]
    by_layer: Mapping[int, Mapping[str, Stack]]
    """The stacks of each layer, by field of LayerWeights."""

    def shard(self, ranks: Ranks) -> "LayerStacks":
        """Return one rank's part of them."""
        parts = {id(stack): stack.shard(ranks) for stack in self.stacks}
        by_layer = {
            layer: {field: parts[id(stack)] for field, stack in fields.items()}
            for layer, fields in self.by_layer.items()
        }
        return LayerStacks(tuple(parts.values()), by_layer)


def layer_stacks(
    layers: Mapping[int, tuple[DecoderLayer, str]], quantization: Quantization
) -> LayerStacks:
    """Stack layers, given with their prefixes, that have the same block in the same formats."""
    shared: dict[tuple[str, Block, tuple[Formats, ...]], list[int]] = {}
    for index, (layer, prefix) in layers.items():
        for field, block in layer.blocks().items():
            formats = block_formats(block, prefix, quantization)
            shared.setdefault((field, block, formats), []).append(index)
    names: Counter[str] = Counter()
    stacks, by_layer = [], {index: dict[str, Stack]() for index in layers}
    for (field, block, formats), indices in shared.items():
        names[block.name] += 1
        suffix = "" if names[block.name] == 1 else f"_{names[block.name]}"
        prefixes = tuple(layers[index][1] for index in indices)
        stack = Stack(block.name + suffix, block, tuple(indices), prefixes, formats)
        stacks.append(stack)
        for index in indices:
            by_layer[index][field] = stack
    return LayerStacks(tuple(stacks), by_layer)


@lru_cache(maxsize=8)  # a start asks several times
def model_stacks(config: ModelConfig) -> LayerStacks:
    """Return the stacks of all layers of a model."""
    prefix = config.names.layer
    layers = {i: (layer, prefix.format(layer=i)) for i, layer in enumerate(config.layers)}
    return layer_stacks(layers, config.quantization)


def block_formats(block: Block, prefix: str, quantization: Quantization) -> tuple[Formats, ...]:
    """Return the formats of the linear weights of a block in the layer with this prefix."""
    params = (value for _, value in _flatten("", block.params()))
    linears = [value.weight for value in params if isinstance(value, LinearParam)]
    found = tuple(source_formats(weight, prefix, quantization) for weight in linears)
    return found if any(formats for formats in found) else ()


def source_formats(weight: Param, prefix: str, quantization: Quantization) -> Formats:
    """Return the formats of a linear weight's sources; empty if none is quantised."""
    assert weight.columns is not None
    found: list[WeightFormat | None] = []
    for source in weight.sources:
        num_routed = max((weight.experts or 1) - weight.num_shared, 1)
        names = [source.name.format(expert=expert) for expert in range(num_routed)]
        if source.shared is not None and weight.num_shared:
            names.append(source.shared.name)
        of_names = [
            quantization.format_of(module_of(prefix + name), weight.columns, weight.is_sensitive)
            for name in dict.fromkeys(names)
        ]
        for name, format in zip(names, of_names, strict=False):
            if format != of_names[0]:
                raise UnsupportedModelError(
                    f"{prefix}{names[0]} and {prefix}{name} are quantised in different formats, "
                    "and experts of one layer need the same"
                )
        found.append(of_names[0])
    return tuple(found) if any(format is not None for format in found) else ()


def split_param(
    name: str, weight: Param, formats: Formats, prefixes: tuple[str, ...] | None
) -> list[StackedParam]:
    """Split a linear weight into those of its sources that have the same format."""
    return [
        StackedParam(part_name, part, prefixes, format)
        for part_name, part, format in _parts(name, weight, formats)
    ]


def _parts(
    name: str, weight: Param, formats: Formats
) -> Iterator[tuple[str, Param, WeightFormat | None]]:
    runs = [list(run) for _, run in groupby(formats)]
    if len(runs) < 2:
        yield name, weight, _fit(runs[0][0] if runs else None, weight)
        return
    first = 0
    for i, run in enumerate(runs):
        sources = weight.sources[first : first + len(run)]
        part = replace(weight, sources=sources)
        yield f"{name}.{i}", part, _fit(run[0], part)
        first += len(run)


def _fit(format: WeightFormat | None, weight: Param) -> WeightFormat | None:
    assert weight.columns is not None
    return None if format is None else fit(format, weight.columns)


def assemble_linear(
    name: str,
    given: LinearParam,
    formats: Formats,
    get: Callable[[str], Tensor],
    dtype: torch.dtype,
) -> LinearWeight:
    """Put a linear layer's weight together from the tensors of its parts."""
    bias = None if given.bias is None else get(f"{name}.bias")
    parts: list[DenseWeight | QuantizedWeight] = []
    first = 0
    for part_name, part, format in _parts(name, given.weight, formats):
        num = part.out_features
        its_bias = None if bias is None else bias[..., first : first + num]
        first += num
        if format is None:
            parts.append(DenseWeight(get(part_name), its_bias, num))
            continue
        tensors = {field: get(f"{part_name}.{field}") for field in format.fields}
        assert part.columns is not None
        parts.append(
            QuantizedWeight(
                **tensors,
                bias=its_bias,
                out_features=num,
                in_features=part.columns,
                dtype=dtype,
                format=format,
            )
        )
    return parts[0] if len(parts) == 1 else JoinedWeight(tuple(parts), first)


def model_params(config: ModelConfig, ranks: Ranks) -> list[StackedParam]:
    """Return this rank's part of the parameters of a model."""
    params = [*_outer_params(config, ranks)]
    if config.layer_embedding is not None:
        params += outer_stack(config.layer_embedding, config.quantization).params()
    for stack in model_stacks(config).stacks:
        params += sharded_params(stack, ranks)
    return params


def outer_stack(block: Block, quantization: Quantization) -> Stack:
    """Return the stack of a block outside the layers."""
    return Stack(block.name, block, None, None, block_formats(block, "", quantization))


def sharded_params(stack: Stack, ranks: Ranks) -> list[StackedParam]:
    """Return this rank's part of a stack's parameters, read from the unsharded checkpoint."""
    if not ranks.is_distributed:
        return stack.params()
    pairs = zip(stack.params(), stack.shard(ranks).params(), strict=True)
    return [part._replace(param=_cut(whole.param, part.param, ranks)) for whole, part in pairs]


def vocabulary_part(size: int, ranks: Ranks) -> int:
    """Return the number of vocabulary rows on each rank.

    The last rank may have fewer tokens; it repeats its last row to fill its part.
    """
    return -(-size // ranks.size)


def vocabulary_weights(
    config: ModelConfig, ranks: Ranks, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[LinearWeight, LinearWeight]:
    """Return the embedding and the vocabulary head, which may be the same."""
    made = {
        field: assemble_linear(
            field,
            LinearParam(weight, None),
            source_formats(weight, "", config.quantization),
            lambda name: tensors[name],
            dtype,
        )
        for field, weight in _vocabulary_params(config, ranks).items()
    }
    return made["embedding"], made.get("head", made["embedding"])


def _vocabulary_params(config: ModelConfig, ranks: Ranks) -> dict[str, Param]:
    names = {"embedding": config.names.embedding}
    if not config.tied_embeddings:
        names["head"] = config.names.head
    made = {}
    for field, name in names.items():
        source = Source(name, config.vocab_size)
        if ranks.attention.is_distributed:
            source = _part_of_vocabulary(source, ranks)
        made[field] = linear(config.hidden_size, source, is_sensitive=True).weight
    return made


def _outer_params(config: ModelConfig, ranks: Ranks) -> Iterator[StackedParam]:
    for field, weight in _vocabulary_params(config, ranks).items():
        formats = source_formats(weight, "", config.quantization)
        yield from split_param(field, weight, formats, None)
    last = norm(config.names.final_norm, config.hidden_size, config.norm_offset)
    yield StackedParam("final_norm", last, None)


def _flatten(path: str, params: Params) -> Iterator[tuple[str, Param | LinearParam]]:
    for field, value in params.items():
        name = f"{path}.{field}"
        match value:
            case None:
                continue
            case Param() | LinearParam():
                yield name, value
            case _:
                yield from _flatten(name, value)


def _assemble(
    kind: type[Any],
    path: str,
    params: Params,
    get: Callable[[str], Tensor],
    linear_weight: Callable[[str, LinearParam], LinearWeight],
) -> Any:
    hints, values = get_type_hints(kind), dict[str, Any]()
    for field, value in params.items():
        name = f"{path}.{field}"
        match value:
            case None:
                values[field] = None
            case Param():
                values[field] = get(name)
            case LinearParam():
                values[field] = linear_weight(name, value)
            case _:
                values[field] = _assemble(hints[field], name, value, get, linear_weight)
    return kind(**values)


def _cut(whole: Param, part: Param, ranks: Ranks) -> Param:
    """Return a rank's parameter with its place in the whole parameter filled in."""
    sources = []
    for w, p in zip(whole.sources, part.sources, strict=True):
        if w.rows != p.rows or w.whole is not None:  # several ranks may share a KV head
            first = ranks.rank * w.rows // ranks.size // p.rows * p.rows
            p = replace(p, whole=w.whole or w.rows, first=w.first + first)
        if ranks.rank > 0 and _is_summed(part, ranks):
            p = replace(p, scale=0.0)
        sources.append(p)
    part = replace(part, sources=tuple(sources))
    if part.experts is not None and ranks.expert_parallel:
        first = ranks.rank * (part.experts - part.num_shared)
        part = replace(part, whole_experts=whole.experts, first_expert=first)
    if whole.columns != part.columns and part.columns is not None:
        first = ranks.rank * part.columns
        part = replace(part, whole_columns=whole.columns, first_column=first)
    return part


def _is_summed(param: Param, ranks: Ranks) -> bool:
    """Return whether this is a bias of a sum over ranks, which only one rank must add."""
    if param.summed_over is None or (param.experts is not None and ranks.expert_parallel):
        return False
    return param.summed_over == "mlp" or not ranks.dp_attention


def _part_of_vocabulary(source: Source, ranks: Ranks) -> Source:
    part = vocabulary_part(source.rows, ranks)
    first = ranks.rank * part
    num_rows = min(part, source.rows - first)
    if num_rows < 1:
        raise ConfigError(
            f"{FLAG}={ranks.size}: a vocabulary of {source.rows} tokens is too small to split over "
            "that many ranks; choose a smaller size"
        )
    order = None if num_rows == part else [min(i, num_rows - 1) for i in range(part)]
    return replace(source, rows=num_rows, whole=source.rows, first=first, order=order)
