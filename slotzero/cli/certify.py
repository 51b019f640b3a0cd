"""`slotzero certify`: runs the checks at the sizes of every runner, and shows the results.

The checks are in slotzero/certify/. The rule: the exit code is 0 only if no check failed and, with
--mutate, every injected fault was caught.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags
from slotzero.config import EngineConfig
from slotzero.errors import ConfigError

if TYPE_CHECKING:
    from slotzero.certify.mutants import Mutant
    from slotzero.certify.report import Certificate

DESCRIPTION = """\
Check that padding, history and neighbours cannot change a result, at every captured size of every
runner; a runner that is not captured is checked at three sizes. Sizes are captured as they are
checked. Prints a table and, for each failure, the runner, size, check, tensor, first differing row
and value, and the violated rule. The exit code is 1 if a check fails.

  slotzero certify --quick
  slotzero certify path/to/model --html report.html
  slotzero certify tiny:llama --json -
  slotzero certify --mutate"""
KV_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # enough for the rows; every trial copies all of it
FEW_KV_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
WIDE = 160  # columns if standard output is not a terminal
FAULTS_ACROSS = 10  # columns of a table that fits a terminal
STDOUT = "-"


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("certify", "[MODEL] [flags]", DESCRIPTION)
    flags.add_model(made)
    group = made.add_argument_group("certification")
    group.add_argument(
        "--quick", action="store_true", help="check a few sizes of every runner instead of all"
    )
    group.add_argument(
        "--mutate",
        action="store_true",
        help="check like --quick, then inject one fault at a time and show whether a check catches "
        "it and names the tensor",
    )
    group.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; - prints only the JSON"
    )
    group.add_argument("--html", metavar="FILE", help="write the results as an HTML page")
    flags.add_engine_flags(made, lazy_recording=True)
    return made


def run(args: argparse.Namespace) -> int:
    for flag, file in (("--json", args.json), ("--html", args.html)):
        if file not in (None, STDOUT):
            _try_to_write(flag, Path(file))
    if args.html == STDOUT:
        raise ConfigError("--html -: the report cannot be printed, give a file name")
    is_quick = args.quick or args.mutate
    config = _config(flags.chosen_model(args), flags.engine_settings(args), is_quick)
    certificate, mutants = _findings(config, is_quick, args.mutate)
    if args.json != STDOUT:
        _print_certificate(certificate)
        if mutants is not None:
            _print_mutants(mutants)
    _write_files(args, certificate, mutants)
    return int(not certificate.passed or not all(mutant.caught for mutant in mutants or ()))


def report(certificate: "Certificate", mutants: "Sequence[Mutant] | None") -> dict[str, Any]:
    made: dict[str, Any] = certificate.as_json()
    if mutants is not None:
        made["mutants"] = len(mutants)
        made["caught"] = sum(mutant.caught for mutant in mutants)
        made["named"] = sum(mutant.is_named for mutant in mutants)
        made["mutation"] = [
            asdict(mutant) | {"caught": mutant.caught, "is_named": mutant.is_named}
            for mutant in mutants
        ]
    return made


def _config(model: str, settings: dict[str, Any], is_quick: bool) -> EngineConfig:
    from slotzero.executor.limits import choose_backend

    config = EngineConfig(model=model, skip_tokenizer_init=True, **settings)
    if config.kv_cache_memory is None:
        device, _ = choose_backend(config)
        kv_bytes = (FEW_KV_BYTES if is_quick else KV_BYTES)[device.type]
        config = replace(config, kv_cache_memory=kv_bytes)
    return config


def _findings(
    config: EngineConfig, is_quick: bool, with_mutants: bool
) -> "tuple[Certificate, list[Mutant] | None]":
    from slotzero.certify.session import CertifySession, Findings, certify_rank, joined
    from slotzero.engine.engine import Engine
    from slotzero.executor.rank0 import certify_ranks
    from slotzero.system.progress import certify_bar

    task = partial(certify_rank, is_quick=is_quick, with_mutants=with_mutants)
    with certify_ranks(config, task) as rank_group:
        engine, mutants = Engine(config, rank_group), None
        session = CertifySession(engine, config.model, is_quick, config.deterministic)
        bar = certify_bar(config.show_progress, session.num_cells)
        with bar as tried, rank_group.watched("certifying"):
            session.certify(lambda cell: tried(f"{cell.size} {cell.check}"))
        if with_mutants:
            bar = certify_bar(config.show_progress, None)
            with bar as tried, rank_group.watched("certifying"):
                mutants = session.mutate(lambda m: tried(f"{m.runner}: {m.tensor}: {m.fault}"))
        found = joined([Findings(session.certificate, mutants), *rank_group.reports()])
    return found.certificate, found.mutants


@contextmanager
def _writing(flag: str, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {file}: cannot be written: {error.strerror}") from error


def _try_to_write(flag: str, file: Path) -> None:
    """Check that the file can be written before minutes of work; a new file is removed again."""
    with _writing(flag, file):
        existed = file.exists()
        file.open("a").close()
        if not existed:
            file.unlink()


def _write_files(
    args: argparse.Namespace, certificate: "Certificate", mutants: "Sequence[Mutant] | None"
) -> None:
    text = json.dumps(report(certificate, mutants), ensure_ascii=False, indent=2) + "\n"
    if args.json == STDOUT:
        print(text, end="", flush=True)
    elif args.json:
        with _writing("--json", Path(args.json)):
            Path(args.json).write_text(text, encoding="utf-8")
    if args.html:
        from slotzero.certify.page import html

        with _writing("--html", Path(args.html)):
            Path(args.html).write_text(html(certificate, mutants), encoding="utf-8")


def _print_certificate(certificate: "Certificate") -> None:
    from slotzero.certify.report import CHECKS

    lines = []
    for size in certificate.sizes:
        cells = [certificate.cell(size, check) for check in CHECKS]
        words = ["-" if c is None or c.left_out else "FAIL" if c.violations else "ok"
                 for c in cells]  # fmt: skip
        lines.append((size, *words, f"{sum(c.seconds for c in cells if c):.2f}"))
    _print_table(f"{certificate.model} on {certificate.backend}", ("size", *CHECKS, "s"), lines)
    if certificate.copies is not None:
        outcome = "FAIL" if certificate.copies.violations else "ok"
        print(f"S11, copies with a late device: {outcome} ({certificate.copies.seconds:.2f} s)")
    invariance = certificate.batch_invariance
    if invariance is not None:
        outcome = "FAIL" if invariance.violations else "ok"
        print(f"S10, batch invariance: {outcome} ({invariance.seconds:.2f} s)")
    for name, why in certificate.uncertified.items():
        print(f"left out: {name}: {why}")
    for size, check, why in _not_tried(certificate):
        print(f"left out: {size}: {check}: {why}")
    failures = list(certificate.violations)
    for failure in failures:
        print(f"FAILED: runner {failure.runner}: {failure}")
    outcome = "passed" if certificate.passed else f"NOT passed, {len(failures)} failures"
    seconds = f"{certificate.seconds:.1f} s, capture included"
    print(f"{outcome}: {certificate.coverage} in {seconds}")


def _not_tried(certificate: "Certificate") -> Iterable[tuple[str, str, str]]:
    return ((c.size, c.check, c.left_out) for c in certificate.cells if c.left_out)


def _print_mutants(mutants: "Sequence[Mutant]") -> None:
    from slotzero.certify.page import NUMBERED, numbered, verdict

    faults = list(dict.fromkeys(mutant.fault for mutant in mutants))
    _print_table("faults", ("", "fault"), [(str(i + 1), f) for i, f in enumerate(faults)])
    for runner in dict.fromkeys(mutant.runner for mutant in mutants):
        ours = [mutant for mutant in mutants if mutant.runner == runner]
        for first in range(0, len(faults), FAULTS_ACROSS):
            some = range(first, min(first + FAULTS_ACROSS, len(faults)))
            words = {(m.tensor, faults.index(m.fault)): verdict(m) for m in ours}
            tensors = dict.fromkeys(m.tensor for m in ours if faults.index(m.fault) in some)
            lines = [(name, *(words.get((name, i), "") for i in some)) for name in tensors]
            title = f"{runner}: the check that caught each fault (?: it named other tensors)"
            _print_table(title, ("tensor", *(str(i + 1) for i in some)), lines)
    _print_table("known bugs of other engines among them", NUMBERED, numbered(mutants))
    num_caught = sum(mutant.caught for mutant in mutants)
    num_named = sum(mutant.is_named for mutant in mutants)
    print(f"{num_caught} of {len(mutants)} mutants were caught, {num_named} with the right tensor")


def _print_table(title: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDE
    table = Table(title=title or None, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*line)
    console.print(table)
