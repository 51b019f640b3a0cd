"""Requests of SGLang's native route /generate, and the generation requests that one becomes.

This module does not know the model. The rule: a field works, or it is accepted with the values that
change nothing, or it is refused by name. Sampling parameters that are not sent have SGLang's
defaults, not those of the model's generation_config.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from slotzero.errors import RequestError
from slotzero.server.answers import GenerationRequest
from slotzero.server.chat_messages import RequestModel
from slotzero.server.generation_requests import generation_requests
from slotzero.server.protocol import MAX_ANSWERS, MAX_STOPS, StopString, Tokens, refuse_values

NEW_TOKENS = 128  # SGLang's default
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Batch = Annotated[list[str], Field(min_length=1, fail_fast=True)]

_NOTHING: tuple[Any, ...] = (None, False, [], {})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "image_data": _NOTHING,
    "video_data": _NOTHING,
    "audio_data": _NOTHING,
    "input_embeds": _NOTHING,
    "lora_path": (None,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "token_ids_logprob": (None,),
    "custom_logit_processor": (None,),
    "session_params": _NOTHING,
    "priority": (0,),
    "background": (False,),
}
SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "custom_params": _NOTHING,
    "stop_regex": _NOTHING,
    "structural_tag": (None,),
}
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
_STRUCTURES = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar"}


class SglangSampling(RequestModel):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    # no effect with the tokenizers that are supported
    spaces_between_special_tokens: bool | None = None
    # SAMPLING_NEUTRAL
    custom_params: Any = None
    stop_regex: Any = None
    structural_tag: Any = None

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        refuse_values(self, SAMPLING_NEUTRAL)
        return self


class SglangRequest(RequestModel):
    text: str | Batch | None = None
    input_ids: Tokens | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)] | None = None
    sampling_params: SglangSampling = SglangSampling()
    rid: RequestId | Annotated[list[RequestId], Field(fail_fast=True)] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    """The first token of the prompt whose log probability is returned; -1: none."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] = 0
    return_text_in_logprobs: bool = False
    # no effect on the answer
    log_metrics: bool | None = None
    # NEUTRAL
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    token_ids_logprob: Any = None
    custom_logit_processor: Any = None
    session_params: Any = None
    priority: Any = None
    background: Any = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        refuse_values(self, NEUTRAL)
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("text: send either text or input_ids", "text")
        if self.is_batch and isinstance(self.rid, str):
            raise RequestError("rid: send one for each prompt", "rid")
        if isinstance(self.rid, list) and len(set(self.rid)) != len(self.prompts):
            raise RequestError(
                f"rid: {len(set(self.rid))} different ones for {len(self.prompts)} prompts", "rid"
            )
        return self

    @property
    def is_batch(self) -> bool:
        given = self.text if self.input_ids is None else self.input_ids
        is_list = isinstance(given, list)
        return is_list and (self.input_ids is None or isinstance(self.input_ids[0], list))

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.text if self.input_ids is None else self.input_ids
        return list(given) if self.is_batch else [given]

    @property
    def rids(self) -> list[str]:
        return [self.rid] if isinstance(self.rid, str) else list(self.rid or ())

    @property
    def n(self) -> int:
        return self.sampling_params.n or 1

    @property
    def scores_from(self) -> int | None:
        """The first token of the prompt whose log probability is wanted."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None


def sglang_requests(body: SglangRequest, prompts: Sequence[list[int]]) -> list[GenerationRequest]:
    sampling = body.sampling_params
    given: dict[str, Any] = {"max_tokens": NEW_TOKENS, **sampling.given(_SAME_NAME)}
    given |= {_NAMES[name]: value for name, value in sampling.given(_NAMES).items()}
    if sampling.stop:
        given["stop"] = sampling.stop
    if body.return_logprob:
        given["logprobs"] = body.top_logprobs_num
    if body.scores_from is not None:
        given["prompt_logprobs"] = body.top_logprobs_num
    wanted = sampling.given(_STRUCTURES)
    if len(wanted) > 1:
        raise RequestError(f"{' and '.join(wanted)}: send one of them", next(iter(wanted)))
    structure = {_STRUCTURES[name]: value for name, value in wanted.items()} or None
    names = {ours: theirs for theirs, ours in _NAMES.items()}
    names["structured_outputs"] = next(iter(wanted), "structured_outputs")
    made = generation_requests(given, prompts, [""] * len(prompts), body.n, structure, names)
    return [replace(request, shows_end=True) for request in made]
