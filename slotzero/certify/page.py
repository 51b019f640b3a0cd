"""A certificate as one HTML page: the matrix of checks as a picture, and every failure.

This module knows what a report contains, not how it was made. The rule: one file without scripts
that fetches nothing; every colour is repeated as a symbol.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING

from slotzero import __version__
from slotzero.certify.report import CHECKS, RULES, Cell, Certificate, Violation

if TYPE_CHECKING:
    from slotzero.certify.mutants import Mutant

CELL, GAP, ROW = 40, 3, 24  # pixels
CHARACTER = 7.5  # width of a character in the monospaced labels
MISSED = "MISSED"
NUMBERED = ("number", "runner", "tensors", "fault", "caught by")
MARKS = {"ok": "✓", "bad": "✕", "none": "·"}
STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2024; --soft: #60666d; --line: #d9dde1;
  --ok: #2f9e57; --bad: #d13438; --odd: #b7791f; --none: #dfe3e6; --mark: #fff; --panel: #f5f7f8 }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e6e9ec; --soft: #9aa2aa;
  --line: #343a40; --ok: #2b8a4d; --bad: #d9484c; --odd: #b7791f; --none: #2c3238;
  --panel: #1c2125 } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 84rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .4rem 0 } .soft { color: var(--soft) } .wide { overflow-x: auto }
.verdict, .legend span { display: inline-block; color: var(--mark); border-radius: 4px;
  padding: .1rem .7rem } .legend span { margin-left: .7rem; padding: 0 .5rem }
span.ok, td.ok { background: var(--ok) } span.bad, td.bad { background: var(--bad) }
td.odd { background: var(--odd) } .legend .none { background: var(--none); color: var(--soft) }
td.ok, td.bad, td.odd { color: var(--mark); text-align: center }
svg text { font: 12.5px ui-monospace, monospace; fill: var(--ink) }
svg .mark { fill: var(--mark); text-anchor: middle } svg .none + .mark { fill: var(--soft) }
svg .ok { fill: var(--ok) } svg .bad { fill: var(--bad) } svg .none { fill: var(--none) }
svg .head { text-anchor: middle; font-weight: 600 } svg .group { font-weight: 600 }
svg .time { text-anchor: end; fill: var(--soft) }
table { border-collapse: collapse; font-size: 13px }
th, td { border: 1px solid var(--line); padding: .2rem .4rem; text-align: left }
th { background: var(--panel); font-weight: 600; vertical-align: bottom }
.failure { border-left: 4px solid var(--bad); background: var(--panel); padding: .5rem .9rem;
  margin: .6rem 0; overflow-wrap: anywhere }
code { font: 13px ui-monospace, monospace }
"""


def html(certificate: Certificate, mutants: "Sequence[Mutant] | None") -> str:
    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    violations = list(certificate.violations)
    verdict = ("ok", "passed") if certificate.passed else ("bad", "NOT passed")
    title = f"slotzero certify: {certificate.model}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p><span class="verdict {verdict[0]}">{verdict[1]}</span></p>',
        f'<p class="soft">backend {escape(certificate.backend)}, {certificate.coverage} in '
        f"{certificate.seconds:.1f} s, {len(violations)} failures, {date}, "
        f"slotzero {__version__}</p>",
        f"<h2>Checks of {certificate.coverage}</h2>",
        f'<div class="wide">{_matrix(certificate)}</div>',
        *_left_out(certificate),
        "<h2>The checks</h2>",
        _table(("check", "rule"), ([_td(check), _td(rule)] for check, rule in RULES.items())),
        *(["<h2>Failures</h2>"] if violations else []),
        *map(_failure, violations),
        *(_mutation(mutants) if mutants is not None else []),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _matrix(certificate: Certificate) -> str:
    """Return the matrix: one row per size, one column per check, a heading per runner."""
    left = int(CHARACTER * max(map(len, certificate.sizes), default=0)) + 16
    parts, y = [], ROW
    for i, check in enumerate(CHECKS):
        title = f"<title>{escape(RULES[check])}</title>"
        parts.append(f'<text class="head" x="{_x(left, i)}" y="16">{title}{check}</text>')
    for runner in certificate.runners:
        parts.append(f'<text class="group" x="0" y="{y + 17}">{escape(runner)}</text>')
        y += ROW
        for size in dict.fromkeys(c.size for c in certificate.cells if c.runner == runner):
            parts.append(f'<text x="8" y="{y + 16}">{escape(size)}</text>')
            cells = [certificate.cell(size, check) for check in CHECKS]
            for i, cell in enumerate(cells):
                parts.append(_square(cell, size, CHECKS[i], _x(left, i), y))
            seconds = sum(cell.seconds for cell in cells if cell)
            x = _x(left, len(CHECKS)) + CELL
            parts.append(f'<text class="time" x="{x}" y="{y + 16}">{seconds:.2f} s</text>')
            y += ROW
    width = _x(left, len(CHECKS)) + CELL + GAP
    return (
        f'<svg role="img" aria-label="sizes by checks" viewBox="0 0 {width} {y}" '
        f'width="{width}" height="{y}">{"".join(parts)}</svg>'
    )


def _x(left: int, column: int) -> int:
    """Return the middle of a column."""
    return left + column * (CELL + GAP) + CELL // 2


def _square(cell: Cell | None, size: str, check: str, x: int, y: int) -> str:
    if cell is None or cell.left_out:
        kind, text = "none", cell.left_out if cell else "not reached"
    elif cell.violations:
        kind, text = "bad", "; ".join(map(str, cell.violations))
    else:
        kind, text = "ok", f"passed, {cell.seconds:.2f} s"
    return (
        f"<g><title>{escape(f'{size} {check}: {text}')}</title>"
        f'<rect class="{kind}" x="{x - CELL // 2}" y="{y}" width="{CELL}" '
        f'height="{ROW - GAP}" rx="3"/>'
        f'<text class="mark" x="{x}" y="{y + 15}">{MARKS[kind]}</text></g>'
    )


def _left_out(certificate: Certificate) -> Iterable[str]:
    legend = zip(MARKS.items(), ("passed", "failed", "not run"), strict=True)
    marks = (f'<span class="{kind}">{mark}</span> {word}' for (kind, mark), word in legend)
    yield f'<p class="legend">{" ".join(marks)}</p>'
    whole = certificate.uncertified.items()
    single = ((f"{c.size} {c.check}", c.left_out) for c in certificate.cells if c.left_out)
    for name, why in (*whole, *single):
        yield f'<p class="soft"><code>{escape(name)}</code>: {escape(why)}</p>'


def _failure(violation: Violation) -> str:
    row = "" if violation.row is None else f", row {violation.row}"
    head = f"runner {violation.runner}, size {violation.size}, check {violation.check}, "
    return (
        f'<div class="failure"><p><strong>{escape(head)}tensor <code>{escape(violation.tensor)}'
        f"</code>{row}</strong></p><p><code>{escape(violation.found)}</code></p>"
        f'<p class="soft">Violated rule: {escape(violation.rule)}.</p></div>'
    )


def _mutation(mutants: "Sequence[Mutant]") -> Iterable[str]:
    """Return the matrix of mutants: one row per tensor, one column per fault."""
    caught, named = sum(m.caught for m in mutants), sum(m.is_named for m in mutants)
    yield "<h2>Injected faults</h2>"
    yield f"<p>{caught} of {len(mutants)} were caught, {named} with the right tensor named.</p>"
    yield '<p class="soft">The check that caught it; ? means that it named other tensors.</p>'
    for runner in dict.fromkeys(m.runner for m in mutants):
        ours = {(m.tensor, m.fault): _verdict(verdict(m)) for m in mutants if m.runner == runner}
        faults = list(dict.fromkeys(fault for _, fault in ours))
        lines = (
            [_td(tensor), *(ours.get((tensor, fault), "<td></td>") for fault in faults)]
            for tensor in dict.fromkeys(tensor for tensor, _ in ours)
        )
        yield f"<h2>{escape(runner)}</h2>"
        yield f'<div class="wide">{_table(("tensor", *faults), lines)}</div>'
    lines = ([*map(_td, words), _verdict(word)] for *words, word in numbered(mutants))
    yield "<h2>Known bugs of other engines among them</h2>"
    yield f'<div class="wide">{_table(NUMBERED, lines)}</div>'


def numbered(mutants: "Sequence[Mutant]") -> list[tuple[str, ...]]:
    """Return bugs of other engines with the columns of NUMBERED; tensors with the same result share
    a line."""
    tensors: dict[tuple[str, ...], list[str]] = {}
    for mutant in mutants:
        for number in mutant.numbers:
            fate = (number, mutant.runner, mutant.fault, verdict(mutant))
            tensors.setdefault(fate, []).append(mutant.tensor)
    return [
        (number, runner, ", ".join(names), fault, word)
        for (number, runner, fault, word), names in sorted(tensors.items())
    ]


def verdict(mutant: "Mutant") -> str:
    """Return the check that caught it, with a question mark if it named only other tensors."""
    if not mutant.caught:
        return MISSED
    return mutant.caught_by + ("" if mutant.is_named else "?")


def _verdict(word: str) -> str:
    kind = "bad" if word == MISSED else "odd" if word.endswith("?") else "ok"
    return f'<td class="{kind}">{word}</td>'


def _table(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _td(text: str) -> str:
    return f"<td>{escape(text)}</td>"
