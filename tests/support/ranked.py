"""The ranks of a rank group, which run a list of jobs: `python ranked.py SIZE JOBS.json`.

Every rank runs the same engine for each job, and saves the tokens and logits of its answers in a
file. With DP attention, rank 0 leads and the other ranks follow it. The ranks are started once for
many models, and forked after the imports, which saves time; tests/distributed/test_parallel.py also
starts ranks as a user does.
"""

import functools
import json
import multiprocessing
import sys
import traceback
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import torch
from traced import Traced, prompts_of

import slotzero.llm
from slotzero import LLM, SamplingParams
from slotzero.certify import mutants
from slotzero.certify.faults import FAULTS
from slotzero.checkpoint.source import open_checkpoint
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.executor.build import build_worker
from slotzero.executor.follower import run_messages
from slotzero.executor.rank_group import RankGroup, RemoteRanks, Rendezvous
from slotzero.sampling.params import MAX_LOGPROBS

PATIENCE = 120.0  # seconds
QUIET = {"lazy_recording": True, "show_progress": False}


def main(rank: int, size: int, file: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = Rendezvous(size, f"file://{file.parent / 'store'}", PATIENCE)
    path = str(file.parent / "wires")
    listener = path if rank else Listener(path, backlog=size)  # before the other ranks connect
    ranks = rendezvous.join(rank, torch.device("cpu"))
    wires = wires_of(rank, size, listener)
    for name, job in json.loads(file.read_text()).items():
        mine = replace(ranks, **job["ranks"])
        leads = mine.dp_attention and "faults" not in job
        if leads and rank > 0:
            follow(job, RankGroup(mine), wires[0])
            continue
        rank_group = RemoteRanks(mine, wires, PATIENCE) if leads else RankGroup(mine)
        slotzero.llm.start_engine = functools.partial(Engine, rank_group=rank_group)  # type: ignore[misc]
        try:
            kept = mutate(job, rank_group) if "faults" in job else JOBS[leads](job)
        except Exception:
            kept = {"failure": traceback.format_exc()}
        if leads:
            for wire in wires.values():
                wire.send(None)
        torch.save(kept, file.parent / f"{name}.{rank}.pt")


def wires_of(rank: int, size: int, listener: Listener | str) -> dict[int, Connection]:
    """Return the connections between rank 0 and each other rank, by the rank at the other end."""
    if isinstance(listener, str):
        wire = Client(listener)
        wire.send(rank)
        return {0: wire}
    with listener:
        wires = [listener.accept() for _ in range(1, size)]
    return {wire.recv(): wire for wire in wires}


def follow(job: dict, rank_group: RankGroup, wire: Connection) -> None:
    torch.manual_seed(0)
    config = EngineConfig(model=job["model"], **QUIET, **job["settings"])
    run_messages(
        build_worker(config, open_checkpoint(config.model), lambda *_: None, rank_group), wire
    )


def run(job: dict) -> dict:
    torch.manual_seed(0)
    traced = Traced(job["model"], tensor_parallel_size=1, **job["settings"])
    params = SamplingParams(temperature=0, max_tokens=job["num_tokens"], ignore_eos=True)
    tokens = traced.generate(prompts_of(job["lengths"], job["vocab"]), params)
    return {
        "tokens": tokens,
        "logits": [torch.stack(traced.logits[i][: job["num_tokens"]]) for i in traced.request_ids],
        "preemptions": traced.engine.schedulers.num_preemptions,
        "replays": traced.engine.worker.decode.counts.replays,
    }


def run_apart(job: dict) -> dict:
    """Run a job with DP attention: one request first, so that other ranks idle, then the rest."""
    llm = LLM(job["model"], skip_tokenizer_init=True, **QUIET, **job["settings"])
    params = SamplingParams(
        temperature=0, max_tokens=job["num_tokens"], ignore_eos=True, logprobs=MAX_LOGPROBS
    )
    prompts, added, add = prompts_of(job["lengths"], job["vocab"]), [], llm.engine.add
    llm.engine.add = lambda *args: added.append(add(*args)) or added[-1]
    outputs = [
        output.outputs[0]
        for some in (prompts[:1], prompts[1:])
        for output in llm.generate(some, params, use_tqdm=False)
    ]
    llm.engine.check()
    return {
        "tokens": [output.token_ids for output in outputs],
        "top": [
            [{i: logprob.logprob for i, logprob in of.items()} for of in output.logprobs]
            for output in outputs
        ],
        "dp_ranks": sorted({answer.request.dp_rank for answer in added}),
        "preemptions": llm.engine.schedulers.num_preemptions,
        "replays": llm.engine.worker.decode.counts.replays,
    }


JOBS = {False: run, True: run_apart}


def mutate(job: dict, rank_group: RankGroup) -> dict:
    """Inject the faults of the job on every rank at once, and return what became of them."""
    config = EngineConfig(model=job["model"], show_progress=False, **job["settings"])
    engine = Engine(config, rank_group)
    mutants.FAULTS = tuple(fault for fault in FAULTS if fault.name in job["faults"])
    found = mutants.mutate(engine, runners=[engine.worker.decode])
    return {
        "found": [str(mutant) for mutant in found],
        "missed": [str(mutant) for mutant in found if not mutant.caught],
        "made": {mutant.fault for mutant in found},
    }


if __name__ == "__main__":
    size, file = int(sys.argv[1]), Path(sys.argv[2])
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(rank, size, file)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
