"""Blocks: what decoder layers are made of. Each file has a block's config, weights and forward."""
