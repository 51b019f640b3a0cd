"""Tests of tool calls in text: the result is the same for every way to split the text."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.tool_format import NamedCall, ToolFormat
from slotzero.formats.tool_formats import HERMES, LLAMA, TOOL_FORMATS
from slotzero.sampling.params import SamplingParams
from slotzero.server.answer_plan import AnswerPlan
from slotzero.server.answers import AnswerBuilder, GenerationRequest, TextDelta
from slotzero.server.chat import ChatWriter
from slotzero.server.protocol import ChatRequest
from slotzero.server.replies import ChatChunk
from slotzero.text.tokenizer import Tokenizer

FORMS = TOOL_FORMATS
CITY_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = {"weather": CITY_SCHEMA, "time": None}
REQUEST = GenerationRequest(0, [], SamplingParams(), {})
TOKENIZER = Tokenizer.bytes_tokenizer()
PARIS = '{"name": "weather", "parameters": {"city": "Paris"}}'


def plan(form: ToolFormat, is_single: bool = False) -> AnswerPlan:
    written = AnswerFormat(calls=form, tools=TOOLS, is_single=is_single)
    return AnswerPlan([REQUEST], written, "", has_reasoning=False)


def writer(of: AnswerPlan, is_stream: bool) -> ChatWriter:
    messages = [{"role": "user", "content": "Hi"}]
    body = ChatRequest.model_validate({"model": "m", "messages": messages, "stream": is_stream})
    return ChatWriter(body, TOKENIZER, of, "m")


def pieces(texts: list[str], reason: str) -> list[TextDelta]:
    """Return the deltas of these texts; the last one ends the answer."""
    reasons = [None] * (len(texts) - 1) + [reason]
    return [TextDelta(0, text, [], why, 0) for text, why in zip(texts, reasons, strict=True)]


Result = tuple[str, list[tuple[str, str]], str]  # content, calls with their arguments, reason


def whole(of: AnswerPlan, texts: list[str], reason: str) -> Result:
    made = writer(of, is_stream=False)
    for piece in pieces(texts, reason):
        made.add(piece)
        if made.is_enough(0):
            break
    run: Any = SimpleNamespace(answers=[AnswerBuilder(REQUEST, TOKENIZER, ())])
    choice = made.whole(run).choices[0]
    calls = choice.message.tool_calls or []
    called = [(call.function.name or "", call.function.arguments or "") for call in calls]
    return choice.message.content or "", called, choice.finish_reason


def streamed(of: AnswerPlan, texts: list[str], reason: str) -> Result:
    made, content, calls = writer(of, is_stream=True), "", []
    run: Any = SimpleNamespace(answers=[AnswerBuilder(REQUEST, TOKENIZER, ())])
    for piece in pieces(texts, reason):
        for data in made.chunks(piece, run):
            chunk = ChatChunk.model_validate_json(data.removeprefix(b"data: "))
            (choice,) = chunk.choices
            assert choice.finish_reason is None or not choice.delta.model_dump(exclude_unset=True)
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name is not None:
                    assert call.index == len(calls)
                    calls.append((call.function.name, ""))
                name, arguments = calls[call.index or 0]
                calls[-1] = (name, arguments + (call.function.arguments or ""))
        if made.is_enough(0):
            break
    return content, calls, choice.finish_reason or ""


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


KEYS = st.sampled_from(['"name"', '"arguments"', '"parameters"', '"type"', '"id"', '"x"', "name"])
VALUES = st.sampled_from(
    [
        '"weather"', '"time"', '"odd"', "3", "null", "{}", '{"city": "Paris"}',
        '{"a": {"b": [{}]}}', '{"q": "a\\"}{[]"}', '{"a": ]}', '{"a": 1', "[1]", '"{\\"a\\": 1}"',
        '"no json"', "tru", '{"a": "\n"}', '"</tool_call>"', '"<|python_tag|>{"',
    ]
)  # fmt: skip
FIELDS = st.builds("{}: {}".format, KEYS, VALUES)
CALLED = ['"name": "weather"', '"arguments": {"city": "Paris"}', '"parameters": {"a": 1}']
OBJECTS = st.lists(st.one_of(FIELDS, st.sampled_from(CALLED)), max_size=4).map(
    lambda fields: "{" + ", ".join(fields) + "}"
)
OTHERS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "<tool_", "</", "<|py", "{", "}", "]", '"',
     "\\", ";", " ", "\n", "text", PARIS]
)  # fmt: skip


def markers(form: ToolFormat) -> list[str]:
    """Return the parts of a format's calls, to be put together at random."""
    call = form.call
    found = [form.opening, form.closing, form.separator, "[", "]", "weather", "city", "time(", ")"]
    if isinstance(call, NamedCall):
        found += [call.opening, call.opening + "weather" + call.after_name, call.closing]
        found += [str(value) for value in vars(call.arguments).values()]
    return [text for text in found if text]


@st.composite
def cut_texts(draw: st.DrawFn, form: ToolFormat) -> list[str]:
    parts = st.one_of(OBJECTS, OTHERS, st.sampled_from(markers(form)))
    text = "".join(draw(st.lists(parts, max_size=8)))
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=6))
    return [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(FORMS).flatmap(lambda form: st.tuples(st.just(form), cut_texts(form))),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
@example((LLAMA, [PARIS[:-1], ', "x": 1}']), False, "stop")
@example((LLAMA, [PARIS[:-6], 'is"}, "x": 1}']), False, "stop")
@example((HERMES, [f"<tool_call>{PARIS}</tool_call>", " and text"]), True, "stop")
def test_the_result_does_not_depend_on_the_split(
    written: tuple[ToolFormat, list[str]], is_single: bool, reason: str
) -> None:
    form, cut = written
    text, of = "".join(cut), plan(form, is_single)
    expected = whole(of, [text], reason)
    for texts in (cut, list(text) or [""]):
        assert whole(of, texts, reason) == expected
        assert streamed(of, texts, reason) == expected
    content, calls, finish_reason = expected
    if finish_reason == "tool_calls":
        assert calls
        assert all(is_json(arguments) for _, arguments in calls)
    else:
        assert finish_reason == reason or is_single
    if not calls and form.name != "harmony":  # its headers are not text
        assert content == text  # nothing is lost
    assert not is_single or len(calls) <= 1


CITY = ("weather", '{"city": "Paris"}')
CUT_OFF = ("weather", '{"city": "Pa')
EXAMPLES: list[tuple[ToolFormat, str, str, Result]] = [
    # an unknown key, before and after the point at which the text is recognised as a call
    (LLAMA, PARIS[:-1] + ', "x": 1}', "stop", ("", [CITY], "tool_calls")),
    (LLAMA, PARIS[:-1] + ', "name": 3}', "stop", ("", [CITY], "tool_calls")),
    (LLAMA, '{"x": 1, ' + PARIS[1:], "stop", ('{"x": 1, ' + PARIS[1:], [], "stop")),
    (HERMES, '<tool_call>{"x": 1, ' + PARIS[1:], "stop", ("", [CITY], "tool_calls")),
    # cut off: by the limit, by the end of the sequence, and before it is recognised as a call
    (LLAMA, PARIS[:-6], "length", ("", [CUT_OFF], "length")),
    (LLAMA, PARIS[:-6], "stop", ("", [CUT_OFF], "stop")),
    (HERMES, f"<tool_call>{PARIS}<tool_call>{PARIS[:-6]}", "stop", ("", [CITY, CUT_OFF], "stop")),
    (LLAMA, PARIS[:20], "length", (PARIS[:20], [], "length")),
    (LLAMA, PARIS[:-1], "length", ("", [CITY], "length")),
    # garbage
    (LLAMA, PARIS + " done", "stop", ("done", [CITY], "tool_calls")),
    (HERMES, f"<tool_call>{PARIS}}}</tool_call>", "stop", ("}</tool_call>", [CITY], "tool_calls")),
    (LLAMA, PARIS.replace('"Paris"', "]"), "stop", ("}", [("weather", '{"city": ]')], "stop")),
    (LLAMA, '{"name": "time"]', "stop", ('{"name": "time"]', [], "stop")),
    (HERMES, '<tool_call>{"name": "f", "arguments": "a"}', "stop", ("", [("f", "a")], "stop")),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "reason", "expected"), EXAMPLES)
def test_results_of_odd_calls(form: ToolFormat, text: str, reason: str, expected: Result) -> None:
    for step in (1, 3, len(text)):
        texts = [text[i : i + step] for i in range(0, len(text), step)]
        assert whole(plan(form), texts, reason) == expected
        assert streamed(plan(form), texts, reason) == expected


def test_a_name_nested_too_deep_is_text() -> None:
    text = '{"name": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert whole(plan(LLAMA), [text], "stop") == (text, [], "stop")
