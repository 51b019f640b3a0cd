"""A server whose answers are those of a conversation with two tools, for `make test-clients`.

    python tests/support/scripted_server.py

It prints its URL. The engine is a fake: it calls `weather`, then `add`, and answers when the prompt
has both results. The HTTP application is the real one.
"""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import uvicorn
from asgi_clients import TOOL_LOOP, app, engine
from fake_engine import FakeClient, FakeStream


def scripted_engine() -> FakeClient:
    client = engine(TOOL_LOOP)
    submit = client.submit

    def scripted(request_id: str, prompt: list[int], params: Mapping[str, Any]) -> FakeStream:
        num_results = bytes(token for token in prompt if token < 256).count(b";tool:")
        client.texts = [TOOL_LOOP[num_results]]
        return submit(request_id, prompt, params)

    client.submit = scripted  # type: ignore[method-assign]
    return client


async def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        print(f"http://{host}:{port}", flush=True)
        config = uvicorn.Config(app(scripted_engine()), log_level="warning")
        await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    asyncio.run(main())
