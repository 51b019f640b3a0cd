"""Speculative decoding: several tokens of an answer are guessed, and verified in one step."""
