"""From the texts of a request for vectors to tokens. Nothing here runs.

The rule: an input that is too long is refused, or cut if the request says so; special tokens that
the tokenizer puts around a text are kept.
"""

from collections.abc import Sequence
from typing import Any

from slotzero.errors import RequestError
from slotzero.server.app_state import AppState
from slotzero.server.vector_requests import MAX_INPUTS, EmbeddingRequest
from slotzero.text.tokenizer import Tokenizer


def listed(texts: str | Sequence[str], param: str) -> list[str]:
    """Return one text or several as a list, of which none is empty."""
    made = [texts] if isinstance(texts, str) else list(texts)
    _check_items(made, param, is_list=not isinstance(texts, str))
    return made


def embedding_inputs(state: AppState, body: EmbeddingRequest) -> list[list[int]]:
    """Return the tokens of each input."""
    given: Any = body.input
    is_list = isinstance(given, list) and not (given and isinstance(given[0], int))
    inputs = given if is_list else [given]
    _check_items(inputs, "input", is_list)
    limit, side = body.truncate_prompt_tokens, body.truncation_side or "right"
    if limit is None and body.truncation_side is not None:
        raise RequestError(
            "truncation_side: allowed only with truncate_prompt_tokens", "truncation_side"
        )
    if limit == -1:
        limit = state.max_model_len
    made = []
    for i, one in enumerate(inputs):
        name = f"input[{i}]" if is_list else "input"
        if isinstance(one, str):
            state.check_text(one, name)
            tokens = encoded(state.tokenizer, one, body.add_special_tokens, limit, side)
        else:
            tokens = cut(one, limit, side)
        state.check_tokens(tokens, name, has_answer=False)
        made.append(tokens)
    return made


def encoded(
    tokenizer: Tokenizer, text: str, has_special_tokens: bool, limit: int | None, side: str
) -> list[int]:
    """Encode a text into at most `limit` tokens, including the special ones around it."""
    tokens = tokenizer.encode(text, add_special_tokens=has_special_tokens)
    if limit is None or len(tokens) <= limit:
        return tokens
    plain = tokenizer.encode(text, add_special_tokens=False)
    num_around = len(tokens) - len(plain)
    for first in range(num_around + 1):
        if tokens[first : first + len(plain)] == plain:
            before, after = tokens[:first], tokens[first + len(plain) :]
            return [*before, *cut(plain, max(0, limit - num_around), side), *after]
    return cut(tokens, limit, side)


def cut(tokens: list[int], limit: int | None, side: str) -> list[int]:
    """Keep at most `limit` tokens: the first ones, or if the left side is cut, the last ones."""
    if limit is None or len(tokens) <= limit:
        return tokens
    return tokens[:limit] if side == "right" else tokens[len(tokens) - limit :]


def clipped(tokenizer: Tokenizer, text: str, limit: int) -> str:
    """Return the beginning of a text, at most `limit` tokens; 0: all of it."""
    if not limit:
        return text
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return text if len(tokens) <= limit else tokenizer.decode(tokens[:limit])


def _check_items(items: Sequence[str | list[int]], param: str, is_list: bool) -> None:
    if not items:
        raise RequestError(f"{param}: the list is empty; give at least one", param)
    if len(items) > MAX_INPUTS:
        raise RequestError(f"{param}: {len(items)} items, at most {MAX_INPUTS}", param)
    for i, item in enumerate(items):
        if not item:
            name = f"{param}[{i}]" if is_list else param
            raise RequestError(f"{name}: is empty", name)
