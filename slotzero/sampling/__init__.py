"""Sampling of the next token: parameters of a request, their tables, and the reference sampler."""
