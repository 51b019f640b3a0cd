"""Ollama's routes that answer, list and name: adapters over the same conversations and answers.

They stream unless the request says otherwise, as Ollama does. Routes that manage models do not
exist here.
"""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from slotzero import __version__
from slotzero.server.answer_plan import plan_answer
from slotzero.server.app_state import AppState
from slotzero.server.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    ollama_conversation,
)
from slotzero.server.ollama_writer import OllamaErrorReply, OllamaReply, OllamaWriter
from slotzero.server.replies import ReplyModel, Version
from slotzero.server.stream_format import OLLAMA
from slotzero.server.streaming import reply, responses, told


class Tags(ReplyModel):
    models: list[dict[str, Any]]


def ollama_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/api")
    shapes = responses(OllamaReply, OLLAMA, OllamaErrorReply)

    @router.post("/chat", responses=shapes, response_model=None)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        return await answer(body, request, is_chat=True)

    @router.post("/generate", responses=shapes, response_model=None)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        return await answer(body, request, is_chat=False)

    @router.get("/tags", responses=responses(Tags), response_model=None)
    async def tags() -> Response:
        started = datetime.fromtimestamp(state.started_at, UTC).isoformat()
        details = {"format": "slotzero", "family": "", "parameter_size": ""}
        models = [
            {"name": name, "model": name, "modified_at": started, "size": 0, "digest": "",
             "details": details}
            for name in state.names
        ]  # fmt: skip
        return told(Tags(models=models))

    @router.get("/version", responses=responses(Version), response_model=None)
    async def version() -> Response:
        return told(Version(version=__version__))

    async def answer(
        body: OllamaChatRequest | OllamaGenerateRequest, request: Request, is_chat: bool
    ) -> Response:
        state.check_model(body.model.removesuffix(":latest"))
        plan = await plan_answer(state, ollama_conversation(body))
        state.log_prompt(request.state.request_id, plan.prompt)
        writer = OllamaWriter(plan, body.model, is_chat=is_chat)
        return await reply(state, request, plan.requests, writer, body.stream is not False)

    return router
