"""Kernel sets: the contract, the reference in plain torch, and fast kernels for CPU and CUDA."""
