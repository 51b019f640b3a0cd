"""Sampling of the next token: a request's parameters, their tables, and the reference sampler."""
