"""Tests of real model shapes in bfloat16 on a GPU: logits within the noise of bfloat16.

The reference is transformers on the same GPU. A few layers of each model are enough: every product,
norm and attention has its real shape. Only DeepSeek-V3 is narrower than in reality, to save memory.
"""

import pytest
import torch
from oracle import Family, build
from shadow import Shadow
from traced import Traced, prompts_of

from slotzero import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

COMMON = {"num_hidden_layers": 2, "max_position_embeddings": 4096, "vocab_size": 32000}
QWEN3 = Family(
    "Qwen3",
    {**COMMON, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
     "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02,
     "tie_word_embeddings": True},
)  # fmt: skip
LLAMA = Family(
    "Llama",
    {**COMMON, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
     "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02},
)  # fmt: skip
GEMMA3 = Family(
    "Gemma3Text",
    {**COMMON, "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
     "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
     "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"],
     "initializer_range": 0.02, "tie_word_embeddings": True},
    causal="Gemma3",
)  # fmt: skip
# every expert is chosen, because a near-tie between experts would change more than rounding does
GPT_OSS = Family(
    "GptOss",
    {**COMMON, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
     "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4,
     "num_experts_per_tok": 4, "attention_bias": True, "initializer_range": 0.02},
)  # fmt: skip
_DEEPSEEK = {
    **COMMON, "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1,
    "topk_group": 1, "initializer_range": 0.02,
}  # fmt: skip
DEEPSEEK_V2 = Family(
    "DeepseekV2",
    {**_DEEPSEEK, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
     "moe_intermediate_size": 1408, "n_shared_experts": 2, "topk_method": "greedy"},
)  # fmt: skip
DEEPSEEK_V3 = Family(
    "DeepseekV3",
    {**_DEEPSEEK, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
     "moe_intermediate_size": 2048, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
)  # fmt: skip
GEMMA4 = Family(
    "Gemma4Text",
    {**COMMON, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 4,
     "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
     "sliding_window": 256, "layer_types": ["sliding_attention", "full_attention"] * 2,
     "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 256,
     "vocab_size_per_layer_input": 32000, "final_logit_softcapping": 30.0,
     "initializer_range": 0.02, "tie_word_embeddings": True},
    causal="Gemma4",
    query_norm=0.1,
)  # fmt: skip
FALCON_H1 = Family(
    "FalconH1",
    {**COMMON, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 8,
     "num_key_value_heads": 2, "head_dim": 128, "mamba_n_heads": 48, "mamba_d_head": 64,
     "mamba_d_state": 256, "mamba_d_ssm": 3072, "mamba_n_groups": 1, "mamba_d_conv": 4,
     "mamba_chunk_size": 256, "initializer_range": 0.02},
)  # fmt: skip
QWEN3_NEXT = Family(
    "Qwen3Next",
    {**COMMON, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 4,
     "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
     "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
     "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 4,
     "num_experts_per_tok": 4, "moe_intermediate_size": 512,
     "shared_expert_intermediate_size": 512, "initializer_range": 0.02},
)  # fmt: skip
NEWEST = {
    "deepseek-v2": DEEPSEEK_V2, "deepseek-v3": DEEPSEEK_V3, "gemma4": GEMMA4,
    "falcon-h1": FALCON_H1, "qwen3-next": QWEN3_NEXT,
}  # fmt: skip
SHAPES = {"qwen3": QWEN3, "llama": LLAMA, "gemma3": GEMMA3, "gpt-oss": GPT_OSS, **NEWEST}
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@torch.no_grad()
def logits_of(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the logits of transformers at each token of the answer."""
    ids = torch.tensor([prompt + answer], device="cuda")
    return model(ids).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("family", SHAPES.values(), ids=SHAPES)
def test_logits_are_within_the_noise_of_bfloat16(tmp_path, family):
    """A prompt and then 1, 7, 14, 50 and 100 rows use every kind of product, with split contexts
    and without."""
    oracle = build(family, tmp_path, torch.bfloat16)
    narrow, exact = (
        oracle.model.cuda(),
        build(family, tmp_path, torch.bfloat16).model.cuda().float(),
    )
    traced = Traced(
        oracle.path, backend="cuda", dtype="bfloat16", kv_cache_memory=4 << 30, max_num_seqs=100,
        enable_prefix_caching=False,
    )  # fmt: skip
    for num_rows in (1, 7, 14, 50, 100):
        lengths = [3 + 41 * i % 700 for i in range(num_rows)]
        prompts = prompts_of(lengths, oracle.vocab_size, seed=num_rows)
        answers = traced.generate(prompts, GREEDY)
        for i in range(0, num_rows, max(1, num_rows // 5)):
            prompt, ours = prompts[i]["prompt_token_ids"], traced.logits[traced.request_ids[i]]
            right = logits_of(exact, prompt, answers[i])
            theirs = (logits_of(narrow, prompt, answers[i]) - right).norm() / right.norm()
            error = (torch.stack(ours).float().cuda() - right).norm() / right.norm()
            assert error < 1.5 * theirs + 1e-3, (num_rows, lengths[i], float(error), float(theirs))
    prefill = traced.engine.worker.prefills[0]
    assert prefill.is_recorded and prefill.counts.replays > 0


@pytest.mark.parametrize("family", NEWEST.values(), ids=NEWEST)
def test_replay_equals_eager_to_the_bit(tmp_path, family):
    oracle = build(family, tmp_path, torch.bfloat16)
    traced = Traced(
        oracle.path, backend="cuda", dtype="bfloat16", kv_cache_memory=1 << 28, max_num_seqs=9,
    )  # fmt: skip
    shadow = Shadow(traced.engine)
    traced.generate(prompts_of([300, 5, 700, 1], oracle.vocab_size), GREEDY)
    traced.generate(prompts_of([9] * 9, oracle.vocab_size), GREEDY)
    assert shadow.num_compared >= 2 * NUM_TOKENS
    assert {name: d for name, d in shadow.differences.items() if d} == {}
