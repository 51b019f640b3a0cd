"""Tests of grammars of answers: in every format, they allow calls of the tools and no others."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from call_texts import as_values, parsed

from slotzero.errors import RequestError
from slotzero.formats.answer_grammar import AnswerRules, answer_grammar
from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.reasoning import HARMONY as HARMONY_REASONING
from slotzero.formats.reasoning import THINK, ReasoningStart
from slotzero.formats.tool_format import LiteralArguments, NamedCall, TagArguments, ToolFormat
from slotzero.formats.tool_formats import HERMES, TOOL_FORMAT_NAMES, TOOL_FORMATS
from slotzero.formats.written_calls import WrittenCall, written_calls
from slotzero.grammars.matcher import CompiledGrammar, GrammarVocabulary, load_vocabulary
from slotzero.sampling.structured import StructuredOutputs
from slotzero.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
EOS = 257
NUMBERS = itertools.count()
FORMS = [pytest.param(form, id=form.name) for form in TOOL_FORMATS]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "deep": {"$ref": "#/$defs/Deep"},
        "sure": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Deep": {"type": "object", "properties": {"a": {"type": "array"}}}},
}
TOOLS: dict[str, Any] = {"weather": WEATHER, "time": None}
GOOD = [
    WrittenCall("weather", {"city": "Paris <b>", "days": 3, "unit": "C"}),
    WrittenCall("time", {}),
    WrittenCall("weather", {"city": "", "deep": {"a": [1]}, "sure": True}),
]
BAD = [
    WrittenCall("weather", {"city": "Paris", "days": 10}),
    WrittenCall("weather", {"city": "Paris", "days": "soon"}),
    WrittenCall("weather", {"city": "Paris", "unit": "K"}),
    WrittenCall("weather", {"days": 3}),
    WrittenCall("weather", {"city": "Paris", "other": 1}),
    WrittenCall("other", {}),
]


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return load_vocabulary(Tokenizer.bytes_tokenizer().to_json(), 259, (EOS,))


def pieces(text: str) -> list[str | int]:
    return Tokenizer.bytes_tokenizer().special_pieces(text)


def compiled(
    vocabulary: GrammarVocabulary, form: AnswerFormat, rules: AnswerRules
) -> CompiledGrammar:
    return CompiledGrammar(vocabulary, "grammar", answer_grammar(form, rules, pieces))


def allows(grammar: CompiledGrammar, tokens: str | list[int]) -> bool:
    mask, number = grammar.first_mask, next(NUMBERS)
    for token in tokens.encode() if isinstance(tokens, str) else tokens:
        if not mask[token // 8] >> token % 8 & 1:
            return False
        mask = grammar.follow(number, [token])
    return bool(mask[EOS // 8] >> EOS % 8 & 1)


def text_of(form: ToolFormat, calls: list[WrittenCall]) -> str:
    """Return calls as the grammar writes them: JSON inside Python and Gemma's own values."""
    syntax = form.call.arguments if isinstance(form.call, NamedCall) else None
    text = written_calls(form, calls)
    if isinstance(syntax, LiteralArguments):
        text = text.replace("'", '"') if syntax.is_python else text.replace("{a:", '{"a":')
    return text


@pytest.mark.parametrize("form", FORMS)
def test_forced_calls_are_enforced(vocabulary: GrammarVocabulary, form: ToolFormat) -> None:
    answer = AnswerFormat(calls=form, tools=TOOLS)
    grammar = compiled(vocabulary, answer, AnswerRules(TOOLS, is_forced=True))
    for calls in ([GOOD[0]], GOOD):
        text = text_of(form, calls)
        assert allows(grammar, text), text
        expected = [(call.name, dict(call.arguments)) for call in calls]
        assert as_values(parsed(answer, [text]).calls) == expected
    for call in BAD:
        assert not allows(grammar, text_of(form, [call])), call
    assert not allows(grammar, "Hello")
    single = compiled(vocabulary, replace(answer, is_single=True), AnswerRules(TOOLS, True))
    assert allows(single, text_of(form, GOOD[:1]))
    assert not allows(single, text_of(form, GOOD))


@pytest.mark.parametrize("form", FORMS)
def test_strict_tools_are_enforced_within_text(
    vocabulary: GrammarVocabulary, form: ToolFormat
) -> None:
    answer = AnswerFormat(calls=form, tools=TOOLS)
    grammar = compiled(vocabulary, answer, AnswerRules(TOOLS, is_forced=False))
    before = "" if form.is_bare else "I look.\n"
    assert allows(grammar, "Just text, with <b> and 1 < 2.")
    assert allows(grammar, before + text_of(form, GOOD))
    for call in BAD[:2]:
        assert not allows(grammar, before + text_of(form, [call]))
    free = compiled(vocabulary, answer, AnswerRules({"weather": None}, is_forced=False))
    assert allows(free, before + text_of(form, [WrittenCall("weather", {"odd": 1})]))


@pytest.mark.parametrize("name", ["hermes", "glm45", "pythonic"])
def test_schemas_may_refer_to_themselves(vocabulary: GrammarVocabulary, name: str) -> None:
    tree = {"type": "array", "items": {"$ref": "#/$defs/Tree"}}
    whole = {
        "properties": {
            "a": {"$ref": "#"},
            "b": {"type": "null"},
            "c": {"$ref": "#/$defs/Tree"},
            "d": {"$ref": "#/properties/b"},
        },
        "additionalProperties": False,
        "$defs": {"Tree": tree},
    }
    form, tools = TOOL_FORMAT_NAMES[name], {"grow": whole}
    answer = AnswerFormat(calls=form, tools=tools)
    grammar = compiled(vocabulary, answer, AnswerRules(tools, is_forced=True))
    assert allows(
        grammar, text_of(form, [WrittenCall("grow", {"a": {"a": {}}, "c": [[]], "d": None})])
    )
    for bad in ({"a": {"a": 1}}, {"a": {"x": {}}}, {"c": [1]}, {"d": 1}):
        assert not allows(grammar, text_of(form, [WrittenCall("grow", bad)]))


def test_strings_without_quotes_follow_their_schema(vocabulary: GrammarVocabulary) -> None:
    form = TOOL_FORMAT_NAMES["minimax_m2"]
    assert isinstance(form.call, NamedCall)
    assert isinstance(form.call.arguments, TagArguments)
    for schema, good, bad in (
        ({"type": "string", "pattern": "^[a-z]+/x$"}, "ab/x", "AB/x"),
        ({"type": "string", "pattern": "b+"}, "abc", "ac"),
        ({"type": "string", "maxLength": 3}, "abc", "abcd"),
        ({"type": "string", "minLength": 2}, "ab", "a"),
        ({"const": "x"}, "x", "y"),
        ({"type": ["string", "null"], "enum": ["a", None]}, None, "b"),
    ):
        tools = {"f": {"properties": {"p": schema}, "required": ["p"]}}
        answer = AnswerFormat(calls=form, tools=tools)
        grammar = compiled(vocabulary, answer, AnswerRules(tools, is_forced=True))
        assert allows(grammar, written_calls(form, [WrittenCall("f", {"p": good})]))
        assert not allows(grammar, written_calls(form, [WrittenCall("f", {"p": bad})]))


STRUCTURES: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": {"type": "integer"}}, "3", '"x"'),
    ({"json_object": True}, "{}", "[]"),
    ({"regex": "a/b+"}, "a/bb", "ab"),
    ({"choice": ["yes", "no"]}, "no", "maybe"),
    ({"grammar": 'start: "a"+ r0\nr0: "b"'}, "aab", "ba"),
]


@pytest.mark.parametrize(("structure", "good", "bad"), STRUCTURES)
def test_a_structure_begins_after_the_reasoning(
    vocabulary: GrammarVocabulary, structure: dict[str, Any], good: str, bad: str
) -> None:
    rules = AnswerRules({}, is_forced=False, structure=StructuredOutputs(**structure))
    within = AnswerFormat(reasoning=THINK, start=ReasoningStart.WITHIN)
    before = replace(within, start=ReasoningStart.BEFORE)
    thought = "It is {3}.\n</think>\n\n"
    grammar = compiled(vocabulary, within, rules)
    assert allows(grammar, thought + good)
    assert not allows(grammar, thought + bad)
    assert not allows(grammar, good)  # reasoning that does not end
    grammar = compiled(vocabulary, before, rules)
    assert allows(grammar, good)
    assert allows(grammar, "<think>" + thought + good)
    assert not allows(grammar, bad)
    beside = replace(within, calls=HERMES, tools=TOOLS)
    grammar = compiled(vocabulary, beside, replace(rules, tools={"time": None}))
    assert allows(grammar, thought + good)
    assert allows(grammar, thought + written_calls(HERMES, GOOD[1:2]))
    assert not allows(grammar, thought + bad)


def test_an_ebnf_grammar_cannot_be_joined() -> None:
    rules = AnswerRules({}, False, StructuredOutputs(grammar='root ::= "a"'))
    with pytest.raises(RequestError, match="only Lark can follow reasoning"):
        answer_grammar(AnswerFormat(reasoning=THINK, start=ReasoningStart.WITHIN), rules, pieces)


def test_markers_that_are_special_tokens_are_written_as_such(
    vocabulary: GrammarVocabulary,
) -> None:
    """<pad> stands for a model's own special tokens."""
    form = replace(HERMES, opening="<pad>\n", closing="\n<pad>")
    answer = AnswerFormat(calls=form, tools=TOOLS)
    grammar = compiled(vocabulary, answer, AnswerRules(TOOLS, is_forced=True))
    assert not allows(grammar, written_calls(form, GOOD[:1]))
    inner = written_calls(replace(form, opening="\n", closing="\n"), GOOD[:1])
    assert allows(grammar, [258, *inner.encode(), 258])
    free = compiled(vocabulary, answer, AnswerRules(TOOLS, is_forced=False))
    assert allows(free, [*b"Well. ", 258, *inner.encode(), 258, *b" Done."])
    assert not allows(free, [*b"Well. ", 258, *b"oops"])


def test_harmony_has_its_own_channels(vocabulary: GrammarVocabulary) -> None:
    form = TOOL_FORMAT_NAMES["harmony"]
    answer = AnswerFormat(
        reasoning=HARMONY_REASONING, start=ReasoningStart.BEFORE, calls=form, tools=TOOLS
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    free = compiled(vocabulary, answer, AnswerRules(TOOLS, is_forced=False))
    for good in (thought + final + "Hi", final + "Hi", thought + written_calls(form, GOOD[:1])):
        assert allows(free, good)
    three = StructuredOutputs(json_schema={"type": "integer"})
    rules = AnswerRules({}, is_forced=False, structure=three)
    grammar = compiled(vocabulary, replace(answer, calls=None), rules)
    assert allows(grammar, thought + final + "3")
    assert not allows(grammar, thought + final + "x")


def enforced(name: str, given: dict[str, Any]) -> str:
    """Return the grammar of forced calls of a tool with one parameter."""
    form = TOOL_FORMAT_NAMES[name]
    schema = {"type": "object", "properties": {"a": given}, "required": ["a"], "$defs": DEFINED}
    answer = AnswerFormat(None, ReasoningStart.AFTER, form, {"f": schema}, False)
    rules = AnswerRules({"f": schema}, is_forced=True, structure=None)
    return answer_grammar(answer, rules, pieces)


DEFINED = {
    "Unused": {"description": "x" * 500},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 30},
    "Last": {"anyOf": [{"const": "z"}, {"enum": ["y", None]}]},
    **{
        f"Deep{depth}": {"oneOf": [{"$ref": f"#/$defs/{inner}"}] * 30}
        for depth, inner in enumerate(["Last", *(f"Deep{depth}" for depth in range(6))])
    },
}


@pytest.mark.parametrize(
    ("name", "rule"), [("qwen3_coder", r": /(.|\n)*/"), ("pythonic", '"#/$defs/Loop"')]
)
def test_schemas_that_refer_to_themselves_many_times_take_no_time(name: str, rule: str) -> None:
    assert rule in enforced(name, {"$ref": "#/$defs/Loop"})


def test_values_that_are_reached_in_many_ways_are_listed_once() -> None:
    assert '("z" | "y" | "null")' in enforced("qwen3_coder", {"$ref": "#/$defs/Deep6"})
    assert '("z" | "y" | "null")' not in enforced("qwen3_coder", {"anyOf": [True]})


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
def test_definitions_are_only_where_they_are_used(name: str) -> None:
    assert "xxx" not in enforced(name, {"type": "integer"})


def test_a_grammar_that_is_too_long_is_refused() -> None:
    given = {"anyOf": [{"type": "integer"}], "description": "x" * 100_000}
    with pytest.raises(RequestError, match="more than 100000 characters"):
        enforced("hermes", given)


def test_listed_values_may_be_null_too() -> None:
    given = {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]}
    text = enforced("qwen3_coder", given)
    assert '"a" | "b" | "null"' in text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "beside a length"),
        ({"type": "string", "pattern": "^cat|dog$"}, "alternatives"),
    ],
)
def test_patterns_that_would_lose_a_part_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        enforced("qwen3_coder", given)


@pytest.mark.parametrize(
    ("pattern", "inner"), [(r"^US\$", r"/(US\$)(.|\n)*/"), (r"^\d+(kg|lb)$", r"/(\d+(kg|lb))/")]
)
def test_anchors_of_patterns(pattern: str, inner: str) -> None:
    assert inner in enforced("qwen3_coder", {"type": "string", "pattern": pattern})
