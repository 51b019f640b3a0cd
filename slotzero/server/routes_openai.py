"""OpenAI's routes: chat completions, completions, models.

They know requests and replies; chat.py and completion.py build the two kinds of answers, and
streaming.py sends them.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from slotzero.server.answer_plan import plan_answer
from slotzero.server.app_state import AppState
from slotzero.server.chat import ChatWriter
from slotzero.server.chat_conversation import chat_conversation
from slotzero.server.completion import CompletionWriter
from slotzero.server.generation_requests import about, check_choices, completion_requests
from slotzero.server.protocol import ChatRequest, CompletionRequest
from slotzero.server.replies import ChatReply, CompletionReply, ModelCard, ModelList
from slotzero.server.stream_format import OPENAI
from slotzero.server.streaming import reply, responses, told


def openai_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions", responses=responses(ChatReply, OPENAI), response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        state.check_model(body.model)
        trusts = state.settings.trust_request_chat_template
        conversation = chat_conversation(body, trusts_templates=trusts)
        plan = await plan_answer(state, conversation)
        state.log_prompt(request.state.request_id, plan.prompt)
        writer = ChatWriter(body, state.tokenizer, plan, state.names[0])
        return await reply(state, request, plan.requests, writer, body.stream)

    @router.post("/completions", responses=responses(CompletionReply, OPENAI), response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        state.check_model(body.model)
        given = prompts_of(body)
        check_choices(body, len(given))
        for text in given:
            if isinstance(text, str):
                state.check_text(text, "prompt")
            else:
                state.check_tokens(last_of(body, text), "prompt")

        def encode() -> tuple[list[list[int]], list[str]]:
            tokens = [last_of(body, encoded(state, prompt)) for prompt in given]
            return tokens, [echo(state, prompt) if body.echo else "" for prompt in given]

        with about("prompt"):
            prompts, echoes = await asyncio.to_thread(encode)
        for prompt in prompts:
            state.check_tokens(prompt, "prompt")
        state.log_prompt(request.state.request_id, given)
        requests = completion_requests(body, prompts, echoes, state.sampling, state.tokenizer)
        writer = CompletionWriter(body, requests, state.tokenizer, state.names[0])
        return await reply(state, request, requests, writer, body.stream)

    @router.get("/models", responses=responses(ModelList), response_model=None)
    async def models() -> Response:
        cards = [card(name) for name in state.names]
        return told(ModelList(object="list", data=cards))

    @router.get("/models/{name:path}", responses=responses(ModelCard), response_model=None)
    async def model(name: str) -> Response:
        state.check_model(name)
        return told(card(name))

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=state.started_at,
            owned_by="slotzero",
            max_model_len=state.max_model_len,
        )

    return router


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts; the field holds one or a list, each as text or as a list of tokens."""
    prompt: Any = body.prompt
    is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    return list(prompt) if is_list and prompt else [prompt]


def last_of(body: CompletionRequest, tokens: list[int]) -> list[int]:
    limit = body.truncate_prompt_tokens
    return tokens if limit is None else tokens[-limit:]


def encoded(state: AppState, prompt: str | list[int]) -> list[int]:
    return state.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def echo(state: AppState, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    known = [token for token in prompt if 0 <= token < state.tokenizer.vocab_size]
    return state.tokenizer.decode(known)  # the engine refuses unknown ones
