"""The HTTP application: routes and error replies.

It starts the engines when it starts, and stops them when it ends. The rule: every error reply has
the shape of the API of its path, and names the wrong field if there is one.
"""

import functools
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route

from slotzero import __version__
from slotzero.errors import SlotzeroError
from slotzero.server.app_state import AppState
from slotzero.server.connections import Connections, Tracked
from slotzero.server.gate import GateMiddleware, log
from slotzero.server.generation import Client
from slotzero.server.metrics import Metrics
from slotzero.server.routes_admin import admin_routes
from slotzero.server.routes_anthropic import anthropic_routes
from slotzero.server.routes_engine import engine_routes
from slotzero.server.routes_ollama import ollama_routes
from slotzero.server.routes_openai import openai_routes
from slotzero.server.routes_responses import responses_routes
from slotzero.server.routes_sglang import sglang_admin_routes, sglang_routes
from slotzero.server.routes_vectors import vector_routes
from slotzero.server.routes_vllm import vllm_routes
from slotzero.server.settings import ServerSettings
from slotzero.server.sglang_running import RunningRequests
from slotzero.server.status import (
    BUG,
    HTTP,
    INVALID,
    HttpStatus,
    error_parts,
    retry_after,
)
from slotzero.server.stream_format import json_bytes, shape_of
from slotzero.text.tokenizer import Tokenizer


def make_app(
    client: Client,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    sampling: Mapping[str, Any] | None = None,
    connections: Connections | None = None,
) -> FastAPI:
    """Return the application.

    `sampling`: default sampling parameters. `connections`: the connections of the server that runs
    the application, if their number is limited.
    """
    connections = connections or Connections(sys.maxsize, settings)
    state = AppState(client, tokenizer, settings, Metrics(client), sampling or {})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await client.start()
        try:
            yield
        finally:
            await client.drain(settings.grace)
            await client.stop()
            state.responses.close()

    app = FastAPI(
        title="Slotzero", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.slotzero = state
    running = RunningRequests()
    routers = [
        openai_routes(state),
        responses_routes(state),
        anthropic_routes(state),
        ollama_routes(state),
        vector_routes(state),
        engine_routes(state),
        sglang_routes(state, running),
    ]

    @functools.cache
    def admin() -> list[APIRouter]:
        """Building routes takes tens of milliseconds: most servers never need these."""
        return [admin_routes(state), sglang_admin_routes(state, running), vllm_routes(state)]

    state.admin_paths = lambda: frozenset(path for router in admin() for path in paths_of(router))
    for router in routers + (admin() if settings.enable_admin else []):
        app.router.routes += router.routes  # `include_router` would build every route again
    _tell_errors(app, state)
    app.add_middleware(
        GateMiddleware,
        settings=settings,
        refused=state.metrics.refused,
        connections=connections,
        is_closing=lambda: state.is_closing,
        admin_paths=state.admin_paths() if settings.enable_admin else (),
    )
    if settings.allowed_origins:  # outside the gate: a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Weight-Version", "Retry-After"],
        )
    app.add_middleware(Tracked)
    return app


def _tell_errors(app: FastAPI, state: AppState) -> None:
    def refuse(
        request: Request,
        status: HttpStatus,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Response:
        state.metrics.refused(status.code)
        body = shape_of(request.url.path).error(status, message, param)
        return Response(json_bytes(body), status.code, headers, "application/json")

    @app.exception_handler(SlotzeroError)
    async def on_error(request: Request, error: Exception) -> Response:
        status, message, param = error_parts(error)
        if status is BUG:
            log.error("request %s failed", request.state.request_id, exc_info=error)
        return refuse(request, status, message, param, retry_after(error))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        param, message = field_and_message(error.errors(), error.body)
        return refuse(request, HTTP[400], message, param)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTP.get(error.status_code, HttpStatus(error.status_code, INVALID))
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(sorted(_methods(app, request)))
        return refuse(request, status, http_message(request, error), headers=headers)


def paths_of(router: APIRouter) -> list[str]:
    return [route.path for route in router.routes if isinstance(route, Route)]


def _methods(app: FastAPI, request: Request) -> set[str]:
    """Return the methods of all routes of this path; the framework names those of the first."""
    found = [route for route in app.router.routes if route.matches(request.scope)[0] != Match.NONE]
    return {method for route in found for method in getattr(route, "methods", None) or ()}


def http_message(request: Request, error: HTTPException) -> str:
    """Return an error message that is more helpful than the framework's."""
    path = request.url.path[:100]
    if error.status_code == 400 and error.__cause__ is not None:
        return f"the body is not JSON: {error.__cause__}"
    if error.status_code == 404 and error.detail == "Not Found":
        if request.url.path in request.app.state.slotzero.admin_paths():
            return f"{path} is off: start the server with --enable-admin"
        return f"no route {path}; OpenAI's routes begin with /v1, and /openapi.json lists all"
    if error.status_code == 405:
        return f"{path} does not support the method {request.method}"
    return error.detail


def field_and_message(errors: Sequence[Any], body: Any) -> tuple[str | None, str]:
    """Return the field and message of the most deeply nested error: the branches of a union give
    many errors."""
    named = [(field_path(error, body), error) for error in errors]
    param, error = max(named, key=lambda both: both[0].count(".") + both[0].count("["))
    if error["type"] == "json_invalid":
        return None, f"the body is not JSON: {error['ctx']['error']} at byte {error['loc'][-1]}"
    if not param:
        return None, "the body must be a JSON object, with Content-Type: application/json"
    if error["type"] == "extra_forbidden":
        return param, f"{param}: unknown field"
    return param, f"{param}: {_told(error)}"


def _told(error: Any) -> str:
    """Return pydantic's message, or what it does not say: which value is wrong."""
    given = error["input"]
    match error["type"]:
        case "missing":
            return "missing"
        case "literal_error":
            return f"must be {error['ctx']['expected']}, got {repr(given)[:40]}"
        case "string_pattern_mismatch":
            pattern = error["ctx"]["pattern"]
            return f"{given[:40]!r}, of {len(given)} characters, does not match {pattern}"
    return str(error["msg"])


def field_path(error: Any, body: Any) -> str:
    """Return a path such as 'messages[0].role'. pydantic puts the branches of a union into the
    path; they are recognised because the body does not contain them."""
    if error["loc"][0] == "query":
        return str(error["loc"][1])
    path, value = "", body
    places = error["loc"][1:]
    for i, place in enumerate(places):
        is_missing = i == len(places) - 1 and error["type"] == "missing"
        if isinstance(place, int) and isinstance(value, list) and place < len(value):
            path, value = f"{path}[{place}]", value[place]
        elif isinstance(place, str) and isinstance(value, dict) and (place in value or is_missing):
            path, value = f"{path}.{place}" if path else place, value.get(place)
    return path[:200]
