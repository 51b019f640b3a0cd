"""`slotzero serve`: the OpenAI-compatible HTTP server, until it is stopped.

The routes are in slotzero/server/. Wrong flags, missing packages, a port in use and an unknown
model are reported before anything is loaded.

The rule: SIGTERM and Ctrl-C do the same. Running requests have `--grace` seconds to finish, while
new ones are answered with 503; then the remaining requests end with an error, the port is closed,
and the exit code is 0. A second Ctrl-C ends the grace time. When all engines have failed for good,
the server exits with the first one's exit code, since refusing everything would hide the failure.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags
from slotzero.config import EngineConfig
from slotzero.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from slotzero.server.client import Launch
    from slotzero.server.connections import Connections
    from slotzero.server.fleet import Fleet
    from slotzero.server.settings import ServerSettings
    from slotzero.text.tokenizer import Tokenizer

DESCRIPTION = """\
Start an OpenAI-compatible HTTP server.

  slotzero serve
  slotzero serve path/to/model --port 8080 --api-key SECRET
  slotzero serve org/name --host 0.0.0.0 --served-model-name mine other --request-timeout 120

On several machines, run the same command on each, with the same secret in SLOTZERO_KEY. Machine 0
runs the server:

  slotzero serve MODEL -tp 4 --nnodes 2 --master-addr ADDRESS-OF-0 --node-rank 0
  slotzero serve MODEL -tp 4 --nnodes 2 --master-addr ADDRESS-OF-0 --node-rank 1"""
PACKAGES = ("fastapi", "uvicorn", "msgspec", "prometheus_client")
POLL_SECONDS = 0.1
FAREWELL_SECONDS = 2  # after the grace time, for clients to read their last replies
BACKLOG = 2048  # connections that the kernel keeps until they are accepted


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("serve", "[MODEL] [flags]", DESCRIPTION)
    flags.add_model(made)
    flags.add_server_flags(made)
    flags.add_chat_template(made)
    flags.add_engine_flags(made)
    return made


def run(args: argparse.Namespace) -> int:
    flags.refuse_swallowed_model(args)
    settings, model = flags.server_settings(args), flags.chosen_model(args)
    engine_settings = flags.engine_settings(args) | {"model": model}
    config = EngineConfig(**engine_settings)
    if config.node_rank:
        return _run_node_agent(args)
    if config.nnodes > 1 and settings.data_parallel_size > 1:
        raise ConfigError(
            f"nnodes={config.nnodes} with data_parallel_size={settings.data_parallel_size}: drop "
            "one, or use --executor ray for several engines on several machines"
        )
    if not settings.served_model_name:
        settings = replace(settings, served_model_name=(model,))
    _check_packages()
    limit, burst = _connection_limits(settings)
    _log_to_stderr()
    with _listen(settings) as listener, _launching(config, settings) as launch:
        address = _address(settings, listener)
        print(f"{model} at {address}, loading", flush=True)
        if not settings.is_local and not settings.api_key:
            print(
                "no --api-key given: anyone who can reach this address can use the server",
                file=sys.stderr,
            )
        from slotzero.server.app import make_app
        from slotzero.server.connections import Connections
        from slotzero.server.fleet import Fleet
        from slotzero.server.heartbeat import ResponseLimits

        tokenizer, sampling = _of_model(config)
        fleet = Fleet(
            engine_settings | {"skip_tokenizer_init": True},  # text stays in this process
            settings.data_parallel_size,
            max_waiting=settings.max_waiting,
            response_limits=ResponseLimits(
                settings.heartbeat_timeout, settings.unresponsive_timeout
            ),
            launch=launch,
        )
        connections = Connections(limit, settings)
        app = make_app(fleet, tokenizer, settings, sampling, connections)
        tools = app.state.slotzero.tools
        if tools.is_builtin:
            print(
                "the chat template does not show tools: requests with tools get Slotzero's own "
                f"prompt for them, in the format {tools.form.name} (--tool-call-parser)",
                flush=True,
            )
        server = _make_server(app, settings, connections, burst)
        asyncio.run(_serve(server, app, fleet, settings, listener, address))
    if fleet.exit_code:
        from slotzero.errors import EngineUnavailableError

        raise EngineUnavailableError(fleet.failure, fleet.exit_code)
    return 0


def _of_model(config: EngineConfig) -> tuple["Tokenizer", Mapping[str, Any]]:
    """Return what this process needs from a model: its tokenizer, and the default sampling
    parameters."""
    from slotzero.checkpoint.place import find_model
    from slotzero.text.chat_template import read_template

    place = find_model(config.model)
    sampling = place.sampling() if config.generation_config == "auto" else {}
    if sampling:
        shown = ", ".join(f"{name}={value}" for name, value in sampling.items())
        print(f"default sampling parameters from generation_config.json: {shown}", flush=True)
    tokenizer = place.tokenizer()
    if config.chat_template is not None:
        tokenizer.set_chat_template(read_template(config.chat_template))
    return tokenizer, sampling


def _run_node_agent(args: argparse.Namespace) -> int:
    """Run a node agent on a machine other than the first, which decides all settings that were not
    given here."""
    from slotzero.executor.node_agent import node_agent

    given = flags.engine_settings(args)
    if args.model is not None or args.model_flag is not None:
        given["model"] = flags.chosen_model(args)
    with contextlib.suppress(KeyboardInterrupt):
        node = node_agent(given)
        # only now: an exception would not end the import of torch
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        node.stay()
    return 0


def _check_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is not installed: pip install 'slotzero[server]'")


def _connection_limits(settings: "ServerSettings") -> tuple[int, int]:
    """Return how many connections may be open, and how many may be accepted at once."""
    from slotzero.server.connections import default_limits

    limit, burst = default_limits()
    if settings.max_connections is None:
        return limit, burst
    if settings.max_connections > limit:
        raise ConfigError(
            f"max_connections={settings.max_connections}: the limit of open files (`ulimit -n`) "
            f"allows {limit}; raise that limit, or set fewer"
        )
    return settings.max_connections, burst


@contextlib.contextmanager
def _launching(config: EngineConfig, settings: "ServerSettings") -> Iterator["Launch"]:
    if config.executor == "local":
        from slotzero.server.client import launch_here

        yield launch_here
        return
    if find_spec("ray") is None:
        raise ConfigError("executor=ray: Ray is not installed: pip install 'slotzero[ray]'")
    from slotzero.server.ray_places import RayPlaces

    places = RayPlaces(config, settings.data_parallel_size)
    try:
        yield places.launch
    finally:
        places.close()


def _log_to_stderr() -> None:
    log = logging.getLogger("slotzero.server")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _collapse_repeats() -> None:
    """Limit repeated log lines that clients can trigger at will."""
    from slotzero.server.repeats import Repeats

    for name in ("asyncio", "uvicorn.error", "slotzero.server.connections"):
        logging.getLogger(name).addFilter(Repeats())


def _listen(settings: "ServerSettings") -> socket.socket:
    """Return a bound socket that does not accept connections yet."""
    where = f"{settings.host}:{settings.port}"
    try:
        kind, _, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"--host {settings.host}: this address cannot be resolved ({error.strerror})"
        ) from None
    # With protocol 0, asyncio does not see that it is TCP, and leaves TCP_NODELAY unset.
    listener = socket.socket(kind, socket.SOCK_STREAM, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {where} ({error.strerror}): choose another --port, or 0 for any"
        ) from None
    return listener


def _address(settings: "ServerSettings", listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}"


def _make_server(
    app: "FastAPI", settings: "ServerSettings", connections: "Connections", burst: int
) -> "uvicorn.Server":
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    config = uvicorn.Config(
        app,
        http=connections.protocol(AutoHTTPProtocol),  # type: ignore[arg-type]
        ws="none",
        backlog=burst,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=FAREWELL_SECONDS,
    )
    _collapse_repeats()  # after uvicorn has configured its loggers
    return uvicorn.Server(config)


async def _serve(
    server: "uvicorn.Server",
    app: "FastAPI",
    fleet: "Fleet",
    settings: "ServerSettings",
    listener: socket.socket,
    address: str,
) -> None:
    # What uvicorn restores when it ends. An exit that has begun is not to be cut short, and a
    # handler in Python would not last until the end of the interpreter.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    watching = asyncio.create_task(_watch(server, app, fleet, settings, listener, address))
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    server: "uvicorn.Server",
    app: "FastAPI",
    fleet: "Fleet",
    settings: "ServerSettings",
    listener: socket.socket,
    address: str,
) -> None:
    """Announce the first engine that is ready. On shutdown, let running requests finish while the
    port still answers; when all engines have failed, do not wait."""
    stop_signals = _StopSignals()
    while not server.started:
        await asyncio.sleep(POLL_SECONDS)
    listener.listen(BACKLOG)  # uvicorn's backlog is also how many asyncio accepts at once
    began, is_announced = time.monotonic(), False
    while not (stop_signals.is_asked or fleet.state == "failed"):
        if fleet.state == "ready" and not is_announced:
            seconds = f"{time.monotonic() - began:.1f} s{_how_many(fleet)}"
            print(f"ready in {seconds}. Try:\n{_curl(settings, address)}")
            sys.stdout.flush()
            is_announced = True
        await asyncio.sleep(POLL_SECONDS)
    app.state.slotzero.is_closing = True
    draining = asyncio.create_task(fleet.drain(settings.grace))
    while not (draining.done() or stop_signals.is_urgent):
        await asyncio.wait({draining}, timeout=POLL_SECONDS)
    if not draining.done():
        draining.cancel()
        await fleet.drain(0)
    server.should_exit = True


class _StopSignals:
    """Replaces uvicorn's signal handlers, which would close the port at once.

    SIGINT and SIGTERM ask the server to end; a SIGINT after that does not let requests finish.
    """

    def __init__(self) -> None:
        self.is_asked = self.is_urgent = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        self.is_urgent |= self.is_asked and number == signal.SIGINT
        self.is_asked = True


def _how_many(fleet: "Fleet") -> str:
    size = len(fleet.replicas)
    return f", {fleet.num_ready} of {size} engines" if size > 1 else ""


def _curl(settings: "ServerSettings", address: str) -> str:
    body = {
        "model": settings.served_model_name[0],
        "messages": [{"role": "user", "content": "Hello!"}],
    }
    key = " -H 'Authorization: Bearer KEY'" if settings.api_key else ""
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    header = "-H 'Content-Type: application/json'"
    return f"curl {address}/v1/chat/completions {header}{key} -d '{quoted}'"
