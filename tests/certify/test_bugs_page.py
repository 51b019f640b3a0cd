"""Tests of docs/bugs.md: it is made from the table of bugs and from what mutants have shown."""

import json

from docs_page import page_maker

from slotzero.certify.known_bugs import BUGS
from slotzero.certify.prevention import PREVENTED


def test_the_page_is_up_to_date() -> None:
    """If it fails, run `python docs/bugs.py`."""
    made = page_maker("bugs")
    assert made.FILE.read_text(encoding="utf-8") == made.page()


def test_every_bug_was_caught_and_named() -> None:
    """If it fails, run `slotzero certify MODEL --mutate --json FILE` for the models on the page,
    and give the files to docs/bugs.py."""
    evidence = json.loads(page_maker("bugs").EVIDENCE.read_text(encoding="utf-8"))
    assert {*evidence["bugs"]} == {f"{bug.number}: {bug.fault}" for bug in BUGS}
    for label, run in evidence["runs"].items():
        assert run["mutants"] == run["caught"] == run["named"], label


def test_every_bug_has_a_row() -> None:
    rows = [line for line in page_maker("bugs").page().splitlines() if line.startswith("| ")]
    for bug in (*BUGS, *PREVENTED):
        assert any(row.startswith(f"| {bug.number} |") for row in rows), bug


def test_evidence_is_taken_from_named_mutants_of_known_bugs() -> None:
    bug = BUGS[0]
    named = {
        "numbers": ["X 1", bug.number],
        "fault": bug.fault,
        "tensor": "slots",
        "caught_by": "S0",
    }
    mutants = [
        {**named, "runner": "verify-3", "is_named": True},
        {**named, "runner": "draft-extend-16", "is_named": True},
        {**named, "runner": "decode", "is_named": False},
        {**named, "runner": "decode", "tensor": "decode[4]", "caught_by": "S1", "is_named": True},
    ]
    report = {"mutation": mutants, "mutants": 4, "caught": 4, "named": 3}
    made = page_maker("bugs").evidence_of({"tiny:x": report})
    assert made["runs"] == {"tiny:x": {"mutants": 4, "caught": 4, "named": 3}}
    assert made["bugs"] == {
        f"{bug.number}: {bug.fault}": {
            "tensors": ["decode", "slots"],
            "checks": ["S0", "S1"],
            "runners": ["decode", "verify", "draft-extend"],
        }
    }
