"""Weights of compressed-tensors (llm-compressor): groups of modules, each stored in its own way.

The rule: `ignore` comes first; then a group that names the module comes before one whose pattern
fits it, and that before one for all linear layers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import WeightFormat
from slotzero.quantization.method import (
    Layout,
    Method,
    TensorSource,
    WeightPart,
    has_float8_cache,
    in_text_model,
    is_linear,
    names_of,
    refuse_field,
    settings_of,
)
from slotzero.quantization.schemes import parse_layout

LINEAR = "Linear"
"""The class name that stands for all linear layers."""


class Group(NamedTuple):
    targets: tuple[str, ...]
    layout: Layout | None  # None: not quantised


@dataclass(frozen=True)
class CompressedTensorsMethod(Method):
    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ()
    kv_cache_scheme: bool = False
    """The KV cache is to be kept in float8."""

    name = "compressed-tensors"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        given = settings_of(config)
        _refuse_unimplemented(given)
        groups, has_cache = given.get("config_groups"), has_float8_cache(given)
        if not isinstance(groups, Mapping) or not (groups or has_cache):
            raise refuse_field("config_groups", groups, "a mapping of groups")
        return cls(
            tuple(
                _parse_group(f"config_groups.{name}", group, given)
                for name, group in groups.items()
            ),
            names_of(given, "ignore"),
            has_cache,
        )

    def format_of(self, module: str) -> WeightFormat | None:
        layout = self._layout_of(module)
        return None if layout is None else layout.format

    def tensors(self, module: str) -> Mapping[str, bool]:
        layout = self._layout_of(module)
        return {} if layout is None else layout.tensors(module)

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        layout = self._layout_of(module)
        assert layout is not None, f"{module} is not quantised"
        return layout.read(source, module, part)

    def _layout_of(self, module: str) -> Layout | None:
        if _rank(module, self.ignored) is not None:
            return None
        ranks = [(_rank(module, group.targets), group.layout) for group in self.groups]
        fits = [(rank, layout) for rank, layout in ranks if rank is not None]
        return min(fits, key=lambda fit: fit[0])[1] if fits else None


class _Targets(NamedTuple):
    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    has_linear: bool


@cache
def _sorted_targets(targets: tuple[str, ...]) -> _Targets:
    patterns = tuple(re.compile(t[3:]) for t in targets if t.startswith("re:"))
    return _Targets(frozenset(map(in_text_model, targets)), patterns, LINEAR in targets)


def _rank(module: str, targets: tuple[str, ...]) -> int | None:
    """Return how closely the targets fit a module: 0 by name, 1 by a pattern, 2 by its class; None:
    not at all. Names are looked up, as in `matches`."""
    names, patterns, has_linear = _sorted_targets(targets)
    if module in names:
        return 0
    if any(pattern.match(module) for pattern in patterns):
        return 1
    return 2 if has_linear and is_linear(module) else None


def _refuse_unimplemented(given: Mapping[str, Any]) -> None:
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise refuse_field("sparsity_config", sparsity, "format dense")
    for field in ("transform_config", "moe_sparsity_config"):
        if given.get(field):
            raise refuse_field(field, given[field], "none")


def _parse_group(field: str, group: object, given: Mapping[str, Any]) -> Group:
    if not isinstance(group, Mapping):
        raise refuse_field(field, group, "a mapping with targets and weights")
    targets = names_of(group, "targets")
    for target in targets:
        if target != LINEAR and target[:1].isupper():
            raise refuse_field(f"{field}.targets", target, "Linear, names of modules and patterns")
    return Group(targets, parse_layout(field, group, given.get("format")))
