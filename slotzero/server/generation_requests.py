"""From an HTTP request to generation requests: prompts as tokens, and the engine's parameters.

This module runs nothing. The rule: whatever can be refused before the engine sees it is refused
here, under the client's name of the field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slotzero.errors import RequestError
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.structured import StructuredOutputs, structure_error, structured_outputs
from slotzero.server.answers import GenerationRequest
from slotzero.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
    Structure,
)

COMPLETION_TOKENS = 16  # OpenAI's default
MAX_CHOICES = 1024
MAX_STRUCTURE_LEN = 100_000  # characters
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
)
_WAYS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")


def chat_requests(
    body: ChatRequest,
    prompt: list[int],
    schema: dict[str, Any] | None,
    has_tools: bool,
    sampling: Mapping[str, Any],
) -> list[GenerationRequest]:
    """Return one request per answer to a chat request.

    `schema`: JSON schema of the answer if tool_choice forces a call. `sampling`: the model's
    default sampling parameters.
    """
    given = {**sampling, **_given(body)}
    limits = (body.max_completion_tokens, body.max_tokens)
    given["max_tokens"] = next((limit for limit in limits if limit is not None), None)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    if has_tools:
        given["skip_special_tokens"] = False  # a model may mark its calls with special tokens
    name, structure = _structure(body)
    if has_tools and structure is not None:
        raise RequestError(
            f"{name}: not supported together with tools; send tool_choice=none or no tools", name
        )
    if schema is not None:
        name, structure = "tools", {"json_schema": schema}
    names = {"prompt": "messages", "logprobs": "top_logprobs", "structured_outputs": name}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return _requests(body, [prompt], [""], given, structure, names)


def completion_requests(
    body: CompletionRequest,
    prompts: Sequence[list[int]],
    echoes: Sequence[str],
    sampling: Mapping[str, Any],
) -> list[GenerationRequest]:
    given = {**sampling, **_given(body)}
    given["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    name, structure = _structure(body)
    return _requests(body, prompts, echoes, given, structure, {"structured_outputs": name})


def check_choices(body: GenerationFields, num_prompts: int) -> None:
    """Refuse too many choices before any prompt is tokenised."""
    if num_prompts * (body.n or 1) > MAX_CHOICES:
        raise RequestError(
            f"prompt: {num_prompts} prompts with n={body.n or 1} answers each are more than "
            f"{MAX_CHOICES} choices",
            "prompt",
        )


def _given(body: GenerationFields) -> dict[str, Any]:
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
    return given


def _structure(body: GenerationFields) -> tuple[str, dict[str, Any] | None]:
    """Return the field that asks for a structured output, and the structure."""
    fields = [name for name in _WAYS if getattr(body, name) is not None]
    if len(fields) > 1:
        raise RequestError(f"{fields[1]}: not supported together with {fields[0]}", fields[1])
    if not fields:
        return "response_format", None
    (name,) = fields
    value = getattr(body, name)
    if isinstance(value, ResponseFormat):
        return name, _response_format(value)
    if isinstance(value, Structure):
        return _structured_outputs(value)
    return name, _shape(name, name.removeprefix("guided_"), value)


def _structured_outputs(structure: Structure) -> tuple[str, dict[str, Any]]:
    kinds = {
        "json": structure.json_,
        "json_object": structure.json_object or None,
        "regex": structure.regex,
        "choice": structure.choice,
    }
    chosen = [kind for kind, value in kinds.items() if value is not None]
    if len(chosen) != 1:
        got = " and ".join(chosen) or "none"
        raise RequestError(
            f"structured_outputs: give one of {', '.join(kinds)}, got {got}", "structured_outputs"
        )
    (kind,) = chosen
    name = f"structured_outputs.{kind}"
    return name, _shape(name, kind, kinds[kind])


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


def _requests(
    body: GenerationFields,
    prompts: Sequence[list[int]],
    echoes: Sequence[str],
    given: dict[str, Any],
    structure: dict[str, Any] | None,
    names: dict[str, str],
) -> list[GenerationRequest]:
    n = body.n or 1
    engine_params = given if structure is None else given | {"structured_outputs": structure}
    try:
        params = SamplingParams(**engine_params, stop=body.stop or ())
        _check_structure(structured_outputs(params.structured_outputs))
    except RequestError as error:
        raise error.renamed(names) from None
    return [
        GenerationRequest(
            index=i * n + j,
            prompt=prompt,
            params=params,
            engine_params=engine_params | _seed(body.seed, j),
            names=names,
            is_counted=j == 0,
            echo=echo,
        )
        for i, (prompt, echo) in enumerate(zip(prompts, echoes, strict=True))
        for j in range(n)
    ]


def _check_structure(structure: StructuredOutputs | None) -> None:
    if structure is not None and len(structure.text) > MAX_STRUCTURE_LEN:
        raise structure_error(f"{len(structure.text)} characters, at most {MAX_STRUCTURE_LEN}")


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
