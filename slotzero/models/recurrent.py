"""What a config says of recurrent mixers: their shape, and in which layers they stand.

A layer mixes tokens by attention, by a recurrence or by both side by side, and then has an MLP; or,
of models whose layers do one thing each, it is one of all these.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types_recurrent import Scan
from slotzero.models.fields import eps, positive

ATTENTION, RECURRENT, MLP, MOE = "attention", "recurrent", "mlp", "moe"
KINDS: Mapping[str, str] = {
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "mlp": MLP,
    "moe": MOE,
}
LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
STATE_DTYPES = ("float32", "bfloat16", "float16")

Mixers = Literal["attention", "either", "both", "alone"]
"""Of each layer: attention; attention or a recurrence; both; or one thing, an MLP among others."""


class Layers(NamedTuple):
    """Which layers have what."""

    attention: tuple[int, ...]
    recurrent: tuple[int, ...]
    mlp: tuple[int, ...]  # or experts
    sparse: tuple[int, ...] | None  # those that have experts; None: another field says it


@dataclass(frozen=True)
class Recurrent:
    """The recurrent layers of a model, which are all alike."""

    name: str  # of the mixer in a checkpoint's layer
    layers: tuple[int, ...]
    scan: Scan
    norm_eps: float
    norm_size: int
    """Of each group under the norm of what comes out; 0: it is gated, and has no norm."""
    gates_first: bool
    state_dtype: str
    in_bias: bool = False
    conv_bias: bool = False
    out_bias: bool = False
    in_scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Of the parts of what goes in: gates, x, B, C and steps."""
    in_scale: float = 1.0
    """Of all that goes in, before a bias."""
    out_scale: float = 1.0

    def index_of(self, layer: int) -> int:
        return self.layers.index(layer)

    def every(self, interval: int) -> "Recurrent":
        """With snapshots after so many tokens, where there are rows for them"""
        return replace(self, scan=self.scan.every(interval))


def plainly(config: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """The same config in the words of the other families."""
    if model_type != "nemotron_h":
        return config
    kinds = config.get("layers_block_type")
    pattern = config.get("hybrid_override_pattern")
    if kinds is None and pattern is not None:
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    if not kinds:
        raise UnsupportedModelError(
            "config field layers_block_type: a kind of each layer is needed"
        )
    names = {
        "rms_norm_eps": "layer_norm_epsilon",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    }
    given = {ours: config[theirs] for ours, theirs in names.items() if theirs in config}
    return {**config, **given, "layer_types": kinds, "num_hidden_layers": len(kinds)}


def layers_of(config: Mapping[str, Any], mixers: Mixers, num_layers: int) -> Layers:
    every = tuple(range(num_layers))
    if mixers == "attention":
        return Layers(every, (), every, None)
    if mixers == "both":
        return Layers(every, every, every, None)
    kinds = _kinds(config, mixers, num_layers)

    def of(*wanted: str) -> tuple[int, ...]:
        return tuple(layer for layer in every if kinds[layer] in wanted)

    attention, recurrent = of(ATTENTION), of(RECURRENT)
    if not attention or not recurrent:
        raise UnsupportedModelError(
            f"config field layer_types names {len(attention)} layers with attention and "
            f"{len(recurrent)} recurrent ones: a model without either is not implemented"
        )
    if mixers == "either":
        return Layers(attention, recurrent, every, None)
    return Layers(attention, recurrent, of(MLP, MOE), of(MOE))


def _kinds(config: Mapping[str, Any], mixers: Mixers, num_layers: int) -> Sequence[str]:
    given = config.get("layer_types") or config.get("layers_block_type")
    if given is None:
        every = config.get("full_attention_interval") or 4
        names = "linear_attention", "full_attention"
        given = [names[(layer + 1) % every == 0] for layer in range(num_layers)]
    known = [name for name, kind in KINDS.items() if mixers == "alone" or kind not in (MLP, MOE)]
    unknown = sorted({str(kind) for kind in given} - set(known))
    if unknown:
        raise UnsupportedModelError(
            f"config field layer_types holds {', '.join(unknown)}: "
            f"implemented are {', '.join(known)}"
        )
    if len(given) != num_layers:
        raise UnsupportedModelError(
            f"config field layer_types names {len(given)} layers of {num_layers}"
        )
    return [KINDS[kind] for kind in given]


def recurrent_of(
    config: Mapping[str, Any], model_type: str, layers: tuple[int, ...]
) -> Recurrent | None:
    if not layers:
        return None
    return (
        _delta(config, layers) if model_type == "qwen3_next" else _mamba(config, model_type, layers)
    )


def _delta(config: Mapping[str, Any], layers: tuple[int, ...]) -> Recurrent:
    scan = Scan(
        "delta",
        num_heads=positive(config, "linear_num_value_heads"),
        head_dim=positive(config, "linear_value_head_dim"),
        num_groups=positive(config, "linear_num_key_heads"),
        state_size=positive(config, "linear_key_head_dim"),
        conv_width=_conv_width(config, "linear_conv_kernel_dim"),
    )
    _require_groups(scan, "linear_num_value_heads", "linear_num_key_heads")
    return Recurrent(
        "linear_attn", layers, scan, eps(config), scan.head_dim, False, _state_dtype(config)
    )


def _mamba(config: Mapping[str, Any], model_type: str, layers: tuple[int, ...]) -> Recurrent:
    _require_silu(config)
    heads, inner = positive(config, "mamba_n_heads"), _inner_size(config, model_type)
    head_dim = config.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner // heads
    if not isinstance(head_dim, int) or head_dim * heads != inner:
        raise UnsupportedModelError(
            f"config fields mamba_n_heads={heads}, mamba_d_head={head_dim}: {inner} channels do "
            "not split into such heads"
        )
    scan = Scan(
        "mamba",
        num_heads=heads,
        head_dim=head_dim,
        num_groups=positive(config, "mamba_n_groups"),
        state_size=positive(config, "mamba_d_state"),
        conv_width=_conv_width(config, "mamba_d_conv"),
        dt_limit=_step_limit(config, model_type),
    )
    _require_groups(scan, "mamba_n_heads", "mamba_n_groups")
    is_falcon, residual = model_type == "falcon_h1", float(config.get("residual_multiplier") or 1.0)
    in_bias = bool(config.get("mamba_proj_bias"))
    size = inner if model_type == "granitemoehybrid" else inner // scan.num_groups
    has_norm = bool(config.get("mamba_rms_norm")) if is_falcon else True
    return Recurrent(
        name="mixer" if model_type == "nemotron_h" else "mamba",
        layers=layers,
        scan=scan,
        norm_eps=eps(config),
        norm_size=size if has_norm else 0,
        gates_first=not (is_falcon and config.get("mamba_norm_before_gate", True)),
        state_dtype=_state_dtype(config),
        in_bias=in_bias,
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        out_bias=bool(config.get("projectors_bias")) if is_falcon else in_bias,
        in_scales=tuple(float(x) for x in config.get("ssm_multipliers") or (1.0,) * 5),
        in_scale=float(config.get("ssm_in_multiplier") or 1.0),
        out_scale=float(config.get("ssm_out_multiplier") or 1.0) * residual,
    )


def _inner_size(config: Mapping[str, Any], model_type: str) -> int:
    if model_type == "nemotron_h":
        return positive(config, "mamba_n_heads") * positive(config, "mamba_d_head")
    if config.get("mamba_d_ssm") is not None:
        return positive(config, "mamba_d_ssm")
    return int((config.get("mamba_expand") or 2) * positive(config, "hidden_size"))


def _conv_width(config: Mapping[str, Any], field: str) -> int:
    width = positive(config, field)
    if width < 2:
        raise UnsupportedModelError(f"config field {field}={width}: at least 2 inputs are needed")
    return width


def _step_limit(config: Mapping[str, Any], model_type: str) -> tuple[float, float]:
    if model_type == "nemotron_h":
        return float(config.get("time_step_min") or 0.0), math.inf
    least, most = config.get("time_step_limit") or (0.0, math.inf)
    return _number(least), _number(most)


def _number(given: Any) -> float:
    """JSON has no word for infinity, and transformers writes {"__float__": "Infinity"}."""
    return float(given["__float__"] if isinstance(given, Mapping) else given)


def _require_groups(scan: Scan, heads: str, groups: str) -> None:
    if scan.num_heads % scan.num_groups:
        raise UnsupportedModelError(
            f"config field {heads}={scan.num_heads} is not a multiple of {groups}={scan.num_groups}"
        )


def _require_silu(config: Mapping[str, Any]) -> None:
    field = "mamba_hidden_act" if "mamba_hidden_act" in config else "hidden_act"
    name = config.get(field) or "silu"
    if name not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"config field {field}={name!r}: mamba layers are implemented with silu"
        )


def _state_dtype(config: Mapping[str, Any]) -> str:
    """Where a config does not say: float32, in which the recurrence is computed."""
    for field in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        name = config.get(field)
        if name is not None and name not in STATE_DTYPES:
            raise UnsupportedModelError(
                f"config field {field}={name!r}: {', '.join(STATE_DTYPES)} are implemented"
            )
        if name is not None:
            return str(name)
    return "float32"
