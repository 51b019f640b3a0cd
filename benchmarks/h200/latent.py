"""A decode step over latent KV against the bandwidth limit: how far batch and context reach.

    python benchmarks/h200/latent.py [--heads 16 128] [--rows 1 16 64 256] [--contexts 1024 32768]

Four dense layers in DeepSeek-V3's shape, random weights: with all of its 128 heads, whose decode is
limited by arithmetic (240 operations a byte), and with 16, what one of eight cards would have. The
limit is to read all weights and all KV once. `kv_of_limit` is of the KV alone: how much longer the
step takes than with an almost empty context. Prints a line each, then one of JSON.
"""

import argparse
import gc
import json
import tempfile
from pathlib import Path

import torch

from slotzero.bench.clock import device_seconds
from slotzero.bench.rows import refusal, standing
from slotzero.bench.session import Session

LAYERS, REPEATS, SHORT = 4, 7, 16
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "hidden_size": 7168,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 40000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096, 32768])
    parser.add_argument("--kv-cache-memory", type=int, default=60 << 30)
    args = parser.parse_args()
    results = []
    for heads in args.heads:
        results += measure(heads, args)
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps({"commandline": vars(args), "results": results}))


def measure(heads: int, args: argparse.Namespace) -> list[dict]:
    inner = 18432 * heads // 128
    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_attention_heads": heads, "num_key_value_heads": heads}
        (Path(folder) / "config.json").write_text(
            json.dumps({**config, "intermediate_size": inner})
        )
        settings = {"load_format": "dummy", "enable_prefix_caching": False, "show_progress": False}
        settings |= {"lazy_recording": True, "max_num_seqs": max(args.rows)}
        settings |= {"kv_cache_memory": args.kv_cache_memory}
        settings |= {"max_model_len": max(args.contexts) + 8}
        session = Session(folder, settings)
    results = []
    for rows in args.rows:
        least = session.least_seconds([0] * rows)
        empty = step_seconds(session, rows, SHORT)
        for context in args.contexts:
            spent = step_seconds(session, rows, context)
            if spent is None or empty is None:
                continue
            limit = session.least_seconds([context] * rows)
            results.append(
                {
                    "heads": heads,
                    "rows": rows,
                    "context": context,
                    "ms": round(1000 * spent, 4),
                    "of_limit": round(limit / spent, 3),
                    "kv_of_limit": round((limit - least) / max(spent - empty, 1e-9), 3),
                }
            )
            print(results[-1], flush=True)
    return results


def step_seconds(session: Session, rows: int, context: int) -> float | None:
    """None: there is no room for so much."""
    engine, runner = session.engine, session.engine.worker.decode
    key = runner.pick(rows, rows)
    if refusal(engine, key, context) is not None:
        return None
    with torch.inference_mode():
        runner.prepare(key)
    with standing(engine, runner, key, context) as stand:
        device = engine.worker.registry.device
        return device_seconds(stand.replay, stand.rewind, REPEATS, device, lead=0.01)


if __name__ == "__main__":
    main()
