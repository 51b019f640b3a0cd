"""Blocks: the parts of decoder layers. Each file has the config, weights and forward of a block."""
