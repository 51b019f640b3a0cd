"""Performance model of a step on one rank, from bytes, flops and collectives; see scaling.py.

The time of a step has four parts: the weights and KV cache that a rank reads, its flops, a fixed
time per layer, and the collectives. slotzero.models.shards says what a rank holds; the collectives
are counted as slotzero.models.decoder issues them. The constants of a GPU come from our
measurements on one H200 (benchmarks/h200), those of the links from published results (scaling.json
has the sources). The time of a product is the root of the sum of the squares of the time to read
its weights and the time to compute it. All other parts add up, unless `overlaps` is set. The model
has no host time, and assumes that experts are chosen evenly.
"""

import functools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.models.blocks.moe import MoeMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import parse_config
from slotzero.models.stacks import StackedParam, model_params

HERE = Path(__file__).parent
DATA: dict[str, Any] = json.loads((HERE / "scaling.json").read_text())
MODELS = {name: parse_config(config) for name, config in DATA["models"].items()}
NODE = 8  # GPUs connected by NVLink
CHOICE_BYTES, SLOT_BYTES = 4, 4
MLP = ("mlp", "moe")  # prefixes of the names of MLP weights


@dataclass(frozen=True)
class Machine:
    """A GPU and its links, in bytes, bytes per second, bfloat16 flops per second, and seconds."""

    memory: float
    bandwidth: float
    rate: float  # flops per second of matrix products
    link: float  # NVLink bandwidth, as achieved by a collective
    nic: float  # bandwidth to other nodes
    latency: float  # time of a collective over almost no data
    layer: float = 0.0  # fixed time of a layer; latent attention and experts add to it
    reach: float = 1.0  # share of the bandwidth achieved when reading weights
    latent_layer: float = 0.0
    latent_rate: float = math.inf
    latent_reach: float = 1.0  # share of the bandwidth achieved when reading latent KV
    expert_layer: float = 0.0
    expert_rate: float = math.inf
    expert_reach: float = 1.0
    prefill_rate: float = math.inf  # flops per second of attention over a prompt


@dataclass(frozen=True)
class Layout:
    ranks: Ranks = ALONE
    replicas: int = 1

    @property
    def num_gpus(self) -> int:
        return self.ranks.size * self.replicas


@dataclass(frozen=True)
class Numbers:
    """Bytes per number, by where it is stored or sent; Slotzero uses bfloat16 everywhere."""

    weight: float = 2
    kv: float = 2
    state: float = 2  # hidden states and logits
    sent: tuple[float, float] = (2, 2)  # to the experts, and back
    speed: float = 1  # speed of matrix products, relative to bfloat16
    sends_wanted: bool = False
    """A row is sent only to the ranks of its experts; Slotzero sends all rows to all ranks."""
    overlaps: bool = False
    """One half of a batch computes while the other half is exchanged."""


OURS = Numbers()


class Load(NamedTuple):
    """One step of all DP ranks together."""

    rows: int
    context: float  # tokens stored for each row, or the length of each prompt
    is_prompt: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * round(self.context) if self.is_prompt else self.rows


class Call(NamedTuple):
    """A collective, and the bytes of its input on every rank."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all
    size: float


class Spent(NamedTuple):
    """The seconds of a step, by part."""

    fixed: float
    products: float
    attention: float
    exchange: float
    overlaps: bool = False

    @property
    def total(self) -> float:
        alone = self.fixed + self.products + self.attention
        return max(alone, self.exchange) if self.overlaps else alone + self.exchange


# --- memory of a rank


def elements(stacked: StackedParam) -> int:
    param, num_layers = stacked.param, len(stacked.prefixes or (0,))
    return param.out_features * (param.columns or 1) * (param.experts or 1) * num_layers


@functools.cache
def held(model: ModelConfig, ranks: Ranks) -> tuple[StackedParam, ...]:
    return tuple(model_params(model, ranks))


def weight_bytes(model: ModelConfig, ranks: Ranks, numbers: Numbers = OURS) -> float:
    """Return the bytes of the weights on one rank."""
    return numbers.weight * sum(map(elements, held(model, ranks)))


def kv_bytes(model: ModelConfig, ranks: Ranks, context: float, numbers: Numbers = OURS) -> float:
    """Return the bytes of KV cache of one row on one rank."""
    return sum(
        len(g.layers) * g.heads.num_kv_heads * g.heads.row_size * _seen(g.heads.window, context)
        for g in model.shard(ranks).groups
    ) * (numbers.kv)


def room(model: ModelConfig, machine: Machine, ranks: Ranks, context: float, n: Numbers) -> int:
    """Return how many rows of this length fit on all DP ranks, in nine tenths of the memory."""
    free = 0.9 * machine.memory - weight_bytes(model, ranks, n)
    return max(0, int(free / kv_bytes(model, ranks, context, n))) * ranks.num_dp_ranks


def _seen(window: int | None, context: float) -> float:
    return context if window is None else min(window, context)


# --- collectives


def calls(model: ModelConfig, ranks: Ranks, load: Load, n: Numbers = OURS) -> Iterator[Call]:
    """Yield every collective of a step, as Decoder and Vocabulary issue them."""
    if not ranks.is_distributed:
        return
    share = -(-load.tokens // ranks.size)
    all_rows, own_rows = (t * model.hidden_size * n.state for t in (load.tokens, share))
    apart = ranks.dp_attention
    if not apart:
        yield Call("all_reduce", all_rows)  # embedding
    for layer in model.layers:
        assert layer.group is not None
        heads, is_sparse = layer.group.heads, layer.moe is not None
        if not apart:
            if heads.norms_whole:
                yield from [Call("all_reduce", load.tokens * 4.0)] * 2
            yield Call("all_reduce", all_rows)
        if not isinstance(layer.mlp, MoeMlp):
            yield from _mlp_calls(apart, all_rows, own_rows)
        if is_sparse and ranks.expert_parallel:
            yield from _expert_calls(model, ranks, share, n)
        elif is_sparse:
            if apart:
                yield Call("all_gather", share * SLOT_BYTES)
            yield from _mlp_calls(apart, all_rows, own_rows)
    if not apart:
        yield Call("all_gather", load.rows * -(-model.vocab_size // ranks.size) * n.state)


def _mlp_calls(apart: bool, all_rows: float, own_rows: float) -> Iterator[Call]:
    if apart:
        yield Call("all_gather", own_rows)
        yield Call("reduce_scatter", all_rows)
    else:
        yield Call("all_reduce", all_rows)


def _expert_calls(model: ModelConfig, ranks: Ranks, share: int, n: Numbers) -> Iterator[Call]:
    assert model.experts is not None
    size, copies = ranks.size, float(ranks.size)
    if n.sends_wanted:
        copies = size * (1 - (1 - 1 / size) ** model.experts.top_k)
    yield Call("all_to_all", size * share * 2.0 * model.experts.num_chosen * CHOICE_BYTES)
    for sent in n.sent:
        yield Call("all_to_all", copies * share * model.hidden_size * sent)
    if not ranks.dp_attention:
        yield Call("all_gather", share * model.hidden_size * n.state)


def call_seconds(machine: Machine, call: Call, size: int) -> float:
    """Return the time of a collective: a latency, and the time for the bytes that leave a rank.

    Sums and gathers across nodes run inside each node first; then each GPU sends an eighth to the
    other nodes.
    """
    is_exchange = call.kind == "all_to_all"
    whole = call.size * (size if call.kind == "all_gather" else 1)
    whole *= 2 if call.kind == "all_reduce" else 1
    here = min(size, NODE)
    inside, outside = (here - 1) / here * whole, (1 - here / size) * whole
    if here == size:
        return machine.latency + inside / machine.link
    if is_exchange:
        return machine.latency + outside / machine.nic
    return 2 * machine.latency + inside / machine.link + outside / NODE / machine.nic


# --- time of a step


def spent(
    model: ModelConfig, machine: Machine, ranks: Ranks, load: Load, n: Numbers = OURS
) -> Spent:
    mine = model.shard(ranks)
    dp_ranks = ranks.num_dp_ranks
    own_tokens, own_rows = load.tokens / dp_ranks, load.rows / dp_ranks
    head, mlps, others = _read(model, ranks)

    def product(size: float, tokens: float) -> float:
        reading = n.weight * size / (machine.bandwidth * machine.reach)
        return math.hypot(reading, 2 * tokens * size / (machine.rate * n.speed))

    products = product(head, own_rows)
    products += product(mlps, load.tokens) + product(others, own_tokens)
    products += _expert_seconds(mine, machine, ranks, load.tokens, n)
    num_latent = sum(len(g.layers) for g in mine.groups if g.heads.mla)
    fixed = model.num_layers * machine.layer + num_latent * machine.latent_layer
    fixed += _num_sparse(model) * machine.expert_layer
    exchange = sum(call_seconds(machine, c, ranks.size) for c in calls(model, ranks, load, n))
    attention = _attention_seconds(mine, machine, load, own_rows, n)
    return Spent(fixed, products, attention, exchange, n.overlaps)


@functools.cache
def _read(model: ModelConfig, ranks: Ranks) -> tuple[int, int, int]:
    """Count the numbers in the head, in the MLPs, and in all other weights that a step reads."""
    params = held(model, ranks)
    head = next((p for p in params if p.name == "head"), params[0])  # if tied, the embedding
    layers = [p for p in params if p.prefixes is not None and p.param.experts is None]
    mlps = sum(elements(p) for p in layers if p.name.startswith(MLP))
    return elements(head), mlps, sum(map(elements, layers)) - mlps


def _num_sparse(model: ModelConfig) -> int:
    return sum(layer.moe is not None for layer in model.layers)


def _expert_seconds(
    mine: ModelConfig, machine: Machine, ranks: Ranks, tokens: int, n: Numbers
) -> float:
    """Return the time of the experts in all sparse layers, if tokens choose experts evenly."""
    shape = mine.experts
    if shape is None:
        return 0.0
    each = 3 * mine.hidden_size * shape.inner_size  # gate, up, down
    spread = shape.num_ranks
    wanted = shape.num_experts / spread * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)
    read = n.weight * (wanted + shape.num_shared) * each
    flops = 2 * tokens * (shape.top_k + shape.num_shared) / spread * each
    reading = read / (machine.bandwidth * machine.expert_reach)
    layer = math.hypot(reading, flops / (machine.expert_rate * n.speed))
    return _num_sparse(mine) * layer


def _attention_seconds(
    mine: ModelConfig, machine: Machine, load: Load, own_rows: float, n: Numbers
) -> float:
    total = 0.0
    for group in mine.groups:
        heads, latent = group.heads, group.heads.mla
        seen = _seen(heads.window, load.context)
        if load.is_prompt:
            size = heads.head_dim + heads.value_dim
            if latent is not None:
                size = latent.nope_dim + latent.rope_dim + latent.v_head_dim
            before = seen - seen * seen / (2 * load.context)  # keys per token, on average
            flops = 2 * own_rows * load.context * before * heads.num_heads * size
            total += len(group.layers) * flops / machine.prefill_rate
            continue
        read = own_rows * seen * heads.num_kv_heads * heads.row_size * n.kv
        if latent is None:
            total += len(group.layers) * read / machine.bandwidth
            continue
        flops = 2 * own_rows * seen * heads.num_heads * (heads.head_dim + heads.value_dim)
        reading = read / (machine.bandwidth * machine.latent_reach)
        total += len(group.layers) * math.hypot(reading, flops / machine.latent_rate)
    return total


def throughput(
    model: ModelConfig, machine: Machine, layout: Layout, rows: int, given: int, asked: int,
    n: Numbers = OURS, chunk: int = 8192,
) -> float:  # fmt: skip
    """Return the tokens per second if requests keep `rows` rows of each replica busy."""
    decode = spent(model, machine, layout.ranks, Load(rows, given + asked / 2), n).total
    prompts = max(1, chunk * layout.ranks.num_dp_ranks // given)
    prefill = spent(model, machine, layout.ranks, Load(prompts, given, True), n).total / prompts
    return layout.replicas * rows * asked / (asked * decode + rows * prefill)


# --- constants of a GPU, from our measurements


def calibrated() -> Machine:
    """Fit an H200 to our measurements.

    Steps of two dense models give the time per layer, the share of the bandwidth and the rate.
    DeepSeek's shape and single layers with experts give what these add.
    """
    links, bandwidth = DATA["links"], 1e9 * measured("cost")["read_bandwidth_gb_per_second"]
    of_links = {"link": links["nvlink"], "nic": links["nic"], "latency": links["latency"]}
    machine = Machine(memory=141e9, bandwidth=bandwidth, rate=math.inf, **of_links)
    tried = [
        replace(machine, layer=layer * 1e-6, reach=reach / 100, rate=rate * 1e12)
        for layer in range(10, 23, 2)
        for reach in range(84, 101, 4)
        for rate in range(500, 801, 25)
    ]
    fitted = list(fitted_steps())
    machine = min(tried, key=lambda m: sum(_error(m, *point) for point in fitted))
    machine = _with_latent(machine, measured("latent"))
    return _with_experts(machine, measured("experts")["results"])


def fitted_steps() -> Iterator[tuple[ModelConfig, Load, float]]:
    """Yield the steps that the constants are fitted to, and their seconds."""
    cost, graphs = measured("cost"), measured("graphs")
    for p in cost["against_batch"] + cost["against_context"]:
        yield MODELS["Llama-3.1-8B"], Load(p["rows"], p["context"]), p["ms"] / 1000
    for g in graphs["graphs"]:
        if g["runner"] == "decode":
            load = Load(g["rows"], graphs["context"])
            yield MODELS["Qwen3-0.6B"], load, g["replay_ms"] / 1000


def _error(machine: Machine, model: ModelConfig, load: Load, seconds: float) -> float:
    return math.log(spent(model, machine, ALONE, load).total / seconds) ** 2


def _with_latent(machine: Machine, latent: Mapping[str, Any]) -> Machine:
    ms = {(r["heads"], r["rows"], r["context"]): r["ms"] for r in latent["results"]}
    model = latent_model(16)
    heads, num = model.groups[0].heads, model.num_layers
    stored = num * 256 * (32768 - 1024)  # tokens that the longest steps store beyond the shortest
    flops = 2 * 128 * (heads.head_dim + heads.value_dim)
    eighth, whole = ((ms[h, 256, 32768] - ms[h, 256, 1024]) / 1000 for h in (16, 128))
    rates = [r["expanded_tflops"] for r in latent["prefill"] if r["tokens"] > 512 > r["before"]]
    machine = replace(
        machine,
        latent_reach=stored * heads.row_size * 2 / eighth / machine.bandwidth,
        latent_rate=stored * flops / whole,
        prefill_rate=statistics.median(rates) * 1e12,
    )
    more = ms[16, 1, 1024] / 1000 - spent(model, machine, ALONE, Load(1, 1024)).total
    return replace(machine, latent_layer=more / num)


def _with_experts(machine: Machine, results: Sequence[Mapping[str, Any]]) -> Machine:
    def of(rows: int) -> list[Mapping[str, Any]]:
        return [r for r in results if r["rows"] == rows]

    fixed = statistics.mean(r["ms"] - r["limit_ms"] for r in of(1))
    reach = statistics.mean(r["limit_ms"] / (r["ms"] - fixed) for r in of(64))
    rates = []
    for r in of(4096):
        alone = math.sqrt((r["ms"] - fixed) ** 2 - (r["limit_ms"] / reach) ** 2)
        rates.append(r["tflops"] * 1e12 * r["ms"] / alone)
    return replace(
        machine,
        expert_layer=fixed / 1000,
        expert_reach=min(1.0, reach),
        expert_rate=statistics.mean(rates),
    )


def latent_model(num_heads: int) -> ModelConfig:
    """Return four dense layers in DeepSeek-V3's shape, as in benchmarks/h200/latent.py."""
    config = DATA["models"]["DeepSeek-V3"] | {"num_hidden_layers": 4, "first_k_dense_replace": 4}
    config |= {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    for name in ("intermediate_size", "vocab_size"):
        config[name] = config[name] * num_heads // 128
    return parse_config(config)


@functools.cache
def machines() -> dict[str, Machine]:
    """Return all machines; others achieve the H200's shares of their makers' specifications."""
    h200 = calibrated()
    stated = DATA["machines"]
    made = {}
    for name, of in stated.items():
        share = {k: of[k] / stated["H200"][k] for k in ("bandwidth", "rate", "link")}
        made[name] = replace(
            h200,
            memory=of["memory"],
            bandwidth=h200.bandwidth * share["bandwidth"],
            link=h200.link * share["link"],
            **{
                name: getattr(h200, name) * share["rate"]
                for name in ("rate", "latent_rate", "expert_rate", "prefill_rate")
            },
        )
    return made


def measured(name: str) -> Any:
    return json.loads((HERE / "h200" / f"{name}.json").read_text())
