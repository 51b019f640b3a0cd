"""Tables, followed by one line of JSON with at least the same content.

This module knows words and columns, not their meaning.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
WIDEST = 1000  # characters


@dataclass(frozen=True)
class Sheet:
    """One table; without a header, its first column contains labels."""

    title: str
    lines: Sequence[Sequence[str]]
    header: Sequence[str] = ()


def print_sheets(report: Report, sheets: Sequence[Sheet]) -> None:
    from rich.console import Console
    from rich.table import Table

    for sheet in sheets:
        console = Console(highlight=False, markup=False)
        table = Table(title=sheet.title, title_justify="left", show_header=bool(sheet.header))
        for i, name in enumerate(sheet.header):
            table.add_column(name, justify="right" if i else "left", no_wrap=True)
        if not sheet.header:
            table.add_column(style="bold", no_wrap=True)
            table.add_column(overflow="fold")
        for line in sheet.lines:
            table.add_row(*line)
        if sheet.header:  # a truncated number is useless
            needed = console.measure(table, options=console.options.update(max_width=WIDEST))
            console.width = max(console.width, needed.maximum)
        console.print(table)
    print(json.dumps(report, ensure_ascii=False), flush=True)


def rounded(value: float) -> float:
    """Round to five digits, the precision of measurements."""
    return float(f"{value:.5g}")
