"""Draft model that is sometimes right: a tiny model with slightly changed weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slotzero.checkpoint.tiny import tiny_checkpoint


def write_near(model: str, off_by: float, folder: Path) -> None:
    """Write the model with noise on its weights; `off_by` is relative to the spread of a weight."""
    checkpoint, generator = tiny_checkpoint(model), torch.Generator().manual_seed(0)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    for weight in tensors.values():
        spread = off_by * (weight.std() if weight.dim() > 1 else 0.0)
        weight += spread * torch.randn(weight.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config)))
