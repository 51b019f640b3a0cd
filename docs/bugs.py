"""Generator of the page of real bugs, bugs.md.

python docs/bugs.py                       write the page
python docs/bugs.py LABEL=REPORT ...      first replace the evidence by what these reports show

A report is what `slotzero certify MODEL --mutate --json FILE` has written, or a part of it; its
label says of what. The evidence is kept in bugs.json: what caught each bug, in which runners.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slotzero.certify.known_bugs import BUGS, Bug
from slotzero.certify.prevention import PREVENTED, PREVENTION, Prevented

FILE = Path(__file__).with_suffix(".md")
EVIDENCE = Path(__file__).with_suffix(".json")
HEAD = """\
# Their bug, our check

This page is made by `python docs/bugs.py` from the table that `slotzero certify --mutate` uses
(`slotzero/certify/known_bugs.py`). Each of these {num_bugs} bugs was reported for another engine or
library. In most of them a CUDA graph computed something that the same step without a graph would
not have; in the others a step got what belongs to another step, row or rank. For each, the same
mistake is made here on purpose, in the tensor that corresponds to theirs, and a check must catch it
and name that tensor. [sanitizer.md](sanitizer.md) says what the checks S0 to S11 do.

A bug is a number of an issue or pull request. Two reports of one mistake are two numbers. "Tried
in" are the runners in which the fault was injected and named; a bug that has no counterpart in one
runner is tried in others. A bug that could not be mapped honestly to a fault is not listed, and
{num_prevented} that have no place here are listed at the end with the reason.

## Where this was tried

| what was certified | faults injected | caught | named |
|---|---|---|---|
"""
BUG_HEAD = """
## The bugs

| bug | what went wrong there | the fault that is injected here | in | caught by | tried in |
|---|---|---|---|---|---|
"""
FAULT_HEAD = """
## Why they do not happen here by themselves

| fault | what prevents it |
|---|---|
"""
PREVENTED_HEAD = """
## Bugs without a counterpart

| bug | what went wrong there | why it cannot happen here |
|---|---|---|
"""
RUNNERS = ("decode", "prefill", "scored prefill", "verify", "draft-extend", "draft", "engine")
Found = dict[str, list[str]]


def page() -> str:
    evidence = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    numbers = {bug.number for bug in BUGS}
    return "".join(
        (
            HEAD.format(num_bugs=len(numbers), num_prevented=len(PREVENTED)),
            *(
                _row(label, *(f"{run[name]:,}" for name in ("mutants", "caught", "named")))
                for label, run in evidence["runs"].items()
            ),
            BUG_HEAD,
            *(_bug_row(bug, evidence["bugs"]) for bug in sorted(BUGS, key=_order)),
            FAULT_HEAD,
            *(_row(fault, PREVENTION[fault]) for fault in sorted({bug.fault for bug in BUGS})),
            PREVENTED_HEAD,
            *(_row(one.number, one.what, one.why) for one in sorted(PREVENTED, key=_order)),
        )
    )


def evidence_of(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the reports show of each bug, by its number and fault."""
    found: dict[str, Found] = {}
    known = {_key(bug.number, bug.fault) for bug in BUGS}  # a report may be older
    for report in reports.values():
        for mutant in report["mutation"]:
            for number in mutant["numbers"] if mutant["is_named"] else ():
                key = _key(number, mutant["fault"])
                if key in known:
                    _add(found.setdefault(key, {}), mutant)
    runs = {
        label: {name: report[name] for name in ("mutants", "caught", "named")}
        for label, report in reports.items()
    }
    return {"runs": runs, "bugs": dict(sorted(found.items()))}


def _key(number: str, fault: str) -> str:
    return f"{number}: {fault}"


def _add(found: Found, mutant: Mapping[str, Any]) -> None:
    for name, value in (
        ("tensors", re.sub(r"\[.*\]", "", mutant["tensor"])),
        ("checks", mutant["caught_by"]),
        ("runners", re.sub(r"-\d+$", "", mutant["runner"])),
    ):
        values = {*found.get(name, ()), value}
        found[name] = sorted(values, key=_place)


def _place(word: str) -> tuple[int, str]:
    return RUNNERS.index(word) if word in RUNNERS else len(RUNNERS), word


def _bug_row(bug: Bug, evidence: Mapping[str, Found]) -> str:
    found = evidence[_key(bug.number, bug.fault)]
    return _row(
        bug.number,
        bug.why,
        bug.fault,
        _code(_seen(bug, found["tensors"])),
        ", ".join(found["checks"]),
        ", ".join(found["runners"]),
    )


def _seen(bug: Bug, tensors: Sequence[str]) -> list[str]:
    """Return the tensors by their names, or by their kind where the bug is in all of a kind."""
    kinds = [name for name in bug.where if name not in tensors]
    return [name for name in bug.where if name in tensors] + (
        [f"every {kind}" for kind in kinds if kind in KINDS]
    )


KINDS = ("table", "published", "derived", "output", "constant")


def _code(names: Iterable[str]) -> str:
    return ", ".join(name if " " in name else f"`{name}`" for name in names)


def _order(bug: Bug | Prevented) -> tuple[str, int]:
    project, number = bug.number.rsplit(" ", 1)
    return project.lower(), int(number)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def main(given: Sequence[str]) -> None:
    if given:
        files = dict(one.rsplit("=", 1) for one in given)
        reports = {label: json.loads(Path(file).read_text()) for label, file in files.items()}
        text = json.dumps(evidence_of(reports), indent=1, ensure_ascii=False) + "\n"
        EVIDENCE.write_text(text, encoding="utf-8")
    FILE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
