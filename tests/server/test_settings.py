"""Tests of the server's settings and of the command `slotzero serve`."""

import asyncio
import json
import math
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from slotzero.cli import flags, serve
from slotzero.cli import main as cli
from slotzero.errors import (
    ConfigError,
)
from slotzero.server.settings import ServerSettings
from slotzero.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"port": -1}, "port"),
        ({"port": 70000}, "port"),
        ({"api_key": [""]}, "api_key"),
        ({"api_key": ["a b"]}, "api_key"),
        ({"api_key": ["é"]}, "api_key"),
        ({"served_model_name": [""]}, "served_model_name"),
        ({"data_parallel_size": 0}, "data_parallel_size must be a number of engines, at least 1"),
        ({"data_parallel_size": 1.5}, "data_parallel_size"),
        ({"data_parallel_size": "2"}, "data_parallel_size"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_request_bytes": 0}, "max_request_bytes"),
        ({"max_connections": 1}, "max_connections"),
        ({"receive_timeout": 0}, "receive_timeout"),
        ({"keep_alive_timeout": -1}, "keep_alive_timeout"),
        ({"heartbeat_timeout": 1}, "heartbeat_timeout must be at least 2 seconds, or 0"),
        ({"unresponsive_timeout": -1}, "unresponsive_timeout"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"request_timeout": math.nan}, "request_timeout"),
        ({"grace": -1}, "grace"),
        ({"tool_call_parser": "odd"}, "tool_call_parser"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names) as error:
        ServerSettings(**given)
    assert "é" not in str(error.value)


def test_the_server_is_local_by_default() -> None:
    assert ServerSettings().is_local
    assert ServerSettings(host="localhost").is_local
    assert ServerSettings(host="::1").is_local
    assert not ServerSettings(host="0.0.0.0").is_local
    assert not ServerSettings(host="example.org").is_local


def test_flags_of_serve() -> None:
    words = (
        "tiny:llama --port 0 --api-key a --api-key b --max-request-bytes 1M --request-timeout 2.5 "
        "--tool-call-parser llama --log-requests --served-model-name x --max-num-seqs 3 --dp 2"
    )
    args = serve.parser().parse_args(words.split())
    assert flags.server_settings(args) == ServerSettings(
        port=0,
        api_key=("a", "b"),
        max_request_bytes=1 << 20,
        request_timeout=2.5,
        tool_call_parser="llama",
        log_requests=True,
        served_model_name=("x",),
        data_parallel_size=2,
    )
    assert flags.engine_settings(args) == {"max_num_seqs": 3}
    text = " ".join(serve.parser().format_help().split())
    for field in fields(ServerSettings):
        assert flags.field_docs(ServerSettings)[field.name] in text
        assert "--" + field.name.replace("_", "-") in text


@pytest.mark.slow
def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from slotzero.cli import serve\n"
        "serve.parser().format_help()\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'uvicorn', 'pydantic', 'msgspec', 'tokenizers'}\n"
        "print(*heavy & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


SERVE_WITHOUT_ENGINES = """
import sys
from slotzero.cli import main, serve

async def build_the_app_only(*_):
    pass

serve._serve = build_the_app_only
for model in sys.argv[1:]:
    assert main.main(["serve", model, "--port", "0"]) == 0
assert main.main(["serve", "no-such-model", "--port", "0"]) == 3
assert main.main(["serve", "tiny:llama", "--page-size", "3"]) == 2
print("heavy:", *{"torch", "transformers", "safetensors"} & set(sys.modules))
"""


def test_the_http_process_does_not_import_torch(tmp_path: Path) -> None:
    """See also Server.end, which asserts this of every server that a test starts."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    Tokenizer.bytes_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    words = [SERVE_WITHOUT_ENGINES, "tiny:llama", "smollm2", str(tmp_path)]
    run = subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True)
    assert "temperature=0.6" in run.stdout, run.stderr
    assert run.stdout.splitlines()[-1] == "heavy:"


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else 1)
    assert cli.main(["serve", "tiny:llama"]) == 2
    assert capsys.readouterr().err == (
        "slotzero: error: uvicorn is not installed: pip install 'slotzero[server]'\n"
    )


def test_a_port_in_use_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with serve._listen(ServerSettings(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "tiny:llama", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"127.0.0.1:{port}" in error
    assert "--port" in error


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_accepted_connections_send_without_delay(host: str) -> None:
    """Nagle's algorithm would delay small writes until the client's delayed ACK, by 40 ms."""

    async def accept() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            end = writer.get_extra_info("socket")
            accepted.set_result(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = serve._listen(ServerSettings(host=host, port=0))
        async with asyncio.timeout(60), await asyncio.start_server(on_accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            try:
                return await accepted
            finally:
                writer.close()

    assert asyncio.run(accept())


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no-such-host"):
        serve._listen(ServerSettings(host="no-such-host.invalid"))


def test_the_curl_line_can_be_pasted() -> None:
    line = serve._curl(ServerSettings(served_model_name=("it's",), api_key=("k",)), "http://h:1")
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert "Authorization: Bearer KEY" in words
