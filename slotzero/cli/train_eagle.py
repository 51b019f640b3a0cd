"""`slotzero train-eagle`: makes an EAGLE-3 head for a model, from text that the model writes.

It does not know how a head learns: that is in slotzero/speculative/training/.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags
from slotzero.config import refuse_ranks
from slotzero.errors import ConfigError

if TYPE_CHECKING:
    from slotzero.engine.engine import Engine
    from slotzero.llm import LLM
    from slotzero.training.data import Answered
    from slotzero.training.loop import Report

    Text = tuple[list[Answered], list[Answered]]
    """Answers to learn from, and greedy ones to try on."""

DESCRIPTION = """\
Train a draft head (EAGLE-3) for a model.

The model writes user messages and answers them; the head learns to guess the answers ahead. While
it learns, the mean number of tokens that a verification would bring is shown, over answers that it
has not seen. No dataset is needed; a GPU makes it a matter of minutes.

  slotzero train-eagle --out head --num-sequences 20000 --minutes 5
  slotzero chat --speculative eagle3 --speculative-model head"""
HELD_OUT = 256
KV_MEMORY = 8 << 30
TEMPERATURES = (0.0, 0.0, 0.8)  # in turn: most answers are wanted greedy


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("train-eagle", "[MODEL] --out FOLDER [flags]", DESCRIPTION)
    flags.add_model(made)
    group = made.add_argument_group("training")
    group.add_argument(
        "--out", metavar="FOLDER", required=True,
        help="where the head is written, after every report: what was learned is not lost",
    )  # fmt: skip
    group.add_argument(
        "--text", metavar="FILE",
        help="answers to learn from, one JSON object a line; made and written there if it is not",
    )  # fmt: skip
    group.add_argument(
        "--num-sequences", type=int, default=2000, metavar="N",
        help=f"answers to learn from, and {HELD_OUT} at most to try on (default: 2000)",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens", type=int, default=384, metavar="N", help="of an answer (default: 384)"
    )
    group.add_argument(
        "--minutes", type=float, metavar="N", help="of training; text and states come before"
    )
    group.add_argument(
        "--steps", type=int, metavar="N", help="of training; with --minutes, whichever ends first"
    )
    group.add_argument(
        "--draft-vocab", type=int, metavar="N",
        help="guess only the N most frequent tokens of the answers (default: all of them)",
    )  # fmt: skip
    group.add_argument(
        "--layers", type=_layers, metavar="A,B,C",
        help="three layers whose input the head sees (default: an early, a middle, a late one)",
    )  # fmt: skip
    group.add_argument(
        "--intermediate-size", type=int, metavar="N",
        help="of the head's one layer (default: as in the model's layers)",
    )  # fmt: skip
    group.add_argument("--learning-rate", type=float, default=3e-3, metavar="X")
    group.add_argument("--batch-tokens", type=int, default=16384, metavar="N")
    group.add_argument("--report-every", type=int, default=200, metavar="STEPS")
    flags.add_engine_flags(made, enable_prefix_caching=False, lazy_recording=True)
    return made


def run(args: argparse.Namespace) -> int:
    _check(args)
    settings = _settings(args)
    refuse_ranks(settings, "train-eagle")
    out = _folder(args.out)
    from slotzero.llm import LLM

    llm = LLM(flags.chosen_model(args), **settings)
    reports = train(llm, args, out)
    last = reports[-1]
    print(f"{out}: {last.acceptance_len:.3f} tokens a verification, after {last.step} steps")
    print(json.dumps({"out": str(out), "reports": [report._asdict() for report in reports]}))
    return 0


def _check(args: argparse.Namespace) -> None:
    """What would be found out late: text and states take longer than training."""
    if args.minutes is None and args.steps is None:
        raise ConfigError("say when to stop: --minutes or --steps")
    for flag, count, least in (
        ("--steps", args.steps, 1),
        ("--num-sequences", args.num_sequences, 2),
        ("--max-tokens", args.max_tokens, 2),
        ("--draft-vocab", args.draft_vocab, 1),
        ("--intermediate-size", args.intermediate_size, 1),
        ("--batch-tokens", args.batch_tokens, 1),
        ("--report-every", args.report_every, 1),
    ):
        if count is not None and count < least:
            raise ConfigError(f"{flag} is at least {least}, got {count}")
    for flag, amount in (("--minutes", args.minutes), ("--learning-rate", args.learning_rate)):
        if amount is not None and not 0 < amount < math.inf:
            raise ConfigError(f"{flag} is above 0, got {amount}")
    text = None if args.text is None else Path(args.text)
    if text is not None and (text.is_dir() or not text.parent.is_dir()):
        raise ConfigError(f"--text {text}: name a file in a folder that is there")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """On a GPU in bfloat16, unless asked otherwise: a head is a guess, and text is no worse. Most
    of the memory there is left to hidden states."""
    from slotzero.config import EngineConfig
    from slotzero.executor.limits import choose_backend

    settings = flags.engine_settings(args)
    for flag, is_given, why in (
        (
            "--enable-prefix-caching",
            settings["enable_prefix_caching"],
            "what is found in a cache cannot be learned from",
        ),
        ("--no-lazy-recording", not settings["lazy_recording"], "states are collected unrecorded"),
        ("--speculative", "speculative" in settings, "a head is made without one"),
    ):
        if is_given:
            raise ConfigError(f"{flag}: {why}, drop it")
    device, _ = choose_backend(EngineConfig(**settings))
    if device.type == "cpu":
        return settings
    return {"dtype": "bfloat16", "kv_cache_memory": KV_MEMORY, **settings}


def _folder(name: str) -> Path:
    out = Path(name)
    if (out / "config.json").exists():
        raise ConfigError(f"--out {out}: there is a head already, choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: no folder ({error.strerror}), choose another") from None
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out {out} cannot be written to: choose another folder")
    return out


def train(llm: "LLM", args: argparse.Namespace, out: Path) -> "list[Report]":
    import torch

    from slotzero.training import data, loop
    from slotzero.training.collect import Collector
    from slotzero.training.head import EagleHead
    from slotzero.training.save import save_head

    engine, shown = llm.engine, args.show_progress if "show_progress" in args else True
    worker = engine.worker
    layers = _chosen_layers(args.layers, worker.model.num_layers)
    if args.draft_vocab is not None and args.draft_vocab > worker.vocab_size:
        raise ConfigError(
            f"--draft-vocab {args.draft_vocab}: the model has {worker.vocab_size} tokens"
        )
    collector = Collector(engine, layers)
    written, greedy = _text(llm, args, shown)
    d2t = data.frequent_ids(written, args.draft_vocab) if args.draft_vocab else None
    head = EagleHead(_head_config(engine, layers, args), d2t)
    samples, unseen = (collector.collect(of, shown) for of in (written, greedy))
    every = torch.arange(worker.vocab_size, device=worker.registry.device)
    embedding, lm_head = (
        worker.kernels.embed_ids(every, weight)
        for weight in (worker.weights.embedding, worker.weights.head)
    )

    def report(made: "Report") -> None:
        _show(made)
        save_head(head, out)

    return loop.train(
        head, embedding, lm_head, samples, unseen,
        max_steps=args.steps, max_minutes=args.minutes, batch_tokens=args.batch_tokens,
        lr=args.learning_rate, report_every=args.report_every, show_progress=shown, report=report,
    )  # fmt: skip


def _text(llm: "LLM", args: argparse.Namespace, shown: bool) -> "Text":
    from slotzero.training import data

    file = None if args.text is None else Path(args.text)
    if file is not None and file.exists():
        stored = data.read_text(file, llm.engine.worker.vocab_size)
        return _usable(llm, stored, f"--text {file}")
    made = _usable(llm, _write(llm, args, shown), "the model")
    if file is not None:
        data.write_text(file, *made)
    return made


def _usable(llm: "LLM", text: "Text", source: str) -> "Text":
    from slotzero.training import data

    most = llm.engine.limits.max_model_len - 1  # as a prompt, it leaves room for an answer
    written, greedy = (data.cut(answered, most) for answered in text)
    for what, answered in (("learn from", written), ("try on", greedy)):
        if not answered:
            raise ConfigError(f"{source}: no answer to {what} within {most} tokens")
    return written, greedy


def _write(llm: "LLM", args: argparse.Namespace, shown: bool) -> "Text":
    from slotzero.training import data

    num_tried = min(HELD_OUT, max(1, args.num_sequences // 8))
    num_prompts = args.num_sequences + num_tried
    seed = args.seed if "seed" in args else 0
    prompts = data.self_prompts(llm, num_prompts, seed, top_p=0.95, show_progress=shown)

    def answers(prompts: list[list[int]], temperatures: tuple[float, ...]) -> "list[Answered]":
        return data.answers(
            llm, prompts, temperatures, args.max_tokens, seed=seed, show_progress=shown
        )

    return answers(prompts[num_tried:], TEMPERATURES), answers(prompts[:num_tried], (0.0,))


def _head_config(engine: "Engine", layers: tuple[int, int, int], args: argparse.Namespace) -> Any:
    """In the shape of the model's own layers, unless asked otherwise."""
    from slotzero.training.head import HeadConfig

    model, heads = engine.worker.model, engine.worker.model.groups[0].heads
    return HeadConfig(
        hidden_size=model.hidden_size,
        intermediate_size=args.intermediate_size or model.mlp_size,
        num_attention_heads=heads.num_heads,
        num_key_value_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=model.norm_eps,
        rope_theta=10000.0,
        vocab_size=model.vocab_size,
        draft_vocab_size=args.draft_vocab or model.vocab_size,
        max_position_embeddings=model.max_position,
        feature_layers=layers,
    )


def _show(report: "Report") -> None:
    accuracy = " ".join(f"{share:.3f}" for share in report.accuracy)
    print(
        f"step {report.step}, {report.seconds:.0f} s: loss {report.loss:.3f}, right by place "
        f"{accuracy}, {report.acceptance_len:.3f} tokens a verification",
        flush=True,
    )


def _chosen_layers(given: tuple[int, int, int] | None, num: int) -> tuple[int, int, int]:
    if num < 3:
        raise ConfigError(f"the model has {num} layers, and a head sees three: take a deeper one")
    layers = given or _default_layers(num)
    if len(set(layers)) < 3 or not all(0 <= layer < num for layer in layers):
        raise ConfigError(
            f"--layers {','.join(map(str, layers))}: a head sees three that differ, and the model "
            f"has {num}, from 0 on"
        )
    return layers


def _default_layers(num_layers: int) -> tuple[int, int, int]:
    """As the field has it: an early, a middle and a late one."""
    if num_layers < 7:  # those of the field would meet
        return 0, num_layers // 2, num_layers - 1
    return 2, num_layers // 2, num_layers - 3


def _layers(text: str) -> tuple[int, int, int]:
    try:
        a, b, c = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three layers such as 2,15,27") from None
    return a, b, c
