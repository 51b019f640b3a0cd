"""Routes besides OpenAI's: health, metrics, server information, tokenizer and the status page."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, PlainTextResponse

from slotzero import __version__
from slotzero.config import LOGPROBS_MODES
from slotzero.errors import RequestError
from slotzero.server.answer_plan import rendered
from slotzero.server.app_state import AppState
from slotzero.server.chat_conversation import shown_conversation
from slotzero.server.events import EventStream, event
from slotzero.server.generation import Replica
from slotzero.server.messages import Stats
from slotzero.server.metrics import certified
from slotzero.server.protocol import DetokenizeRequest, TokenizeRequest
from slotzero.server.replies import (
    Health,
    Prompt,
    ServerInfo,
    TokenizeReply,
    TokenizerInfo,
    Version,
)
from slotzero.server.stream_format import json_bytes
from slotzero.server.streaming import responses, told
from slotzero.text.tokenizer import SPECIAL_KINDS

PAGE = Path(__file__).parent / "page" / "index.html"
POLICY = "default-src 'self' 'unsafe-inline'"
LIVE_SECONDS = 1.0
_POOL_FIELDS = ("running", "waiting", "slots", "pages_used", "pages_cached", "pages")


def engine_routes(state: AppState) -> APIRouter:
    router = APIRouter()

    @router.post("/ping", include_in_schema=False, response_model=None)
    @router.get("/ping", include_in_schema=False, response_model=None)
    @router.head("/health", include_in_schema=False, response_model=None)
    @router.get(
        "/health", responses={200: {"model": Health}, 503: {"model": Health}}, response_model=None
    )
    async def health() -> Response:
        """200 if an engine is ready; 503 while all are loading, recording, restarting, unresponsive
        or failed."""
        engines = [replica.state for replica in state.client.replicas]
        health = Health(status=state.engine_state, engines=engines)
        if state.engine_state == "unresponsive":
            health.reason = state.client.failure
        if (progress := _progress(state.client)) is not None:
            health.progress = progress
        return told(health, 200 if state.engine_state == "ready" else 503)

    @router.get("/version", responses=responses(Version), response_model=None)
    async def version() -> Response:
        return told(Version(version=__version__))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        body, kind = state.metrics.render()
        return Response(body, headers={"Content-Type": kind})

    @router.get("/server_info", responses=responses(ServerInfo), response_model=None)
    async def server_info() -> Response:
        return told(_server_info(state))

    @router.post("/tokenize", responses=responses(TokenizeReply), response_model=None)
    async def tokenize(body: TokenizeRequest) -> Response:
        state.check_model(body.model)
        tokens = await asyncio.to_thread(_tokens, state, body)
        made = TokenizeReply(count=len(tokens), max_model_len=state.max_model_len, tokens=tokens)
        if body.return_token_strs:
            made.token_strs = state.tokenizer.token_texts(tokens)
        return told(made)

    @router.post("/detokenize", responses=responses(Prompt), response_model=None)
    async def detokenize(body: DetokenizeRequest) -> Response:
        state.check_model(body.model)
        return told(Prompt(prompt=await asyncio.to_thread(_text, state, body.tokens)))

    @router.get("/tokenizer_info", responses=responses(TokenizerInfo), response_model=None)
    async def tokenizer_info() -> Response:
        known = state.tokenizer.special_tokens
        special = {name: known.get(name) for name in SPECIAL_KINDS}
        return told(TokenizerInfo(chat_template=state.tokenizer.chat_template, **special))

    @router.get("/live", responses={200: {"content": {EventStream.media_type: {}}}})
    async def live() -> Response:
        """Server-sent events with the data of the page at /, once a second and at shutdown."""
        return EventStream(_live(state))

    @router.head("/", include_in_schema=False, response_model=None)
    @router.get("/", include_in_schema=False, response_model=None)
    async def page() -> Response:
        if not PAGE.is_file():
            raise HTTPException(404, "this installation does not contain the page")
        return FileResponse(PAGE, headers={"Content-Security-Policy": POLICY})

    @router.get("/favicon.ico", include_in_schema=False, response_model=None)
    async def icon() -> Response:
        """There is no icon; browsers request one anyway."""
        return Response(status_code=204)

    return router


def _tokens(state: AppState, body: TokenizeRequest) -> list[int]:
    """Return the tokens, also if they do not fit into the context: evaluations cut a long text into
    windows themselves. The size of a request limits the work."""
    if body.prompt is not None:
        return state.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    text = rendered(state, shown_conversation(body))
    return state.tokenizer.encode(text, add_special_tokens=False)


def _text(state: AppState, tokens: list[int]) -> str:
    bad = next((token for token in tokens if not 0 <= token < state.tokenizer.vocab_size), None)
    if bad is not None:
        raise RequestError(f"tokens: {bad} is not in the vocabulary", "tokens")
    return state.tokenizer.decode(tokens, skip_special_tokens=False)


def _server_info(state: AppState) -> ServerInfo:
    client = state.client
    info, stats = dict(client.info), client.stats
    counts: dict[str, Any] = {} if stats is None else msgspec.structs.asdict(stats)
    return ServerInfo(
        version=__version__,
        state=state.engine_state,
        failure=client.failure or None,
        engines=[
            {
                "state": replica.state,
                "failure": replica.failure or None,
                "progress": _progress(replica),
                "pools": _pools(replica.stats),
            }
            for replica in client.replicas
        ],
        config={"engine": dict(client.settings), "server": state.settings.as_json()},
        runners=info.pop("sizes", {}),
        pools=_pools(stats),
        certification={
            "sizes": certified(client.info, stats),
            "sanitize": info.pop("sanitize", None),
            "steps_watched": counts.get("steps_watched"),
            "violations": counts.get("violations"),
        },
        formats={
            "tool_calls": state.tools.form.name if state.tools.form else None,
            "has_tool_prompt": state.tools.is_builtin,
            "reasoning": state.reasoning.name if state.reasoning else None,
        },
        engine=info,
        vllm_config=_vllm_config(state),
    )


def _vllm_config(state: AppState) -> dict[str, Any]:
    """Return what TRL reads: whether weights can be sent over a group, and so on."""
    has_transfer, limits = state.settings.enable_admin, state.client.info.get("limits", {})
    return {
        "weight_transfer_config": {"backend": "torch.distributed"} if has_transfer else None,
        "model_config": {
            "dtype": f"torch.{limits.get('dtype', 'float32')}",
            "logprobs_mode": state.client.settings.get("logprobs_mode", LOGPROBS_MODES[0]),
        },
    }


def _progress(replica: Replica) -> dict[str, Any] | None:
    return None if replica.progress is None else msgspec.structs.asdict(replica.progress)


def _pools(stats: Stats | None) -> dict[str, int]:
    return {} if stats is None else {name: getattr(stats, name) for name in _POOL_FIELDS}


async def _live(state: AppState) -> AsyncGenerator[bytes, None]:
    while True:
        is_last = state.is_closing
        why = {
            "state": state.engine_state,
            "failure": state.client.failure or None,
            "progress": _progress(state.client),
        }
        yield event(json_bytes(state.metrics.live() | why))
        if is_last:
            return
        await asyncio.sleep(LIVE_SECONDS)
