"""What a config says of latent heads: see kernels/types.py, MlaShape."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Heads, MlaShape
from slotzero.models.fields import positive
from slotzero.models.rope import RopeConfig, correction, parse_rope

NORM_EPS = 1e-6  # of the norms inside attention, whatever the config says of the others


def latent_heads(config: Mapping[str, Any], max_position: int) -> tuple[Heads, RopeConfig]:
    if config.get("attention_bias"):
        raise UnsupportedModelError(
            "config field attention_bias=True is not implemented with latent heads"
        )
    num_heads = positive(config, "num_attention_heads")
    if (config.get("num_key_value_heads") or num_heads) != num_heads:
        raise UnsupportedModelError(
            f"config field num_key_value_heads={config['num_key_value_heads']}: latent heads need "
            f"as many as num_attention_heads={num_heads}"
        )
    plain, turned = positive(config, "qk_nope_head_dim"), positive(config, "qk_rope_head_dim")
    if turned % 2:
        raise UnsupportedModelError(
            f"config field qk_rope_head_dim={turned}: an even size is needed"
        )
    rank = positive(config, "kv_lora_rank")
    rope = replace(
        parse_rope(config, turned, max_position),
        is_interleaved=bool(config.get("rope_interleave", True)),
    )
    heads = Heads(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=turned + rank,
        value_dim=rank,
        norm_eps=NORM_EPS,
        scale=(plain + turned) ** -0.5 * correction(config, rope) ** 2,
        mla=MlaShape(plain, turned, positive(config, "v_head_dim")),
    )
    return heads, rope
