"""Kernels of speculative decoding: draft bookkeeping and draft trees."""
