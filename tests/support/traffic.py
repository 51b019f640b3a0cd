"""Random traffic: batches of requests that arrive over time, are cancelled and run out of pages.

Everything is drawn from a `random.Random`: a seeded one, or Hypothesis's.
"""

import random
from dataclasses import dataclass

import torch

from slotzero.certify.start import start_engine
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.executor.limits import group_shapes
from slotzero.models.families.family import parse_config
from slotzero.sampling.params import POOLED, SamplingParams

TEXT = 256  # the token ids below this are bytes, in a tiny model
# "tight" runs out of pages; "wide" has long prompts and padded rows.
SHAPES: dict[str, dict[str, int]] = {
    "tight": {
        "max_num_seqs": 5, "max_num_batched_tokens": 20, "max_model_len": 64, "page_size": 4,
    },
    "wide": {
        "max_num_seqs": 7, "max_num_batched_tokens": 96, "max_model_len": 128, "page_size": 16,
    },
}  # fmt: skip
NUM_PAGES = {"tight": 19, "wide": 57}


def settings_of(family: str, shape: str) -> dict[str, object]:
    fields = SHAPES[shape]
    groups = group_shapes(
        parse_config(tiny_configs()[family]).groups, fields["page_size"], torch.float32
    )
    longest, chunk = fields["max_model_len"], fields["max_num_batched_tokens"]
    room = {
        g.name: NUM_PAGES[shape] if g.window is None else g.needed(longest, chunk) + 6
        for g in groups
    }
    return {
        "model": f"tiny:{family}",
        "kv_cache_memory": sum(room[g.name] * g.num_bytes for g in groups),
        "skip_tokenizer_init": True,
        "show_progress": False,
        "lazy_recording": True,
        **SHAPES[shape],
    }


def engine_of(family: str, shape: str, **more: object) -> Engine:
    return start_engine(EngineConfig(**{**settings_of(family, shape), **more}))


@dataclass(frozen=True)
class Visit:
    """One request of a batch: when it arrives, what it asks for, and when it is cancelled."""

    wait: int
    """Steps between the previous arrival and this one."""
    prompt: list[int]
    params: SamplingParams
    patience: int | None
    """Steps from its arrival to its cancellation, or None if it is not cancelled."""


def draw_batch(rng: random.Random, max_model_len: int) -> list[Visit]:
    return [draw_visit(rng, max_model_len) for _ in range(rng.randint(1, 8))]


def draw_visit(rng: random.Random, max_model_len: int) -> Visit:
    """Draw a request; two in three share a prefix, so that the prefix cache finds it. Of one prompt
    in five a vector is wanted."""
    text = rng.randint(0, 2)
    shared = [(7 * i + text) % TEXT for i in range(rng.choice([0, 16, 33]))]
    room = max_model_len - len(shared) - 1
    prompt = shared + [rng.randrange(TEXT) for _ in range(rng.randint(1, min(room, 24)))]
    max_tokens = rng.randint(1, 12)
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 3, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.5]),
        logit_bias=rng.choice([{}, {257: 4.0}, {7: -100.0, 11: 2.0}]),
        seed=rng.getrandbits(40),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, None, 0, 4]),
        prompt_logprobs=None if len(prompt) % 4 else 2,
    )
    patience = rng.randint(0, 10) if rng.random() < 0.15 else None
    if len(prompt) % 5 == 2:
        params = POOLED
    return Visit(rng.choice([0, 0, 0, 1, 2, 5]), prompt, params, patience)


def send(engine: Engine, batch: list[Visit], name: str = "") -> list[RequestHandle]:
    """Run the batch to its end, and return the answers in order of arrival."""
    answers: list[RequestHandle] = []
    arrivals, now = [], 0
    for visit in batch:
        now += visit.wait
        arrivals.append(now)
    leaving = {
        f"{name}{i}": arrivals[i] + visit.patience
        for i, visit in enumerate(batch)
        if visit.patience is not None
    }
    for step in range(10_000):
        while len(answers) < len(batch) and arrivals[len(answers)] <= step:
            visit = batch[len(answers)]
            answers.append(engine.add(f"{name}{len(answers)}", visit.prompt, visit.params))
        for request_id in [i for i, when in leaving.items() if when <= step]:
            del leaving[request_id]
            engine.cancel(request_id)
        engine.step()
        if len(answers) == len(batch) and not engine.has_work:
            engine.check()
            return answers
    raise AssertionError("a request never ends")
