"""Throughput of quantised weights and KV caches, random weights, best of two runs.

    python benchmarks/h200/quantization.py path/to/llama-3.1-8b path/to/qwen3-0.6b --out out.json

The workloads are those of run.py. Each model and format runs in its own engine and process; bf16 is
the same model unquantised, on the same card. The name of a result is the model, the format and the
workload; prefill is in requests per second. The script prints a line for each result, then JSON.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run import NAMES, measure
from stack import apart

from slotzero.bench.workloads import WORKLOADS

W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 128,
            },
        }
    },
}  # fmt: skip
FORMATS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({}, {}),
    "fp8": ({"quantization": "fp8"}, {}),
    "fp8+kv": ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, {}),
    "w4a16": ({}, {"quantization_config": W4A16}),
}
"""Settings of the engine, and fields of the model's config.json, by format."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, float] = {}
    for model in args.models:
        for name in args.formats:
            results |= apart(measure_format, model, name, args.workloads)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def measure_format(model: Path, name: str, workloads: list[str]) -> dict[str, float]:
    settings, fields = FORMATS[name]
    config = json.loads((model / "config.json").read_text()) | fields
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        label = f"{NAMES.get(model.name, model.name)}/{name}"
        return measure(Path(folder), workloads, label, settings)


if __name__ == "__main__":
    main()
