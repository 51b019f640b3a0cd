"""Routes of Anthropic's Messages API. Their errors have Anthropic's shape (stream_format.py)."""

import asyncio

from fastapi import APIRouter, Request, Response

from slotzero.server.answer_plan import plan_answer, rendered
from slotzero.server.anthropic_request import CountRequest, MessagesRequest, messages_conversation
from slotzero.server.anthropic_writer import (
    AnthropicErrorReply,
    CountReply,
    MessageReply,
    MessageWriter,
)
from slotzero.server.app_state import AppState
from slotzero.server.generation_requests import about
from slotzero.server.stream_format import ANTHROPIC
from slotzero.server.streaming import reply, responses, told


def anthropic_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/v1/messages")

    @router.post(
        "",
        responses=responses(MessageReply, ANTHROPIC, AnthropicErrorReply),
        response_model=None,
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        state.check_model(body.model)
        plan = await plan_answer(state, messages_conversation(body))
        state.log_prompt(request.state.request_id, plan.prompt)
        writer = MessageWriter(plan, state.names[0])
        return await reply(state, request, plan.requests, writer, body.stream)

    @router.post(
        "/count_tokens",
        responses=responses(CountReply, error=AnthropicErrorReply),
        response_model=None,
    )
    async def count_tokens(body: CountRequest) -> Response:
        """Count the tokens of the prompt exactly, as the model would get it."""
        state.check_model(body.model)
        conversation = messages_conversation(body)

        def count() -> int:
            text = rendered(state, conversation)
            state.check_text(text, "messages")
            return len(state.tokenizer.encode(text, add_special_tokens=False))

        with about("messages"):
            return told(CountReply(input_tokens=await asyncio.to_thread(count)))

    return router
