"""Gemma 4 (text).

Full and sliding layers have different heads, the last layers read the KV of earlier ones, each
layer has its own input, and large models have experts beside the MLP.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Heads
from slotzero.models.blocks.attention import Attention, KvGroup
from slotzero.models.blocks.layer_input import LayerEmbedding, LayerInputMixer
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.blocks.moe_shared import MoeBesideMlp
from slotzero.models.config import FULL, ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    experts,
    kv_group,
    layer_groups,
    model,
    nested_rope,
    sandwich_norms,
    sparse_layers,
)
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import activation, eps, positive
from slotzero.models.layer import DecoderLayer, LayerScale, Mlp

Config = Mapping[str, Any]

HEAD_FIELDS = ("head_dim", "num_key_value_heads")  # fields that per_layer_config may set
FULL_HEAD_DIM = 512  # of full layers, if the config does not set it
NAMES = MoeNames(
    router="router.proj",
    gate=None,
    up="experts.gate_up_proj",
    down="experts.down_proj",
    shared=None,
    factors="router.per_expert_scale",
    is_joint=True,
)


def parse(config: Config) -> ModelConfig:
    num_layers, hidden = positive(config, "num_hidden_layers"), positive(config, "hidden_size")
    names = layer_groups(
        config, lambda layer: (layer + 1) % 6 != 0 and layer + 1 != num_layers, ends_full=True
    )
    config = _with_per_layer_config(config, names)
    groups = {name: _kv_group(config, name, names) for name in sorted(set(names))}
    norms, embedding = sandwich_norms(config), _layer_embedding(config)
    input_mixer = None
    if embedding is not None:
        size = embedding.input_size
        input_mixer = LayerInputMixer(hidden, size, activation(config), eps(config))
    layers = []
    for layer, (name, is_sparse) in enumerate(zip(names, _sparse(config), strict=True)):
        reads = layer in groups[name].readers
        layers.append(
            DecoderLayer(
                norms,
                _attention(config, groups[name], reads),
                _mlp(config, reads, is_sparse),
                input_mixer,
                LayerScale(),
            )
        )
    return model(
        config,
        layers,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        embedding_scale=math.sqrt(hidden),
        layer_embedding=embedding,
    )


def _attention(config: Config, group: KvGroup, reads: bool) -> Attention:
    bias = bool(config.get("attention_bias", False))
    return Attention(
        group,
        positive(config, "hidden_size"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        reads=reads,
        values_are_keys=group.name == FULL and bool(config.get("attention_k_eq_v")),
    )


def _mlp(config: Config, reads: bool, is_sparse: bool) -> Mlp:
    """Return the MLP of a layer; layers that store no KV may have one of twice the width."""
    mlp = dense_mlp(config)
    if reads and config.get("use_double_wide_mlp"):
        mlp = replace(mlp, inner_size=2 * mlp.inner_size)
    if not is_sparse:
        return mlp
    shape = experts(
        config, "num_experts", "top_k_experts", "moe_intermediate_size",
        scores="softmax", is_normed=True,
    )  # fmt: skip
    return MoeBesideMlp(MoeMlp(positive(config, "hidden_size"), shape, NAMES), mlp, eps(config))


def _sparse(config: Config) -> list[bool]:
    if config.get("enable_moe_block"):
        return sparse_layers(config)
    return [False] * int(config["num_hidden_layers"])


def _kv_group(config: Config, name: str, names: Sequence[str]) -> KvGroup:
    layers = [layer for layer, group in enumerate(names) if group == name]
    heads = _heads(config, name, layers)
    owners, readers = _owners_and_readers(config, name, layers)
    rope = nested_rope(config, name)
    if rope is None:
        raise UnsupportedModelError(f"config field rope_parameters has no entry for {name} layers")
    return kv_group(config, name, owners, heads, rope, readers)


def _with_per_layer_config(config: Config, names: Sequence[str]) -> Config:
    """Fill per_layer_config from the older fields, which apply to full layers."""
    if config.get("per_layer_config") is not None:
        return config
    own = {"head_dim": config.get("global_head_dim") or FULL_HEAD_DIM}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    full = [layer for layer, group in enumerate(names) if group == FULL]
    return {**config, "per_layer_config": {str(layer): own for layer in full}}


def _heads(config: Config, group: str, layers: Sequence[int]) -> Heads:
    """Return the heads of a group. They are equal in all its layers, which share a KV pool."""
    given = config.get("per_layer_config") or {}
    own = [given.get(str(layer), given.get(layer)) or {} for layer in layers]
    if any(fields != own[0] for fields in own):
        raise UnsupportedModelError(
            f"config field per_layer_config: {group} layers differ from each other, which is not "
            "implemented"
        )
    for field, value in own[0].items():
        if field not in HEAD_FIELDS or not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(
                f"config field per_layer_config has {field}={value!r} for {group} layers: only "
                f"positive values of {' and '.join(HEAD_FIELDS)} are implemented"
            )
    heads = attention_heads(config, scale=1.0, norms_values=True)
    return replace(
        heads,
        head_dim=own[0].get("head_dim", heads.head_dim),
        value_dim=own[0].get("head_dim", heads.value_dim),
        num_kv_heads=own[0].get("num_key_value_heads", heads.num_kv_heads),
    )


def _owners_and_readers(
    config: Config, group: str, layers: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Split a group into layers that store KV and layers that read the KV of the last of those."""
    num_layers = positive(config, "num_hidden_layers")
    num_shared = config.get("num_kv_shared_layers") or 0
    if not isinstance(num_shared, int) or not 0 <= num_shared < num_layers:
        raise UnsupportedModelError(
            f"config field num_kv_shared_layers={num_shared!r}: must be a number from 0 to "
            f"{num_layers - 1}, less than num_hidden_layers={num_layers}"
        )
    first = num_layers - num_shared
    owners = [layer for layer in layers if layer < first]
    if not owners:
        raise UnsupportedModelError(
            f"config field num_kv_shared_layers={num_shared}: no {group} layer is left to store KV"
        )
    return owners, [layer for layer in layers if layer >= first]


def _layer_embedding(config: Config) -> LayerEmbedding | None:
    if not config.get("hidden_size_per_layer_input"):
        return None
    vocab, input_vocab = (positive(config, f"vocab_size{end}") for end in ("", "_per_layer_input"))
    if input_vocab < vocab:
        raise UnsupportedModelError(
            f"config field vocab_size_per_layer_input={input_vocab} is less than vocab_size={vocab}"
        )
    return LayerEmbedding(
        positive(config, "hidden_size"),
        positive(config, "hidden_size_per_layer_input"),
        positive(config, "num_hidden_layers"),
        input_vocab,
        eps(config),
    )


TINY = tiny(
    "gemma4_text", "Gemma4ForCausalLM", 6, 64, 72, (4, 2, 24),
    hidden_activation="gelu_pytorch_tanh", sliding_window=24, layer_types=layer_types("sfssff"),
    rope_parameters={
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    per_layer_config={str(i): {"head_dim": 40, "num_key_value_heads": 1} for i in (1, 4, 5)},
    attention_k_eq_v=True, num_kv_shared_layers=3, use_double_wide_mlp=True,
    hidden_size_per_layer_input=12, vocab_size_per_layer_input=259, enable_moe_block=False,
    final_logit_softcapping=30.0, tie_word_embeddings=True, initializer_range=0.05,
)  # fmt: skip
FAMILIES = (
    Family(
        "gemma4_text", "Gemma4ForCausalLM", parse,
        frozenset({
            "final_logit_softcapping", "per_layer_config", "global_head_dim",
            "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers",
            "use_double_wide_mlp", "hidden_size_per_layer_input", "enable_moe_block", "num_experts",
        }),
        tiny={"gemma4": TINY},
        multimodal={"Gemma4ForConditionalGeneration": "gemma4_text"},
    ),
)  # fmt: skip
