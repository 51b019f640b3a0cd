"""The bridge to transformers: its layers, in our runners.

Positions, slots, KV pages, sampling and recording are ours; the layers and the head are theirs.
Only this package imports transformers, and only when a model needs it.
"""
