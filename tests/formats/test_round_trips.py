"""Tests of every tool format: random calls, written as text and parsed in random pieces."""

from typing import Any

import pytest
from call_texts import as_values, calls_in, is_ambiguous, parsed, pieces_of, tools_for
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.tool_format import NamedCall, TagArguments, ToolFormat
from slotzero.formats.tool_formats import TOOL_FORMAT_NAMES, TOOL_FORMATS
from slotzero.formats.written_calls import WrittenCall, written_calls

FORMS = [pytest.param(form, id=form.name) for form in TOOL_FORMATS]


def is_tagged(form: ToolFormat) -> bool:
    return isinstance(form.call, NamedCall) and isinstance(form.call.arguments, TagArguments)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=16, deadline=None)
@given(data=st.data())
def test_calls_survive_being_written_and_parsed(form: ToolFormat, data: Any) -> None:
    calls = data.draw(calls_in(form))
    assume(not (is_tagged(form) and is_ambiguous(calls)))
    text, answer = written_calls(form, calls), AnswerFormat(calls=form, tools=tools_for(calls))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    found = parsed(answer, pieces_of(text, cuts))
    assert as_values(found.calls) == [(call.name, dict(call.arguments)) for call in calls]
    assert (found.said, found.num_done, found.num_whole) == ("", len(calls), len(calls))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_text_that_breaks_off_invents_nothing(form: ToolFormat, data: Any) -> None:
    calls = data.draw(calls_in(form))
    text, answer = written_calls(form, calls), AnswerFormat(calls=form, tools=tools_for(calls))
    end = data.draw(st.integers(0, len(text)))
    whole, cut = parsed(answer, [text]), parsed(answer, [text[:end]])
    assert parsed(answer, list(text[:end])) == cut
    for i, (name, arguments) in enumerate(cut.calls):
        assert name == whole.calls[i][0]
        assert whole.calls[i][1].startswith(arguments)
        if i < cut.num_whole:
            assert arguments == whole.calls[i][1]
    assert len(cut.calls) - cut.num_done in (0, 1)
    assert cut.said in ("", text[:end]) or cut.calls


TWO = [WrittenCall("f", {"city": "Paris"}), WrittenCall("f", {"city": "Rome"})]


@pytest.mark.parametrize("form", FORMS)
def test_a_single_call_ends_the_answer(form: ToolFormat) -> None:
    answer = AnswerFormat(calls=form, tools=tools_for(TWO), is_single=True)
    for pieces in ([written_calls(form, TWO)], list(written_calls(form, TWO))):
        found = parsed(answer, pieces)
        assert as_values(found.calls) == [("f", {"city": "Paris"})]
        assert (found.said, found.num_whole) == ("", 1)


@pytest.mark.parametrize("form", [form for form in FORMS if form.id not in ("harmony",)])
def test_text_beside_calls_is_kept(form: Any) -> None:
    written = written_calls(form, TWO[:1])
    if form.is_bare:
        written = form.opening + written
    answer = AnswerFormat(calls=form, tools=tools_for(TWO))
    found = parsed(answer, list(f"I look.\n{written}\n"))
    assert (found.said, as_values(found.calls)) == ("I look.", [("f", {"city": "Paris"})])
    other = parsed(answer, list("No call < [ { here: f(x) "))
    assert (other.said, other.calls) == ("No call < [ { here: f(x) ", [])


def test_types_of_tagged_values_follow_from_the_schema() -> None:
    form = TOOL_FORMAT_NAMES["qwen3_coder"]
    schema = {
        "properties": {
            "text": {"type": "string"},
            "flag": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "kind": {"enum": ["a", "3"]},
            "ref": {"$ref": "#/$defs/R"},
            "number": {"type": "number"},
        },
        "$defs": {"R": {"type": "array"}},
    }
    values = {"text": "3", "flag": "True", "maybe": "None", "kind": "3", "ref": "[1]",
              "number": "2", "other": "4"}  # fmt: skip
    text = written_calls(form, [WrittenCall("f", values)])
    found = parsed(AnswerFormat(calls=form, tools={"f": schema}), [text])
    assert as_values(found.calls) == [
        ("f", {"text": "3", "flag": True, "maybe": None, "kind": "3", "ref": [1], "number": 2,
               "other": 4})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', {"a": 1}),
        ("granite", '<|tool_call|> {"name": "f", "arguments": {"a": 1}}', {"a": 1}),
        ("pythonic", '<|python_start|>[f(a=1,)]<|python_end|>', {"a": 1}),
        ("lfm2", "<|tool_call_start|>[f(a=('x', 2), b={'k': True})]<|tool_call_end|>",
         {"a": ["x", 2], "b": {"k": True}}),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
         {"a": 1}),
        ("gemma4", '<|tool_call>call:f{a:"x",b:[true]}<tool_call|>', {"a": "x", "b": [True]}),
        ("harmony", '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.f'
         '<|channel|>commentary json<|message|>{"a": 1}<|call|>', {"a": 1}),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>'
         '{"a": 1}<|tool_call_end|>', {"a": 1}),
    ],
)  # fmt: skip
def test_variants_that_models_write(name: str, text: str, expected: Any) -> None:
    answer = AnswerFormat(calls=TOOL_FORMAT_NAMES[name], tools={"f": None})
    for pieces in ([text], list(text)):
        found = parsed(answer, pieces)
        assert as_values(found.calls) == [("f", expected)]
        assert (found.said, found.num_whole) == ("", 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\nno parameter</function></tool_call>"),
        ("lfm2", "<|tool_call_start|>[f(a=oops)]<|tool_call_end|>"),
        ("pythonic", "[f(a=[1)]"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{]"),
        ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>"),
        ("pythonic", "[f(a=" + "[" * 500),
    ],
)
def test_a_broken_call_is_not_whole(name: str, text: str) -> None:
    found = parsed(AnswerFormat(calls=TOOL_FORMAT_NAMES[name], tools={"f": None}), list(text))
    assert [call for call, _ in found.calls] == ["f"]
    assert found.num_whole == 0
