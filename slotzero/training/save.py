"""The folder of a trained head: config.json and model.safetensors, like heads on the hub.

This module does not know training or the engine. A draft vocabulary is saved as `d2t`; its rows of
the output table belong to the target and are not saved.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slotzero.errors import ConfigError, CorruptCheckpointError
from slotzero.system.json_file import read_json
from slotzero.training.head import EagleHead, HeadConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def save_head(head: EagleHead, folder: Path, dtype: str = "float16") -> None:
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_to_json(head.config, dtype), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    stored = {
        name: tensor.to("cpu", _DTYPES[dtype] if tensor.is_floating_point() else None).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def load_head(folder: Path) -> EagleHead:
    """Load a head in float32 on the CPU, ready for further training."""
    try:
        stored = load_file(folder / WEIGHTS)
        head = EagleHead(_from_json(read_json(folder / CONFIG)), stored.get("d2t"))
        head.load_state_dict(stored)
    except (ConfigError, SafetensorError, KeyError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CorruptCheckpointError(
            f"{folder} contains no draft head of train-eagle: {reason}"
        ) from None
    return head


def _to_json(config: HeadConfig, dtype: str) -> dict[str, Any]:
    fields = asdict(config)
    layers = list(fields.pop("feature_layers"))
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **fields,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
        "dtype": dtype,
    }


def _from_json(stored: dict[str, Any]) -> HeadConfig:
    names = set(HeadConfig.__dataclass_fields__) - {"feature_layers"}
    layers = stored["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return HeadConfig(**{name: stored[name] for name in names}, feature_layers=tuple(layers))
