"""Triton kernels: CUDA's kernel set, and on the CPU through Triton's interpreter for tests."""
