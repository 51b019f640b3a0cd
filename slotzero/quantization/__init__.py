"""Formats of quantised weights, one file each: which config is recognised, which tensors are read.

Arithmetic and storage layout are in kernels/quantized.py and kernels/weights.py.
"""
