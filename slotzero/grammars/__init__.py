"""Structured outputs: grammars that are compiled and followed in processes of their own."""
