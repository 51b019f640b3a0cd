"""What one of several ranks has of a model: some heads, and a part of every MLP and vocabulary; or
all heads and the whole vocabulary, and a part of every MLP.

A rank's model is a smaller model of the same family, so its config says all; its weights are cut
out of the same checkpoint. What a layer adds to the residual is then a part of a sum over ranks.
"""

from dataclasses import replace

from slotzero.distributed.ranks import Ranks
from slotzero.errors import ConfigError
from slotzero.kernels.types import Experts, Heads
from slotzero.models.config import KvGroup, ModelConfig
from slotzero.models.param import Param, Source
from slotzero.models.recurrent import Recurrent

FLAG = "tensor_parallel_size"


def sharded(config: ModelConfig, ranks: Ranks) -> ModelConfig:
    """What every rank has: as many heads, as wide MLPs."""
    if not ranks.is_distributed:
        return config
    experts = None if config.experts is None else _part_of_experts(config.experts, ranks)
    groups, num = config.groups, ranks.attention.size
    return replace(
        config,
        groups=tuple(_part_of_group(g, num) for g in groups) if num > 1 else groups,
        intermediate_size=_part(config.intermediate_size, "intermediate_size", ranks.size),
        experts=experts,
        recurrent=None if config.recurrent is None else _part_of_mixer(config.recurrent, num),
        shared_expert_size=None
        if config.shared_expert_size is None
        else _part(config.shared_expert_size, "shared_expert_intermediate_size", ranks.size),
    )


def cut(whole: list[Param], mine: list[Param], ranks: Ranks) -> list[Param]:
    """Params of the rank's own config, as they are cut out of those of the whole model."""
    if not ranks.is_distributed:
        return mine
    return [_cut(w, m, ranks) for w, m in zip(whole, mine, strict=True)]


def vocabulary_part(size: int, ranks: Ranks) -> int:
    """Tokens of each rank; the last may have fewer, and then has some twice."""
    return -(-size // ranks.size)


def _cut(whole: Param, mine: Param, ranks: Ranks) -> Param:
    if mine.field in ("embedding", "head"):
        if not ranks.attention.is_distributed:
            return mine
        return replace(mine, sources=tuple(_tokens(s, ranks) for s in mine.sources))
    sources = []
    for w, m in zip(whole.sources, mine.sources, strict=True):
        if w.rows != m.rows or w.whole is not None:  # heads may be shared by several ranks
            first = ranks.rank * w.rows // ranks.size // m.rows * m.rows
            m = replace(m, whole=w.whole or w.rows, first=w.first + first)
        if mine.field in _summed(mine, ranks) and ranks.rank > 0:
            m = replace(m, scale=0.0)
        sources.append(m)
    mine = replace(mine, sources=tuple(sources))
    if mine.experts is not None and ranks.expert_parallel:
        first = ranks.rank * (mine.experts - mine.num_shared)
        mine = replace(mine, whole_experts=whole.experts, first_expert=first)
    if whole.columns != mine.columns and mine.columns is not None:
        first = ranks.rank * mine.columns
        mine = replace(mine, whole_columns=whole.columns, first_column=first)
    return mine


def _tokens(source: Source, ranks: Ranks) -> Source:
    part = vocabulary_part(source.rows, ranks)
    first = ranks.rank * part
    there = min(part, source.rows - first)
    if there < 1:
        raise ConfigError(f"{FLAG}={ranks.size}: a vocabulary of {source.rows} is too small for it")
    order = None if there == part else [min(i, there - 1) for i in range(part)]
    return replace(source, rows=there, whole=source.rows, first=first, order=order)


def _part_of_group(group: KvGroup, size: int) -> KvGroup:
    return replace(group, heads=_part_of_heads(group.heads, size))


def _part_of_heads(heads: Heads, size: int) -> Heads:
    kv = heads.num_kv_heads
    if heads.mla is None and kv % size and size % kv:
        raise ConfigError(
            f"{FLAG}={size}: {kv} KV heads can be neither split over the ranks nor shared by "
            "equally many; choose a divisor or a multiple"
        )
    num = _part(heads.num_heads, "num_attention_heads", size)
    return replace(heads, num_heads=num, num_kv_heads=max(1, kv // size))


def _part_of_mixer(mixer: Recurrent, size: int) -> Recurrent:
    """Heads, their channels and the groups that serve them. A norm over all heads is computed over
    the ranks; one over some that several ranks have is not implemented."""
    scan, groups = mixer.scan, mixer.scan.num_groups
    if groups % size and size % groups:
        raise ConfigError(
            f"{FLAG}={size}: {groups} groups of recurrent heads can be neither split over the "
            "ranks nor shared by equally many; choose a divisor or a multiple"
        )
    part = replace(
        scan,
        num_heads=_part(scan.num_heads, "recurrent heads", size),
        num_groups=max(1, groups // size),
    )
    if part.inner_size < mixer.norm_size < scan.inner_size:
        raise ConfigError(
            f"{FLAG}={size}: a norm of {mixer.norm_size} channels of recurrent heads would be "
            f"split over some ranks; choose a divisor of {groups}"
        )
    return replace(mixer, scan=part)


def _part_of_experts(experts: Experts, ranks: Ranks) -> Experts:
    size = ranks.size
    if ranks.expert_parallel:
        _part(experts.num_experts, "num_experts", size)
        return replace(experts, num_ranks=size)
    return replace(experts, inner_size=_part(experts.inner_size, "moe_intermediate_size", size))


def _summed(param: Param, ranks: Ranks) -> tuple[str, ...]:
    """Biases that are added to a sum over ranks, and so by one of them alone."""
    if param.experts is not None and ranks.expert_parallel:
        return ()
    return ("down_bias",) if ranks.dp_attention else ("out_bias", "down_bias", "scan_out_bias")


def _part(number: int, field: str, size: int) -> int:
    if number % size:
        raise ConfigError(
            f"{FLAG}={size}: {field}={number} cannot be split evenly; choose a divisor of it"
        )
    return number // size
