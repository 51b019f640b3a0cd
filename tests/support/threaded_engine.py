"""The whole server in one process: the HTTP application, and engines whose loops run in threads."""

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save_file
from served import SETTINGS
from torch import Tensor

from slotzero.certify.start import start_engine
from slotzero.checkpoint.dummy import DummyCheckpoint
from slotzero.checkpoint.tiny import tiny_checkpoint
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.server import process
from slotzero.server.app import make_app
from slotzero.server.fleet import Fleet
from slotzero.server.messages import Cancel, EngineReady, Frames, ToEngine
from slotzero.server.settings import ServerSettings
from slotzero.server.share import Share
from slotzero.text.tokenizer import Tokenizer

LLAMA = "tiny:llama"
SOON = 300.0  # seconds: enough for a busy machine


class ThreadedEngine:
    """An engine's process that is a thread."""

    pid = None

    def __init__(self, settings: Mapping[str, Any], end: socket.socket) -> None:
        self.engine: Engine = start_engine(EngineConfig(**settings))
        self._end = end
        self._inbox: process.Inbox = queue.SimpleQueue()
        self._has_ended = threading.Event()
        outbox = process.Outbox(end)
        outbox.put(EngineReady(process.info_of(self.engine, 0.0, "off")))
        self.loop = process.EngineLoop(self.engine, self._inbox, outbox)
        threading.Thread(target=self._listen, daemon=True).start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        frames = Frames(ToEngine)
        try:
            while data := self._end.recv(1 << 18):
                for message in frames.feed(data):
                    self._inbox.put(message)
        except OSError:
            pass
        self.kill()

    def _run(self) -> None:
        try:
            while not self._has_ended.is_set():
                self.loop.turn()
        except OSError:
            pass
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # `close` would wait for `recv`
        self._end.close()

    def kill(self) -> None:
        self._has_ended.set()
        self._inbox.put(Cancel(""))  # wakes the loop

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        return 1


class Stack:
    """The server as its HTTP clients see it, and its engines."""

    def __init__(self, http: httpx.AsyncClient, fleet: Fleet, engines: list[ThreadedEngine]):
        self.http, self.fleet, self.engines = http, fleet, engines

    async def post(self, path: str, body: Any = None, status: int = 200, **more: Any) -> Any:
        response = await self.http.post(path, json=body, **more)
        assert response.status_code == status, response.text
        return response.json()

    async def get(self, path: str) -> Any:
        response = await self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    async def complete(self, prompt: Any, max_tokens: int = 8, **more: Any) -> Any:
        """Return the choice of a greedy completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        made = await self.post("/v1/completions", body | {"return_token_ids": True} | more)
        return made["choices"][0]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(SOON):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_running(self, num: int) -> None:
        await self.until(
            lambda: sum(one.engine.schedulers.num_running for one in self.engines) == num
        )


@asynccontextmanager
async def stack(size: int = 1, engine: Mapping[str, Any] | None = None) -> AsyncIterator[Stack]:
    engines: list[ThreadedEngine] = []

    async def launch(
        settings: Mapping[str, Any], share: Share
    ) -> tuple[ThreadedEngine, socket.socket]:
        ours, theirs = socket.socketpair()
        engines.append(await asyncio.to_thread(ThreadedEngine, settings, theirs))
        return engines[-1], ours

    fleet = Fleet(SETTINGS | dict(engine or {}), size, launch=launch)
    served = ServerSettings(served_model_name=("tiny",), enable_admin=True)
    app = make_app(fleet, Tokenizer.bytes_tokenizer(), served, {})
    transport = httpx.ASGITransport(app)
    await fleet.start()
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=SOON
        ) as http:
            made = Stack(http, fleet, engines)
            await made.until(lambda: fleet.num_ready == size)
            yield made
    finally:
        await fleet.stop()


def tensors_of(seed: int, model: str = LLAMA) -> dict[str, Tensor]:
    """Return other random weights of a tiny model."""
    checkpoint = checkpoint_of(seed, model)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def checkpoint_of(seed: int, model: str = LLAMA) -> DummyCheckpoint:
    first = tiny_checkpoint(model)
    return DummyCheckpoint(
        first.config,
        model,
        eos_token_ids=first.eos_token_ids,
        make_tokenizer=Tokenizer.bytes_tokenizer,
        seed=seed,
    )


def write_folder(folder: Path, seed: int, model: str = LLAMA) -> str:
    import json

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_checkpoint(model).config))
    save_file(tensors_of(seed, model), folder / "model.safetensors")
    return f"{folder}"
