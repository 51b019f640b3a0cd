"""`slotzero bench`: measures this machine. What is measured and how is in slotzero/bench/."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags
from slotzero.errors import ConfigError

if TYPE_CHECKING:
    from slotzero.bench.workloads import WorkloadSpec

DESCRIPTION = """\
Measure throughput (a workload of many requests), latency (one request, again and again), graphs
(every recording by itself) or cost (a decode step against batch and context).

Prompts are random token ids, sampling is greedy, answers have a fixed length, and prefix caching is
off. A table is printed, and then one line of JSON.

  slotzero bench throughput --workload b8
  slotzero bench throughput path/to/model --load-format dummy --num-prompts 32
  slotzero bench latency --input-len 512 --output-len 64
  slotzero bench graphs --sizes 1,8 --context 1024
  slotzero bench cost --plot cost.svg"""
WORKLOAD_NAMES = ("b1", "b8", "b64", "b256", "mixed")  # a test holds them to bench/workloads.py
THROUGHPUT_SHAPE = (8, 128, 512)  # requests, input and output length
LATENCY_SHAPE = (1, 128, 128)
NUM_REPEATS = 10
NUM_REPLAYS = 20
CONTEXT = 384  # halfway through an answer of workload b1 to b256
FLAGS = {
    "throughput": ("workload", "num_prompts", "input_len", "output_len", "profile"),
    "latency": ("batch_size", "input_len", "output_len", "repeats"),
    "graphs": ("sizes", "all_sizes", "context", "repeats"),
    "cost": ("context", "plot", "repeats"),
}


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("bench", f"{{{','.join(FLAGS)}}} [MODEL] [flags]", DESCRIPTION)
    made.add_argument("what", choices=FLAGS)
    flags.add_model(made)
    group = made.add_argument_group("workload")
    group.add_argument(
        "--workload",
        choices=WORKLOAD_NAMES,
        help="throughput: bN is N requests of 128 tokens in and 512 out, mixed is 256 of 100 to "
        "1024 in and out (default: b8)",
    )
    group.add_argument("--num-prompts", type=_positive, metavar="N", help="throughput: requests")
    group.add_argument("--batch-size", type=_positive, metavar="N", help="latency: requests (1)")
    group.add_argument("--input-len", type=_positive, metavar="N", help="tokens of a prompt (128)")
    group.add_argument(
        "--output-len",
        type=_positive,
        metavar="N",
        help="tokens of an answer (throughput: 512, latency: 128)",
    )
    group.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help=f"how often (latency: {NUM_REPEATS}, graphs and cost: {NUM_REPLAYS})",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        default=None,
        help="throughput: then trace 64 decode steps: idle time of the GPU, costliest kernels",
    )
    group.add_argument(
        "--sizes", type=_sizes, metavar="N,N", help="graphs: decode at these sizes and no others"
    )
    group.add_argument(
        "--all-sizes", action="store_true", default=None, help="graphs: every recorded size"
    )
    group.add_argument(
        "--context",
        type=_positive,
        metavar="N",
        help=f"graphs and cost: tokens stored in each row ({CONTEXT})",
    )
    group.add_argument("--plot", metavar="FILE.svg", help="cost: draw it into this file")
    flags.add_engine_flags(made, enable_prefix_caching=False)
    return made


def run(args: argparse.Namespace) -> int:
    for name in dict.fromkeys(name for names in FLAGS.values() for name in names):
        if getattr(args, name) is not None and name not in FLAGS[args.what]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is not a flag of `bench {args.what}`: drop it")
    model, settings = flags.chosen_model(args), flags.engine_settings(args)
    {"throughput": _throughput, "latency": _latency, "graphs": _graphs, "cost": _cost}[args.what](
        args, model, settings
    )
    return 0


def _throughput(args: argparse.Namespace, model: str, settings: dict[str, Any]) -> None:
    spec = _throughput_spec(args)
    settings = flags.fit_rows(settings, spec.num_requests)
    from slotzero.bench.report import print_report
    from slotzero.bench.throughput import run_throughput

    print_report(run_throughput(model, settings, spec, bool(args.profile)))


def _latency(args: argparse.Namespace, model: str, settings: dict[str, Any]) -> None:
    spec = _latency_spec(args)
    settings = flags.fit_rows(settings, spec.num_requests)
    from slotzero.bench.latency import run_latency
    from slotzero.bench.report import print_report

    print_report(run_latency(model, settings, spec, args.repeats or NUM_REPEATS))


def _graphs(args: argparse.Namespace, model: str, settings: dict[str, Any]) -> None:
    if args.sizes and args.all_sizes:
        raise ConfigError("--sizes and --all-sizes contradict each other: drop one")
    from slotzero.bench.graphs import run_graphs, sheets
    from slotzero.bench.sheets import print_sheets

    context, repeats = args.context or CONTEXT, args.repeats or NUM_REPLAYS
    sizes, all_sizes = args.sizes or (), bool(args.all_sizes)
    report = run_graphs(model, settings, sizes, all_sizes, context, repeats)
    print_sheets(report, sheets(report))


def _cost(args: argparse.Namespace, model: str, settings: dict[str, Any]) -> None:
    plot = Path(args.plot) if args.plot else None
    if plot is not None and (plot.suffix != ".svg" or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot {plot}: give a file that ends in .svg, in a folder that exists")
    from slotzero.bench.cost import run_cost, sheets, write_plot
    from slotzero.bench.sheets import print_sheets

    report = run_cost(model, settings, args.context or CONTEXT, args.repeats or NUM_REPLAYS)
    if plot is not None:
        write_plot(report, plot)
    print_sheets(report, sheets(report))


def _throughput_spec(args: argparse.Namespace) -> "WorkloadSpec":
    from slotzero.bench.workloads import WORKLOADS, fixed_spec

    custom = (args.num_prompts, args.input_len, args.output_len)
    if custom == (None, None, None):
        return WORKLOADS[args.workload or "b8"]
    if args.workload:
        raise ConfigError(
            f"--workload {args.workload} says how many and how long: "
            "drop it, or --num-prompts, --input-len and --output-len"
        )
    num, inp, out = (a or b for a, b in zip(custom, THROUGHPUT_SHAPE, strict=True))
    return fixed_spec(num, inp, out)


def _latency_spec(args: argparse.Namespace) -> "WorkloadSpec":
    from slotzero.bench.workloads import fixed_spec

    given = (args.batch_size, args.input_len, args.output_len)
    num, inp, out = (a or b for a, b in zip(given, LATENCY_SHAPE, strict=True))
    return fixed_spec(num, inp, out)


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    """'8,1' -> (1, 8)"""
    return tuple(sorted({_positive(word) for word in text.split(",")}))
