"""Scores of pairs of texts: answers of a reranker, or similarities of embeddings."""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from slotzero.errors import RequestError
from slotzero.models.pooling import Pooling, similarity
from slotzero.server.app_state import AppState
from slotzero.server.generation_requests import about
from slotzero.server.pooled import pooled, usage
from slotzero.server.vector_inputs import clipped
from slotzero.server.vector_replies import VectorUsage
from slotzero.server.vector_requests import PairFields
from slotzero.text.score_template import template_variables

Pairs = Sequence[tuple[str, str]]


class Scores(NamedTuple):
    values: list[float]
    usage: VectorUsage


async def score_pairs(
    state: AppState, body: PairFields, texts: Pairs, names: tuple[str, str]
) -> Scores:
    """Score pairs of texts, which the client sent under these names."""
    pooling = state.pooling
    variables = template_variables(body.instruction, body.chat_template_kwargs)
    if pooling.kind != "labels":
        if variables:
            field = "chat_template_kwargs" if body.instruction is None else "instruction"
            raise RequestError(
                f"{field}: only with --score-tokens; this model compares embeddings", field
            )
        return await _similarities(state, pooling, body, texts, names)

    def prompts() -> list[list[int]]:
        made = []
        for query, document in _clipped(state, body, texts, names):
            text = state.score_template.render(query, document, variables)
            tokens = state.tokenizer.encode(text, add_special_tokens=False)
            state.check_tokens(tokens, names[1], has_answer=False)
            made.append(tokens)
        return made

    with about(names[1]):
        tokens = await asyncio.to_thread(prompts)
    found = await pooled(state, tokens, body.cache_salt, names[1])
    return Scores([pooling.probability(prompt.vector) for prompt in found], usage(found))


async def _similarities(
    state: AppState, pooling: Pooling, body: PairFields, texts: Pairs, names: tuple[str, str]
) -> Scores:
    """Compare embeddings. Each text is computed once, however many pairs it is in."""
    pooling.check_embeds()

    def encode() -> dict[str, list[int]]:
        by_text: dict[str, list[int]] = {}
        for pair in clipped_pairs:
            for text, name in zip(pair, names, strict=True):
                if text not in by_text:
                    by_text[text] = state.tokenizer.encode(text)
                    state.check_tokens(by_text[text], name, has_answer=False)
        return by_text

    with about(names[1]):
        clipped_pairs = await asyncio.to_thread(_clipped, state, body, texts, names)
        by_text = await asyncio.to_thread(encode)
    found = await pooled(state, list(by_text.values()), body.cache_salt, names[1])
    vector_of: dict[str, Any] = {}
    for text, prompt in zip(by_text, found, strict=True):
        vector_of[text] = pooling.embedding(prompt.vector)
    values = [similarity(vector_of[one], vector_of[other]) for one, other in clipped_pairs]
    return Scores(values, usage(found))


def _clipped(
    state: AppState, body: PairFields, texts: Pairs, names: tuple[str, str]
) -> list[tuple[str, str]]:
    """Return the pairs, with each text cut to the number of tokens that the request allows."""
    limits = body.max_tokens_per_query, body.max_tokens_per_doc
    made = {}
    for pair in texts:
        for text, limit, name in zip(pair, limits, names, strict=True):
            if (text, limit) not in made:
                state.check_text(text, name)
                made[text, limit] = clipped(state.tokenizer, text, limit)
    return [(made[one, limits[0]], made[other, limits[1]]) for one, other in texts]
