"""Tests of structured outputs: parameters, grammars on the host, and answers that follow them."""

import functools
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from engines import EOS, PAGE, VOCAB, check_nothing_leaked, drain, greedy, make, prompt_of
from shadow import Shadow
from structures import COLOURS, MAIL, PERSON, SHAPES, TIDY, begun, settled, shaped, tokens_of

from slotzero import LLM, SamplingParams
from slotzero.engine.engine import Engine
from slotzero.engine.output_text import OutputText
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import RequestError
from slotzero.executor.worker import Worker
from slotzero.grammars.grammar import Grammar
from slotzero.grammars.limits import GrammarLimits
from slotzero.grammars.matcher import CompiledGrammar, load_vocabulary
from slotzero.grammars.pool import Grammars
from slotzero.request import RequestStatus
from slotzero.sampling.structured import StructuredOutputs
from slotzero.step import Step
from slotzero.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

pytest.importorskip("llguidance")

# Four letters are fine; then llguidance must expand the million, and gives up. On a busy machine
# that takes longer than the default grammar_timeout.
ENDLESS = {"regex": "(a|b){4}c{1000000}"}
ENDLESS_ERROR = (
    "structured_outputs: regex: the answer cannot continue "
    "(lexer error: too many expressions constructed): use a simpler grammar"
)


def text_of(tokens: Sequence[int]) -> str:
    return Tokenizer.bytes_tokenizer().decode(tokens)


def check_shape(shape: str, text: str) -> None:
    match shape:
        case "schema":
            value = json.loads(text)
            assert list(value) == ["name", "age", "likes"]
            assert re.fullmatch("[A-Z][a-z]{1,8}", value["name"])
            assert type(value["age"]) is int and 0 <= value["age"] <= 130
            assert len(value["likes"]) <= 2 and {*value["likes"]} <= {"tea", "jazz"}
        case "regex":
            assert re.fullmatch(MAIL, text), text
        case "choice":
            assert text in COLOURS
        case "object":
            assert isinstance(json.loads(text), dict)


# ---- parameters ----


def test_a_structure_is_stored_as_text() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for given in (schema, json.dumps(schema), MappingProxyType(schema)):
        asked = StructuredOutputs(json_schema=given)
        assert (asked.kind, json.loads(asked.text)) == ("json_schema", schema)
        assert list(json.loads(asked.text)["properties"]) == ["b", "a"]
        assert StructuredOutputs(json=given) == asked
        assert SamplingParams(structured_outputs={"json": given}).structured_outputs == asked
    assert StructuredOutputs(json_object=True, regex=None).kind == "json_object"
    assert StructuredOutputs(regex="a|b", json_object=False).text == "a|b"
    assert StructuredOutputs(choice=["b", "é"]).text == '["b", "\\u00e9"]'
    asked = SamplingParams(structured_outputs={"regex": "a"}).structured_outputs
    assert asked == StructuredOutputs(regex="a")
    assert SamplingParams(structured_outputs=asked).structured_outputs is asked
    assert SamplingParams().structured_outputs is None


@pytest.mark.parametrize(
    "asked",
    [
        "json",
        5,
        [],
        {},
        {"json": {}, "json_schema": {}},
        {"json": "{"},
        {"grammar": 5},
        {"json_object": False},
        {"json_object": "yes"},
        {"regex": "a", "choice": ["a"]},
        {"regex": 5},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", 5]},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": 7},
        {"json_schema": {"const": float("nan")}},
        {"json_schema": {"const": {1, 2}}},
    ],
    ids=repr,
)
def test_a_bad_structure_is_refused_by_name(asked: Any) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs"):
        SamplingParams(structured_outputs=asked)


def test_the_error_says_what_is_wrong_with_a_structure() -> None:
    for asked, message in (
        ({"choice": []}, "choice=[] is empty; it needs at least one"),
        ({"regex": "a\ud800"}, "regex has half a surrogate pair at position 1; send valid Unicode"),
        (
            {"choice": ["a", "\ud800"]},
            "choice[1] has half a surrogate pair at position 0; send valid",
        ),
        ({"json": "[1]"}, "json='[1]' must be a JSON object"),
        ({"json": {}, "regex": "a"}, "must have exactly one of json_schema, json_object, regex, "),
    ):
        with pytest.raises(RequestError) as raised:
            SamplingParams(structured_outputs=asked)
        assert str(raised.value).startswith(f"structured_outputs: {message}")


def test_a_schema_too_deep_to_serialise_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit() * 50):
        schema = {"items": schema}
    with pytest.raises(RequestError, match=r"^structured_outputs: json_schema="):
        SamplingParams(structured_outputs={"json_schema": schema})


# ---- grammars ----


@functools.cache
def grammars(vocab: int = VOCAB, ends: Sequence[int] = (EOS,)) -> Grammars:
    return Grammars(Tokenizer.bytes_tokenizer, vocab, ends, GrammarLimits())


def begin(regex: str, **how: Any) -> Grammar:
    return begun(grammars(**how), regex=regex)


def after(grammar: Grammar, text: str) -> set[int]:
    assert all(grammar.advance(byte) and settled(grammar) for byte in text.encode())
    return tokens_of(grammar.allowed)


@pytest.mark.parametrize("text", ['start: "a" B?\nB: "b"', 'root ::= "a" b?\nb ::= "b"'])
def test_a_grammar_in_lark_or_ebnf(text: str) -> None:
    grammar = begun(grammars(), grammar=text)
    assert tokens_of(grammar.allowed) == {ord("a")}
    assert after(grammar, "a") == {ord("b"), EOS}


@pytest.mark.parametrize("text", ["start: x", "root ::= x", "no grammar", 'start: "a', ""])
def test_a_grammar_that_is_none_is_refused(text: str) -> None:
    vocabulary = load_vocabulary(Tokenizer.bytes_tokenizer().to_json(), VOCAB, [EOS])
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        CompiledGrammar(vocabulary, "grammar", text)


def test_a_grammar_gives_the_allowed_tokens() -> None:
    grammar = begin("ab?c*")
    assert tokens_of(grammar.allowed) == {ord("a")}
    assert after(grammar, "a") == {ord("b"), ord("c"), EOS}
    assert after(grammar, "b") == {ord("c"), EOS}
    assert grammar.can_go_on()
    assert grammar.can_go_on(banned={EOS})
    assert not grammar.can_go_on(banned={ord("c"), 10**6})


def test_a_grammar_ends_when_only_its_end_is_left() -> None:
    grammar = begin("ab")
    assert after(grammar, "a") == {ord("b")} and grammar.can_go_on()
    assert after(grammar, "b") == {EOS} and not grammar.can_go_on()


def test_a_wrong_token_is_noticed() -> None:
    assert not begin("ab").advance(ord("b"))
    assert not begin("ab").advance(EOS)


def test_a_too_complex_grammar_fails_with_a_reason_unlike_a_wrong_token() -> None:
    for token, failure in ((ord("c"), ENDLESS_ERROR), (ord("a"), "")):
        grammar = begin(ENDLESS["regex"])
        assert after(grammar, "abba") == {ord("c")}
        assert not (grammar.advance(token) and settled(grammar))
        assert grammar.failure == failure


def test_an_answer_that_was_too_complex_does_not_affect_the_next() -> None:
    model = grammars()
    for _ in range(3):
        grammar = begun(model, **ENDLESS)
        assert after(grammar, "abba") == {ord("c")}
        assert grammar.advance(ord("c")) and not settled(grammar)
        assert grammar.failure == ENDLESS_ERROR
        grammar.release()


def compiled(regex: str) -> CompiledGrammar:
    tokenizer = Tokenizer.bytes_tokenizer().to_json()
    return CompiledGrammar(load_vocabulary(tokenizer, VOCAB, [EOS]), "regex", regex)


def test_a_grammar_without_a_next_mask_gives_the_reason() -> None:
    """The token was accepted, but computing the tokens that may follow exceeded the limits."""

    class Overtaxed:
        def consume_tokens(self, tokens: list[int]) -> bool:
            return True

        def compute_bitmask(self) -> bytes:
            return b""

        def get_error(self) -> str:
            return "too much\n<non-verbose/>"

    grammar = compiled("[a-z]+")
    grammar._copy = Overtaxed  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match=r"^too much$"):
        grammar.follow(1, [ord("a")])


def test_an_answer_does_not_fail_because_of_others_with_its_grammar() -> None:
    """Each of these answers is fine alone, but two of them are too much for one lexer."""
    grammar = compiled("|".join(f"{letter}(1|2){{4}}{letter}{{60000}}" for letter in "abc"))
    for number, letter in enumerate("abc", start=1):
        mask = grammar.follow(number, list(f"{letter}1212".encode()))
        assert mask[ord(letter) // 8] == 1 << ord(letter) % 8
    for number, letter in enumerate("abc", start=1):
        mask = grammar.follow(number, [ord(letter)] * 3)
        assert mask[ord(letter) // 8] == 1 << ord(letter) % 8


def test_answers_of_one_grammar_have_separate_positions() -> None:
    model = grammars()
    first, second = (begun(model, regex="ab|cd") for _ in range(2))
    assert after(first, "a") == {ord("b")}
    assert after(second, "c") == {ord("d")}
    assert tokens_of(begun(model, regex="ab|cd").allowed) == {97, 99}
    assert [source.text for source in model._workers].count("ab|cd") == 1


@pytest.mark.parametrize("vocab", [259, 288, 300, 1000])
def test_tokens_that_the_tokenizer_does_not_know_are_never_allowed(vocab: int) -> None:
    grammar = begin(r"(.|\n)*", vocab=vocab)
    assert len(grammar.allowed) == -(-vocab // 32)
    assert max(tokens_of(grammar.allowed)) == EOS
    assert not tokens_of(grammar.allowed) & {256, 258}  # nor are special tokens


def test_a_model_smaller_than_its_tokenizer() -> None:
    assert tokens_of(begin("[a-z]", vocab=100).allowed) == {97, 98, 99}


def test_several_ends_are_all_allowed() -> None:
    assert after(begin("a+", ends=(257, 258)), "a") == {97, 257, 258}


@pytest.mark.parametrize("ends", [(), (5000,)])
def test_a_model_without_an_end(ends: tuple[int, ...]) -> None:
    for vocab in (259, 300):  # the second has a row where the missing end would be
        grammar = begin("aa+", ends=ends, vocab=vocab)
        assert after(grammar, "aa") == {97}
        grammar = begin("aa", ends=ends, vocab=vocab)
        assert after(grammar, "aa") == set() and not grammar.can_go_on()


def test_json_has_limited_white_space() -> None:
    grammar = begun(grammars(), json_object=True)
    assert ord(" ") in after(grammar, "{")
    assert ord(" ") not in after(grammar, " \n" * 20)
    assert after(grammar, '"a": [{}]') and grammar.can_go_on()


def test_choices_are_literal_text() -> None:
    texts = ["green", "greenish", ".*", '"\\/', "né\n", "[a]"]
    for text in texts:
        grammar = begun(grammars(), choice=texts)
        assert tokens_of(grammar.allowed) == {text.encode()[0] for text in texts}
        assert EOS in after(grammar, text)
        assert grammar.can_go_on() == (text == "green")
    many = begun(grammars(), choice=[f"option {i}" for i in range(5000)])
    assert after(many, "option 4999") == {EOS}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "a("}, "regex: unclosed group"),
        ({"regex": "(?=a)b"}, "regex: look-around"),
        ({"regex": "[^\\x00-\\u{10ffff}]"}, "regex: no text can match it"),
        ({"regex": "(a?){500}a{500}"}, "regex: lexer error: too many expressions"),
        ({"json_schema": {"type": "nope"}}, "json_schema: Invalid type: nope"),
        ({"grammar": 'start: %json {"type": "nope"}'}, "grammar: Invalid type: nope"),
        ({"json_schema": {"$ref": "#/nope"}}, "json_schema: Pointer '/nope' does not exist"),
        ({"json_schema": {"uniqueItems": True}}, "json_schema: Unimplemented keys"),
    ],
    ids=repr,
)
def test_an_invalid_grammar_is_refused_in_one_line(asked: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as raised:
        begun(grammars(), **asked)
    assert str(raised.value).startswith("structured_outputs: ")
    assert "\n" not in str(raised.value)


def test_a_refused_grammar_is_refused_again_without_compiling() -> None:
    ours, asked = grammars(), StructuredOutputs(regex="(a")
    assert not settled(ours.begin(asked))
    for _ in range(3):
        with pytest.raises(RequestError, match="structured_outputs: regex"):
            ours.begin(asked)
    assert not ours.is_busy


def test_without_llguidance_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=re.escape("pip install 'slotzero[server]'")):
        grammars.__wrapped__().begin(StructuredOutputs(regex="a"))


# ---- one answer ----


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make(max_num_seqs=8, skip_tokenizer_init=False, grammar_timeout=60.0)


def ask(
    engine: Engine, params: SamplingParams, prompt: Sequence[int] = (104, 105)
) -> RequestHandle:
    text = None
    if engine.tokenizer is not None:
        text = OutputText(engine.tokenizer, params, engine.eos_token_ids)
    answer = engine.add("one", list(prompt), params, text)
    drain(engine)
    return answer


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0, 1.0, 2.0])
def test_an_answer_has_the_shape(engine: Engine, shape: str, temperature: float) -> None:
    for seed in range(3):
        answer = ask(engine, shaped(shape, seed, temperature=temperature))
        assert (answer.finish_reason, answer.request.stop_reason) == ("stop", None)
        check_shape(shape, answer.text)


def test_the_shape_holds_under_every_other_parameter(engine: Engine) -> None:
    for more in (
        {"top_k": 2},
        {"top_p": 0.1},
        {"min_p": 0.9},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": TIDY | {0: 100.0, EOS: 100.0, ord("{"): -100.0}},
        {"logprobs": 3},
        {"detokenize": False},
    ):
        answer = ask(engine, shaped("schema", **more))
        assert answer.finish_reason == "stop"
        check_shape("schema", text_of(answer.token_ids))


def test_an_answer_matches_its_schema_according_to_another_library(engine: Engine) -> None:
    validator = pytest.importorskip("jsonschema_rs").validator_for(PERSON)
    for seed in range(8):
        validator.validate(json.loads(ask(engine, shaped("schema", seed)).text))


def test_the_end_of_the_grammar_ends_the_answer(engine: Engine) -> None:
    """It ends at once, even if end-of-sequence is ignored or still forbidden by min_tokens."""
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        answer = ask(engine, shaped({"regex": "abc"}, **more))
        assert (answer.text, answer.finish_reason) == ("abc", "stop")
        assert answer.token_ids == [97, 98, 99]


def test_where_a_grammar_may_end_the_model_decides(engine: Engine) -> None:
    lengths = set()
    for seed in range(12):
        answer = ask(engine, shaped({"regex": "a*b"}, seed, logit_bias={97: 2.0}))
        assert re.fullmatch("a*b", answer.text)
        lengths.add(len(answer.text))
    assert len(lengths) > 3
    go_on = ask(engine, shaped({"regex": "a+"}, max_tokens=9, logit_bias={EOS: -100.0}))
    assert (go_on.text, go_on.finish_reason) == ("a" * 9, "length")
    for more in ({}, {"ignore_eos": True}):
        at_once = ask(engine, shaped({"regex": "a+"}, logit_bias={EOS: 100.0}, **more))
        assert (at_once.text, at_once.finish_reason) == ("a", "stop")
        assert at_once.token_ids == [97, EOS]
    late = ask(engine, shaped({"regex": "a+"}, logit_bias={EOS: 100.0}, min_tokens=7))
    assert (late.text, late.finish_reason) == ("a" * 7, "stop")


def test_the_last_token_allowed_may_be_the_last_of_the_grammar(engine: Engine) -> None:
    assert ask(engine, shaped({"regex": "abc"}, max_tokens=3)).finish_reason == "stop"
    cut = ask(engine, shaped({"regex": "abc"}, max_tokens=2))
    assert (cut.text, cut.finish_reason) == ("ab", "length")


def test_stops_of_the_request_end_a_structured_answer_too(engine: Engine) -> None:
    by_id = ask(engine, shaped({"regex": "abcd"}, stop_token_ids=[99]))
    assert (by_id.text, by_id.request.stop_reason) == ("ab", 99)
    by_text = ask(engine, shaped({"regex": "abcd"}, stop="bc"))
    assert (by_text.text, by_text.request.stop_reason) == ("a", "bc")


def test_an_answer_that_cannot_begin_is_refused(engine: Engine) -> None:
    for asked, more in (
        ({"regex": ""}, {}),
        ({"choice": [""]}, {}),
        ({"regex": "aa"}, {"stop_token_ids": [97], "min_tokens": 2}),
    ):
        answer = ask(engine, shaped(asked, **more))
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])
        assert "no token can begin such an answer" in answer.failure
        with pytest.raises(RequestError, match="no token can begin such an answer"):
            engine.add("one", [1], shaped(asked, **more))  # now the grammar is compiled
    check_nothing_leaked(engine)


def test_a_banned_stop_id_that_is_the_only_allowed_token_ends_the_answer(engine: Engine) -> None:
    answer = ask(engine, shaped({"regex": "abc"}, stop_token_ids=[99], min_tokens=3))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


def test_broken_logits_end_a_structured_answer_and_no_other(engine: Engine) -> None:
    """A row without a valid distribution yields token 0, which no grammar here allows."""
    bad = engine.add("bad", [1], shaped({"regex": "[a-z]{40}"}))
    good = engine.add("good", [2], greedy(12))
    run, weights = engine.worker.run, engine.worker.tables

    def broken(step: Step) -> Any:
        for row in step.rows:
            if row.request is bad.request and len(bad.token_ids) == 5:
                weights.stage("allowed", row.slot, [0] * 9)
        return run(step)

    engine.worker.run = broken  # type: ignore[method-assign]
    try:
        drain(engine)
    finally:
        del engine.worker.run
    assert (bad.finish_reason, len(bad.token_ids), bad.token_ids[-1]) == ("abort", 6, 0)
    assert bad.failure == ""
    assert (good.finish_reason, len(good.token_ids)) == ("length", 12)


def test_a_grammar_that_becomes_too_complex_ends_its_answer_and_no_other(engine: Engine) -> None:
    bad = engine.add("bad", [1], shaped(ENDLESS))
    good = engine.add("good", [2], greedy(12))
    short = engine.add("short", [2], shaped("regex", max_tokens=4))
    drain(engine)
    assert (bad.finish_reason, len(bad.token_ids), bad.token_ids[-1]) == ("abort", 5, ord("c"))
    assert bad.failure == ENDLESS_ERROR
    for answer, length in ((good, 12), (short, 4)):
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", length)
        assert answer.failure == ""
    check_nothing_leaked(engine)


def test_a_stop_condition_ends_an_answer_before_its_grammar_fails(engine: Engine) -> None:
    for letter, more in (("x", {"stop": "c"}), ("y", {"stop_token_ids": [ord("c")]})):
        answer = ask(engine, shaped({"regex": f"(a|{letter}){{4}}c{{1000000}}"}, **more))
        assert (answer.finish_reason, len(answer.text), answer.failure) == ("stop", 4, "")


def test_a_grammar_that_fails_while_its_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is preempted while the sample that exceeds the limits is in flight."""
    monkeypatch.setattr(Worker, "overlaps", True)
    engine = make(max_num_seqs=8, skip_tokenizer_init=False, grammar_timeout=60.0)
    answer = engine.add("one", [1], shaped(ENDLESS))
    while len(answer.token_ids) < 4 or not answer.request.num_in_flight:
        assert not answer.finished
        engine.step()
    assert engine.schedulers[0].preempt_last() is answer.request
    drain(engine)
    assert (answer.finish_reason, answer.failure) == ("abort", ENDLESS_ERROR)
    check_nothing_leaked(engine)


# ---- neighbours, chunks, preemption, cancelling ----


def mixed_asks(num: int, seed: int = 0) -> list[tuple[str | None, list[int], SamplingParams]]:
    """Return (shape, prompt, parameters); every other request is unstructured, some are greedy."""
    rng = random.Random(seed)
    asks: list[tuple[str | None, list[int], SamplingParams]] = []
    for i in range(num):
        prompt = prompt_of(rng.randint(1, 60), seed=i)
        if i % 2:
            shape = list(SHAPES)[i // 2 % len(SHAPES)]
            asks.append((shape, prompt, shaped(shape, i)))
        else:
            sampled = SamplingParams(temperature=1.0, seed=i, max_tokens=30, top_p=0.9)
            asks.append((None, prompt, greedy(30) if i % 4 else sampled))
    return asks


@pytest.fixture(scope="module")
def alone() -> Mapping[int, list[int]]:
    """Return the answers to `mixed_asks(16)`, each from an engine that runs nothing else."""
    engine = make(max_num_seqs=1, enable_prefix_caching=False)
    return {
        i: list(ask(engine, params, prompt).token_ids)
        for i, (_, prompt, params) in enumerate(mixed_asks(16))
    }


def answers_to(
    engine: Engine, asks: Sequence[tuple[str | None, list[int], SamplingParams]]
) -> list[RequestHandle]:
    answers = [engine.add(f"{i}", prompt, params) for i, (_, prompt, params) in enumerate(asks)]
    drain(engine)
    for (shape, _, _), answer in zip(asks, answers, strict=True):
        if shape is not None:
            assert answer.finish_reason == "stop"
            check_shape(shape, text_of(answer.token_ids))
    return answers


def test_neighbours_are_not_affected(alone: Mapping[int, list[int]]) -> None:
    engine = make(max_num_seqs=8)
    answers = answers_to(engine, mixed_asks(8))
    assert {i: answer.token_ids for i, answer in enumerate(answers)} == {
        i: alone[i] for i in range(8)
    }
    plain = [(None, p, params) for shape, p, params in mixed_asks(8) if shape is None]
    without = answers_to(make(max_num_seqs=8), plain)
    assert [a.token_ids for a in without] == [a.token_ids for a in answers[::2]]


@pytest.mark.parametrize("page_size", [2, 4])
def test_chunks_and_preemption_change_no_answer(
    alone: Mapping[int, list[int]], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars are compiled first and masks never late, or who is preempted depends on the time."""
    monkeypatch.setattr("slotzero.engine.admission.MASK_GRACE", 60.0)
    engine = make(
        max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128, page_size=page_size,
        kv_cache_memory=10 * PAGE,
    )  # fmt: skip
    asks = mixed_asks(16)
    engine.validate_batch([(f"{i}", prompt, params) for i, (_, prompt, params) in enumerate(asks)])
    answers = answers_to(engine, asks)
    assert {i: answer.token_ids for i, answer in enumerate(answers)} == alone
    assert any(a.request.num_preemptions and a.request.grammar is not None for a in answers)


def test_preemption_in_the_middle_of_an_answer_and_of_a_step(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    monkeypatch.setattr("slotzero.engine.admission.MASK_GRACE", 60.0)  # no mask is late
    asks = [(prompt_of(6, seed=i), shaped({"regex": "[a-z]{40}"}, i)) for i in range(4)]
    asks.insert(1, (prompt_of(6), greedy(60)))  # it never waits, and takes pages meanwhile
    alone = make(max_num_seqs=1)
    expected = [list(ask(alone, params, prompt).token_ids) for prompt, params in asks]
    engine = make(
        max_num_seqs=5, max_num_batched_tokens=8, max_model_len=80, page_size=1,
        kv_cache_memory=6 * PAGE,
    )  # fmt: skip
    seen: list[tuple[bool, int]] = []
    preempt = engine.schedulers[0].preempt_last

    def watched() -> Any:
        request = preempt()
        if request.grammar is not None:
            seen.append((bool(request.output_token_ids), request.num_in_flight))
        return request

    engine.schedulers[0].preempt_last = watched  # type: ignore[method-assign]
    engine.validate("compiled", *asks[0])
    answers = [engine.add(f"{i}", *asked) for i, asked in enumerate(asks)]
    drain(engine)
    assert [answer.token_ids for answer in answers] == expected
    assert {(True, 0), (True, int(overlaps))} <= {*seen}


def test_a_sample_in_flight_is_waited_for_by_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    monkeypatch.setattr("slotzero.engine.admission.MASK_GRACE", 60.0)  # no mask is late
    engine = make(max_num_seqs=4)
    ask(engine, shaped({"regex": "[a-z]{30}"}))  # compile the grammar
    asks = {
        "shaped": shaped({"regex": "[a-z]{30}"}), "plain": greedy(40), "long": greedy(40),
    }  # fmt: skip
    for name, params in asks.items():
        engine.add(name, prompt_of(5), params)
    rows: list[set[str]] = []
    run = engine.worker.run

    def watched(step: Step) -> Any:
        for row in step.rows:
            request = row.request
            assert request.grammar is None or request.num_in_flight == 1
        rows.append({row.request.id for row in step.rows})
        return run(step)

    engine.worker.run = watched  # type: ignore[method-assign]
    drain(engine)
    everyone, others = {"shaped", "plain", "long"}, {"plain", "long"}
    assert rows[:4] == ([everyone, others] * 2 if overlaps else [everyone] * 4)
    # one step for each token of the plain requests; with overlap, every other step after that
    assert len(rows) == (50 if overlaps else 40)


def test_a_mask_is_staged_only_for_rows_that_sample() -> None:
    engine = make(max_num_seqs=2, max_num_batched_tokens=8)
    constrained: list[tuple[int, int]] = []
    stage = engine.worker.writers[0].constrained

    def watched(request: Any) -> None:
        constrained.append((request.num_computed, len(request.output_token_ids)))
        stage(request)

    engine.worker.writers[0].constrained = watched  # type: ignore[method-assign]
    answer = engine.add("a", prompt_of(30), shaped({"regex": "abcd"}))
    for _ in range(3):
        engine.step()
        assert not engine.worker.tables["is_masked"].any()
    drain(engine)
    assert answer.token_ids == [*b"abcd"]
    assert constrained == [(30, 0), (31, 1), (32, 2), (33, 3)]


def test_the_prefix_cache_serves_structured_requests(alone: Mapping[int, list[int]]) -> None:
    engine = make(max_num_seqs=2)
    prompt = prompt_of(50)
    first, second = (ask(engine, shaped("schema", 5), prompt) for _ in range(2))
    assert second.request.num_cached >= 48
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("victim", [0, 1])
def test_cancelling_at_any_moment(
    alone: Mapping[int, list[int]], overlaps: bool, victim: int
) -> None:
    engine = make(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=200)
    asks, seen = mixed_asks(16)[1:4], set()
    wanted = {
        (RequestStatus.WAITING, 0),
        (RequestStatus.RUNNING, 0),
        (RequestStatus.RUNNING, int(overlaps)),
    }
    for moment in [*range(24)] * 20:  # once, unless masks come too late for a step in flight
        if moment == 0 and seen >= wanted:
            break
        answers = [engine.add(f"{i}", p, params) for i, (_, p, params) in enumerate(asks)]
        for _ in range(moment):
            engine.step()
        cancelled = answers[victim]
        seen.add((cancelled.request.status, cancelled.request.num_in_flight))
        engine.cancel(f"{victim}")
        engine.check()
        drain(engine)
        for i, answer in enumerate(answers):
            had = len(answer.token_ids) if i == victim else None
            assert answer.token_ids == alone[i + 1][:had]
    assert seen >= wanted


def test_a_slot_forgets_the_grammar_of_its_last_owner(alone: Mapping[int, list[int]]) -> None:
    engine = make(max_num_seqs=1)
    for i in (1, 0, 3, 2, 5, 4):
        _, prompt, params = mixed_asks(16)[i]
        assert ask(engine, params, prompt).token_ids == alone[i]


def test_a_bad_structure_affects_no_other_request(alone: Mapping[int, list[int]]) -> None:
    engine = make(max_num_seqs=8)
    answers, refused = {}, []
    for i, (_, prompt, params) in enumerate(mixed_asks(8)):
        for j, bad in enumerate(({"json_schema": {"type": f"nope {i}"}}, {"regex": "(" + "a" * i})):
            refused.append(engine.add(f"bad {i} {j}", [1, 2], shaped(bad)))
        answers[i] = engine.add(f"{i}", prompt, params)
        engine.step()
    drain(engine)
    for answer in refused:
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])
        assert answer.failure.startswith("structured_outputs: ")
    with pytest.raises(RequestError, match="structured_outputs: regex: unclosed group"):
        engine.add("again", [1, 2], shaped({"regex": "("}))
    assert all(answers[i].token_ids == alone[i] for i in answers)


def test_n_answers_and_streams() -> None:
    llm = LLM("tiny:llama", backend="eager", show_progress=False, max_num_seqs=8)
    params = shaped("regex", n=5)
    output = llm.generate("hello", params, use_tqdm=False)[0]
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) == 5
    streamed = [""] * 5
    for chunk in llm.stream("hello", params):
        streamed[chunk.index] += chunk.text
    assert streamed == texts
    for text in texts:
        check_shape("regex", text)
    with pytest.raises(RequestError, match="prompt 0: structured_outputs: regex: unclosed group"):
        llm.generate("hello", shaped({"regex": "("}), use_tqdm=False)


@pytest.fixture(scope="module")
def llm() -> LLM:
    settings: Any = {"max_num_seqs": 4, "grammar_timeout": 60.0}
    return LLM("tiny:llama", backend="eager", show_progress=False, **settings)


def test_a_grammar_that_fails_does_not_lose_the_batch(llm: LLM) -> None:
    """Its own answers report why they ended; all others, running and waiting, are complete."""
    plain = greedy(40)
    prompts = ["hello", "there", *["more"] * 6]
    alone = {p: llm.generate(p, plain, use_tqdm=False)[0].outputs for p in ("hello", "more")}
    asked = [plain, shaped(ENDLESS, n=2), *[plain] * 6]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        if output.prompt == "there":
            assert [(a.finish_reason, a.error) for a in output.outputs] == [
                ("abort", ENDLESS_ERROR)
            ] * 2
            assert all(re.fullmatch("[ab]{1,4}c?", answer.text) for answer in output.outputs)
        else:
            assert output.outputs == alone[output.prompt]
            assert output.outputs[0].error is None
    check_nothing_leaked(llm.engine)


def test_a_grammar_that_fails_does_not_end_the_stream_of_the_others(llm: LLM) -> None:
    texts, ends = ["", ""], {}
    for chunk in llm.stream(["hello", "there"], [greedy(40), shaped(ENDLESS)]):
        texts[chunk.prompt_index] += chunk.text
        if chunk.finish_reason is not None:
            ends[chunk.prompt_index] = chunk.finish_reason, chunk.error
    assert ends == {0: ("length", None), 1: ("abort", ENDLESS_ERROR)}
    assert re.fullmatch("[ab]{4}c", texts[1])
    assert texts[0] == llm.generate("hello", greedy(40), use_tqdm=False)[0].outputs[0].text
    check_nothing_leaked(llm.engine)


def test_broken_logits_are_not_the_error_of_a_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammar, "advance", lambda *_: False)
    output = llm.generate("hello", shaped("regex"), use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)


# ---- captured graphs ----


def test_replay_equals_eager_with_masks(alone: Mapping[int, list[int]]) -> None:
    engine = make(backend="cpu", max_num_seqs=8, lazy_recording=True)
    shadow = Shadow(engine)
    answers = answers_to(engine, mixed_asks(8))
    assert shadow.num_compared > 20
    assert {name: d for name, d in shadow.differences.items() if d} == {}
    assert {"is_masked", "allowed"} <= shadow.differences.keys()
    assert all(answer.token_ids == alone[i] for i, answer in enumerate(answers))


def test_a_real_tokenizer_and_a_real_model() -> None:
    llm = LLM(backend="eager", show_progress=False, max_num_seqs=4, max_model_len=256)
    prompts = ["A person, as JSON:", "My address is ", "My colour is ", "In short:"]
    shapes = ["schema", "regex", "choice", None]
    params = [shaped(shape, 3, logit_bias={}, max_tokens=60) for shape in shapes if shape]
    plain = SamplingParams(temperature=0, max_tokens=16)
    outputs = llm.generate(prompts, [*params, plain], use_tqdm=False)
    for shape, output in zip(shapes, outputs, strict=True):
        if shape is not None:
            assert output.outputs[0].finish_reason == "stop"
            check_shape(shape, output.outputs[0].text)
    assert outputs[3].outputs == llm.generate(prompts[3], plain, use_tqdm=False)[0].outputs
