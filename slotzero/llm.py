"""The offline API, compatible with vLLM's `LLM`: porting a script only takes a changed import."""

import difflib
import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slotzero.certify.start import start_engine
from slotzero.checkpoint.named_tensors import NamedTensors
from slotzero.config import DEFAULT_MODEL, EngineConfig
from slotzero.engine.engine import RunningAction
from slotzero.engine.output_text import OutputText
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import ConfigError, RequestError, StepFailedError, TokenizerMissingError
from slotzero.executor.results import RowLogprobs
from slotzero.models.pooling import Vector, similarity
from slotzero.sampling.params import POOLED, SamplingParams
from slotzero.system.interrupt import uninterrupted
from slotzero.system.progress import prompts_bar
from slotzero.text.chat_template import reserved_variable, template_message
from slotzero.text.score_template import ScoreTemplate, template_variables
from slotzero.text.tokenizer import Tokenizer
from slotzero.vectors import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    ScoringOutput,
    ScoringRequestOutput,
    pairs,
)

Prompt = str | list[int] | Mapping[str, Any]  # a dict has "prompt" or "prompt_token_ids"
Params = SamplingParams | Sequence[SamplingParams] | None
Message = Mapping[str, Any]
# Settings of vLLM that are accepted with the only supported value; any other value raises.
_ACCEPTED_VALUES = (
    ("pipeline_parallel_size", 1),
    ("trust_remote_code", False),
    ("quantization", None),
)
Conversations = Sequence[Message] | Sequence[Sequence[Message]]


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None
    """Why the grammar failed, if the answer ended with finish_reason "abort"."""
    routed_experts: np.ndarray | None = None
    """With `enable_return_routed_experts`: the experts of each token of prompt and answer but the
    last, [tokens - 1, MoE layers, top_k] int16; None for an answer that was aborted."""

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        chosen = zip(self.token_ids, self.logprobs, strict=True)
        return sum(by_id[token].logprob for token, by_id in chosen)


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    weight_version: str = "0"
    """The version of the weights that computed the last token; see `LLM.update_weights`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """By token of the prompt; None for the first one."""


@dataclass(frozen=True)
class StreamChunk:
    """A new part of one answer: final text, and tokens."""

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    error: str | None = None
    """As in `CompletionOutput`."""


@dataclass(frozen=True)
class _Job:
    """One prompt: its text, its tokens, and the parameters of each of its n answers."""

    text: str | None
    tokens: list[int]
    params: list[SamplingParams]


class _Changes:
    """The answers of one call that changed since the last `take`, whichever thread ran the step.

    Taking them costs time proportional to their number, not to the number of prompts.
    """

    def __init__(self) -> None:
        self._changed: dict[str, RequestHandle] = {}

    def add(self, answer: RequestHandle) -> None:
        self._changed[answer.request.id] = answer

    def take(self) -> list[RequestHandle]:
        changed, self._changed = self._changed, {}
        return list(changed.values())


class LLM:
    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        """Load a model; `settings` are fields of EngineConfig."""
        settings = {k: v for k, v in settings.items() if (k, v) not in _ACCEPTED_VALUES}
        unknown = sorted(set(settings) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            near = difflib.get_close_matches(unknown[0], EngineConfig.__dataclass_fields__, 2)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(
                f"LLM has no setting {unknown[0]!r}{hint}; settings are the fields of "
                "slotzero.config.EngineConfig"
            )
        config = EngineConfig(model=model, **settings)
        if config.skip_tokenizer_init and config.chat_template is not None:
            raise ConfigError("chat_template contradicts skip_tokenizer_init: drop one")
        self._score_template = ScoreTemplate(config.score_template)
        self.engine = start_engine(config)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise TokenizerMissingError(
                "this LLM has no tokenizer (skip_tokenizer_init=True): use prompt_token_ids"
            )
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default parameters of a call; see EngineConfig.generation_config."""
        return SamplingParams(**self.engine.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, and return the answers in their order. All prompts are validated first.

        An answer whose grammar fails ends with finish_reason "abort", and its `error` has the
        reason; other answers are not affected. If a step fails, the call that ran it raises the
        error, and calls of other threads with requests in it raise a StepFailedError.
        """
        return self._run(self._answer_jobs(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, using the model's chat template.

        Tools are described to the model; its calls are returned as text. With
        `continue_final_message` (and add_generation_prompt=False) the answer continues the last
        message.
        """
        prompts = self.chat_prompts(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(self._answer_jobs(prompts, sampling_params), use_tqdm)

    def chat_prompts(
        self,
        messages: Conversations,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Prompt]:
        """Render conversations as prompts; the template adds its own special tokens."""
        if isinstance(messages, str):
            raise RequestError("a conversation is a list of messages with role and content")
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        tokenizer = self.get_tokenizer()
        if tools and "tools" not in (tokenizer.tool_template or ""):
            raise RequestError("tools: this model's chat template does not support tools")
        variables = dict(chat_template_kwargs or {})
        if (reserved := reserved_variable(variables)) is not None:
            raise RequestError(f"chat_template_kwargs: {reserved!r} is set by the engine")
        prompts: list[Prompt] = []
        for conversation in conversations:
            if isinstance(conversation, str) or not all(
                isinstance(message, Mapping) for message in conversation
            ):
                raise RequestError("a conversation is a list of messages with role and content")
            if not conversation:
                raise RequestError("the conversation is empty: it needs at least one message")
            text = tokenizer.apply_chat_template(
                [template_message(i, message) for i, message in enumerate(conversation)],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **variables,
            )
            tokens = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": tokens})
        return prompts

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts in their order; see EngineConfig.pooling."""
        params, pooling = pooling_params or PoolingParams(), self.engine.pooling
        pooling.check_embeds()
        pooling.check_dimensions(params.dimensions)
        jobs = self._jobs(prompts, POOLED)
        return [
            EmbeddingRequestOutput(
                handle.request.id,
                job.text,
                job.tokens,
                EmbeddingOutput(
                    pooling.embedding(_vector(handle), params.dimensions, params.normalize).tolist()
                ),
                handle.request.num_found,
                handle.weight_version,
            )
            for job, (handle,) in zip(jobs, self._answers(jobs, use_tqdm), strict=True)
        ]

    def score(
        self,
        data_1: str | list[str],
        data_2: str | list[str],
        *,
        use_tqdm: bool = True,
        instruction: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one text (a query) with each text of a list, or two lists in pairs.

        If the engine has `score_tokens`, a score is the probability that the model answers with the
        second of them; instruction and chat_template_kwargs are variables of the score template.
        Otherwise it is the cosine similarity of the embeddings.
        """
        chosen = pairs(data_1, data_2)
        variables = template_variables(instruction, chat_template_kwargs)
        one, other = ([d] if isinstance(d, str) else list(d) for d in (data_1, data_2))
        if not all(isinstance(text, str) for text in (*one, *other)):
            raise RequestError("texts to score must be strings")
        if self.engine.pooling.kind == "labels":
            texts = [(one[i], other[j]) for i, j in chosen]
            return self._score_by_answer(texts, variables, use_tqdm)
        if variables:
            raise RequestError(
                f"{next(iter(variables))}: only with --score-tokens; this model compares embeddings"
            )
        embeddings = self.embed([*one, *other], use_tqdm)
        scores = []
        for i, j in chosen:
            a, b = embeddings[i], embeddings[len(one) + j]
            vectors = (np.array(e.outputs.embedding, np.float32) for e in (a, b))
            scores.append(
                ScoringRequestOutput(
                    b.request_id,
                    a.prompt_token_ids + b.prompt_token_ids,
                    ScoringOutput(similarity(*vectors)),
                    a.num_cached_tokens + b.num_cached_tokens,
                    b.weight_version,
                )
            )
        return scores

    def _score_by_answer(
        self, texts: Sequence[tuple[str, str]], variables: Mapping[str, Any], use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        """Score pairs by the probability that the model answers with the second score token."""
        tokenizer, pooling = self.get_tokenizer(), self.engine.pooling
        prompts = [self._score_template.render(*pair, variables) for pair in texts]
        tokens: list[Prompt] = [tokenizer.encode(p, add_special_tokens=False) for p in prompts]
        jobs = self._jobs(tokens, POOLED)
        return [
            ScoringRequestOutput(
                handle.request.id,
                job.tokens,
                ScoringOutput(pooling.probability(_vector(handle))),
                handle.request.num_found,
                handle.weight_version,
            )
            for job, (handle,) in zip(jobs, self._answers(jobs, use_tqdm), strict=True)
        ]

    def update_weights(
        self,
        weights: NamedTensors | str | Path,
        *,
        running: RunningAction = "hold",
        partial: bool = False,
        version: str | None = None,
    ) -> str:
        """Replace the model's weights in place; see `Engine.update_weights`."""
        return self.engine.update_weights(
            weights, running=running, partial=partial, version=version
        )

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> Generator[StreamChunk, None, None]:
        """Yield chunks of all answers as they arrive.

        Closing the generator early cancels the rest. If a grammar fails, the answer's last chunk
        has the `error`; if a step fails, this raises as `generate` does.
        """
        return self._stream(self._answer_jobs(prompts, sampling_params))

    def _stream(self, jobs: list[_Job]) -> Generator[StreamChunk, None, None]:
        answers: list[list[RequestHandle]] = []
        changes = _Changes()
        try:
            self._add(jobs, answers, changes)
            places = {
                answer.request.id: (i, j)
                for i, handles in enumerate(answers)
                for j, answer in enumerate(handles)
            }
            while places:
                self.engine.step()  # other threads' steps advance these answers too
                with self.engine.lock:
                    changed = changes.take()
                    kept = [answer for answer in changed if answer.error is None]
                    chunks = [_next_chunk(answer, *places[answer.request.id]) for answer in kept]
                    ended = [a.request.id for a in changed if a.finished]
                for request_id in ended:
                    del places[request_id]
                yield from chunks
                _raise_if_lost(changed)
        finally:
            self._cancel(answers)

    def _answer_jobs(self, prompts: Prompt | Sequence[Prompt], params: Params) -> list[_Job]:
        jobs = self._jobs(prompts, params)
        if any(p.pooled for job in jobs for p in job.params):
            raise RequestError("pooled: a vector is not an answer; use LLM.embed", "pooled")
        return jobs

    def _jobs(self, prompts: Prompt | Sequence[Prompt], params: Params) -> list[_Job]:
        """Validate all prompts and parameters before any request is queued."""
        if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
            given: Any = [prompts]
        else:
            given = prompts
        if not isinstance(given, Sequence):
            kind = type(given).__name__
            raise RequestError(f"prompts: must be a prompt or a list of prompts, not {kind}")
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * len(given)
        wrong = [p for p in params if not isinstance(p, SamplingParams)]
        if isinstance(params, Mapping) or wrong:
            kind = type(wrong[0] if isinstance(params, list | tuple) else params).__name__
            raise RequestError(
                f"sampling_params: must be a SamplingParams or a list of them, not {kind}"
            )
        if len(params) != len(given):
            raise RequestError(
                f"{len(given)} prompts with {len(params)} sampling parameters: pass one for all, "
                "or one per prompt"
            )
        parts = [self._encoded(i, prompt) for i, prompt in enumerate(given)]
        if self.engine.tokenizer is None and any(p.stop for p in params):
            raise TokenizerMissingError("stop strings need a tokenizer: use stop_token_ids")
        inputs = [("", tokens, p) for (_, tokens), p in zip(parts, params, strict=True)]
        jobs = []
        for i, request in enumerate(self.engine.validate_batch(inputs)):
            if isinstance(request, RequestError):
                raise RequestError(f"prompt {i}: {request}")
            by_answer = [_params_of_answer(params[i], j) for j in range(params[i].n)]
            jobs.append(_Job(parts[i][0], request.prompt_token_ids, by_answer))
        return jobs

    def _encoded(self, index: int, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """Return text and token ids of a prompt."""
        try:
            text, tokens = _parts(prompt)
            if tokens is None:
                tokens = self.get_tokenizer().encode(text or "")
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from None
        return text, tokens

    def _add(self, jobs: list[_Job], answers: list[list[RequestHandle]], changes: _Changes) -> None:
        """Queue n requests per prompt and append their handles to `answers`.

        If this fails, the caller cancels those that were added.
        """
        for job in jobs:
            answers.append([])
            for params in job.params:
                request_id = f"{next(self._ids)}"
                text = self._new_text(params)
                # Ctrl-C between these lines would leave a queued request that is not in `answers`.
                with self.engine.lock, uninterrupted():
                    answer = self.engine.add(request_id, job.tokens, params, text)
                    answers[-1].append(answer)
                    answer.listener = changes.add

    def _new_text(self, params: SamplingParams) -> OutputText | None:
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not params.detokenize:
            return None
        return OutputText(tokenizer, params, self.engine.eos_token_ids)

    def _cancel(self, answers: list[list[RequestHandle]]) -> None:
        """Cancel all unfinished answers, even if Ctrl-C is pressed again."""
        with self.engine.lock, uninterrupted():
            for answer in itertools.chain.from_iterable(answers):
                if not answer.finished:
                    self.engine.cancel(answer.request.id)

    def _run(self, jobs: list[_Job], show_progress: bool) -> list[RequestOutput]:
        answers = self._answers(jobs, show_progress)
        return [self._output(job, handles) for job, handles in zip(jobs, answers, strict=True)]

    def _answers(self, jobs: list[_Job], show_progress: bool) -> list[list[RequestHandle]]:
        """Run all requests to completion, and return the answers of each prompt."""
        answers: list[list[RequestHandle]] = []
        changes = _Changes()
        num_answers = sum(len(job.params) for job in jobs)
        try:
            self._add(jobs, answers, changes)
            num_tokens = {answer.request.id: 0 for handles in answers for answer in handles}
            with prompts_bar(show_progress and num_answers > 1, num_answers) as progress:
                while num_tokens:  # has the answers that are not finished
                    self.engine.step()  # other threads' steps advance these answers too
                    with self.engine.lock:
                        changed = changes.take()
                        now = {a.request.id: len(a.token_ids) for a in changed}
                        ended = [a.request.id for a in changed if a.finished]
                    _raise_if_lost(changed)
                    progress(len(ended), sum(n - num_tokens[i] for i, n in now.items()))
                    num_tokens.update(now)
                    for request_id in ended:
                        del num_tokens[request_id]
        finally:
            self._cancel(answers)
        return answers

    def _output(self, job: _Job, answers: list[RequestHandle]) -> RequestOutput:
        return RequestOutput(
            request_id=answers[0].request.id,
            prompt=job.text,
            prompt_token_ids=job.tokens,
            outputs=[self._completion(i, answer) for i, answer in enumerate(answers)],
            finished=all(answer.finished for answer in answers),
            num_cached_tokens=answers[0].request.num_found,
            weight_version=answers[0].weight_version,
            prompt_logprobs=self._prompt_logprobs(answers[0]),
        )

    def _completion(self, index: int, answer: RequestHandle) -> CompletionOutput:
        request = answer.request
        return CompletionOutput(
            index=index,
            text=answer.text,
            token_ids=list(answer.token_ids),
            logprobs=None
            if (wanted := request.params.logprobs) is None
            else self._by_id(answer.token_ids, answer.logprobs, wanted),
            finish_reason=answer.finish_reason,
            stop_reason=request.stop_reason,
            error=answer.failure or None,
            routed_experts=answer.routed_experts,
        )

    def _prompt_logprobs(self, answer: RequestHandle) -> list[dict[int, Logprob] | None] | None:
        request = answer.request
        if (wanted := request.params.prompt_logprobs) is None:
            return None
        # a request that ended early has not all of them
        tokens = request.prompt_token_ids[1 : 1 + len(answer.prompt_logprobs)]
        return [None, *self._by_id(tokens, answer.prompt_logprobs, wanted)]

    def _by_id(
        self, tokens: Sequence[int], rows: Sequence[RowLogprobs], wanted: int
    ) -> list[dict[int, Logprob]]:
        """Return for each token its log probability, and those of the most likely tokens."""
        logprobs = []
        for token, row in zip(tokens, rows, strict=True):
            top = list(zip(row.top_ids, row.top_values, strict=True))[:wanted]
            ranks = {t: rank for rank, (t, _) in enumerate(top, start=1)}
            by_id = {token: Logprob(row.chosen, ranks.get(token), self._text_of(token))}
            for t, value in top:
                by_id.setdefault(t, Logprob(value, ranks[t], self._text_of(t)))
            logprobs.append(by_id)
        return logprobs

    def _text_of(self, token: int) -> str | None:
        if self.engine.tokenizer is None:
            return None
        return self.engine.tokenizer.decode([token], skip_special_tokens=False)


def _vector(handle: RequestHandle) -> Vector:
    if handle.vector is None:
        raise StepFailedError("a weight update has aborted this request: send it again")
    return handle.vector


def _next_chunk(answer: RequestHandle, prompt_index: int, index: int) -> StreamChunk:
    tokens, _ = answer.take()
    text = answer.output_text.take() if answer.output_text is not None else ""
    error = answer.failure or None
    return StreamChunk(prompt_index, index, text, tokens, answer.finish_reason, error)


def _raise_if_lost(answers: Sequence[RequestHandle]) -> None:
    for answer in answers:
        if (error := answer.error) is not None:
            raise StepFailedError(
                "a step that another call ran has failed, with requests of this call in it: "
                f"{type(error).__name__}: {error}"
            ) from error


def _params_of_answer(params: SamplingParams, i: int) -> SamplingParams:
    """Return the parameters of answer i. A seed becomes seed + i, in 64 bits; only answer 0 scores
    the prompt."""
    if i:
        params = replace(params, prompt_logprobs=None)
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + i + 2**63) % 2**64 - 2**63)


def _is_token_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _parts(prompt: object) -> tuple[str | None, Sequence[int] | None]:
    """Return text and token ids of a prompt; one of them may be missing."""
    if isinstance(prompt, str):
        return prompt, None
    if _is_token_ids(prompt):
        return None, prompt  # type: ignore[return-value]
    if not isinstance(prompt, Mapping):
        kind = type(prompt).__name__
        raise RequestError(f"a prompt must be a string, token ids or a dict, not {kind}")
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
    if unknown:
        raise RequestError(f"{unknown[0]!r} is not supported in a prompt")
    if prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None:
        raise RequestError("'prompt' or 'prompt_token_ids' is missing")
    if not isinstance(prompt.get("prompt") or "", str):
        raise RequestError(f"'prompt' must be a string, not {type(prompt['prompt']).__name__}")
    return prompt.get("prompt"), prompt.get("prompt_token_ids")
