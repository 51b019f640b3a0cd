"""Tests of pauses and weight updates over HTTP, with engines in threads of this process."""

import asyncio
import base64
import gc
import os
import pickle
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from threaded_engine import SOON, Stack, stack, tensors_of, write_folder

from slotzero import LLM, SamplingParams
from slotzero.server import client as client_module

pytestmark = pytest.mark.slow

PROMPT = list(range(20))
TRAINER = f"{Path(__file__).parent.parent}/support/broadcasting_trainer.py"


def fresh_tokens(folder: str, prompt: list[int], num: int) -> list[int]:
    """Return the answer of an engine that was started with these weights."""
    llm = LLM(folder, max_model_len=128, backend="eager", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num, detokenize=False)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids


async def in_flight(served: Stack, num: int, num_tokens: int) -> list[asyncio.Task[Any]]:
    """Start requests, and wait until all run."""
    asks = [
        asyncio.create_task(served.complete([*PROMPT, i], num_tokens, logprobs=0))
        for i in range(num)
    ]
    await served.until_running(num)
    return asks


def test_a_folder_replaces_the_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", 1)

    async def run() -> None:
        async with stack() as served:
            old = await served.complete(PROMPT)
            assert old["weight_version"] == "0"
            body = {"path": folder, "weight_version": "step 7"}
            assert await served.post("/load_weights", body) == {"weight_version": "step 7"}
            new = await served.complete(PROMPT)
            assert new["weight_version"] == "step 7"
            assert await served.get("/weight_info") == {"weight_version": "step 7"}
            assert new["token_ids"] == fresh_tokens(folder, PROMPT, 8) != old["token_ids"]
            made = await served.http.post("/v1/completions", json={"prompt": "a", "stream": True})
            assert made.headers["x-weight-version"] == "step 7"

    asyncio.run(run())


@pytest.mark.parametrize("running", ["hold", "finish", "abort"])
def test_requests_in_flight(running: str, tmp_path: Path) -> None:
    folder, num = write_folder(tmp_path / "a", 1), 90

    async def run() -> None:
        async with stack() as served:
            alone = [(await served.complete([*PROMPT, i], num))["token_ids"] for i in range(2)]
            asks = await in_flight(served, 2, num)
            await served.post("/load_weights", {"path": folder, "running": running})
            for i, choice in enumerate(await asyncio.gather(*asks)):
                tokens = choice["token_ids"]
                assert len(choice["logprobs"]["tokens"]) == len(tokens)
                if running == "finish":
                    assert (tokens, choice["weight_version"]) == (alone[i], "0")
                elif running == "abort":
                    assert choice["finish_reason"] == "abort"
                    assert tokens == alone[i][: len(tokens)]
                else:
                    assert (len(tokens), choice["weight_version"]) == (num, "1")
                    num_old = next(j for j in range(num) if tokens[j] != alone[i][j])
                    rest = fresh_tokens(folder, [*PROMPT, i, *tokens[:num_old]], num - num_old)
                    assert tokens[num_old:] == rest
            served.engines[0].engine.check()

    asyncio.run(run())


def test_an_update_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    folder = Path(write_folder(tmp_path / "a", 1))
    tensors = tensors_of(1)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({name: tensors[name][:, 1:].contiguous()}, tmp_path / "bad.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 100)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")

    async def run() -> None:
        async with stack(2) as served:
            old = await served.complete(PROMPT)
            for path, message in (
                (folder, f"{name} is missing"),
                (tmp_path / "bad.safetensors", f"{name} has shape"),
                (tmp_path / "broken.safetensors", "broken.safetensors"),
                (tmp_path / "none", "there is no such folder"),
                ("tiny:llama", "there is no such folder"),
            ):
                made = await served.post("/load_weights", {"path": f"{path}"}, 400)
                assert message in made["error"]["message"]
            assert await served.complete(PROMPT) == old
            assert await served.get("/weight_info") == {"weight_version": "0"}

    asyncio.run(run())


def test_a_file_replaces_a_part(tmp_path: Path) -> None:
    folder, file = write_folder(tmp_path / "a", 1), tmp_path / "shared.safetensors"

    async def run() -> None:
        async with stack() as served:
            for prefix in ("model.layers.0", "model.layers.1", "model.embed", "model.norm", "lm_"):
                part = {n: t for n, t in tensors_of(1).items() if n.startswith(prefix)}
                save_file(part, file)
                await served.post("/load_weights", {"path": f"{file}"})
            choice = await served.complete(PROMPT)
            assert choice["weight_version"] == "5"
            assert choice["token_ids"] == fresh_tokens(folder, PROMPT, 8)

    asyncio.run(run())


def pickled(tensors: dict[str, Any]) -> list[str]:
    return [base64.b64encode(pickle.dumps(list(tensors.items()))).decode()]


def test_tensors_wait_for_each_other(tmp_path: Path) -> None:
    """They replace the weights together, also if two buckets have parts of one weight."""
    folder = write_folder(tmp_path / "a", 1)
    names = sorted(tensors := tensors_of(1))
    buckets = [{name: tensors[name] for name in names[i::2]} for i in range(2)]
    path, wrong = "/update_weights_from_tensor", "model.norm.weight"

    async def run() -> None:
        async with stack(2) as served:
            old = await served.complete(PROMPT)
            body = {"flush_cache": False, "weight_version": "s1"}
            for bucket in buckets:
                await served.post(path, body | {"serialized_named_tensors": pickled(bucket)})
                assert (await served.complete(PROMPT))["token_ids"] == old["token_ids"]
            await served.post("/continue_generation")
            made = await served.post(
                "/generate",
                {
                    "input_ids": PROMPT,
                    "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
                },
            )
            assert made["meta_info"]["weight_version"] == "s1"
            assert made["output_ids"] == fresh_tokens(folder, PROMPT, 8)
            await served.post(path, body | {"serialized_named_tensors": pickled(buckets[0])})
            bad = {"serialized_named_tensors": pickled({wrong: tensors[wrong][1:]})}
            error = (await served.post(path, bad, 400))["error"]["message"]
            assert f"{wrong} is given twice" in error or f"{wrong} has shape" in error
            assert (await served.complete(PROMPT))["token_ids"] == made["output_ids"]
            made = await served.post("/update_weights_from_tensor", bad, 400)
            assert f"{wrong} has shape" in made["error"]["message"], "the others were dropped"

    asyncio.run(run())


@asynccontextmanager
async def trainer(served: Stack, file: Path, group: str, chunk_bytes: int) -> AsyncIterator[int]:
    """Start a process that broadcasts the tensors of a file, as often as there are stages; yield
    the port of its group."""
    words = [TRAINER, f"{1 + len(served.engines)}", group, f"{file}", f"{chunk_bytes}"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)
    try:
        assert process.stdout is not None
        yield int(await asyncio.wait_for(process.stdout.readline(), SOON))
        assert await asyncio.wait_for(process.wait(), SOON) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_trainer_broadcasts_for_sglang(tmp_path: Path) -> None:
    """Requests run on while tensors arrive."""
    folder = Path(write_folder(tmp_path / "a", 1))
    tensors, group = load_file(folder / "model.safetensors"), "weight_update_group"
    body = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "weight_version": "s1",
    }

    async def run() -> None:
        async with (
            stack(2) as served,
            trainer(served, folder / "model.safetensors", group, 0) as port,
        ):
            info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
            asks = await in_flight(served, 2, 90)
            await served.post("/init_weights_update_group", info | {"world_size": 3})
            made = await served.post("/update_weights_from_distributed", body)
            assert made["success"]
            assert {choice["weight_version"] for choice in await asyncio.gather(*asks)} <= {
                "0",
                "s1",
            }
            answer = await served.complete(PROMPT)
            assert answer["weight_version"] == "s1"
            assert answer["token_ids"] == fresh_tokens(f"{folder}", PROMPT, 8)
            await served.post("/destroy_weights_update_group", {})
            made = await served.post("/update_weights_from_distributed", body, 400)
            assert "make it first" in made["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize("chunk_bytes", [0, 20_000])
def test_a_trainer_broadcasts_for_vllm(chunk_bytes: int, tmp_path: Path) -> None:
    folder = Path(write_folder(tmp_path / "a", 1))
    tensors = load_file(folder / "model.safetensors")  # in the order in which they are sent
    body = {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }

    async def run() -> None:
        async with (
            stack() as served,
            trainer(served, folder / "model.safetensors", "weight_transfer", chunk_bytes) as port,
        ):
            old = await served.complete(PROMPT)
            size = (await served.get("/get_world_size"))["world_size"] + 1
            info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
            info |= {"world_size": size, "packed": chunk_bytes > 0}
            if chunk_bytes:
                info["packed_buffer_size_bytes"] = chunk_bytes
            await served.post("/init_weight_transfer_engine", {"init_info": info})
            await served.post("/start_weight_update")
            await served.post("/update_weights", {"update_info": body})
            assert (await served.complete(PROMPT))["token_ids"] == old["token_ids"]
            await served.post("/finish_weight_update", {"weight_version": "9"})
            answer = await served.complete(PROMPT)
            assert answer["weight_version"] == "9"
            assert answer["token_ids"] == fresh_tokens(f"{folder}", PROMPT, 8)
            await served.post("/shutdown_weight_transfer_engine")

    asyncio.run(run())


def test_a_group_that_does_not_fit_is_refused() -> None:
    async def run() -> None:
        async with stack(2) as served:
            info = {"master_address": "127.0.0.1", "master_port": 1}
            for rank, size in ((0, 3), (1, 2), (2, 3)):
                body = info | {"rank_offset": rank, "world_size": size}
                made = await served.post("/init_weights_update_group", body, 400)
                assert made["error"]["param"] == "world_size"

    asyncio.run(run())


def test_all_engines_of_a_fleet_change(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", 1)

    async def run() -> None:
        async with stack(2) as served:
            await served.post("/load_weights", {"path": folder})
            versions = [one.engine.weight_version for one in served.engines]
            assert versions == ["1", "1"]

    asyncio.run(run())


def test_a_restarted_engine_gets_the_folder_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.0)
    folder = write_folder(tmp_path / "a", 1)

    async def run() -> None:
        async with stack() as served:
            await served.post("/load_weights", {"path": folder})
            await served.post("/pause", None, params={"mode": "keep"})
            new = (await restarted(served)).engine
            await served.until(lambda: served.fleet.state == "ready")
            assert new.weight_version == "1"
            asked = asyncio.create_task(served.complete(PROMPT))
            await served.until(lambda: new.schedulers.num_waiting == 1)
            await served.post("/resume")
            assert (await asked)["token_ids"] == fresh_tokens(folder, PROMPT, 8)

    asyncio.run(run())


async def restarted(served: Stack) -> Any:
    """End the process of the engine, and return the next one."""
    served.engines[0].kill()
    await served.until(lambda: len(served.engines) == 2)
    return served.engines[1]


def test_an_engine_whose_weights_are_gone_stays_out(tmp_path: Path) -> None:
    folder = Path(write_folder(tmp_path / "a", 1))
    file = tmp_path / "shared.safetensors"
    save_file(tensors_of(1), file)

    async def run(path: Path, message: str) -> None:
        async with stack() as served:
            await served.post("/load_weights", {"path": f"{path}"})
            for stored in folder.iterdir():
                if path == folder:
                    stored.unlink()
            served.engines[0].kill()
            await served.until(lambda: served.fleet.state == "failed")
            assert message in served.fleet.failure

    asyncio.run(run(file, "came as tensors"))
    asyncio.run(run(folder, "could not take the newest weights"))


def test_a_pause_keeps_requests_and_new_ones_wait() -> None:
    async def run() -> None:
        async with stack() as served:
            alone = [(await served.complete([*PROMPT, i], 60))["token_ids"] for i in range(3)]
            asks = await in_flight(served, 2, 60)
            assert await served.get("/is_paused") == {"is_paused": False}
            assert (await served.post("/pause?mode=keep"))["status"] == "paused"
            assert await served.get("/is_paused") == {"is_paused": True}
            engine = served.engines[0].engine
            asks.append(asyncio.create_task(served.complete([*PROMPT, 2], 60)))
            await served.until(lambda: engine.schedulers.num_waiting == 1)
            steps = engine.num_steps
            await asyncio.sleep(0.2)
            assert engine.num_steps == steps
            assert not any(ask.done() for ask in asks)
            await served.post("/resume")
            assert [choice["token_ids"] for choice in await asyncio.gather(*asks)] == alone

    asyncio.run(run())


def test_a_pause_waits_for_requests() -> None:
    async def run() -> None:
        async with stack() as served:
            asks = await in_flight(served, 2, 60)
            await served.post("/pause?mode=wait")
            choices = await asyncio.gather(*asks)
            assert [choice["finish_reason"] for choice in choices] == ["length"] * 2

    asyncio.run(run())


def test_a_pause_aborts_requests() -> None:
    """Also those that have not begun; what they have is answered."""

    async def run() -> None:
        async with stack() as served:
            asks = await in_flight(served, 4, 90)
            asks.append(asyncio.create_task(served.complete("waits", 90)))
            await served.until(lambda: served.engines[0].engine.schedulers.num_waiting == 1)
            await served.post("/pause")
            choices = await asyncio.gather(*asks)
            assert [choice["finish_reason"] for choice in choices] == ["abort"] * 5
            assert choices[4]["token_ids"] == []
            served.engines[0].engine.check()

    asyncio.run(run())


def test_held_requests_cannot_finish_during_a_pause(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", 1)

    async def run() -> None:
        async with stack() as served:
            asks = await in_flight(served, 1, 60)
            await served.post("/pause?mode=keep")
            body = {"path": folder, "running": "finish"}
            made = await served.post("/load_weights", body, 400)
            assert "generation is paused" in made["error"]["message"]
            await served.post("/resume")
            assert (await asks[0])["weight_version"] == "0"

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_taken_again(level: int, tmp_path: Path) -> None:
    """Requests go on afterwards; at level 2 with the weights that were loaded."""
    folder, num = write_folder(tmp_path / "a", 1), 60

    async def run() -> None:
        async with stack() as served:
            alone = [(await served.complete([*PROMPT, i], num))["token_ids"] for i in range(2)]
            asks = await in_flight(served, 2, num)
            made = await served.post(f"/sleep?level={level}&mode=keep")
            assert made == {"status": "sleeping"}
            assert await served.get("/is_sleeping") == {"is_sleeping": True}
            again = await served.post("/sleep", None, 400)
            assert "sleep already" in again["error"]["message"]
            made = await served.post("/load_weights", {"path": folder}, 400)
            assert "the weights sleep" in made["error"]["message"]
            engine = served.engines[0].engine
            asks.append(asyncio.create_task(served.complete([*PROMPT, 2], num)))
            await served.until(lambda: engine.schedulers.num_waiting == 3)
            made = await served.post("/wake_up?tags=weights")
            assert made == {"status": "sleeping"}
            if level == 2:
                part = tmp_path / "part.safetensors"
                save_file({"model.norm.weight": tensors_of(1)["model.norm.weight"]}, part)
                made = await served.post("/load_weights", {"path": f"{part}"}, 400)
                assert "is missing" in made["error"]["message"], "all weights are needed"
                await served.post("/load_weights", {"path": folder})
            steps = engine.num_steps
            assert await served.post("/wake_up?tags=kv_cache") == {"status": "awake"}
            choices = await asyncio.gather(*asks)
            assert engine.num_steps > steps
            assert {choice["weight_version"] for choice in choices} == {f"{level - 1}"}
            if level == 1:
                assert [choice["token_ids"] for choice in choices[:2]] == alone
            answer = await served.complete(PROMPT)
            if level == 2:
                assert answer["token_ids"] == fresh_tokens(folder, PROMPT, 8)
            engine.check()
            stats = served.fleet.replicas[0]
            await served.until(lambda: stats.stats is not None and not stats.stats.asleep)
            assert not await is_listed(served, "slotzero_engine_asleep")

    asyncio.run(run())


async def is_listed(served: Stack, name: str) -> bool:
    """Return whether a metric is above 0."""
    text = (await served.http.get("/metrics")).text
    (value,) = [line.split()[-1] for line in text.splitlines() if line.startswith(f"{name}{{")]
    return float(value) > 0


def test_sleep_is_reported() -> None:
    async def run() -> None:
        async with stack() as served:
            await served.complete(PROMPT)
            names = ("slotzero_engine_asleep", "slotzero_asleep_bytes", "slotzero_engine_paused")
            for name in names:
                assert not await is_listed(served, name)
            await served.post("/pause")
            await served.post("/sleep?level=2")
            stats = served.fleet.replicas[0]
            await served.until(lambda: stats.stats is not None and stats.stats.asleep)
            for name in names:
                assert await is_listed(served, name)

    asyncio.run(run())


def test_memory_over_the_names_of_sglang(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", 1)

    async def run() -> None:
        async with stack() as served:
            asks = await in_flight(served, 1, 60)
            await served.post("/release_memory_occupation", {"tags": ["kv_cache"]})
            await served.post("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]})
            assert len((await asks[0])["token_ids"]) == 60
            await served.post("/release_memory_occupation", {})
            await served.post("/resume_memory_occupation", {"tags": ["weights"]})
            await served.post("/update_weights_from_disk", {"model_path": folder})
            await served.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
            answer = await served.complete(PROMPT)
            assert answer["token_ids"] == fresh_tokens(folder, PROMPT, 8)

    asyncio.run(run())


def test_many_updates_under_load_lose_no_request(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / f"{seed}", seed) for seed in (1, 2)]
    num_updates = 12

    async def run() -> None:
        memory: list[int] = []
        async with stack() as served:
            asks: list[asyncio.Task[Any]] = []
            for i in range(num_updates):
                asks += [asyncio.create_task(served.complete([i % 256, j], 12)) for j in range(3)]
                await served.post("/load_weights", {"path": folders[i % 2]})
                if i in (num_updates // 2, num_updates - 1):
                    gc.collect()
                    memory.append(_resident())
            choices = await asyncio.gather(*asks)
            assert {len(choice["token_ids"]) for choice in choices} == {12}
            assert {choice["finish_reason"] for choice in choices} == {"length"}
            served.engines[0].engine.check()
        assert memory[1] - memory[0] < 8 << 20

    asyncio.run(run())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
