"""Energy of the parts of a step, from the GPU's energy counter, under a sustained load.

    python benchmarks/h200/energy.py path/to/llama-3.1-8b [--rows 64 256] [--contexts 128 384 640]

The parts are: reading memory (zeros, and random numbers like weights), the four matrix products of
a Llama-3.1-8B layer over 256 rows, the largest of them over 8,192 rows, and decode steps of the
model with random weights. Each part is a CUDA graph that is replayed for a second, over more
weights than the cache holds. The script prints a line for each, then one line of JSON.
"""

import argparse
import ctypes
import json
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from slotzero.bench.rows import standing
from slotzero.bench.session import BenchSession

PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
DEVICE, DTYPE, COLD_BYTES, READ_BYTES = "cuda", torch.bfloat16, 4 << 30, 4 << 30
WARM_UP, SECONDS, SM_CLOCK = 0.5, 0.8, 1
BLOCK, ROUNDS = 8192, 16


class Card:
    """The first GPU, through NVML."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._handle))

    def joules(self) -> float:
        spent = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(spent))
        return spent.value / 1000

    def megahertz(self) -> int:
        clock = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._handle, SM_CLOCK, ctypes.byref(clock))
        return clock.value

    def _ask(self, name: str, *args: object) -> None:
        code = getattr(self._nvml, name)(*args)
        if code:
            raise RuntimeError(
                f"{name} returned {code}: this benchmark needs a GPU whose driver counts energy"
            )


class Meter:
    def __init__(self) -> None:
        self.results: list[dict] = []
        self._card = Card()

    def measure(self, name: str, call: Callable[[], object], per: int = 1) -> None:
        """Measure a call that repeats the part `per` times, and record the energy of one part.

        The counter is updated only a few times a second, so the measurement begins and ends at an
        update.
        """
        self._until(call, time.perf_counter() + WARM_UP)
        start, before = self._moved(call)[1:]
        count = self._until(call, start + SECONDS)
        clock = self._card.megahertz()
        more, end, after = self._moved(call)
        times, spent = (count + more) * per, after - before
        result = {
            "what": name,
            "us": round((end - start) / times * 1e6, 1),
            "mj": round(spent / times * 1e3, 2),
            "watts": round(spent / (end - start)),
            "mhz": clock,
        }
        self.results.append(result)
        print("{what:28} {us:9,.1f} us {mj:9,.2f} mJ {watts} W {mhz} MHz".format(**result))

    def _until(self, call: Callable[[], object], end: float) -> int:
        count = 0
        while time.perf_counter() < end:
            call()
            call()
            torch.cuda.synchronize()
            count += 2
        return count

    def _moved(self, call: Callable[[], object]) -> tuple[int, float, float]:
        """Call until the counter changes; return the number of calls, the time and the joules."""
        before, count = self._card.joules(), 0
        while (now := self._card.joules()) == before:
            call()
            torch.cuda.synchronize()
            count += 1
        return count, time.perf_counter(), now


@triton.jit
def _read_kernel(x, out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * ROUNDS * BLOCK
    found = tl.zeros([BLOCK], tl.int32)
    for i in range(ROUNDS):
        found ^= tl.load(x + begin + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(found, axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 384, 640])
    args = parser.parse_args()
    meter = Meter()
    with torch.inference_mode():
        measure_reads(meter)
        for features, inner in PRODUCTS:
            measure_product(meter, features, inner, 256)
        measure_product(meter, *PRODUCTS[2], 8192)
    torch.cuda.empty_cache()
    measure_steps(meter, args)
    print(json.dumps({"commandline": vars(args), "results": meter.results}))


def measure_reads(meter: Meter) -> None:
    data = torch.zeros(READ_BYTES // 4, dtype=torch.int32, device=DEVICE)
    programs = len(data) // (BLOCK * ROUNDS)
    out = torch.empty(programs, dtype=torch.int32, device=DEVICE)
    for name in ("zeros", "noise"):
        if name == "noise":
            data.view(DTYPE).normal_()
        graph = recorded(
            lambda: _read_kernel[(programs,)](data, out, BLOCK=BLOCK, ROUNDS=ROUNDS, num_warps=8)
        )
        meter.measure(f"read 4 GiB of {name}", graph.replay)


def measure_product(meter: Meter, features: int, inner: int, rows: int) -> None:
    copies = 1 if rows > 256 else COLD_BYTES // (features * inner * 2)
    shape = copies, features, inner
    weights = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(0, 0.02).unbind()
    x = torch.randn(rows, inner, device=DEVICE, dtype=DTYPE)
    out = torch.empty(rows, features, device=DEVICE, dtype=DTYPE)

    def multiply() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)

    meter.measure(f"{features}x{inner}, {rows:,} rows", recorded(multiply).replay, copies)


def measure_steps(meter: Meter, args: argparse.Namespace) -> None:
    settings = {"load_format": "dummy", "enable_prefix_caching": False, "show_progress": False}
    settings |= {"lazy_recording": True, "max_num_seqs": max(args.rows)}
    session = BenchSession(args.model, {**settings, "max_model_len": max(args.contexts) + 8})
    engine, runner = session.engine, session.engine.worker.decode
    for rows in args.rows:
        key = runner.pick(rows, rows)
        with torch.inference_mode():
            runner.prepare(key)
        for context in args.contexts:
            with standing(engine, runner, key, context) as stand:

                def step(stand=stand) -> None:
                    stand.replay()
                    stand.rewind()

                meter.measure(f"step, {rows} x {context}", step)


def recorded(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


if __name__ == "__main__":
    main()
