"""Recorded functions over registered tensors. It knows tensors, not tokens.

A function that runs again and again is recorded once per size and replayed. Whatever a recording
can see is registered first, as one of five kinds, each with its rule:

    table       rows by slot; row 0 is reserved; host writes are staged, in stream order
    published   written to its full capacity every step, the tail with its pad value
    derived     rewritten inside the graph over the whole size on every replay
    output      written inside the graph, read by the host after it
    constant    frozen before the first recording
"""

from slotzero.graph.backend import Backend, Pieces, Recording
from slotzero.graph.ladder import Ladder, NoCaptureSize
from slotzero.graph.registry import Kind, Registry
from slotzero.graph.runner import GraphKey, Runner, RunnerSpec

__all__ = [
    "Backend",
    "GraphKey",
    "Kind",
    "Ladder",
    "NoCaptureSize",
    "Pieces",
    "Recording",
    "Registry",
    "Runner",
    "RunnerSpec",
]
