"""From a request to the answers it wants: prompts as tokens, parameters as the engine knows them.

It does not run anything. The rule: whatever can be refused before the engine sees it is refused
here, under the name that the client gave it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slotzero.errors import RequestError
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.structured import StructuredOutputs, structure_error, structured_outputs
from slotzero.server.answers import Ask
from slotzero.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    ResponseFormat,
    Structure,
)
from slotzero.server.status import FieldError

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


def chat_asks(
    body: ChatRequest,
    prompt: list[int],
    schema: dict[str, Any] | None,
    has_tools: bool,
    sampling: Mapping[str, Any],
) -> list[Ask]:
    """`schema`: what the answer must be because tool_choice forces a call. `sampling`: what the
    model would have of fields that are left out."""
    given = {**sampling, **_given(body)}
    limits = (body.max_completion_tokens, body.max_tokens)
    given["max_tokens"] = next((limit for limit in limits if limit is not None), None)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    if has_tools:
        given["skip_special_tokens"] = False  # a model may mark its calls with special tokens
    name, structure = _structure(body)
    if has_tools and structure is not None:
        raise FieldError(name, f"{name}: not with tools, or with tool_choice=none")
    if schema is not None:
        name, structure = "tools", {"json_schema": schema}
    names = {"prompt": "messages", "logprobs": "top_logprobs", "structured_outputs": name}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return _asks(body, [prompt], [""], given, structure, names)


def completion_asks(
    body: CompletionRequest,
    prompts: Sequence[list[int]],
    echoes: Sequence[str],
    sampling: Mapping[str, Any],
) -> list[Ask]:
    given = {**sampling, **_given(body)}
    given["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    name, structure = _structure(body)
    return _asks(body, prompts, echoes, given, structure, {"structured_outputs": name})


def check_choices(body: Generation, num_prompts: int) -> None:
    """Before any of them is tokenised."""
    if num_prompts * (body.n or 1) > MAX_CHOICES:
        raise FieldError(
            "prompt", f"prompt: {num_prompts} prompts: with n answers each, at most {MAX_CHOICES}"
        )


def _given(body: Generation) -> dict[str, Any]:
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
    return given


def _structure(body: Generation) -> tuple[str, dict[str, Any] | None]:
    """-> the field that asks for a structure, and the structure"""
    asked = [name for name in _WAYS if getattr(body, name) is not None]
    if len(asked) > 1:
        raise FieldError(asked[1], f"{asked[1]}: {asked[0]} says already what the answer must be")
    if not asked:
        return "response_format", None
    (name,) = asked
    wanted = getattr(body, name)
    if isinstance(wanted, ResponseFormat):
        return name, _response_format(wanted)
    if isinstance(wanted, Structure):
        return _structured_outputs(wanted)
    return name, _shape(name, name.removeprefix("guided_"), wanted)


def _structured_outputs(wanted: Structure) -> tuple[str, dict[str, Any]]:
    kinds = {
        "json": wanted.json_,
        "json_object": wanted.json_object or None,
        "regex": wanted.regex,
        "choice": wanted.choice,
    }
    given = [kind for kind, value in kinds.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise FieldError(
            "structured_outputs",
            f"structured_outputs: give one of {', '.join(kinds)}, got {got}",
        )
    (kind,) = given
    name = f"structured_outputs.{kind}"
    return name, _shape(name, kind, kinds[kind])


def _shape(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"json_schema": _schema(name, value)} if kind == "json" else {kind: value}


def _response_format(wanted: ResponseFormat) -> dict[str, Any] | None:
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise FieldError(
            "response_format.json_schema",
            "response_format.json_schema: given if and only if type is json_schema",
        )
    if wanted.json_schema is not None:
        if wanted.json_schema.schema_ is None:
            where = "response_format.json_schema.schema"
            raise FieldError(where, f"{where}: missing")
        return {"json_schema": wanted.json_schema.schema_}
    return {"json_object": True} if wanted.type == "json_object" else None


def _schema(name: str, given: dict[str, Any] | str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise FieldError(name, f"{name}: is text, but not JSON") from None


def _asks(
    body: Generation,
    prompts: Sequence[list[int]],
    echoes: Sequence[str],
    given: dict[str, Any],
    structure: dict[str, Any] | None,
    names: dict[str, str],
) -> list[Ask]:
    n = body.n or 1
    engine_params = given if structure is None else given | {"structured_outputs": structure}
    try:
        params = SamplingParams(**engine_params, stop=body.stop or ())
        _check_structure(structured_outputs(params.structured_outputs))
    except RequestError as error:
        raise error.renamed(names) from None
    return [
        Ask(
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


def _check_structure(asked: StructuredOutputs | None) -> None:
    if asked is not None and len(asked.text) > MAX_STRUCTURE_LEN:
        raise structure_error(f"{len(asked.text)} characters, at most {MAX_STRUCTURE_LEN}")


@contextmanager
def about(param: str) -> Iterator[None]:
    """Whatever the tokenizer or the template refuse is this field's fault."""
    try:
        yield
    except FieldError:
        raise
    except RequestError as error:
        raise FieldError(param, str(error)) from None


def _seed(seed: int | None, i: int) -> dict[str, int]:
    """Answer i of a seeded request has seed + i, in 64 bits: the same as LLM.generate."""
    return {} if seed is None else {"seed": (seed + i + 2**63) % 2**64 - 2**63}
