"""`slotzero serve` in a process of its own, for tests that talk to it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from slotzero.loading.tiny import TINY_CONFIGS
from slotzero.tokenizer import Tokenizer

KEY = "only-for-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}
PATIENCE = 120.0  # seconds; machines that test are busy
HELLO: Any = [{"role": "user", "content": "Hello"}]
# tiny models have no template that knows tools
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Server:
    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "slotzero", "serve", *words, "--port", "0"]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("curl"):
                break
        assert self.lines, log.read_text()
        self.url = self.lines[0].split()[2].rstrip(",")

    def client(self, **given: Any) -> OpenAI:
        given = {"api_key": KEY, "max_retries": 0, "timeout": PATIENCE} | given
        return OpenAI(base_url=f"{self.url}/v1", **given)

    def wait_until_idle(self) -> None:
        def is_idle() -> bool:
            pools = httpx.get(f"{self.url}/server_info", headers=HEADERS).json()["pools"]
            return not (pools["running"] or pools["waiting"] or pools["pages_used"])

        wait_until(is_idle)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def tiny_server(folder: Path) -> Iterator[Server]:
    """Serves a random model, which it writes into the folder, under the name tiny."""
    (folder / "config.json").write_text(json.dumps(TINY_CONFIGS["llama"]))
    Tokenizer.bytes_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    words = f"{folder} --load-format dummy --backend eager --served-model-name tiny --api-key {KEY}"
    server = Server(words.split(), folder / "log")
    yield server
    assert server.end() == 0, server.log.read_text()
