"""Checkpoint formats (safetensors, GGUF, random weights) behind one contract, `Checkpoint`."""
