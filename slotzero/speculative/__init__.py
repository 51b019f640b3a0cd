"""Speculative decoding: several tokens of an answer are drafted, and verified in one step."""
