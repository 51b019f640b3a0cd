"""Chat completions: answers as messages with reasoning and tool calls, whole or streamed."""

from collections.abc import Iterator

from slotzero.formats.events import Called, Event, Said, Thought
from slotzero.server.answer import Answer, num_reasoning_tokens
from slotzero.server.answer_plan import AnswerPlan
from slotzero.server.answers import TextDelta
from slotzero.server.generation import Generation
from slotzero.server.logprobs import LogprobShapes
from slotzero.server.protocol import ChatRequest
from slotzero.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatReply,
    Delta,
    EncodedExperts,
    FunctionCall,
    ToolCallReply,
    Usage,
    head,
)
from slotzero.server.stream_format import OPENAI, WireFormat
from slotzero.server.usage import StreamUsage, usage
from slotzero.text.tokenizer import Tokenizer


class _ChatChoice(Answer):
    """One answer, and how much of it was sent."""

    has_begun = False
    num_rows_sent = 0
    num_tokens_sent = 0


class ChatWriter:
    shape: WireFormat = OPENAI

    def __init__(
        self, body: ChatRequest, tokenizer: Tokenizer, plan: AnswerPlan, model: str
    ) -> None:
        """`model`: the name in replies, whichever of the model's names the request used."""
        self._shapes = LogprobShapes(tokenizer, body.return_tokens_as_token_ids)
        self._num_top = body.top_logprobs or 0
        self._has_logprobs = bool(body.logprobs)
        self._num_prompt_top = body.prompt_logprobs
        self._shows_reasoning = body.include_reasoning
        self._shows_tokens = bool(body.return_token_ids)
        self._prompt = plan.requests[0].prompt
        self._has_reasoning = plan.has_reasoning
        self._choices = [_ChatChoice(plan.form) for _ in plan.requests]
        self._usage = StreamUsage(body.stream_options)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = head("chatcmpl", kind, model, body.request_id)

    def add(self, delta: TextDelta) -> None:
        self._choices[delta.index].take(delta)

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[bytes]:
        choice = self._choices[delta.index]
        if choice.finish_reason is not None:
            return
        for message, reason in self._messages(choice, delta):
            chunk = self._chunk(delta.index, message, reason)
            if reason is not None and delta.weight_version:
                chunk.choices[0].weight_version = delta.weight_version
            self._usage.put(chunk, generation.answers)
            yield self.shape.event(chunk.json_bytes())

    def _messages(
        self, choice: _ChatChoice, delta: TextDelta
    ) -> Iterator[tuple[Delta, str | None]]:
        if not choice.has_begun:
            choice.has_begun = True
            yield Delta(role="assistant", content="", refusal=None), None
        self._usage.count(delta)
        for event in choice.take(delta):
            if not isinstance(event, Thought) or self._shows_reasoning:
                yield _message_of(event), None
        if choice.finish_reason is not None:
            yield Delta(), choice.finish_reason

    def is_enough(self, index: int) -> bool:
        return self._choices[index].finish_reason is not None

    def last_chunks(self, generation: Generation) -> Iterator[bytes]:
        if self._usage.has_last:
            chunk = ChatChunk(choices=[], usage=self._counts(generation), **self._head)
            yield self.shape.event(chunk.json_bytes())

    def whole(self, generation: Generation) -> ChatReply:
        choices = [self._whole_choice(i, choice) for i, choice in enumerate(self._choices)]
        for choice, answer in zip(choices, generation.answers, strict=True):
            if answer.weight_version:
                choice.weight_version = answer.weight_version
            if (experts := answer.routed_experts) is not None:
                choice.routed_experts = EncodedExperts.of(experts)
        made = ChatReply(choices=choices, usage=self._counts(generation), **self._head)
        if self._shows_tokens:
            made.prompt_token_ids = self._prompt
        if self._num_prompt_top is not None:
            scores = generation.answers[0].prompt_logprobs
            made.prompt_logprobs = self._shapes.of_prompt(
                self._prompt, scores, self._num_prompt_top
            )
        return made

    def _counts(self, generation: Generation) -> Usage:
        if not self._has_reasoning:
            return usage(generation.answers)
        return usage(generation.answers, num_reasoning_tokens(self._choices, generation.answers))

    def _chunk(self, index: int, delta: Delta, finish_reason: str | None) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=None, finish_reason=finish_reason
        )
        state = self._choices[index]
        rows = state.rows[state.num_rows_sent :]
        if self._has_logprobs and rows:
            choice.logprobs = self._shapes.of_chat(rows, self._num_top)
            state.num_rows_sent += len(rows)
        if self._shows_tokens:
            choice.token_ids = state.token_ids[state.num_tokens_sent :]
            if not state.num_tokens_sent and not choice.token_ids:
                choice.prompt_token_ids = self._prompt
            state.num_tokens_sent = len(state.token_ids)
        return ChatChunk(choices=[choice], **self._head)

    def _whole_choice(self, index: int, choice: _ChatChoice) -> ChatChoice:
        message = Delta(role="assistant", content=choice.text, refusal=None)
        if choice.reasoning and self._shows_reasoning:
            message.reasoning_content = message.reasoning = choice.reasoning
        if choice.calls:
            message.content = choice.text or None
            message.tool_calls = [
                ToolCallReply(
                    id=call.id,
                    type="function",
                    function=FunctionCall(name=call.name, arguments=call.arguments),
                )
                for call in choice.calls
            ]
        logprobs = None
        if self._has_logprobs:
            logprobs = self._shapes.of_chat(choice.rows, self._num_top)
        assert choice.finish_reason is not None
        made = ChatChoice(
            index=index, message=message, logprobs=logprobs, finish_reason=choice.finish_reason
        )
        if self._shows_tokens:
            made.token_ids, made.prompt_token_ids = choice.token_ids, self._prompt
        return made


def _message_of(event: Event) -> Delta:
    if isinstance(event, Said):
        return Delta(content=event.text)
    if isinstance(event, Thought):
        return Delta(reasoning_content=event.text, reasoning=event.text)
    if isinstance(event, Called):
        function = FunctionCall(name=event.name, arguments="")
        call = ToolCallReply(index=event.index, id=event.id, type="function", function=function)
    else:
        call = ToolCallReply(index=event.index, function=FunctionCall(arguments=event.text))
    return Delta(tool_calls=[call])
