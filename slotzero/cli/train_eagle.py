"""`slotzero train-eagle`: trains an EAGLE-3 head for a model, on text that the model writes.

The training itself is in slotzero/training/.
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
    from slotzero.llm import LLM
    from slotzero.models.config import ModelConfig
    from slotzero.training.data import Answered
    from slotzero.training.loop import Report

    Text = tuple[list[Answered], list[Answered]]
    """Answers to train on, and greedy answers to evaluate on."""

DESCRIPTION = """\
Train a draft head (EAGLE-3) for a model.

The model writes user messages and answers them; the head is trained to predict these answers.
During training, the mean number of tokens per verification step (acceptance length) is shown for
answers that were not trained on. No dataset is needed; on a GPU this takes minutes.

  slotzero train-eagle --out head --num-sequences 20000 --minutes 5
  slotzero chat --speculative eagle3 --speculative-model head"""
HELD_OUT = 256
KV_MEMORY = 8 << 30
TEMPERATURES = (0.0, 0.0, 0.8)  # in turn: most answers are sampled greedily in use


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("train-eagle", "[MODEL] --out FOLDER [flags]", DESCRIPTION)
    flags.add_model(made)
    group = made.add_argument_group("training")
    group.add_argument(
        "--out", metavar="FOLDER", required=True,
        help="folder for the head, which is saved after every report",
    )  # fmt: skip
    group.add_argument(
        "--text", metavar="FILE",
        help="answers to train on, one JSON object per line; if the file does not exist, "
        "answers are generated and saved to it",
    )  # fmt: skip
    group.add_argument(
        "--num-sequences", type=int, default=2000, metavar="N",
        help=f"answers to train on; up to {HELD_OUT} more are for evaluation (default: 2000)",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens", type=int, default=384, metavar="N",
        help="most tokens per answer (default: 384)",
    )  # fmt: skip
    group.add_argument(
        "--minutes", type=float, metavar="N",
        help="time limit of training, without generating text and collecting hidden states",
    )  # fmt: skip
    group.add_argument(
        "--steps", type=int, metavar="N",
        help="training steps; with --minutes, whichever limit is reached first",
    )  # fmt: skip
    group.add_argument(
        "--draft-vocab", type=int, metavar="N",
        help="draft only the N most frequent tokens of the answers (default: all tokens)",
    )  # fmt: skip
    group.add_argument(
        "--layers", type=_layers, metavar="A,B,C",
        help="three layers whose input the head gets (default: an early, a middle and a late one)",
    )  # fmt: skip
    group.add_argument(
        "--intermediate-size", type=int, metavar="N",
        help="MLP size of the head's one layer (default: that of the model's layers)",
    )  # fmt: skip
    group.add_argument(
        "--learning-rate", type=float, default=3e-3, metavar="X",
        help="peak learning rate (default: 0.003)",
    )  # fmt: skip
    group.add_argument(
        "--batch-tokens", type=int, default=16384, metavar="N",
        help="tokens per training step (default: 16384)",
    )  # fmt: skip
    group.add_argument(
        "--report-every", type=int, default=200, metavar="STEPS",
        help="steps between two evaluations (default: 200)",
    )  # fmt: skip
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
    print(f"{out}: acceptance length {last.acceptance_len:.3f} after {last.step} steps")
    print(json.dumps({"out": str(out), "reports": [report._asdict() for report in reports]}))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check flags early: generating text and collecting states takes longer than training."""
    if args.minutes is None and args.steps is None:
        raise ConfigError("no limit of training: give --minutes or --steps")
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
            raise ConfigError(f"{flag} must be at least {least}, got {count}")
    for flag, amount in (("--minutes", args.minutes), ("--learning-rate", args.learning_rate)):
        if amount is not None and not 0 < amount < math.inf:
            raise ConfigError(f"{flag} must be above 0, got {amount}")
    text = None if args.text is None else Path(args.text)
    if text is not None and (text.is_dir() or not text.parent.is_dir()):
        raise ConfigError(f"--text {text}: give a file in an existing folder")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's settings. On a GPU the default is bfloat16, which is precise enough for a
    head and its text; most of the memory is left for hidden states."""
    from slotzero.config import EngineConfig
    from slotzero.executor.limits import choose_backend

    settings = flags.engine_settings(args)
    for flag, is_given, why in (
        (
            "--enable-prefix-caching",
            settings["enable_prefix_caching"],
            "there are no hidden states for cached tokens",
        ),
        (
            "--no-lazy-recording",
            not settings["lazy_recording"],
            "hidden states are collected without recordings",
        ),
        ("--speculative", "speculative" in settings, "training uses the model without a drafter"),
    ):
        if is_given:
            raise ConfigError(f"{flag}: {why}; drop it")
    device, _ = choose_backend(EngineConfig(**settings))
    if device.type == "cpu":
        return settings
    return {"dtype": "bfloat16", "kv_cache_memory": KV_MEMORY, **settings}


def _folder(name: str) -> Path:
    out = Path(name)
    if (out / "config.json").exists():
        raise ConfigError(f"--out {out}: the folder already has a head, choose another")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: the folder cannot be created ({error.strerror}), choose another"
        ) from None
    if not os.access(out, os.W_OK):
        raise ConfigError(f"--out {out}: the folder is not writable, choose another")
    return out


def train(llm: "LLM", args: argparse.Namespace, out: Path) -> "list[Report]":
    import torch

    from slotzero.models.config import ModelConfig
    from slotzero.training import data, loop
    from slotzero.training.collect import Collector
    from slotzero.training.head import EagleHead
    from slotzero.training.save import save_head

    engine, shown = llm.engine, args.show_progress if "show_progress" in args else True
    worker = engine.worker
    model, weights = worker.model, worker.weights
    if not isinstance(model, ModelConfig) or weights is None:
        raise ConfigError(
            "model_impl=transformers: a draft head is trained for layers of this package only"
        )
    layers = _chosen_layers(args.layers, worker.model.num_layers)
    if args.draft_vocab is not None and args.draft_vocab > worker.vocab_size:
        raise ConfigError(
            f"--draft-vocab {args.draft_vocab}: the model has {worker.vocab_size} tokens"
        )
    collector = Collector(engine, layers)
    written, greedy = _text(llm, args, shown)
    d2t = data.frequent_ids(written, args.draft_vocab) if args.draft_vocab else None
    head = EagleHead(_head_config(model, layers, args), d2t)
    samples, unseen = (collector.collect(of, shown) for of in (written, greedy))
    every = torch.arange(worker.vocab_size, device=worker.registry.device)
    embedding, lm_head = (
        worker.kernels.embed_ids(every, weight) for weight in (weights.embedding, weights.head)
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
    for what, answered in (("train on", written), ("evaluate on", greedy)):
        if not answered:
            raise ConfigError(f"{source}: no answer to {what} has at most {most} tokens")
    return written, greedy


def _write(llm: "LLM", args: argparse.Namespace, shown: bool) -> "Text":
    from slotzero.training import data

    num_held_out = min(HELD_OUT, max(1, args.num_sequences // 8))
    num_prompts = args.num_sequences + num_held_out
    seed = args.seed if "seed" in args else 0
    prompts = data.self_prompts(llm, num_prompts, seed, top_p=0.95, show_progress=shown)

    def answers(prompts: list[list[int]], temperatures: tuple[float, ...]) -> "list[Answered]":
        return data.answers(
            llm, prompts, temperatures, args.max_tokens, seed=seed, show_progress=shown
        )

    return answers(prompts[num_held_out:], TEMPERATURES), answers(prompts[:num_held_out], (0.0,))


def _head_config(
    model: "ModelConfig", layers: tuple[int, int, int], args: argparse.Namespace
) -> Any:
    """Return the head's configuration, by default with the shape of the model's own layers."""
    from slotzero.training.head import HeadConfig

    heads = model.groups[0].heads
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
        f"step {report.step}, {report.seconds:.0f} s: loss {report.loss:.3f}, accuracy by position "
        f"{accuracy}, acceptance length {report.acceptance_len:.3f}",
        flush=True,
    )


def _chosen_layers(given: tuple[int, int, int] | None, num: int) -> tuple[int, int, int]:
    if num < 3:
        raise ConfigError(f"the model has {num} layers, and a head needs three: use a deeper model")
    layers = given or _default_layers(num)
    if len(set(layers)) < 3 or not all(0 <= layer < num for layer in layers):
        raise ConfigError(
            f"--layers {','.join(map(str, layers))}: give three different layers from 0 to "
            f"{num - 1}"
        )
    return layers


def _default_layers(num_layers: int) -> tuple[int, int, int]:
    """Return an early, a middle and a late layer, as EAGLE-3 does."""
    if num_layers < 7:  # EAGLE-3's choice would coincide
        return 0, num_layers // 2, num_layers - 1
    return 2, num_layers // 2, num_layers - 3


def _layers(text: str) -> tuple[int, int, int]:
    try:
        a, b, c = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three layers such as 2,15,27") from None
    return a, b, c
