"""Proofs that no padded row can hurt, over whatever a registry declares. No check names a runner.

It attaches to runners through `graph.observer` and to tables through `pools.tables`; an engine that
is not watched never imports it.
"""
