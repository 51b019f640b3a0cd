"""Helpers for structured outputs: example grammars, requests with them, and waiting for masks."""

import time
from typing import Any

import numpy as np

from slotzero import SamplingParams
from slotzero.errors import RequestError
from slotzero.grammars.grammar import Grammar
from slotzero.grammars.pool import Grammars
from slotzero.sampling.structured import StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["tea", "jazz"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
MAIL = r"[a-z]{2,5}@[a-z]{2,5}\.(com|org)"
COLOURS = ["red", "green", "greenish", "né"]
# A random model would hardly ever end a string or a list: these biases favour the closing tokens.
TIDY = {ord('"'): 6.0, ord("]"): 6.0, ord("}"): 4.0} | dict.fromkeys(b" \t\r\n", -100.0)
SHAPES: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": PERSON},
    "regex": {"regex": MAIL},
    "choice": {"choice": COLOURS},
    "object": {"json_object": True},
}


def shaped(shape: str | dict[str, Any], seed: int = 1, **more: Any) -> SamplingParams:
    structure = SHAPES[shape] if isinstance(shape, str) else shape
    params = {"temperature": 1.0, "seed": seed, "max_tokens": 150, "logit_bias": TIDY, **more}
    return SamplingParams(**params, structured_outputs=structure)


def begun(pool: Grammars, **structure: Any) -> Grammar:
    """Begin a grammar and wait for its first mask; raise `RequestError` if it fails."""
    grammar = pool.begin(StructuredOutputs(**structure))
    if not settled(grammar):
        raise RequestError(grammar.failure)
    return grammar


def settled(grammar: Grammar) -> bool:
    """Wait for the grammar's mask, and return whether there is one."""
    until = time.monotonic() + 60.0
    while not grammar.is_settled:
        assert time.monotonic() < until
        grammar._pool.poll(0.1)  # type: ignore[attr-defined]
    return grammar.is_ready


def tokens_of(allowed: np.ndarray) -> set[int]:
    return {i for i in range(len(allowed) * 32) if int(allowed[i // 32]) >> i % 32 & 1}
