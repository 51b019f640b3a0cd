"""Models as functions of registered tensors: one decoder for all families, which differ in data."""
