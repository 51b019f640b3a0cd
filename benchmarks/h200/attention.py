"""Decode attention as a share of the bandwidth: as the engine does it, the same with other cuts
("now"), with its loads a tile further ahead ("deep"), and as one line of rows (decode_line.py).

    python benchmarks/h200/attention.py [seconds]

Shares are of 4,346 GB/s, over the bytes of KV that are read. now/deep: keys/warps/stages/E(arly)
cut; line: keys/warps/stages kPROGRAMS cROW_COST. On a CPU, to see it run: DRY=1 TRITON_INTERPRET=1.
"""

import importlib.util
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import decode_line
import torch

from slotzero.kernels.nouns import Angles, Heads
from slotzero.kernels.triton import decode
from slotzero.kernels.triton.launch import compiling_ahead, num_processors

DRY = os.environ.get("DRY") == "1"
DEVICE = "cpu" if DRY else "cuda"
DTYPE = torch.float16 if DRY else torch.bfloat16
LIMIT = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
START = time.monotonic()
PEAK, PAGE, CALLS, KV = 4346e9, 16, 2 if DRY else 16, 8
MODELS = {"llama": (32, False), "qwen": (16, True)}
ROWS = [3] if DRY else [64, 96, 128, 256]
CONTEXTS = ["384", "1000", "mixed"]
COARSE = [(3, "mixed")] if DRY else [(256, "384"), (256, "mixed"), (96, "mixed")]


def deep_module():
    """decode.py with the stages as the launch's, which gives a tile more in flight, not EARLY."""
    source = Path(decode.__file__).read_text()
    for old, new in (
        (
            "tl.range(begin_loop, stored, KEYS, num_stages=STAGES)",
            "range(begin_loop, stored, KEYS)",
        ),
        ("num_warps=warps, **overlap()", "num_warps=warps, num_stages=stages, **overlap()"),
    ):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp()) / "decode_deep.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("decode_deep", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["decode_deep"] = module
    spec.loader.exec_module(module)
    return module


deep = deep_module()
TODAY_SHAPE, TODAY_CUT = decode.shape_for, decode.cut_for


class Way:
    """One kernel with its parameters."""

    def __init__(self, kind, shape=None, cut=None, cost=1):
        self.kind, self.shape, self.cut, self.cost = kind, shape, cut, cost

    def __str__(self):
        if self.kind == "today":
            return "today"
        if self.kind == "line":
            k, keys, warps, stages = self.shape
            return f"line {keys}/{warps}/{stages} k{k} c{self.cost}"
        keys, warps, stages, early = self.shape
        cut = "" if self.cut is None else f" {self.cut[0]},{self.cut[1]}"
        return f"{self.kind} {keys}/{warps}/{stages}{'E' if early else ''}{cut}"

    def set(self):
        """-> the module to call"""
        if self.kind == "line":
            decode_line.shape_for = lambda _: self.shape
            decode_line.ROW_COST = self.cost
            return decode_line
        module = deep if self.kind == "deep" else decode
        module.shape_for = TODAY_SHAPE if self.shape is None else lambda *_: self.shape
        module.cut_for = TODAY_CUT if self.cut is None else lambda _: self.cut
        return module


def fits(k, keys, warps, stages):
    memory = (max(stages - 1, 1) * keys * 512) + 4608 + 1024
    return k * memory <= 228 << 10 and k * warps <= 8 and keys // warps <= 32


def lines():
    every = itertools.product(range(2, 9), (16, 32, 64), (1, 2), (2, 3, 4))
    return [Way("line", s) for s in every if fits(*s)]


def nows():
    kinds = [(k, w, 2, e) for k in (16, 32, 64) for w in (1, 2, 4) for e in (False, True)]
    kinds += [(32, 1, 3, False), (32, 1, 3, True), (64, 2, 3, True)]
    return [Way("now", s) for s in kinds if s[0] // s[1] <= 32 and s[0] >= 16]


def deeps():
    kinds = itertools.product((16, 32, 64), (1, 2), (2, 3, 4), (False,))
    return [Way("deep", s) for s in kinds if s[0] // s[1] <= 32]


CUTS = [(4096, 128), (8192, 128), (8192, 256), (16384, 128)]


class Case:
    def __init__(self, model, rows, context, pools):
        heads, norm = MODELS[model]
        self.name = f"{model} {rows}x{context}"
        self.heads = Heads(heads, KV, 128, 128, 1e-6, 128**-0.5)
        torch.manual_seed(rows)
        lengths = torch.randint(100, 2001, (rows,)) if context == "mixed" else None
        lengths = torch.full((rows,), int(context)) if lengths is None else lengths
        if DRY:
            lengths = lengths // 20
        per_row = -(-lengths // PAGE)
        used = int(per_row.sum())
        assert used < len(pools[0]), used
        ids = torch.randperm(used) + 1
        table = torch.zeros(rows + 1, int(per_row.max()), dtype=torch.int32)
        at = 0
        for row, num in enumerate(per_row.tolist()):
            table[row + 1, :num] = ids[at : at + num].int()
            at += num
        self.slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
        self.positions = (lengths - 1).int().to(DEVICE)
        self.table, self.pools = table.to(DEVICE), pools
        self.joined = torch.randn(rows, sum(self.heads.sizes), device=DEVICE, dtype=DTYPE)
        angle = torch.rand(rows, 1, 64, device=DEVICE) * 6
        self.angles = Angles(angle.cos(), angle.sin())
        weights = torch.rand(2, 128, device=DEVICE, dtype=DTYPE) + 0.5
        self.norms = tuple(weights) if norm else (None, None)
        self.bytes = int((lengths - 1).sum()) * KV * 256 * 2
        self.expected = None

    def attend(self, module, plan, pool):
        return module.attend(
            self.joined, *self.norms, None, self.angles, pool, self.table, plan, self.heads
        )

    def ask(self, way):
        module = way.set()
        plan = module.plan(self.slots, self.positions, self.heads)
        self.attend(module, plan, self.pools[0])

    def check(self, out, way):
        if self.expected is None:
            self.expected = out.float()
        gap = (out.float() - self.expected).norm() / self.expected.norm()
        if not gap < 1e-2:
            print(f"WRONG {self.name} {way}: {gap:.4f}", flush=True)

    def time(self, way):
        """-> share of the bandwidth"""
        module = way.set()
        plan = module.plan(self.slots, self.positions, self.heads)
        out = self.attend(module, plan, self.pools[0])
        self.check(out, way)
        if DRY:
            return self.bytes / PEAK
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for pool in self.pools:
                self.attend(module, plan, pool)
        graph.replay()
        best = float("inf")
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3 / CALLS)
        return self.bytes / PEAK / best

    def times(self, ways):
        """-> [(share, way)], best first"""
        found = []
        for way in ways:
            if time.monotonic() - START > LIMIT and found:
                print("(out of time)", flush=True)
                break
            try:
                found.append((self.time(way), way))
            except Exception as error:  # one that does not fit
                if DRY:
                    raise
                print(f"{way}: {str(error)[:80]}", flush=True)
        return sorted(found, key=lambda f: -f[0])

    def show(self, found, today):
        best = ", ".join(f"{way} {share:.1%}" for share, way in found[:5])
        kinds = {}
        for share, way in found:
            kinds.setdefault(way.kind, f"{share:.1%}")
        print(f"{self.name}: today {today:.1%} | best of {kinds} | {best}", flush=True)


def main():
    pages = 40 if DRY else max(256 * 63, 19000) + 8
    shape = pages, PAGE, KV, 256
    pools = [torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_() for _ in range(CALLS)]
    every = [Way("today"), *nows(), *deeps(), *lines()]
    if DRY:
        every = [Way("today"), nows()[3], deeps()[1], *lines()[:2]]
    costs = (0, 2, 4)
    with compiling_ahead():
        for model in MODELS:
            case = Case(model, ROWS[0], "384", pools)
            for way in every:
                case.ask(way)
            for rows in ROWS:  # plans of another size, and of another cost of a row
                case = Case(model, rows, "384", pools)
                for way in (Way("today"), *(Way("line", s, cost=c)
                            for s in ((4, 32, 1, 3), (4, 16, 1, 3), (2, 64, 2, 3))
                            for c in (1, *costs))):  # fmt: skip
                    case.ask(way)
    print(f"compiled in {time.monotonic() - START:.0f} s, {len(every)} ways, "
          f"{num_processors()} processors", flush=True)  # fmt: skip
    for model in MODELS:
        kept = {}
        for rows, context in COARSE:
            case = Case(model, rows, context, pools)
            first = case.times([Way("today")])[0][0]
            found = case.times(every[1:])
            top = {k: [w for _, w in found if w.kind == k] for k in ("now", "deep", "line")}
            more = [
                Way(w.kind, w.shape, c) for k in ("now", "deep") for w in top[k][:2] for c in CUTS
            ]
            more += [Way("line", w.shape, cost=c) for w in top["line"][:2] for c in costs]
            found = sorted(found + case.times(more), key=lambda f: -f[0])
            case.show(found, first)
            for kind in ("now", "deep", "line"):
                best = [w for _, w in found if w.kind == kind][: 6 if kind == "line" else 3]
                kept.update({str(w): w for w in best})
        for rows, context in itertools.product(ROWS, CONTEXTS):
            if (rows, context) not in COARSE:
                case = Case(model, rows, context, pools)
                first = case.times([Way("today")])[0][0]
                case.show(case.times(kept.values()), first)
    print(f"{time.monotonic() - START:.0f} s", flush=True)


with torch.inference_mode():
    main()
