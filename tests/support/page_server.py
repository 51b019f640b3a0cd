"""Fake server for the web page: canned answers, and an engine that appears to be busy.

    python tests/support/page_server.py [PORT] [--key KEY] [--gpu]

It serves the real page with the real content security policy. /live comes from the real Metrics,
over a fake client whose statistics follow the clock. With --gpu the fake engine also captures
prefill, and one capture size has failed.
"""

import argparse
import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

from slotzero.server import metrics
from slotzero.server.messages import Stats

PAGE = Path(metrics.__file__).parent / "page" / "index.html"
POLICY = "default-src 'self' 'unsafe-inline'"
ANSWER = (
    "A padded row is a row of slot 0.\n\n"
    "It owns no page, its writes are dropped, and its attention is zeros. So whatever a graph"
    " computes for it, nobody reads:\n"
    "  1. the batch is padded up to a recorded size,\n"
    "  2. the graph is replayed,\n"
    "  3. only real rows are committed."
)
MARKED = "# Title\nSome **bold** and `a < b`, see [this](https://example.com/x).\n```py\n<b>1</b>\n```\nEnd"
SPECIAL: dict[str, list[dict[str, Any]]] = {
    "think": [{"reasoning_content": "First, "}, {"reasoning_content": "then."}],
    "muse": [{"reasoning_content": "Only a thought."}],
    "mark": [{"content": MARKED}],
    "call": [
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                         "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
    ],
}  # fmt: skip
"""What comes before the answer to these questions."""
DECODE = (1, 2, 4, *range(8, 257, 8))
PREFILL = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
ROWS = (1, 2, 4, 8, 16)
FAILED = "failed its check: tensor 'sampled' row 3 is 17 and should be 0"


class FakeClient:
    """An engine client whose statistics follow the clock: about 40 steps a second, 5 to 23 rows."""

    state = "ready"
    failure = ""
    progress = None
    generation = 0

    def __init__(self, has_gpu: bool) -> None:
        self._has_gpu = has_gpu
        self._start = time.monotonic() - 90
        self.info: dict[str, Any] = fake_info(has_gpu)
        self.replicas = [self]

    @property
    def stats(self) -> Stats:
        return fake_stats(time.monotonic() - self._start, self._has_gpu)


def fake_info(has_gpu: bool) -> dict[str, Any]:
    backend, device = ("cuda", "cuda") if has_gpu else ("cpu", "cpu")
    most = 256 if has_gpu else 32
    decode = [_size(f"decode[{n}]", backend) for n in DECODE if n <= most]
    if has_gpu:
        decode[5] = _size("decode[24]", "eager", FAILED)
        prefill = [
            _size(f"prefill[{t}]" if t == r else f"prefill[{t}t x {r}r]", backend)
            for t in PREFILL
            for r in ROWS
            if r <= t
        ]
    else:
        prefill = [_size(f"prefill[{t}t x 1r]", "eager") for t in (16, 32, 48, 64)]
    return {
        "limits": {
            "device": device, "backend": backend, "dtype": "bfloat16" if has_gpu else "float32",
            "max_model_len": 8192, "max_num_seqs": most, "max_num_batched_tokens": 2048,
            "num_pages": {"full": 2049}, "windows": {"full": None}, "page_size": 16,
            "enable_prefix_caching": True,
        },
        "kv_cache": {"dtype": "fp8" if has_gpu else "float32", "tokens": 32768},
        "eos_token_ids": [2],
        "vocab_size": 49152,
        "sizes": {"decode": decode, "prefill": prefill},
        "load_seconds": 1.83,
        "recording_seconds": 6.41,
        "versions": {"python": "3.11.9", "slotzero": "0.1.0", "torch": "2.13.0", "triton": None},
        "sanitize": "sample" if has_gpu else "off",
    }  # fmt: skip


def _size(key: str, backend: str, failure: str = "") -> dict[str, Any]:
    return {"key": key, "backend": backend, "seconds": 0.2, "bytes": 1 << 20, "failure": failure}


def fake_stats(age: float, has_gpu: bool) -> Stats:
    running = round(14 + 9 * math.sin(age / 7))
    steps = int(40 * age)
    tokens = int(40 * (14 * age - 63 * (math.cos(age / 7) - 1)))  # the integral of `running`
    keys = ("decode[8]", "decode[16]", "decode[24]")
    replays = {key: int(steps * share) for key, share in zip(keys, (0.28, 0.41, 0.23), strict=True)}
    replays["decode[4]"] = 31
    eager = {"prefill is not recorded on a CPU": int(steps * 0.08)}
    failed = {}
    if has_gpu:
        eager = {FAILED: replays.pop("decode[24]")}
        failed = {"decode[24]": FAILED}
        replays |= {"prefill[64t x 4r]": int(steps * 0.05), "prefill[512t x 8r]": int(steps * 0.03)}
    return Stats(
        running=running,
        waiting=max(0, running - 18),
        slots=256 if has_gpu else 32,
        pages_used=60 * running,
        pages_cached=410,
        pages=2048,
        prompt_tokens=int(210 * age),
        generated_tokens=tokens,
        prefix_asked_tokens=int(210 * age),
        prefix_hit_tokens=int(91 * age),
        preemptions=3,
        steps=steps,
        replays=replays,
        eager=eager,
        real_tokens={"decode": tokens, "prefill": int(120 * age)},
        padded_tokens={"decode": int(tokens * 0.14), "prefill": int(17 * age)},
        failed_sizes=failed,
        steps_watched=steps // 1000 if has_gpu else 0,
        violations=0,
    )


def make_app(client: Any, key: str = "", delay: float = 0.02) -> FastAPI:
    app = FastAPI()
    told = metrics.Metrics(client)

    @app.middleware("http")
    async def guard(request: Request, handle: Any) -> Response:
        is_open = request.url.path in ("/", "/favicon.ico")
        if key and not is_open and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": {"message": "the API key is wrong or missing"}}, 401)
        response: Response = await handle(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE)

    @app.get("/favicon.ico")
    def favicon() -> Response:
        return Response(status_code=204)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "smollm2", "object": "model"}]}

    @app.get("/live")
    def live() -> StreamingResponse:
        async def objects() -> AsyncIterator[str]:
            while True:
                why = {"failure": client.failure or None, "progress": client.progress}
                yield _event(told.live() | why)
                await asyncio.sleep(1)

        return StreamingResponse(objects(), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await request.json()
        prompt = asked["messages"][-1]["content"]
        if prompt == "fail":
            error = {"message": "the engine is restarting: try again later"}
            return JSONResponse({"error": error}, 503)
        return StreamingResponse(_answer(asked, told, delay), media_type="text/event-stream")

    return app


async def _answer(asked: dict[str, Any], told: metrics.Metrics, delay: float) -> AsyncIterator[str]:
    start = last = time.monotonic()
    told.arrived()
    question = asked["messages"][-1]["content"]
    for special in SPECIAL.get(question, ()):
        yield _event({"choices": [{"index": 0, "delta": special, "finish_reason": None}]})
    if question == "call":
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        yield "data: [DONE]\n\n"
        return
    words = ANSWER.split(" ") if question != "echo" else [json.dumps(asked)]
    if question == "muse":
        words = []
    words = words[: asked.get("max_tokens", len(words))]
    for i, word in enumerate(words):
        await asyncio.sleep(3 * delay if i == 0 else delay)
        now = time.monotonic()
        (told.first_token if i == 0 else told.token)(now - last)
        last = now
        delta = {"content": word if i == 0 else f" {word}"}
        yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    reason = "length" if len(words) == asked.get("max_tokens") else "stop"
    told.finished(reason, last - start, 12, len(words))
    yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    yield _event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": len(words)}})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int, nargs="?", default=8080)
    parser.add_argument("--key", default="")
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    uvicorn.run(make_app(FakeClient(given.gpu), given.key), port=given.port, log_level="warning")
