"""The offline front door, shaped like vLLM's `LLM`: a script ports by changing its import."""

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slotzero.config import DEFAULT_MODEL, EngineConfig
from slotzero.engine import Answer, Engine
from slotzero.errors import ConfigError, RequestError, TokenizerMissingError
from slotzero.progress import prompts_bar
from slotzero.sampling.params import SamplingParams
from slotzero.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": [...]}
Params = SamplingParams | Sequence[SamplingParams] | None
Message = Mapping[str, Any]
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


@dataclass(frozen=True)
class StreamChunk:
    """What one answer gained: text that is final, and the tokens behind it."""

    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True)
class _Job:
    """One prompt: its text, its tokens, and what is asked of it."""

    text: str | None
    tokens: list[int]
    params: SamplingParams


class _Streamed:
    """An answer and how much of it was handed out."""

    def __init__(self, answer: Answer, prompt_index: int, index: int) -> None:
        self.answer = answer
        self._place = (prompt_index, index)
        self._num_characters = 0
        self._num_tokens = 0
        self.is_over = False

    @property
    def has_grown(self) -> bool:
        return len(self.answer.token_ids) > self._num_tokens or self.answer.finished

    def next_chunk(self) -> StreamChunk:
        answer = self.answer
        safe = answer.transcript.num_safe if answer.transcript else 0
        text = answer.text[self._num_characters : safe]
        tokens = answer.token_ids[self._num_tokens :]
        self._num_characters += len(text)
        self._num_tokens += len(tokens)
        self.is_over = answer.finished
        return StreamChunk(*self._place, text, tokens, answer.finish_reason)


class LLM:
    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        """`settings` are the fields of EngineConfig; an unknown one is refused by name."""
        unknown = sorted(set(settings) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ConfigError(f"LLM has no setting {unknown[0]!r}; it has: {known}")
        self.engine = Engine(EngineConfig(model=model, **settings))
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise TokenizerMissingError(
                "this LLM has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids"
            )
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts. Nothing runs unless every prompt is valid."""
        return self._run(self._jobs(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Conversations,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """One conversation, or a list of them, through the model's chat template."""
        prompts = self.chat_prompts(messages, add_generation_prompt=add_generation_prompt)
        return self._run(self._jobs(prompts, sampling_params), use_tqdm)

    def chat_prompts(
        self, messages: Conversations, *, add_generation_prompt: bool = True
    ) -> list[Prompt]:
        """Conversations as prompts; the template brings its own special tokens."""
        if not messages:
            raise RequestError("the conversation is empty: give at least one message")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation, add_generation_prompt=add_generation_prompt
            )
            tokens = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": tokens})
        return prompts

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> Generator[StreamChunk, None, None]:
        """Chunks of all answers as they come; closing it early cancels the rest."""
        return self._stream(self._jobs(prompts, sampling_params))

    def _stream(self, jobs: list[_Job]) -> Generator[StreamChunk, None, None]:
        answers = [
            _Streamed(answer, i, j)
            for i, siblings in enumerate(self._add(jobs))
            for j, answer in enumerate(siblings)
        ]
        try:
            while answers:
                self.engine.step()  # others may be in it, and others may step for us
                yield from [s.next_chunk() for s in answers if s.has_grown]
                answers = [s for s in answers if not s.is_over]
        finally:
            for streamed in answers:
                self.engine.cancel(streamed.answer.request.id)

    def _jobs(self, prompts: Prompt | Sequence[Prompt], params: Params) -> list[_Job]:
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts with {len(params)} sampling parameters")
        return [
            self._job(i, prompt, p)
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]

    def _job(self, index: int, prompt: Prompt, params: SamplingParams) -> _Job:
        try:
            text = prompt if isinstance(prompt, str) else prompt.get("prompt")
            tokens = None if isinstance(prompt, str) else prompt.get("prompt_token_ids")
            if tokens is None:
                if text is None:
                    raise RequestError("give 'prompt' or 'prompt_token_ids'")
                tokens = self.get_tokenizer().encode(text)
            self.engine.validate("", tokens, params)
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from None
        return _Job(text, list(tokens), params)

    def _add(self, jobs: list[_Job]) -> list[list[Answer]]:
        """n answers to each prompt; answer i of a seeded request has seed + i."""
        return [
            [
                self.engine.add(f"{next(self._ids)}", job.tokens, _sibling(job.params, i))
                for i in range(job.params.n)
            ]
            for job in jobs
        ]

    def _run(self, jobs: list[_Job], show_progress: bool) -> list[RequestOutput]:
        answers = self._add(jobs)
        try:
            with prompts_bar(show_progress and len(jobs) > 1, len(jobs)) as progress:
                while self.engine.has_work:
                    grown = self.engine.step()
                    progress(sum(answer.finished for answer in grown), len(grown))
        finally:
            for answer in itertools.chain.from_iterable(answers):
                self.engine.cancel(answer.request.id)  # only what an interrupt left behind
        return [self._output(job, siblings) for job, siblings in zip(jobs, answers, strict=True)]

    def _output(self, job: _Job, siblings: list[Answer]) -> RequestOutput:
        return RequestOutput(
            request_id=siblings[0].request.id,
            prompt=job.text,
            prompt_token_ids=job.tokens,
            outputs=[self._completion(i, answer) for i, answer in enumerate(siblings)],
            finished=all(answer.finished for answer in siblings),
            num_cached_tokens=siblings[0].request.num_cached,
        )

    def _completion(self, index: int, answer: Answer) -> CompletionOutput:
        request = answer.request
        return CompletionOutput(
            index=index,
            text=answer.text,
            token_ids=list(answer.token_ids),
            logprobs=None if request.params.logprobs is None else self._logprobs(answer),
            finish_reason=answer.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _logprobs(self, answer: Answer) -> list[dict[int, Logprob]]:
        wanted = answer.request.params.logprobs or 0
        rows = []
        for token, row in zip(answer.token_ids, answer.logprobs, strict=True):
            top = list(zip(row.top_ids, row.top_values, strict=True))[:wanted]
            ranks = {t: rank for rank, (t, _) in enumerate(top, start=1)}
            by_id = {token: Logprob(row.chosen, ranks.get(token), self._text_of(token))}
            for t, value in top:
                by_id.setdefault(t, Logprob(value, ranks[t], self._text_of(t)))
            rows.append(by_id)
        return rows

    def _text_of(self, token: int) -> str | None:
        if self.engine.tokenizer is None:
            return None
        return self.engine.tokenizer.decode([token], skip_special_tokens=False)


def _sibling(params: SamplingParams, i: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=params.seed + i)
