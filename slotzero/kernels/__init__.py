"""Fast kernels, each beside its slow reference."""
