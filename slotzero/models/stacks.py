"""Stacked parameters: layers with equal blocks keep their weights in one tensor, [layers, ...].

Stacking keeps the registry short, so that checking all fingerprints on every replay stays cheap.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.errors import ConfigError
from slotzero.kernels.types import LinearWeight
from slotzero.models.blocks.block import FLAG, Block
from slotzero.models.config import ModelConfig
from slotzero.models.layer import DecoderLayer
from slotzero.models.param import LinearParam, Param, Params, Source, Stored, linear, norm


class StackedParam(NamedTuple):
    """One parameter of all layers of a stack, which becomes one tensor of the registry."""

    name: str
    param: Param
    prefixes: tuple[str, ...] | None  # of the layers in the checkpoint; None: outside the layers

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

    def params(self) -> list[StackedParam]:
        flat = _flatten(self.name, self.block.params())
        return [StackedParam(name, param, self.prefixes) for name, param in flat]

    def shard(self, ranks: Ranks) -> "Stack":
        return replace(self, block=self.block.shard(ranks)) if ranks.is_distributed else self

    def weights(self, tensors: Mapping[str, Tensor], index: int | None) -> Any:
        """Return the weights of the stack's `index`th layer; `index` is None outside the layers."""

        def get(name: str) -> Tensor:
            return tensors[name] if index is None else tensors[name][index]

        return _assemble(self.block.weights_type, self.name, self.block.params(), get)


def layer_stacks(layers: Mapping[int, tuple[DecoderLayer, str]]) -> dict[tuple[str, Block], Stack]:
    """Group layers, given by index with their prefixes, by field of LayerWeights and block."""
    shared: dict[tuple[str, Block], list[int]] = {}
    for index, (layer, _) in layers.items():
        for field, block in layer.blocks().items():
            shared.setdefault((field, block), []).append(index)
    names: Counter[str] = Counter()
    stacks = {}
    for (field, block), indices in shared.items():
        names[block.name] += 1
        suffix = "" if names[block.name] == 1 else f"_{names[block.name]}"
        prefixes = tuple(layers[index][1] for index in indices)
        stacks[field, block] = Stack(block.name + suffix, block, tuple(indices), prefixes)
    return stacks


def model_stacks(config: ModelConfig) -> dict[tuple[str, Block], Stack]:
    """Return the stacks of all layers of a model."""
    prefix = config.names.layer
    return layer_stacks(
        {i: (layer, prefix.format(layer=i)) for i, layer in enumerate(config.layers)}
    )


def model_params(config: ModelConfig, ranks: Ranks) -> list[StackedParam]:
    """Return this rank's part of the parameters of a model."""
    params = [*_outer_params(config, ranks)]
    if config.layer_embedding is not None:
        params += Stack(config.layer_embedding.name, config.layer_embedding, None, None).params()
    for stack in model_stacks(config).values():
        params += sharded_params(stack, ranks)
    return params


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


def _outer_params(config: ModelConfig, ranks: Ranks) -> Iterator[StackedParam]:
    names, hidden = config.names, config.hidden_size
    for field, name in (("embedding", names.embedding), ("head", names.head)):
        if field == "embedding" or not config.tied_embeddings:
            source = Source(name, config.vocab_size)
            if ranks.attention.is_distributed:
                source = _part_of_vocabulary(source, ranks)
            yield StackedParam(field, linear(hidden, source).weight, None)
    yield StackedParam("final_norm", norm(names.final_norm, hidden, config.norm_offset), None)


def _flatten(path: str, params: Params) -> Iterator[tuple[str, Param]]:
    for field, value in params.items():
        name = f"{path}.{field}"
        match value:
            case None:
                continue
            case Param():
                yield name, value
            case LinearParam(weight, bias):
                yield name, weight
                if bias is not None:
                    yield f"{name}.bias", bias
            case _:
                yield from _flatten(name, value)


def _assemble(kind: type[Any], path: str, params: Params, get: Callable[[str], Tensor]) -> Any:
    hints, values = get_type_hints(kind), dict[str, Any]()
    for field, value in params.items():
        name = f"{path}.{field}"
        match value:
            case None:
                values[field] = None
            case Param():
                values[field] = get(name)
            case LinearParam(weight, bias):
                values[field] = LinearWeight(
                    get(name), None if bias is None else get(f"{name}.bias"), weight.out_features
                )
            case _:
                values[field] = _assemble(hints[field], name, value, get)
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
