"""`slotzero serve` in its own process, for tests that send requests to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from slotzero.checkpoint.tiny import tiny_configs
from slotzero.text.tokenizer import Tokenizer

KEY = "only-for-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SETTINGS = {  # for an engine that starts quickly
    "model": "tiny:llama",
    "backend": "eager",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": 4 << 20,
    "skip_tokenizer_init": True,
    "show_progress": False,
}
PATIENCE = 300.0  # seconds; a machine that runs tests is busy
RANK_TIMEOUT = 60.0
HELLO: Any = [{"role": "user", "content": "Hello"}]
# a chat template with tools, because tiny models have none
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
    """A running `slotzero serve`: its process, URL, output lines and log file."""

    def __init__(self, words: list[str], log: Path, num_files: int | None = None) -> None:
        """Start the server and wait for its URL; `num_files` limits its open files."""
        self.log = log
        command = [sys.executable, "-m", "slotzero", "serve", *words, "--port", "0"]
        if num_files is not None:
            command = ["sh", "-c", f'ulimit -n {num_files} && exec "$@"', "sh", *command]
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
        """End the server and return its exit code; its HTTP process must not have loaded torch."""
        maps = Path(f"/proc/{self.process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill the process if it is still running."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def children(pid: int) -> list[int]:
    """Return the processes that process `pid` has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended meanwhile
        if int(parent) == pid:
            found.append(int(folder.name))
    return sorted(found)


def descendants(pid: int, module: str) -> list[int]:
    """Return the processes `python -m module` below process `pid`."""
    found = []
    for child in children(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [child] if module.encode() in words else descendants(child, module)
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)  # not shorter: polling slows down the process that we wait for


@contextmanager
def outpost(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `slotzero serve --node-rank 1` for a server that is started elsewhere."""
    command = [sys.executable, "-m", "slotzero", "serve", *words, "--node-rank", "1"]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def kill_a_rank(server: Server, rank: int, named: str) -> None:
    """Kill a rank in the middle of an answer; check that the answer fails and the next is right."""
    completions = server.client().completions

    def answer() -> str:
        made = completions.create(model="tiny:llama", prompt="Hello", max_tokens=8, temperature=0)
        return made.choices[0].text

    before = answer()
    stream = completions.create(
        model="tiny:llama", prompt="a", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    os.kill(rank, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(APIError, match="engine"):
        for _ in stream:
            pass
    assert time.monotonic() - start < RANK_TIMEOUT
    wait_until(lambda: httpx.get(f"{server.url}/server_info").json()["state"] == "ready")
    assert answer() == before
    assert f"{named} was killed by signal 9" in server.log.read_text()


@contextmanager
def tiny_server(folder: Path) -> Iterator[Server]:
    """Write a random model into the folder and serve it under the name tiny."""
    (folder / "config.json").write_text(json.dumps(tiny_configs()["llama"]))
    Tokenizer.bytes_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    words = f"{folder} --load-format dummy --backend eager --served-model-name tiny --seed 0"
    server = Server([*words.split(), "--api-key", KEY], folder / "log")
    yield server
    assert server.end() == 0, server.log.read_text()
