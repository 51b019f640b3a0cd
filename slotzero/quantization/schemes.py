"""Schemes of compressed-tensors: from the settings of a group of modules to a layout.

The rule: a setting that changes results and has no layout here is refused by its name.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.kernels.weights import Activations
from slotzero.quantization.fp8 import Block, Fp8Layout, block_of
from slotzero.quantization.integers import ByteLayout, PackedLayout
from slotzero.quantization.method import Layout, is_count, refuse_field

Settings = Mapping[str, Any]
FLOAT_FORMATS = "float-quantized", "naive-quantized"
BYTE_FORMATS = "int-quantized", "naive-quantized"
PACKED_FORMATS = ("pack-quantized",)
FORMATS = tuple(dict.fromkeys((*FLOAT_FORMATS, *BYTE_FORMATS, *PACKED_FORMATS)))


def parse_layout(field: str, group: Settings, default_format: object) -> Layout | None:
    """Return the layout of a group of modules; None: they are not quantised."""
    weights, inputs = (_arguments(field, group, name) for name in ("weights", "input_activations"))
    if group.get("output_activations") is not None:
        raise refuse_field(f"{field}.output_activations", group["output_activations"], "null")
    if weights is None:
        if inputs is not None:
            raise refuse_field(f"{field}.weights", None, "quantised weights")
        return None
    stored_as = group.get("format") or default_format
    if stored_as not in FORMATS:
        raise refuse_field("format", stored_as, ", ".join(FORMATS))
    if weights.get("dynamic"):
        raise refuse_field(f"{field}.weights.dynamic", weights["dynamic"], "false")
    kind, bits = str(weights.get("type", "int")).lower(), weights.get("num_bits", 8)
    if kind == "float" and bits == 8:
        _check_format(stored_as, FLOAT_FORMATS, "8-bit float")
        return _parse_float(field, weights, inputs)
    if kind != "int":
        raise refuse_field(f"{field}.weights", {"type": kind, "num_bits": bits}, "8-bit float")
    if inputs is not None:
        raise refuse_field(f"{field}.input_activations", dict(inputs), "null for integer weights")
    if bits == 8 and stored_as in BYTE_FORMATS:
        return _parse_integers(f"{field}.weights", weights, is_packed=False)
    if bits not in (4, 8):
        raise refuse_field(f"{field}.weights.num_bits", bits, "4 or 8")
    _check_format(stored_as, PACKED_FORMATS, f"{bits}-bit integers")
    return _parse_integers(f"{field}.weights", weights, is_packed=True)


def _arguments(field: str, group: Settings, name: str) -> Settings | None:
    given = group.get(name)
    if not isinstance(given, Mapping | None):
        raise refuse_field(f"{field}.{name}", given, "a mapping")
    return given


def _check_format(given: object, implemented: tuple[str, ...], kind: str) -> None:
    if given not in implemented:
        raise refuse_field("format", given, f"{' or '.join(implemented)} for {kind}")


def _strategy(given: Settings) -> str:
    """Return which numbers share a scale; if the config does not say, its group size does."""
    size = given.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    return str(given.get("strategy") or inferred).lower()


def _parse_float(field: str, weights: Settings, inputs: Settings | None) -> Layout:
    strategy, block = _strategy(weights), None
    _check_symmetric(f"{field}.weights", weights)
    if strategy == "block":
        block = block_of(weights.get("block_structure"), f"{field}.weights.block_structure")
    elif strategy not in ("tensor", "channel"):
        raise refuse_field(f"{field}.weights.strategy", strategy, "tensor, channel or block")
    activations = _parse_activations(f"{field}.input_activations", inputs, block)
    return Fp8Layout(activations, block, is_per_row=strategy == "channel")


def _parse_activations(field: str, inputs: Settings | None, block: Block | None) -> Activations:
    if inputs is None:
        return "plain"
    if str(inputs.get("type", "int")).lower() != "float" or inputs.get("num_bits", 8) != 8:
        raise refuse_field(field, dict(inputs), "8-bit float")
    _check_symmetric(field, inputs)
    strategy, dynamic = _strategy(inputs), inputs.get("dynamic", False)
    if block is not None:
        if dynamic is True and strategy == "group" and inputs.get("group_size") == block[1]:
            return "float8_group"
        raise refuse_field(field, dict(inputs), f"dynamic groups of {block[1]} for such blocks")
    if dynamic is True and strategy == "token":
        return "float8_row"
    if dynamic is False and strategy == "tensor":
        return "float8_static"
    raise refuse_field(field, dict(inputs), "dynamic by token, or static by tensor")


def _check_symmetric(field: str, given: Settings) -> None:
    if given.get("symmetric", True) is not True:
        raise refuse_field(f"{field}.symmetric", given["symmetric"], "true for 8-bit float")


def _parse_integers(field: str, weights: Settings, is_packed: bool) -> Layout:
    strategy, size, order = _strategy(weights), weights.get("group_size"), weights.get("actorder")
    if strategy not in ("tensor", "channel", "group"):
        raise refuse_field(f"{field}.strategy", strategy, "tensor, channel or group")
    if strategy == "group" and not is_count(size):
        raise refuse_field(f"{field}.group_size", size, "a positive number")
    is_symmetric = weights.get("symmetric", True)
    if not isinstance(is_symmetric, bool):
        raise refuse_field(f"{field}.symmetric", is_symmetric, "true or false")
    if is_packed and strategy == "tensor" and not is_symmetric:
        raise refuse_field(f"{field}.symmetric", False, "true where the strategy is tensor")
    has_order = order in (True, "group", "dynamic")
    if not has_order and order not in (None, False, "weight", "static"):
        raise refuse_field(f"{field}.actorder", order, "group, weight or null")
    if has_order and strategy != "group":
        raise refuse_field(f"{field}.actorder", order, "null where the strategy is not group")
    return (PackedLayout if is_packed else ByteLayout)(
        weights.get("num_bits", 8),
        size if strategy == "group" else None,
        is_symmetric,
        is_per_tensor=strategy == "tensor",
        has_order=has_order,
    )
