"""Generator of the documentation's pictures, step.svg and architecture.svg.

    python docs/draw.py

The pictures have their own background and follow the reader's colour scheme.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = """
  .page { fill: #ffffff; }
  .box { fill: #f6f8fa; stroke: #57606a; }
  .host { fill: #ddf4ff; stroke: #0969da; }
  .graph { fill: #dafbe1; stroke: #1a7f37; }
  .zero { fill: #fff1e5; stroke: #bc4c00; }
  .line { stroke: #57606a; stroke-width: 1.5; fill: none; }
  .tip { fill: #57606a; }
  text { fill: #1f2328; font: 13px ui-sans-serif, system-ui, sans-serif; }
  .title { font-weight: 600; }
  .small { font-size: 11.5px; }
  .code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; }
    .box { fill: #161b22; stroke: #8b949e; }
    .host { fill: #0c2d6b; stroke: #58a6ff; }
    .graph { fill: #033a16; stroke: #3fb950; }
    .zero { fill: #5a1e02; stroke: #f0883e; }
    .line { stroke: #8b949e; }
    .tip { fill: #8b949e; }
    text { fill: #e6edf3; }
  }
"""


class Picture:
    """An SVG picture made of boxes, texts and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">\n'
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
        )
        self._parts = [f'<rect class="page" width="{width}" height="{height}" rx="8"/>']

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        shape = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="5"'
        self._parts.append(f'<rect class="{kind}" {shape}/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        place = f'x="{x}" y="{y}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{kind}" {place}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="line" marker-end="url(#tip)" d="{path}"/>')

    def cells(self, x: float, y: float, values: Sequence[str], zeros: Sequence[int] = ()) -> None:
        for i, value in enumerate(values):
            self.box(x + 38 * i, y, 38, 26, "zero" if i in zeros else "box")
            self.text(x + 38 * i + 19, y + 18, value, "code", "middle")

    def save(self, path: Path) -> None:
        path.write_text("\n".join([self._head, *self._parts, "</svg>\n"]))


def step() -> Picture:
    """Draw a decode step of three requests, padded to the capture size 4."""
    made = Picture(860, 426, "One decode step: three requests, padded to the capture size of four")
    made.text(20, 30, "Host: publish the slots that run", "title")
    made.cells(20, 44, ["3", "7", "5", "0"], zeros=[3])
    made.text(180, 54, "Three requests run. The capture size is 4,", "small")
    made.text(180, 70, "so one row is padding: slot 0.", "small")

    made.box(20, 108, 820, 112, "graph")
    made.text(116, 130, "Device: replay one captured graph", "title")
    steps = [
        ("positions", "length[slot]"),
        ("embed", "tokens[slot, pos]"),
        ("all layers", "page_table[slot]"),
        ("sample", "parameters[slot]"),
        ("write back", "tokens, length"),
    ]
    for i, (name, reads) in enumerate(steps):
        x = 34 + 160 * i
        made.box(x, 146, 146, 58)
        made.text(x + 73, 170, name, "title", "middle")
        made.text(x + 73, 190, reads, "code", "middle")
        if i:
            made.arrow((x - 14, 175), (x - 1, 175))
    made.arrow((96, 72), (96, 144))

    made.text(20, 262, "Tables on the device: one row per slot", "title")
    names, widths = ("slot", "length", "page table", "tokens", "sampling"), (60, 80, 130, 190, 140)
    rows = [
        ("0", "0", "0 0 0 0", "0 0 0 0 0", "neutral"),
        ("3", "4", "4 0 0 0", "17 9 4 88 2", "temperature 0.8"),
        ("5", "19", "8 2 0 0", "31 7 7 12 ...", "greedy"),
        ("7", "2", "6 0 0 0", "5 61 20", "top_p 0.9"),
    ]
    for r, row in enumerate([names, *rows]):
        x = 20
        for value, width in zip(row, widths, strict=True):
            made.box(x, 274 + 28 * r, width, 28, "zero" if r == 1 else "box")
            made.text(x + 8, 293 + 28 * r, value, "code" if r else "title small")
            x += width
    notes = [
        "Slot 0 belongs to no request:",
        "it owns no page, its KV writes are",
        "dropped, its attention is zeros, and",
        "its row is never changed.",
    ]
    for i, note in enumerate(notes):
        made.text(634, 300 + 17 * i, note, "small")
    made.arrow((330, 272), (330, 206))
    made.arrow((747, 206), (747, 240), (440, 240), (440, 272))
    made.text(634, 392, "No other index is published,", "small")
    made.text(634, 409, "so no stale index can be read.", "small")
    return made


LAYERS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("cli/", "the command slotzero"), ("server/", "HTTP APIs, engine processes")),
    (("training/", "EAGLE heads"), ("bench/", "benchmarks"), ("llm.py", "the offline API")),
    (("certify/", "proofs, mutants, live checks"),),
    (("engine/", "plan, run, commit; scheduler; output text"),),
    (("executor/", "limits, build, worker, table writer, ranks as processes"),),
    (("speculative/", "drafters, verify passes"), ("runners/", "decode and prefill passes")),
    (("checkpoint/", "folders, GGUF, tiny, dummy"), ("models/", "blocks, families, weights")),
    (("step.py, request.py", "a step, a request"), ("pools/", "slots, pages, tables, prefixes")),
    (("quantization/", "how checkpoints store quantised weights"),),
    (("kernels/", "contract, torch, cpu, triton"), ("grammars/", "structured outputs")),
    (("formats/", "how models write reasoning and tool calls: data, parser, grammar"),),
    (("sampling/", "parameters, noise"), ("distributed/", "collectives, sockets")),
    (("graph/", "registry, runner, backends"), ("text/", "tokenizer, template")),
    (
        ("system/", "memory, cache"),
        ("config.py", "settings"),
        ("tree_shape.py", "drafts"),
        ("errors.py", "error tree"),
    ),
)


def architecture() -> Picture:
    made = Picture(860, 24 + 46 * len(LAYERS) + 24, "Folders as layers: imports point downwards")
    for i, layer in enumerate(LAYERS):
        width = (800 - 10 * (len(layer) - 1)) / len(layer)
        for j, (name, what) in enumerate(layer):
            x, y = 40 + j * (width + 10), 16 + 46 * i
            kind = "host" if name.endswith("/") else "box"
            made.box(x, y, width, 38, kind)
            made.text(x + 12, y + 24, name, "title")
            made.text(x + 24 + 8 * len(name), y + 24, what, "small")
    bottom = 16 + 46 * len(LAYERS)
    made.arrow((22, 18), (22, bottom - 10))
    made.text(40, bottom + 14, "Imports point downwards, or to the right within a row.", "small")
    return made


def main() -> None:
    folder = Path(__file__).parent
    step().save(folder / "step.svg")
    architecture().save(folder / "architecture.svg")


if __name__ == "__main__":
    main()
