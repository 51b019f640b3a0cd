"""Replay against eager on the same padded buffers, on the CPU backend."""

from shadow import Shadow
from traced import GREEDY, Traced, prompts_of

# Inductor fuses norm, rope and activation, and sums a norm in another order than eager torch does;
# everything that is no floating-point arithmetic of a layer must be equal to the bit.
ARITHMETIC = {"kv_full": 1e-5, "logits": 1e-4, "logprobs": 1e-5, "top_logprobs": 1e-5}


def test_replay_equals_eager_on_the_same_padded_buffers(oracles):
    oracle = oracles("qwen3")
    traced = Traced(oracle.path, backend="cpu", max_num_seqs=5)
    shadow = Shadow(traced.engine)
    tokens = traced.generate(prompts_of([5, 30, 17], oracle.vocab_size))  # 3 rows in size 4
    assert shadow.num_compared >= 63
    for name, difference in shadow.differences.items():
        assert difference <= ARITHMETIC.get(name, 0), name
    assert {"tokens", "length", "page_table", "sampled"} <= shadow.differences.keys()
    expected = [oracle.generate(p["prompt_token_ids"])[0] for p in prompts_of([5, 30, 17], 1013)]
    assert tokens == expected


def test_lazy_recording_records_what_is_used_and_eager_start_records_all(oracles):
    oracle = oracles("llama")
    traced = Traced(oracle.path, backend="cpu", max_num_seqs=9)
    traced.generate(prompts_of([4], oracle.vocab_size), GREEDY)
    assert [key.rows for key in traced.engine.worker.decode.records] == [1]
