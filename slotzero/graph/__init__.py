"""Recording and replay of functions over registered tensors. It knows tensors, not tokens.

A function that runs repeatedly is recorded once per size (on CUDA as a CUDA graph) and replayed.
Every tensor that a recording can see is registered first, as one of five kinds with a rule each:

    table       rows by slot; row 0 is reserved; host writes are staged, in stream order
    published   written to its full capacity every step, the tail with its pad value
    derived     rewritten inside the graph over the whole size on every replay
    output      written inside the graph, read by the host after it
    constant    frozen before the first recording
"""

from slotzero.graph.backend import Backend, Pieces, Recording
from slotzero.graph.ladder import Ladder, NoCaptureSize
from slotzero.graph.registry import Registry, TensorKind
from slotzero.graph.runner import GraphKey, Runner, RunnerSpec

__all__ = [
    "Backend",
    "GraphKey",
    "Ladder",
    "NoCaptureSize",
    "Pieces",
    "Recording",
    "Registry",
    "Runner",
    "RunnerSpec",
    "TensorKind",
]
