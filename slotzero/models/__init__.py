"""Models as functions of registered tensors: one decoder skeleton, told apart by data."""
