"""Tests of ranks on other nodes, which are processes of this machine, and of refused settings."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from served import PATIENCE, children, free_port, outpost, wait_until

from slotzero import LLM, SamplingParams
from slotzero.cli.main import main
from slotzero.config import EngineConfig
from slotzero.distributed import secure_socket
from slotzero.errors import ConfigError, RankLostError, SlotzeroError
from slotzero.executor.node_agent import NodeAgent
from slotzero.executor.node_messages import Hello
from slotzero.executor.nodes import Nodes
from slotzero.executor.rank0 import start_ranks
from slotzero.executor.rank_group import LOOPBACK, interface_towards

pytestmark = pytest.mark.slow

SECRET = "only-for-tests-" * 2
TINY: dict[str, Any] = {
    "backend": "eager",
    "max_num_seqs": 2,
    "max_model_len": 128,
    "show_progress": False,
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secure_socket.KEY, SECRET)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(["Hello", "a" * 40], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_tokens_are_those_of_one_rank() -> None:
    """One outpost serves an engine of two ranks, of which one is lost, and then one of four
    ranks."""
    alone, port = generate(LLM("tiny:llama", **TINY)), free_port()
    words = f"tiny:llama --backend eager --nnodes 2 --master-port {port}"
    many = {"nnodes": 2, "master_port": port, "rank_timeout": 60.0, **TINY}
    with outpost(words.split()) as node:
        llm = LLM("tiny:llama", tensor_parallel_size=2, **many)
        assert generate(llm) == alone
        (pid,) = children(node.pid)
        os.kill(pid, signal.SIGKILL)
        named = rf"rank 1 \(process {pid} on node 1\) was killed by signal 9"
        with pytest.raises(RankLostError, match=named):
            generate(llm)
        llm = LLM("tiny:llama", tensor_parallel_size=4, **many)
        assert generate(llm) == alone
        ranks = children(node.pid)
        assert len(ranks) == 2 and len(llm.engine.rank_group.pids) == 1  # type: ignore[attr-defined]
        llm.engine.rank_group.close()
        assert node.wait(PATIENCE) == 0
        assert not any(map(is_alive, ranks))


def test_a_node_that_is_killed_is_named_and_its_ranks_end() -> None:
    port = free_port()
    with outpost(f"--backend eager --nnodes 2 --master-port {port}".split()) as node:
        llm = LLM("tiny:llama", tensor_parallel_size=2, nnodes=2, master_port=port, **TINY)
        (rank,) = children(node.pid)
        node.kill()
        wait_until(lambda: not is_alive(rank))
        with pytest.raises(RankLostError, match="node 1 is gone, and its ranks with it"):
            generate(llm)


def test_a_node_ends_when_it_is_interrupted() -> None:
    with outpost(f"--backend eager --nnodes 2 --master-port {free_port()}".split()) as node:
        wait_until(lambda: ignores_or_catches(node.pid, signal.SIGTERM))
        node.send_signal(signal.SIGTERM)
        assert node.wait(PATIENCE) == 0


def ignores_or_catches(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as lines:
        caught = next(text.split()[1] for text in lines if text.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Refusals


def config_of(port: int, **more: Any) -> EngineConfig:
    given: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "node_timeout": PATIENCE}
    return EngineConfig(model="tiny:llama", master_port=port, **given | TINY | more)


@contextmanager
def waiting(config: EngineConfig, on_gpus: bool = False) -> Iterator[list[str]]:
    """Start node 0, which waits for the other nodes; yield the reasons for which it ended."""
    nodes, why = Nodes(config, on_gpus), list[str]()

    def gather() -> None:
        try:
            nodes.gather(1)
        except SlotzeroError as error:
            why.append(str(error))
        nodes.close()

    thread = threading.Thread(target=gather)
    thread.start()
    try:
        yield why
    finally:
        nodes._config = replace(config, node_timeout=0.01)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def come(port: int, hello: Hello, key: str = SECRET) -> None:
    NodeAgent(hello, ("127.0.0.1", port), key.encode(), PATIENCE).attend()


@pytest.mark.parametrize(
    ("hello", "named"),
    [
        (Hello(1, {"model": "tiny:qwen3"}, 0), "model is 'tiny:qwen3' on node 1, but 'tiny:ll"),
        (Hello(1, {"max_num_seqs": 4}, 0), "max_num_seqs is 4 on node 1, but 2 on node 0"),
        (Hello(1, {"nnodes": 3}, 0), "nnodes is 3 on node 1, but 2 on node 0"),
        (Hello(1, {}, 0, version="0.0"), r"it has slotzero 0\.0, but node 0 has"),
        (Hello(1, {}, 2), "node 1 would compute on a GPU, but node 0 on a CPU"),
    ],
)
def test_a_difference_between_nodes_is_named_on_both(hello: Hello, named: str) -> None:
    port = free_port()
    with waiting(config_of(port)) as why, pytest.raises(ConfigError, match=named):
        come(port, hello)
    assert "node 1 of 2 did not connect" in why[0] and "a node was refused" in why[0]


def test_too_few_gpus_of_a_node_are_named() -> None:
    port = free_port()
    config = config_of(port, tensor_parallel_size=8)
    with (
        waiting(config, True),
        pytest.raises(ConfigError, match="needs 4 GPUs on each, but node 1 has"),
    ):
        come(port, Hello(1, {}, 3))


def test_two_nodes_with_one_number_are_refused() -> None:
    port = free_port()
    config = config_of(port, nnodes=3, tensor_parallel_size=3)
    with waiting(config) as why, pytest.raises(ConfigError, match="node 1 has connected already"):
        first = secure_socket.connect("127.0.0.1", port, SECRET.encode())
        first.send(Hello(1, {}, 0))
        come(port, Hello(1, {}, 0))
    first.close()
    assert "node 2 of 3 did not connect" in why[0]


def test_a_client_without_the_key_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not block other nodes either, and nothing that it sends is unpickled."""
    monkeypatch.setattr(secure_socket, "HANDSHAKE", 0.3)
    port = free_port()
    with waiting(config_of(port)) as why:
        silent = socket.create_connection(("127.0.0.1", port))
        rude = socket.create_connection(("127.0.0.1", port))
        rude.sendall(b"\0\0\0\x04" + b"cos\n" * 40)
        with pytest.raises(ConfigError, match="SLOTZERO_KEY differs"):
            come(port, Hello(1, {}, 0), "another-secret-of-theirs")
        with pytest.raises(ConfigError, match="max_num_seqs"):
            come(port, Hello(1, {"max_num_seqs": 9}, 0))
        for end in (silent, rude):
            end.close()
    assert "max_num_seqs" in why[0]


def test_a_node_that_disconnects_is_missing() -> None:
    port = free_port()
    with waiting(config_of(port, nnodes=3, tensor_parallel_size=3)) as why:
        for hello in (Hello(1, {}, 0), "no hello"):
            with secure_socket.connect("127.0.0.1", port, SECRET.encode()) as came:
                came.send(hello)
                assert hello != "no hello" or came.poll(PATIENCE)
    assert "node 1 of 3 did not connect" in why[0] and "it sent no Hello message" in why[0]


def test_the_command_prints_why_it_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    words = f"serve tiny:llama --backend eager --nnodes 2 --node-rank 1 --master-port {port}"
    before = signal.getsignal(signal.SIGTERM)
    with waiting(config_of(port)):
        assert main([*words.split(), "--page-size", "32"]) == 2
    signal.signal(signal.SIGTERM, before)
    assert "page_size is 32 on node 1, but 16 on node 0" in capsys.readouterr().err


def test_an_unreachable_node_0_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    port, before = free_port(), signal.getsignal(signal.SIGTERM)
    words = f"serve --backend eager --nnodes 2 --node-rank 1 --master-port {port} --node-timeout 1"
    assert main(words.split()) == 1
    signal.signal(signal.SIGTERM, before)
    assert f"node 0 at 127.0.0.1:{port} was not reachable for 1 s" in capsys.readouterr().err


def test_a_missing_node_a_used_address_and_a_bad_key_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    settings = {"tensor_parallel_size": 4, "nnodes": 2, "master_port": port, **TINY}
    start = time.monotonic()
    with pytest.raises(RankLostError, match=r"node 1 of 2 did not connect .* and --node-rank 1"):
        LLM("tiny:llama", node_timeout=1.0, **settings)
    assert time.monotonic() - start < PATIENCE
    in_use = rf"cannot listen on 127\.0\.0\.1:{port} \(Address already in use\)"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=in_use):
        LLM("tiny:llama", **settings)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7:.* must be an IPv4 address of node 0"):
        LLM("tiny:llama", master_addr="203.0.113.7", **settings)
    for key in ("", "short"):
        monkeypatch.setenv(secure_socket.KEY, key)
        with pytest.raises(ConfigError, match=r"SLOTZERO_KEY must be a secret .* at least 16"):
            LLM("tiny:llama", **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 3}, "tensor_parallel_size=3.* nnodes=2"),
        ({"nnodes": 2}, "tensor_parallel_size=1.* nnodes=2"),
        ({"nnodes": 0}, "nnodes must be at least 1"),
        ({"node_rank": 1}, "node_rank must be below nnodes=1"),
        ({"node_rank": -1}, "node_rank"),
        ({"master_port": 1 << 16}, "master_port"),
        ({"node_timeout": 0.0}, "node_timeout"),
        ({"executor": "dask"}, "executor must be one of local, ray"),
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, "on this machine run"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM("tiny:llama", **TINY, **settings)


def test_several_engines_need_one_machine_or_ray(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "tiny:llama", "-tp", "2", "-dp", "2", "--nnodes", "2"]) == 2
    assert "--executor ray" in capsys.readouterr().err


def test_a_node_runs_as_many_ranks_as_it_has_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = config_of(free_port(), tensor_parallel_size=4)
    model: Any = None
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=4 over 2 nodes: this machine has 1"
    ):
        start_ranks(config, model)


def test_collectives_use_the_network_interface_of_the_other_nodes() -> None:
    assert interface_towards("127.0.0.1") == LOOPBACK
