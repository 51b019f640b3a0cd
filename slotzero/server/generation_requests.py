"""From an HTTP request to generation requests: prompts as tokens, and the engine's parameters.

This module runs nothing. The rule: whatever can be refused before the engine sees it is refused
here, under the client's name of the field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from slotzero.errors import RequestError
from slotzero.formats.lark import MAX_GRAMMAR_LEN
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.structured import StructuredOutputs, structure_error, structured_outputs
from slotzero.server.answers import GenerationRequest
from slotzero.server.conversation import Structure
from slotzero.server.protocol import (
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
    StructureFields,
)
from slotzero.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16  # OpenAI's default
MAX_CHOICES = 1024
_NEVER = -1e9  # added to the logit of a token that must not be chosen
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
    "priority",
    "prompt_logprobs",
)
_WAYS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def completion_requests(
    body: CompletionRequest,
    prompts: Sequence[list[int]],
    echoes: Sequence[str],
    sampling: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> list[GenerationRequest]:
    given = {**sampling, **sampling_of(body)}
    given["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    wanted = structure_of(body)
    is_answered = body.max_tokens != 0 or not body.echo
    if not is_answered:
        given |= {"max_tokens": 1, "min_tokens": 0}  # the engine always generates
        wanted = None
    is_scored = bool(body.echo) and body.logprobs is not None
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if is_scored:
            given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    given |= without_words(given, body.bad_words or (), tokenizer)
    structure = None if wanted is None else dict(wanted.params)
    names = {} if wanted is None else {"structured_outputs": wanted.field}
    requests = generation_requests(
        given, prompts, echoes, body.n or 1, structure, names, answers_per_score(body)
    )
    shows_end = is_scored or bool(body.return_token_ids)
    return [replace(request, is_answered=is_answered, shows_end=shows_end) for request in requests]


def answers_per_score(body: CompletionRequest) -> int:
    """Return how many answers share the log probabilities of their prompt. A streamed answer has
    its own, because it waits for no other."""
    return 1 if body.stream else body.n or 1


def check_choices(body: GenerationFields, num_prompts: int) -> None:
    """Refuse too many choices before any prompt is tokenised."""
    if num_prompts * (body.n or 1) > MAX_CHOICES:
        raise RequestError(
            f"prompt: {num_prompts} prompts with n={body.n or 1} answers each are more than "
            f"{MAX_CHOICES} choices",
            "prompt",
        )


def sampling_of(body: GenerationFields) -> dict[str, Any]:
    """Return the sampling parameters that a request sets."""
    given = body.given(_SAME_NAME)
    if body.logit_bias:
        given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
    if body.stop:
        given["stop"] = body.stop
    return given


def without_words(
    given: Mapping[str, Any], words: Sequence[str], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the parameters that keep these words out of an answer, also after a space.

    A bias is enough for words of one token; banned sequences cost more, as a step cannot be planned
    before the token of the last one is known.
    """
    if not all(words):
        raise RequestError("bad_words: must not contain an empty string", "bad_words")
    texts = [text for word in words for text in (word, f" {word}")]
    banned = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    bias = {tokens[0]: _NEVER for tokens in banned if len(tokens) == 1}
    sequences = [tokens for tokens in banned if len(tokens) > 1]
    made: dict[str, Any] = {"banned_sequences": sequences} if sequences else {}
    return made | ({"logit_bias": {**given.get("logit_bias", {}), **bias}} if bias else {})


def structure_of(body: GenerationFields) -> Structure | None:
    """Return the structure that the answer must have."""
    fields = [name for name in _WAYS if getattr(body, name) is not None]
    if len(fields) > 1:
        raise RequestError(f"{fields[1]}: not supported together with {fields[0]}", fields[1])
    if not fields:
        return None
    (name,) = fields
    value = getattr(body, name)
    if isinstance(value, ResponseFormat):
        params = _response_format(value)
        return None if params is None else Structure(name, params)
    if isinstance(value, StructureFields):
        return _structured_outputs(value)
    return Structure(name, _shape(name, name.removeprefix("guided_"), value))


def _structured_outputs(structure: StructureFields) -> Structure:
    kinds = {
        "json": structure.json_,
        "json_object": structure.json_object or None,
        "regex": structure.regex,
        "choice": structure.choice,
        "grammar": structure.grammar,
    }
    chosen = [kind for kind, value in kinds.items() if value is not None]
    if len(chosen) != 1:
        got = " and ".join(chosen) or "none"
        raise RequestError(
            f"structured_outputs: give one of {', '.join(kinds)}, got {got}", "structured_outputs"
        )
    (kind,) = chosen
    name = f"structured_outputs.{kind}"
    return Structure(name, _shape(name, kind, kinds[kind]))


def _shape(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"json_schema": _schema(name, value)} if kind == "json" else {kind: value}


def _response_format(form: ResponseFormat) -> dict[str, Any] | None:
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise RequestError(
            "response_format.json_schema: required with type json_schema, and only then",
            "response_format.json_schema",
        )
    if form.json_schema is not None:
        if form.json_schema.schema_ is None:
            where = "response_format.json_schema.schema"
            raise RequestError(f"{where}: missing", where)
        return {"json_schema": form.json_schema.schema_}
    return {"json_object": True} if form.type == "json_object" else None


def _schema(name: str, schema: dict[str, Any] | str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise RequestError(f"{name}: the string is not valid JSON", name) from None


def generation_requests(
    given: Mapping[str, Any],
    prompts: Sequence[list[int]],
    echoes: Sequence[str],
    n: int,
    structure: dict[str, Any] | None,
    names: Mapping[str, str],
    num_sharing: int | None = None,
) -> list[GenerationRequest]:
    """Return n requests for each prompt. `given`: fields of SamplingParams. `num_sharing`: answers
    that share the log probabilities of their prompt; None: all n."""
    names = {"banned_sequences": "bad_words", **names}
    engine_params = {name: value for name, value in given.items() if name != "stop"}
    if structure is not None:
        engine_params["structured_outputs"] = structure
    try:
        params = SamplingParams(**engine_params, stop=given.get("stop") or ())
        _check_structure(structured_outputs(params.structured_outputs))
    except RequestError as error:
        raise error.renamed(names) from None
    unscored = {**engine_params, "prompt_logprobs": None}
    return [
        GenerationRequest(
            index=i * n + j,
            prompt=prompt,
            params=params,
            engine_params=(unscored if j % (num_sharing or n) else engine_params)
            | _seed(given.get("seed"), j),
            names=names,
            is_counted=j == 0,
            echo=echo,
        )
        for i, (prompt, echo) in enumerate(zip(prompts, echoes, strict=True))
        for j in range(n)
    ]


def _check_structure(structure: StructuredOutputs | None) -> None:
    if structure is not None and len(structure.text) > MAX_GRAMMAR_LEN:
        raise structure_error(f"{len(structure.text)} characters, at most {MAX_GRAMMAR_LEN}")


@contextmanager
def about(param: str) -> Iterator[None]:
    """Attribute errors without a field (of the tokenizer, the chat template) to this one."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            raise
        raise RequestError(str(error), param) from None


def _seed(seed: int | None, i: int) -> dict[str, int]:
    """Return the seed of answer i: seed + i in 64 bits, as in LLM.generate."""
    return {} if seed is None else {"seed": (seed + i + 2**63) % 2**64 - 2**63}
