"""Slotzero: an LLM inference engine built on CUDA graphs in which padding is provably harmless.

    from slotzero import LLM, SamplingParams
    LLM().generate("Once upon a time", SamplingParams(max_tokens=32))

Names are loaded when first used, so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slotzero.llm import LLM, CompletionOutput, RequestOutput, StreamChunk
    from slotzero.sampling.params import SamplingParams
    from slotzero.sampling.structured import StructuredOutputs
    from slotzero.vectors import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput

__version__ = "0.1.0"

_HOMES = {
    "LLM": "slotzero.llm",
    "CompletionOutput": "slotzero.llm",
    "RequestOutput": "slotzero.llm",
    "StreamChunk": "slotzero.llm",
    "SamplingParams": "slotzero.sampling.params",
    "StructuredOutputs": "slotzero.sampling.structured",
    "EmbeddingRequestOutput": "slotzero.vectors",
    "PoolingParams": "slotzero.vectors",
    "ScoringRequestOutput": "slotzero.vectors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StreamChunk",
    "StructuredOutputs",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'slotzero' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
