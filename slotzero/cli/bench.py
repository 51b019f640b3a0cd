"""`slotzero bench`: measures this machine. What is measured and how is in slotzero/bench/."""

import argparse
from typing import TYPE_CHECKING

from slotzero.cli import flags
from slotzero.errors import ConfigError

if TYPE_CHECKING:
    from slotzero.bench.workloads import WorkloadSpec

DESCRIPTION = """\
Measure throughput (a workload of many requests) or latency (one request, again and again).

Prompts are random token ids, sampling is greedy, answers have a fixed length, and prefix caching is
off. A table is printed, and then one line of JSON.

  slotzero bench throughput --workload b8
  slotzero bench throughput path/to/model --load-format dummy --num-prompts 32
  slotzero bench latency --input-len 512 --output-len 64"""
WORKLOAD_NAMES = ("b1", "b8", "b64", "b256", "mixed")  # a test holds them to bench/workloads.py
THROUGHPUT_SHAPE = (8, 128, 512)  # requests, input and output length
LATENCY_SHAPE = (1, 128, 128)
NUM_REPEATS = 10


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("bench", "{throughput,latency} [MODEL] [flags]", DESCRIPTION)
    made.add_argument("what", choices=("throughput", "latency"))
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
        "--repeats", type=_positive, metavar="N", help=f"latency: how often ({NUM_REPEATS})"
    )
    flags.add_engine_flags(made, enable_prefix_caching=False)
    return made


def run(args: argparse.Namespace) -> int:
    is_latency = args.what == "latency"
    for name in ("workload", "num_prompts") if is_latency else ("batch_size", "repeats"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is not a flag of `bench {args.what}`: drop it")
    model, settings = flags.chosen_model(args), flags.engine_settings(args)
    spec = _latency_spec(args) if is_latency else _throughput_spec(args)
    settings = flags.fit_rows(settings, spec.num_requests)
    from slotzero.bench.latency import run_latency
    from slotzero.bench.report import print_report
    from slotzero.bench.throughput import run_throughput

    if is_latency:
        print_report(run_latency(model, settings, spec, args.repeats or NUM_REPEATS))
    else:
        print_report(run_throughput(model, settings, spec))
    return 0


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
