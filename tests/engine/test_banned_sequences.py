"""Tests of banned sequences: the last token of one is not chosen after the others."""

from collections.abc import Sequence

import pytest
from engines import EOS, PAGE, answer_all, answer_alone, greedy, make, prompt_of

from slotzero.engine.engine import Engine
from slotzero.errors import RequestError
from slotzero.sampling.params import MAX_BANNED_SEQUENCES

pytestmark = pytest.mark.slow

NEVER = -1e9
NUM_TOKENS = 48


def bans_of(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """Return sequences of one to four tokens that the answer without bans contains."""
    free = answer_alone(engine, prompt, greedy(NUM_TOKENS))
    return [free[2:4], free[9:13], [free[6]], free[15:18]]


def has(tokens: Sequence[int], sequence: Sequence[int]) -> bool:
    size = len(sequence)
    return any(tokens[i : i + size] == sequence for i in range(len(tokens) - size + 1))


def one_by_one(engine: Engine, prompt: list[int], banned: list[list[int]]) -> list[int]:
    """Return the greedy answer, asking for each token anew with a bias against what is banned."""
    made: list[int] = []
    for _ in range(NUM_TOKENS):
        ended = [s for s in banned if made[len(made) - len(s) + 1 :] == s[:-1]]
        bias = {sequence[-1]: NEVER for sequence in ended if len(sequence) <= len(made) + 1}
        asked = greedy(1, logit_bias=bias)
        made += answer_alone(engine, prompt + made, asked)
    return made


def test_a_banned_sequence_never_appears(overlaps: bool) -> None:
    """Neither alone nor beside other requests, nor after a preemption."""
    engine = make(max_num_seqs=4)
    prompts = [prompt_of(5, seed) for seed in range(4)]
    bans = [bans_of(engine, prompt) for prompt in prompts]
    expected = [
        one_by_one(engine, prompt, banned) for prompt, banned in zip(prompts, bans, strict=True)
    ]
    asks = [
        (prompt, greedy(NUM_TOKENS, banned_sequences=banned))
        for prompt, banned in zip(prompts, bans, strict=True)
    ]
    free = (prompt_of(9), greedy(NUM_TOKENS))
    alone = answer_alone(engine, *free)
    for num_pages in (40, 6):
        other = make(max_num_seqs=5, max_model_len=80, kv_cache_memory=num_pages * PAGE)
        *answers, beside = answer_all(other, [*asks, free])
        assert (other.schedulers.num_preemptions > 0) == (num_pages == 6)
        assert [answer.token_ids for answer in answers] == expected
        assert beside.token_ids == alone
        assert not any(has(a.token_ids, s) for a, b in zip(answers, bans, strict=True) for s in b)


def test_drafts_are_not_verified_for_such_a_request() -> None:
    engine = make(speculative="ngram")
    plain = make()
    prompt = [1, 2, 3, 4] * 8
    banned = bans_of(plain, prompt)
    asked = greedy(NUM_TOKENS, banned_sequences=banned)
    assert answer_alone(engine, prompt, asked) == answer_alone(plain, prompt, asked)


def test_a_grammar_and_banned_sequences_are_both_kept() -> None:
    pytest.importorskip("llguidance")
    engine = make(skip_tokenizer_init=False)
    prompt, a, b = prompt_of(5), ord("a"), ord("b")
    asked = greedy(
        40, structured_outputs={"regex": "[ab]{12}"}, banned_sequences=[[a, a], [b, b, b], [b, a]]
    )
    (answer,) = answer_all(engine, [(prompt, asked)])
    text = bytes(answer.token_ids).decode()
    assert text in ("abb"[: len(text)], "bb"[: len(text)])
    # after "bb" nothing is left, so the answer ends there, as at the end of a grammar
    assert text.endswith("bb")
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "sequences", [[[]], [["a"]], [5], 5, "ab", [[1]] * (MAX_BANNED_SEQUENCES + 1), [[True]]]
)
def test_what_is_no_sequence_of_tokens_is_refused(sequences: object) -> None:
    with pytest.raises(RequestError) as error:
        greedy(banned_sequences=sequences)
    assert error.value.param == "banned_sequences"


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    engine = make()
    for token in (-1, 10**6):
        with pytest.raises(RequestError) as error:
            engine.add("a", prompt_of(5), greedy(banned_sequences=[[EOS, token]]))
        assert error.value.param == "banned_sequences"
