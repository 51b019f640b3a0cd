"""Checks that padded rows cannot change a result, for every tensor that a registry declares.

No check names a runner. The package attaches to runners through `graph.observer` and to tables
through `pools.tables`; an engine without the sanitizer never imports it.
"""
