"""What a config says of its experts: how many, how a token chooses among them, in which layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Experts
from slotzero.models.fields import activation, positive

_DENSE_AT_FIRST = {"mimo_v2_flash": 1}
"""Layers without experts, where a config does not say."""
_SCORES = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}


def experts_of(config: Mapping[str, Any], model_type: str) -> Experts | None:
    if model_type == "gpt_oss":
        _require(config, "swiglu_alpha", 1.702)
        _require(config, "swiglu_limit", 7.0)
        return _by_fields(
            config, "num_local_experts", "num_experts_per_tok", "intermediate_size",
            activation="clamped_silu", scores="softmax_of_chosen",
        )  # fmt: skip
    if model_type == "qwen3_next":
        return _by_fields(
            config, "num_experts", "num_experts_per_tok", "moe_intermediate_size",
            scores="softmax", is_normed=bool(config.get("norm_topk_prob", True)),
        ) if config.get("num_experts") else None  # fmt: skip
    if model_type == "granitemoehybrid":
        return _by_fields(
            config, "num_local_experts", "num_experts_per_tok", "intermediate_size",
            scores="softmax_of_chosen",
        ) if config.get("num_local_experts") else None  # fmt: skip
    if model_type == "nemotron_h":
        if config.get("moe_latent_size") is not None:
            raise UnsupportedModelError(
                f"config field moe_latent_size={config['moe_latent_size']}: experts over a smaller "
                "row are not implemented"
            )
        has_any = "moe" in config["layer_types"]
        return replace(_by_sigmoid(config, 0), activation="relu") if has_any else None
    if model_type == "gemma4_text":
        return _by_fields(
            config, "num_experts", "top_k_experts", "moe_intermediate_size",
            scores="softmax", is_normed=True,
        ) if config.get("enable_moe_block") else None  # fmt: skip
    if model_type == "mimo_v2_flash":
        return _by_sigmoid(config, num_shared=0)
    if model_type in _SCORES:
        _require(config, "scoring_func", _SCORES[model_type])
        num_shared = config.get("n_shared_experts") or 0
        if model_type == "deepseek_v3":
            return _by_sigmoid(config, num_shared)
        return _by_softmax(config, num_shared)
    return None


def shared_expert_size(config: Mapping[str, Any], model_type: str) -> int | None:
    """Of the MLP beside experts, where that is another than the other MLPs'."""
    if model_type == "qwen3_next" and config.get("num_experts"):
        return positive(config, "shared_expert_intermediate_size")
    if model_type == "nemotron_h" and "moe" in config["layer_types"]:
        return positive(config, "moe_shared_expert_intermediate_size")
    return None


def sparse_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    if config.get("decoder_sparse_step") is not None or config.get("mlp_only_layers"):
        every = positive({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
        dense = config.get("mlp_only_layers") or ()
        return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0)
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        first = config.get("first_k_dense_replace")
        if first is None:
            first = _DENSE_AT_FIRST.get(str(config.get("model_type")), 0)
        first = min(first, num_layers)
        kinds = ["dense"] * first + ["sparse"] * (num_layers - first)
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise UnsupportedModelError(
            f"config field mlp_layer_types={kinds!r}: dense or sparse is needed for each of "
            f"{num_layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _by_fields(
    config: Mapping[str, Any], num: str, top_k: str, inner_size: str, **how: Any
) -> Experts:
    """Of a config that calls their number, how many are chosen, and their size so."""
    made = Experts(
        num_experts=positive(config, num),
        top_k=positive(config, top_k),
        inner_size=positive(config, inner_size),
        **{"activation": activation(config), **how},
    )
    if made.top_k > made.num_experts:
        raise UnsupportedModelError(
            f"config fields {num}={made.num_experts}, {top_k}={made.top_k}: so many cannot be "
            "chosen"
        )
    return made


def _by_sigmoid(config: Mapping[str, Any], num_shared: int) -> Experts:
    _require(config, "topk_method", "noaux_tc")
    return Experts(
        num_experts=positive(config, "n_routed_experts"),
        top_k=positive(config, "num_experts_per_tok"),
        inner_size=positive(config, "moe_intermediate_size"),
        activation=activation(config),
        scores="sigmoid",
        is_normed=bool(config.get("norm_topk_prob", True)),
        factor=float(config.get("routed_scaling_factor") or 1.0),
        num_shared=num_shared,
        **_groups(config, judged_by=2),
    )


def _by_softmax(config: Mapping[str, Any], num_shared: int) -> Experts:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"config field topk_method={method!r}: greedy or group_limited_greedy is implemented"
        )
    _require(config, "norm_topk_prob", False)
    return Experts(
        num_experts=positive(config, "n_routed_experts"),
        top_k=positive(config, "num_experts_per_tok"),
        inner_size=positive(config, "moe_intermediate_size"),
        activation=activation(config),
        scores="softmax",
        factor=float(config.get("routed_scaling_factor") or 1.0),
        num_shared=num_shared,
        **_groups(config if method != "greedy" else {**config, "n_group": 1}, judged_by=1),
    )


def _groups(config: Mapping[str, Any], judged_by: int) -> dict[str, Any]:
    num = config.get("n_group") or 1
    top = (config.get("topk_group") or 1) if num > 1 else 1
    experts, top_k = positive(config, "n_routed_experts"), positive(config, "num_experts_per_tok")
    if experts % num:
        raise UnsupportedModelError(
            f"config field n_routed_experts={experts} is not a multiple of n_group={num}"
        )
    if top > num or top_k > experts // num * top or judged_by > experts // num:
        raise UnsupportedModelError(
            f"config fields n_group={num}, topk_group={top}, num_experts_per_tok={top_k}: "
            f"{experts} experts do not allow for such a choice"
        )
    return {"num_groups": num, "top_groups": top, "judged_by": judged_by}


def _require(config: Mapping[str, Any], field: str, value: object) -> None:
    given = config.get(field)
    if given is not None and given != value:
        raise UnsupportedModelError(f"config field {field}={given!r}: only {value} is implemented")
