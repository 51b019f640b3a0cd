"""Predicted performance of one GPU, one node and several nodes, checked against measurements.

    python benchmarks/scaling.py             # constants, checks, and a prediction for each layout
    python benchmarks/scaling.py --measure   # gloo's collectives and a step's message, on this CPU

The predictions come from step_model.py. They are printed beside our measurements on one H200,
beside published results (scaling.json has the sources), and for every layout of a node. The script
prints tables, then one line of JSON. docs/scaling.md explains the results.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from step_model import (
    DATA,
    MODELS,
    NODE,
    OURS,
    Call,
    Layout,
    Load,
    Machine,
    Numbers,
    call_seconds,
    fitted_steps,
    latent_model,
    machines,
    measured,
    room,
    spent,
    throughput,
    weight_bytes,
)

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.models.config import ModelConfig

# --- checks against our measurements and published ones


def check_ours(machine: Machine) -> list[dict[str, Any]]:
    """Compare with our measurements on one H200, in milliseconds.

    The model's constants were fitted to the entries whose names say "fitted".
    """
    found = []

    def add(what: str, rows: int, context: float, seconds: float, ms: float) -> None:
        found.append(
            {"what": what, "rows": rows, "context": context}
            | {"predicted": _short(1000 * seconds), "measured": _short(ms)}
        )

    def steps(what: str, model: ModelConfig, points: Sequence[Mapping[str, Any]]) -> None:
        for p in points:
            load = Load(p["rows"], p["context"])
            add(what, *load[:2], spent(model, machine, ALONE, load).total, p["ms"])

    for model, load, seconds in fitted_steps():
        name = next(name for name, of in MODELS.items() if of is model)
        predicted = spent(model, machine, ALONE, load).total
        add(f"{name}, fitted", *load[:2], predicted, 1000 * seconds)
    gemma = measured("windows")["gemma3-4b"]
    steps("Gemma-3-4B", MODELS["Gemma-3-4B"], gemma["against_batch"] + gemma["against_context"])
    for heads in (16, 128):
        points = [r for r in measured("latent")["results"] if r["heads"] == heads]
        steps(f"latent, {heads} heads, partly fitted", latent_model(heads), points)
    for workload, tokens in measured("results").items():
        name, batch = workload.split("/")
        if batch == "mixed":
            continue
        rows = int(batch[1:])
        rate = throughput(MODELS[name], machine, Layout(), rows, 128, 512)
        add(f"{name}, whole workload", rows, 384, rows / rate, 1000 * rows / tokens)
    return found


def check_published(machine_of: Mapping[str, Machine]) -> list[dict[str, Any]]:
    found = []
    for entry in DATA["published"]:
        predicted = _predicted(entry, machine_of[entry["machine"]])
        kept = {k: entry.get(k, "") for k in ("what", "model", "machine", "published", "unit")}
        kept |= {"predicted": _short(predicted), "date": entry["date"], "url": entry["url"]}
        found.append(kept)
    return found


def _predicted(entry: Mapping[str, Any], machine: Machine) -> float:
    layout = _layout(**entry["layout"])
    ranks, kind = layout.ranks, entry["kind"]
    if kind == "collective":
        return 1e6 * call_seconds(machine, Call(entry["call"], entry["size"]), ranks.size)
    model, numbers = MODELS[entry["model"]], Numbers(**entry["numbers"])
    if kind in ("tokens", "gain"):
        given, asked = entry["given"], entry["asked"]
        most = min(2048, room(model, machine, ranks, given + asked / 2, numbers))
        of = machine, layout, entry.get("rows", most), given, asked, numbers
        rate = throughput(model, *of)
        if kind == "tokens":
            return rate
        return rate / throughput(model, machine, _layout(ranks.size), *of[2:])
    load = Load(entry["rows"], entry["context"], kind == "prompts")
    total = spent(model, machine, ranks, load, numbers).total
    if kind == "step":
        return 1000 * total
    return load.tokens / total / (1 if kind == "rate" else ranks.size / NODE)


def _layout(tp: int, ep: bool = False, apart: bool = False, replicas: int = 1) -> Layout:
    return Layout(Ranks(0, tp, "", ep, apart), replicas)


# --- predictions for each layout


LAYOUTS = {
    "8 replicas": _layout(1, replicas=8),
    "4 x TP2": _layout(2, replicas=4),
    "2 x TP4": _layout(4, replicas=2),
    "TP8": _layout(8),
    "TP8, experts whole": _layout(8, ep=True),
    "TP8, attention apart": _layout(8, apart=True),
    "TP8, both": _layout(8, ep=True, apart=True),
}
CHOICES = ("Llama-3.1-8B", "Llama-3.1-70B", "gpt-oss-120b", "DeepSeek-V2", "DeepSeek-V3")
ROWS, NODE_ROWS, CONTEXT, MOST = (8, 64, 512), (16, 128, 512), 2048, 4096


def choices(machine: Machine) -> list[dict[str, Any]]:
    """Predict decode steps of a node of eight GPUs in bfloat16, by the rows of the whole node."""
    found = []
    for name in CHOICES:
        model = MODELS[name]
        for called, layout in LAYOUTS.items():
            if layout.ranks.expert_parallel and model.experts is None:
                continue
            ranks, each = layout.ranks, layout.replicas
            weights = weight_bytes(model, ranks)
            rows_kept = room(model, machine, ranks, CONTEXT, OURS) * each
            kept = {"model": name, "layout": called, "weights_gb": _short(weights / 1e9)}
            kept |= {"room": rows_kept}
            kept["steps"] = {
                rows: _step(model, machine, layout, rows)
                for rows in (*ROWS, min(rows_kept, MOST))
                if each * ranks.num_dp_ranks <= rows <= rows_kept
            }
            found.append(kept)
    return found


def nodes(machine: Machine) -> list[dict[str, Any]]:
    """Predict two nodes: one engine per node, and ranks across both, which is not implemented."""
    found = []
    for name in ("Llama-3.1-70B", "Llama-3.1-405B"):
        for called, layout in {"2 x TP8": _layout(8, replicas=2), "TP16": _layout(16)}.items():
            steps = {rows: _step(MODELS[name], machine, layout, rows) for rows in NODE_ROWS}
            found.append({"model": name, "layout": called, "steps": steps})
    return found


def _step(model: ModelConfig, machine: Machine, layout: Layout, rows: int) -> dict[str, float]:
    """Predict a decode step of `rows` rows in total."""
    took = spent(model, machine, layout.ranks, Load(-(-rows // layout.replicas), CONTEXT))
    return {
        "ms": _short(1000 * took.total),
        "exchange": round(took.exchange / took.total, 2),
        "tokens_per_second": round(rows / took.total),
    }


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def _print(title: str, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for line in lines:
        print(f"| {' | '.join(f'{x:,}' if isinstance(x, int | float) else x for x in line)} |")


def _print_all(report: Mapping[str, Any]) -> None:
    _print("Constants of an H200", ("what", "is"), list(report["constants"].items()))
    for r in [*report["ours"], *report["published"]]:
        r["ratio"] = round(r["predicted"] / r.get("measured", r.get("published")), 2)
    fields: Sequence[str] = ("what", "rows", "context", "predicted", "measured", "ratio")
    lines: list[Sequence[Any]] = [[r[name] for name in fields] for r in report["ours"]]
    _print("One H200, milliseconds", fields, lines)
    fields = ("what", "model", "machine", "predicted", "published", "unit", "ratio")
    _print("Published", fields, [[r[name] for name in fields] for r in report["published"]])
    lines = []
    for c in report["choices"]:
        cells = [_cell(c["steps"].get(rows)) for rows in ROWS]
        last = c["steps"].get(min(c["room"], MOST), {"tokens_per_second": ""})
        at_most = last["tokens_per_second"]
        lines.append((c["model"], c["layout"], c["weights_gb"], *cells, c["room"], at_most))
    fields = ("model", "layout", "weights GB", *(f"{rows} rows" for rows in ROWS))
    fields = (*fields, "rows with KV", f"tok/s with these, at most {MOST:,}")
    _print(f"Eight H200, {CONTEXT:,} stored: ms a step (of it exchange)", fields, lines)
    lines = [(c["model"], c["layout"], *map(_cell, c["steps"].values())) for c in report["nodes"]]
    _print("Two nodes", ("model", "layout", *(f"{rows} rows" for rows in NODE_ROWS)), lines)


def _cell(step: Mapping[str, float] | None) -> str:
    return f"{step['ms']} ({step['exchange']:.0%})" if step else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    if args.measure:
        import loopback

        report = loopback.measure()
    else:
        made = machines()
        report = {
            "constants": {k: _short(v) for k, v in asdict(made["H200"]).items()},
            "ours": check_ours(made["H200"]),
            "published": check_published(made),
            "choices": choices(made["H200"]),
            "nodes": nodes(made["H200"]),
        }
        _print_all(report)
    print(json.dumps({"commandline": vars(args)} | report))


if __name__ == "__main__":
    main()
