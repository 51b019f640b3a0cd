"""Attention kernels: decode, prefill, verify, MLA."""
