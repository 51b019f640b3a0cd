"""Config fields of Mamba-2 mixers and of hybrid models, shared by the families that have them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types_recurrent import Scan
from slotzero.models.blocks.recurrent import RecurrentMixer, RecurrentScales
from slotzero.models.fields import eps, positive

Config = Mapping[str, Any]

ATTENTION, RECURRENT, MLP, MOE = "attention", "recurrent", "mlp", "moe"
LAYER_KINDS: Mapping[str, str] = {
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "mlp": MLP,
    "moe": MOE,
}
STATE_DTYPES = ("float32", "bfloat16", "float16")


def hybrid_layers(
    config: Config,
    kinds: Sequence[str] = (ATTENTION, RECURRENT),
    names: Mapping[str, str] = LAYER_KINDS,
) -> list[str]:
    """Return the kind of each layer; raise if it is not one of `kinds`.

    `names` are the kinds by their names in layer_types.
    """
    num_layers = positive(config, "num_hidden_layers")
    given = config.get("layer_types") or config.get("layers_block_type")
    if given is None:
        every = config.get("full_attention_interval") or 4
        both = "linear_attention", "full_attention"
        given = [both[(layer + 1) % every == 0] for layer in range(num_layers)]
    known = [name for name, kind in names.items() if kind in kinds]
    unknown = sorted({str(kind) for kind in given} - set(known))
    if unknown:
        raise UnsupportedModelError(
            f"config field layer_types contains {', '.join(unknown)}, which is not implemented; "
            f"implemented: {', '.join(known)}"
        )
    if len(given) != num_layers:
        raise UnsupportedModelError(
            f"config field layer_types has {len(given)} entries for {num_layers} layers"
        )
    layers = [names[kind] for kind in given]
    attention, recurrent = layers.count(ATTENTION), layers.count(RECURRENT)
    if not attention or not recurrent:
        raise UnsupportedModelError(
            f"config field layer_types has {attention} layers with attention and {recurrent} "
            "recurrent layers; a hybrid model must have both"
        )
    return layers


def mamba_mixer(
    config: Config,
    inner_size: int,
    prefix: str = "mamba",
    norm_size: int | None = None,  # None: a group's channels; 0: no norm
    dt_limit: tuple[float, float] | None = None,
    **overrides: Any,
) -> RecurrentMixer:
    """Return the Mamba-2 mixer of a config; `overrides` are fields of RecurrentMixer."""
    _require_silu(config)
    heads = positive(config, "mamba_n_heads")
    head_dim = config.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner_size // heads
    if not isinstance(head_dim, int) or head_dim * heads != inner_size:
        raise UnsupportedModelError(
            f"config fields mamba_n_heads={heads}, mamba_d_head={head_dim}: their product must be "
            f"the number of channels, {inner_size}"
        )
    scan = Scan(
        "mamba",
        num_heads=heads,
        head_dim=head_dim,
        num_groups=positive(config, "mamba_n_groups"),
        state_size=positive(config, "mamba_d_state"),
        conv_width=conv_width(config, "mamba_d_conv"),
        dt_limit=dt_limit or _dt_limit(config),
    )
    require_groups(scan, "mamba_n_heads", "mamba_n_groups")
    bias = bool(config.get("mamba_proj_bias"))
    standard: dict[str, Any] = {
        "hidden_size": positive(config, "hidden_size"),
        "prefix": prefix,
        "norm_eps": eps(config),
        "norm_size": inner_size // scan.num_groups if norm_size is None else norm_size,
        "gates_first": True,
        "state_dtype": state_dtype(config),
        "in_bias": bias,
        "conv_bias": bool(config.get("mamba_conv_bias", True)),
        "out_bias": bias,
        "scales": RecurrentScales(),
    }
    return RecurrentMixer(scan, **(standard | overrides))


def conv_width(config: Config, field: str) -> int:
    """Read the number of tokens that a convolution spans."""
    width = positive(config, field)
    if width < 2:
        raise UnsupportedModelError(f"config field {field}={width}: must be at least 2")
    return width


def require_groups(scan: Scan, heads: str, groups: str) -> None:
    """Raise unless the heads split evenly into groups; `heads` and `groups` are field names."""
    if scan.num_heads % scan.num_groups:
        raise UnsupportedModelError(
            f"config field {heads}={scan.num_heads} is not a multiple of {groups}={scan.num_groups}"
        )


def state_dtype(config: Config) -> str:
    """Read the dtype of recurrent states; the default is float32, as in the computation."""
    for field in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        name = config.get(field)
        if name is not None and name not in STATE_DTYPES:
            raise UnsupportedModelError(
                f"config field {field}={name!r} is not implemented; "
                f"implemented: {', '.join(STATE_DTYPES)}"
            )
        if name is not None:
            return str(name)
    return "float32"


def _dt_limit(config: Config) -> tuple[float, float]:
    low, high = config.get("time_step_limit") or (0.0, math.inf)
    return _number(low), _number(high)


def _number(given: Any) -> float:
    """Read a number; JSON has no infinity, so transformers writes {"__float__": "Infinity"}."""
    return float(given["__float__"] if isinstance(given, Mapping) else given)


def _require_silu(config: Config) -> None:
    field = "mamba_hidden_act" if "mamba_hidden_act" in config else "hidden_act"
    name = config.get(field) or "silu"
    if name not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"config field {field}={name!r} is not implemented for Mamba layers; implemented: silu"
        )
