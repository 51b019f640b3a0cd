"""`slotzero bench`: runs the benchmarks of slotzero/bench/."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags
from slotzero.errors import ConfigError

if TYPE_CHECKING:
    from slotzero.bench.workloads import WorkloadSpec

DESCRIPTION = """\
Measure one of:

  throughput  a workload of many requests
  latency     one request, repeatedly
  graphs      every captured graph by itself
  cost        a decode step, by batch size and context length
  serve       a running server, with requests that arrive at random times
  accuracy    how much quantised weights or an FP8 KV cache change the predictions of a text

Except for accuracy, prompts are random token ids, sampling is greedy and answers have a fixed
length. Prefix caching is off. Prints a table, and then one line of JSON.

  slotzero bench throughput --workload b8
  slotzero bench throughput path/to/model --load-format dummy --num-prompts 32
  slotzero bench latency --input-len 512 --output-len 64
  slotzero bench graphs --sizes 1,8 --context 1024
  slotzero bench cost --plot cost.svg
  slotzero bench serve --url http://127.0.0.1:8000 --rate 2,8 --num-prompts 200
  slotzero bench accuracy --quantization int4"""
WORKLOAD_NAMES = (
    "b1",
    "b8",
    "b64",
    "b256",
    "mixed",
    "prefill",
)  # a test holds them to bench/workloads.py
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
    "serve": ("url", "api_key", "rate", "goal", "num_prompts", "input_len", "output_len"),
    "accuracy": ("text", "context", "max_tokens", "reference_quantization"),
}
URL = "http://127.0.0.1:8000"
GOAL = (0.5, 0.05)  # seconds to the first token, and per further token


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("bench", f"{{{','.join(FLAGS)}}} [MODEL] [flags]", DESCRIPTION)
    made.add_argument("what", choices=FLAGS)
    flags.add_model(made)
    group = made.add_argument_group("workload")
    group.add_argument(
        "--workload",
        choices=WORKLOAD_NAMES,
        help="throughput: bN is N requests with 128 prompt and 512 output tokens, mixed is 256 "
        "requests with 100 to 1024 each, prefill is 64 requests with 2048 and 1 (default: b8)",
    )
    group.add_argument(
        "--num-prompts",
        type=_positive,
        metavar="N",
        help="throughput: number of requests (default: 8); serve: requests at each rate "
        "(default: 100)",
    )
    group.add_argument(
        "--batch-size", type=_positive, metavar="N", help="latency: number of requests (default: 1)"
    )
    group.add_argument(
        "--input-len", type=_positive, metavar="N", help="tokens per prompt (default: 128)"
    )
    group.add_argument(
        "--output-len",
        type=_positive,
        metavar="N",
        help="tokens per answer (default: 512 for throughput, 128 for latency); unless one of the "
        "two is given, serve draws lengths from ShareGPT's distribution",
    )
    group.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help=f"number of repetitions (default: {NUM_REPEATS} for latency, {NUM_REPLAYS} for graphs "
        "and cost)",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        default=None,
        help="throughput: also trace 64 decode steps, and show the GPU's idle time and the most "
        "expensive kernels",
    )
    group.add_argument(
        "--sizes", type=_sizes, metavar="N,N", help="graphs: measure decode at these sizes only"
    )
    group.add_argument(
        "--all-sizes",
        action="store_true",
        default=None,
        help="graphs: measure every captured size",
    )
    group.add_argument(
        "--context",
        type=_positive,
        metavar="N",
        help=f"graphs and cost: tokens in the KV cache of each row (default: {CONTEXT}); accuracy: "
        "tokens per window of text (default: 512, or the model's limit)",
    )
    group.add_argument("--plot", metavar="FILE.svg", help="cost: write a plot to this file")
    group.add_argument("--url", help=f"serve: address of the server (default: {URL})")
    group.add_argument("--api-key", metavar="KEY", help="serve: API key of the server")
    group.add_argument(
        "--rate",
        type=_rates,
        metavar="N,N",
        help="serve: requests per second, or inf for all at once (default: 4)",
    )
    group.add_argument(
        "--goal",
        type=_goal,
        metavar="MS,MS",
        help="serve: limits in ms, to the first token and per further token, that a good request "
        "meets (default: 500,50)",
    )
    group.add_argument(
        "--text",
        metavar="FILE",
        help="accuracy: text to predict (default: prose from Python's own documentation)",
    )
    group.add_argument(
        "--max-tokens",
        type=_positive,
        metavar="N",
        help="accuracy: maximum number of tokens to predict (default: 4096)",
    )
    group.add_argument(
        "--reference-quantization",
        choices=("none", "auto"),
        help="accuracy: --quantization of the same model that is compared with (default: none)",
    )
    flags.add_engine_flags(made, enable_prefix_caching=False)
    return made


def run(args: argparse.Namespace) -> int:
    for name in dict.fromkeys(name for names in FLAGS.values() for name in names):
        if getattr(args, name) is not None and name not in FLAGS[args.what]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} does not apply to `bench {args.what}`: drop it")
    model, settings = flags.chosen_model(args), flags.engine_settings(args)
    measure = {
        "throughput": _throughput,
        "latency": _latency,
        "graphs": _graphs,
        "cost": _cost,
        "serve": _serve,
        "accuracy": _accuracy,
    }[args.what]
    measure(args, model, settings)
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
        raise ConfigError(f"--plot {plot}: give a file name ending in .svg in an existing folder")
    from slotzero.bench.cost import run_cost, sheets, write_plot
    from slotzero.bench.sheets import print_sheets

    report = run_cost(model, settings, args.context or CONTEXT, args.repeats or NUM_REPLAYS)
    if plot is not None:
        write_plot(report, plot)
    print_sheets(report, sheets(report))


def _serve(args: argparse.Namespace, model: str, settings: dict[str, Any]) -> None:
    given = [name for name in settings if name not in ("enable_prefix_caching", "show_progress")]
    if given or args.model or args.model_flag:
        what = "a model" if not given else "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{what}: bench serve measures a running server, give it to `slotzero serve` instead"
        )
    import asyncio
    from collections.abc import Mapping, Sequence

    from slotzero.bench.http import Site
    from slotzero.bench.serve import Goal, RequestLoad, run_loads, sharegpt, sheets
    from slotzero.bench.sheets import print_sheets
    from slotzero.system.progress import load_bar

    rates, num = args.rate or (4.0,), args.num_prompts or 100

    def make(info: Mapping[str, Any]) -> Sequence[RequestLoad]:
        longest = int(info["engine"]["limits"]["max_model_len"])
        shapes = sharegpt(num, 0, longest)
        if args.input_len or args.output_len:
            shapes = [(args.input_len or 128, args.output_len or 128)] * num
        return [RequestLoad(rate, shapes) for rate in rates]

    site = Site.at(args.url or URL, args.api_key)
    with load_bar(settings.get("show_progress", True), num * len(rates)) as seen:
        report = asyncio.run(run_loads(site, make, Goal(*(args.goal or GOAL)), seen))
    print_sheets(report, sheets(report))


def _accuracy(args: argparse.Namespace, model: str, settings: dict[str, Any]) -> None:
    from slotzero.bench.accuracy import MAX_TOKENS, AccuracySpec, run_accuracy, sheets
    from slotzero.bench.sheets import print_sheets

    spec = AccuracySpec(
        reference=args.reference_quantization or "none",
        text=Path(args.text) if args.text else None,
        context=args.context,
        max_tokens=args.max_tokens or MAX_TOKENS,
    )
    report = run_accuracy(model, settings, spec)
    print_sheets(report, sheets(report))


def _throughput_spec(args: argparse.Namespace) -> "WorkloadSpec":
    from slotzero.bench.workloads import WORKLOADS, fixed_spec

    custom = (args.num_prompts, args.input_len, args.output_len)
    if custom == (None, None, None):
        return WORKLOADS[args.workload or "b8"]
    if args.workload:
        raise ConfigError(
            f"--workload {args.workload} already defines number and lengths of requests: "
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
    """Return sorted sizes: '8,1' -> (1, 8)"""
    return tuple(sorted({_positive(word) for word in text.split(",")}))


def _rates(text: str) -> tuple[float, ...]:
    """Return rates in requests per second: '2,8,inf' -> (2.0, 8.0, inf)"""
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates such as 2,8 or inf")
    return rates


def _goal(text: str) -> tuple[float, float]:
    """Return time limits in seconds: '500,50' -> (0.5, 0.05)"""
    try:
        first, each = (float(word) / 1000 for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not two times in ms such as 500,50"
        ) from None
    return first, each
