"""Structured outputs: grammars are compiled, and their masks computed, in separate processes."""
