"""Decode steps of current model families with random weights, against the bandwidth limit.

    python benchmarks/h200/families.py [--models Qwen3-30B-A3B ...] [--rows 1 16 64 256]
        [--context 512] [--out benchmarks/h200/families.json]

The limit is the time to read the weights in use and the KV cache once, and to move the recurrent
states, at the measured bandwidth; of routed experts, those count that the rows would choose at
random. The script prints a line for each step, then JSON. To try it on a CPU: --models small --rows
1 2 --context 8.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack import apart, open_stack, step_seconds

COMMON = {
    "torch_dtype": "bfloat16", "hidden_act": "silu", "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": QWEN3_MOE,
    "Qwen3.6-35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        },
    },
    "Phi-4": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 100352,
        "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 10, "rms_norm_eps": 1e-5,
        "rope_theta": 250000.0, "original_max_position_embeddings": 16384,
        "max_position_embeddings": 16384,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    "small": {
        **QWEN3_MOE, "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "torch_dtype": "float32",
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = [name for name in MODELS if name != "small"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Mapping[str, float]] = {}
    for name in args.models:
        results |= apart(measure, name, args.rows, args.context)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def measure(name: str, rows: list[int], context: int) -> dict[str, Mapping[str, float]]:
    session = open_stack(
        {**COMMON, **MODELS[name]}, max_num_seqs=max(rows), max_model_len=context + 64
    )
    found = {}
    for num in rows:
        seconds = step_seconds(session, num, context)
        if seconds is None:
            print(f"{name} at {num} rows: no room in the KV cache", flush=True)
            continue
        share = session.least_seconds([context] * num) / seconds
        found[f"{name}/{num}"] = {"ms": round(1000 * seconds, 3), "share": round(share, 3)}
        print(
            f"{name} at {num} rows: {1000 * seconds:.3f} ms, {share:.0%} of the limit", flush=True
        )
    return found


if __name__ == "__main__":
    main()
