"""Tests of tools: calls parsed from text, streamed and forced, and the tools that are refused."""

import json
import re
from typing import Any

import pytest
from call_texts import parsed
from fake_engine import (
    CHAT,
    FakeClient,
    ask,
    chat,
    refused,
    stream,
    structure_refusal,
    tool_tokenizer,
)

from slotzero.formats.answer_parser import AnswerFormat, AnswerParser
from slotzero.formats.events import Argued, Called
from slotzero.formats.tool_format import ToolFormat
from slotzero.formats.tool_formats import HERMES, LLAMA, TOOL_FORMATS
from slotzero.server.settings import TOOL_CALL_PARSERS
from slotzero.server.tool_support import tool_support
from slotzero.text.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
_MESSAGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)
HERMES_TEMPLATE = "{% if tools %}{{ tools | tojson }} use <tool_call>\n{% endif %}" + _MESSAGES
LLAMA_TEMPLATE = "{% if tools %}{{ tools | tojson }} <|python_tag|>\n{% endif %}" + _MESSAGES
ODD_TEMPLATE = "{% if tools %}{{ tools | tojson }} call as [f(x)]\n{% endif %}" + _MESSAGES
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARIS_LLAMA = '{"name": "weather", "parameters": {"city": "Paris"}}'
NOW = '{"name": "time", "arguments": {}}'


def parser(form: ToolFormat) -> AnswerParser:
    return AnswerParser(AnswerFormat(calls=form, tools={"weather": None, "time": None}))


CITY = ("weather", '{"city": "Paris"}')
PARSED = [
    (HERMES, "just text <tool", "just text <tool", []),
    (HERMES, f"<tool_call>\n{PARIS}\n</tool_call>", "", [CITY]),
    (HERMES, f"I look.\n<tool_call>{PARIS}</tool_call>", "I look.", [CITY]),
    (
        HERMES,
        f"<tool_call>{PARIS}</tool_call>\n<tool_call>{NOW}</tool_call>\n",
        "",
        [CITY, ("time", "{}")],
    ),
    (HERMES, f"a <tool_call>{PARIS}</tool_call> b", "ab", [CITY]),
    (HERMES, f"<tool_call>{PARIS}", "", [CITY]),
    (HERMES, f"<tool_call>{PARIS}</tool_", "", [CITY]),
    (HERMES, f"<tool_call>{PARIS[:-6]}", "", [("weather", '{"city": "Pa')]),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    (HERMES, '<tool_call>{"a": 1}</tool_call>x', '<tool_call>{"a": 1}</tool_call>x', []),
    (HERMES, '<tool_call>{"arguments": {"x": "}"}, "name": "f"}', "", [("f", '{"x": "}"}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', "", [("f", "[1]")]),
    (HERMES, '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"id": 3, "name": "time"}</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": 3, "x": {}}', '<tool_call>{"name": 3, "x": {}}', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"q": "a\\"}{[", "b": [{}]}}', "",
     [("f", '{"q": "a\\"}{[", "b": [{}]}')]),
    (HERMES, "  \n text \n", "  \n text \n", []),
    (LLAMA, PARIS_LLAMA, "", [CITY]),
    (LLAMA, f" \n{PARIS_LLAMA}; {PARIS_LLAMA}", "", [CITY, CITY]),
    (LLAMA, f"<|python_tag|>{PARIS_LLAMA}", "", [CITY]),
    (LLAMA, f"Wait.<|python_tag|>{PARIS_LLAMA};", "Wait.", [CITY]),
    (LLAMA, '{"type": "function", "name": "time", "parameters": {}}', "", [("time", "{}")]),
    (LLAMA, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LLAMA, '{"city": "Rome"} is JSON', '{"city": "Rome"} is JSON', []),
    (LLAMA, '{"name": "weather"', '{"name": "weather"', []),
    (LLAMA, "{oh", "{oh", []),
    (LLAMA, "<|python", "<|python", []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA, f"No {PARIS_LLAMA}", f"No {PARIS_LLAMA}", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "said", "calls"), PARSED)
def test_calls_are_parsed_however_they_are_split(
    form: ToolFormat, text: str, said: str, calls: list[tuple[str, str]]
) -> None:
    for step in (1, 2, 3, 7, len(text) or 1):
        pieces = [text[i : i + step] for i in range(0, len(text), step)]
        found = parsed(AnswerFormat(calls=form, tools={"weather": None, "time": None}), pieces)
        assert (found.said, found.calls) == (said, calls)
        assert len(calls) - found.num_done in (0, 1)  # the last call may be cut off


def test_arguments_are_streamed() -> None:
    made = parser(HERMES)
    assert made.push('<tool_call>{"name": "weather", "argu') == []
    called, first = made.push('ments": {"city": "Pa')
    assert isinstance(called, Called)
    assert called.name == "weather"
    assert first == Argued(0, '{"city": "Pa')
    assert made.push("ris") == [Argued(0, "ris")]
    assert made.push('"}}</tool_call>') == [Argued(0, '"}')]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES_TEMPLATE, f"<tool_call>\n{PARIS}\n</tool_call>"),
        (LLAMA_TEMPLATE, PARIS_LLAMA),
        (LLAMA_TEMPLATE, "<|python_tag|>" + PARIS_LLAMA),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 100])
def test_a_tool_call(template: str, text: str, step: int) -> None:
    tokenizer, client = tool_tokenizer(template), FakeClient(text, step=step)
    (choice,) = chat(client, tokenizer, tools=[WEATHER, TIME])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert call == {"type": "function", "function": function}
    assert json.dumps(WEATHER) in client.prompt  # the prompt describes the tool
    assert client.params["skip_special_tokens"] is False


@pytest.mark.parametrize(
    ("template", "text"),
    [(HERMES_TEMPLATE, f"So:<tool_call>{PARIS}</tool_call>"), (LLAMA_TEMPLATE, PARIS_LLAMA)],
)
def test_a_streamed_tool_call(template: str, text: str) -> None:
    made = stream(
        FakeClient(text, step=3, pace=0.005),
        "/v1/chat/completions",
        tools=[WEATHER],
        tokenizer=tool_tokenizer(template),
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in made]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert calls[0]["type"] == "function"
    assert calls[0]["id"].startswith("call_")
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert all(call["index"] == 0 for call in calls)
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"city": "Paris"}
    assert len(calls) > 3
    assert deltas[-1] == {}
    assert made[-1]["choices"][0]["finish_reason"] == "tool_calls"
    content = "".join(delta.get("content", "") for delta in deltas)
    assert content == ("So:" if "So:" in text else "")


def test_text_beside_tools_stays_text() -> None:
    tokenizer = tool_tokenizer(HERMES_TEMPLATE)
    (choice,) = chat(FakeClient("No need. <b>"), tokenizer, tools=[WEATHER])["choices"]
    assert choice["message"]["content"] == "No need. <b>"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_truncated_call_has_finish_reason_length() -> None:
    tokenizer, client = tool_tokenizer(HERMES_TEMPLATE), FakeClient(f"<tool_call>{PARIS}")
    (choice,) = chat(client, tokenizer, tools=[WEATHER], max_tokens=55)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "P'
    forced = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 55}
    (choice,) = chat(client, tokenizer, **forced)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "P'


def test_parallel_tool_calls_can_be_disabled() -> None:
    two = f"<tool_call>{PARIS}</tool_call><tool_call>{NOW}</tool_call>"
    for step in (1, 500):
        client = FakeClient(two, step=step)
        tokenizer = tool_tokenizer(HERMES_TEMPLATE)
        tools = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
        (choice,) = chat(client, tokenizer, **tools)["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
        assert choice["finish_reason"] == "tool_calls"
        assert len(client.closed) == 1
        both = chat(client, tokenizer, tools=[WEATHER, TIME])["choices"][0]["message"]["tool_calls"]
        assert len(both) == 2


def test_a_choice_that_forces_a_call() -> None:
    text = f"<tool_call>\n{PARIS}\n</tool_call>"
    tokenizer, client = tool_tokenizer(HERMES_TEMPLATE), FakeClient(text)
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = chat(client, tokenizer, tools=[WEATHER, TIME], tool_choice=named)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"
    grammar = client.params["structured_outputs"]["grammar"]
    assert "weather" in grammar
    assert "time" not in grammar
    assert '"city": {"type": "string"}' in grammar
    chat(client, tokenizer, tools=[WEATHER, TIME], tool_choice="required")
    assert "time" in client.params["structured_outputs"]["grammar"]


def test_strict_tools_are_enforced() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    client = FakeClient(f"<tool_call>{PARIS}</tool_call>")
    for tool, choice in ((strict, "auto"), (WEATHER, "required"), (WEATHER, "auto")):
        tokenizer = tool_tokenizer(HERMES_TEMPLATE)
        (made,) = chat(client, tokenizer, tools=[tool, TIME], tool_choice=choice)["choices"]
        assert made["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
        is_enforced = tool is strict or choice == "required"
        assert ("structured_outputs" in client.params) == is_enforced


def test_tool_choice_none_keeps_tools_out() -> None:
    client = FakeClient(f"<tool_call>{PARIS}</tool_call>")
    (choice,) = chat(client, tool_tokenizer(HERMES_TEMPLATE), tools=[WEATHER], tool_choice="none")[
        "choices"
    ]
    assert choice["message"]["content"].startswith("<tool_call>")
    assert "weather" not in client.prompt
    chat(client, tools=[WEATHER], tool_choice="none")  # even if the template does not support tools


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "odd"}}},
            "tool_choice",
        ),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tools": [TIME], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_unsupported_tools_are_refused(body: dict[str, Any], param: str) -> None:
    error = refused("/v1/chat/completions", CHAT | body, tokenizer=tool_tokenizer(HERMES_TEMPLATE))
    assert error["param"] == param


def test_a_conversation_with_tools_continues() -> None:
    client = FakeClient("It rains.")
    chat(
        client,
        tool_tokenizer(HERMES_TEMPLATE),
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "yes"},
        ],
    )  # fmt: skip
    assert client.prompt.endswith('assistant: [weather {"city": "Paris"}]tool: yes')


def test_the_call_format_follows_from_the_template() -> None:
    assert tool_support("auto", HERMES_TEMPLATE).form is HERMES
    assert tool_support("auto", LLAMA_TEMPLATE).form is LLAMA
    assert tool_support("llama", HERMES_TEMPLATE).form is LLAMA
    assert tool_support("hermes", ODD_TEMPLATE).form is HERMES
    builtin = tool_support("auto", "{{ messages }}")
    assert (builtin.form, builtin.is_builtin) == (HERMES, True)
    assert tool_support("llama", "{{ messages }}").form is LLAMA
    assert {"auto", "none", *(form.name for form in TOOL_FORMATS)} <= {*TOOL_CALL_PARSERS}


@pytest.mark.parametrize(
    ("setting", "template", "why"),
    [
        ("auto", None, "this model has no chat template"),
        ("hermes", None, "this model has no chat template"),
        ("auto", ODD_TEMPLATE, "serve it with --tool-call-parser hermes, or another"),
        ("none", HERMES_TEMPLATE, "disabled on this server (--tool-call-parser none)"),
        ("none", "{{ messages }}", "disabled on this server (--tool-call-parser none)"),
    ],
)
def test_the_error_says_why_tools_are_refused(setting: str, template: str | None, why: str) -> None:
    plain = Tokenizer.bytes_tokenizer()
    error = refused(
        "/v1/chat/completions",
        CHAT | {"tools": [WEATHER]},
        tokenizer=Tokenizer(plain._backend, plain.special_tokens, template),
        tool_call_parser=setting,
    )
    assert error["param"] == "tools"
    assert why in error["message"]
    whys = ("no chat template", "serve it with", "disabled on")
    assert sum(one in error["message"] for one in whys) == 1


def test_a_tool_whose_schema_is_wrong_is_named() -> None:
    error = refused(
        "/v1/chat/completions",
        CHAT | {"tools": [WEATHER], "tool_choice": "required"},
        FakeClient(refusal=structure_refusal("no such type", "json_schema")),
        tokenizer=tool_tokenizer(HERMES_TEMPLATE),
    )
    assert (error["param"], error["message"]) == ("tools", "tools: no such type")


@pytest.mark.parametrize(
    "way",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_choice": ["a"]},
    ],
)
def test_a_structure_beside_tools_is_an_alternative(way: dict[str, Any]) -> None:
    tokenizer, client = tool_tokenizer(HERMES_TEMPLATE), FakeClient("a")
    chat(client, tokenizer, **way, tools=[WEATHER])
    assert "weather" in client.params["structured_outputs"]["grammar"]
    chat(client, tokenizer, **way, tools=[WEATHER], tool_choice="none")
    assert "grammar" not in client.params["structured_outputs"]
    body = CHAT | way | {"tools": [WEATHER], "tool_choice": "required"}
    reply = ask(client, "/v1/chat/completions", body, tokenizer=tokenizer)
    assert reply.status_code == 400
    assert "not supported while tool_choice forces a call" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"].startswith(next(iter(way)))


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        ({"type": "array"}, ".type"),
        ({"properties": []}, ".properties"),
        ({"properties": {"a": 3}}, ".properties.a"),
        ({"required": "a"}, ".required"),
        ({"properties": {"a": {"x": [[[]]] * 2}}, "required": [1]}, ".required"),
        ({"properties": {"a": {"type": "strin"}}}, ".properties.a.type"),
        ({"properties": {"a": {"type": ["string", 3]}}}, ".properties.a.type"),
        ({"properties": {"a": {"items": {"anyOf": [{}, {"type": "text"}]}}}},
         ".properties.a.items.anyOf[1].type"),
        ({"$defs": {"a": {"oneOf": {}}}}, ".$defs.a.oneOf"),
        ({"additionalProperties": 3}, ".additionalProperties"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"c": {}}}, ".properties.a.$ref"),
        ({"$ref": "#"}, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"],
          "$defs": {"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"allOf": [{"$ref": "#"}]}]}}}, ""),
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_refused(parameters: Any, where: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = refused(
        "/v1/chat/completions", CHAT | {"tools": [tool]}, tokenizer=tool_tokenizer(HERMES_TEMPLATE)
    )
    assert error["param"] == f"tools[0].function.parameters{where}"


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"type": {"const": "strin"}, "$ref": True, "required": False}},
        {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"$ref": "#/$defs/x~1y%20z/anyOf/1"}},
         "$defs": {"x/y z": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x~1y%20z"}]}}},
        {"properties": {"a": {"type": ["string", "null"], "items": [{}, {}]}}},
        {"properties": {"a": {"$ref": "#anchor"}}, "x-any": {"type": 3, "properties": []}},
        {"properties": {"a": {"default": {"type": "strin"}, "enum": [{"$ref": "#/no"}]}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
         "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#/x"}}, "required": ["a"],
         "x": {"type": "object", "required": [[]], "properties": 3, "allOf": 4, "$ref": []}},
    ],
)  # fmt: skip
def test_an_unusual_schema_is_accepted(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = CHAT | {"tools": [tool]}
    reply = ask(
        FakeClient(), "/v1/chat/completions", body, tokenizer=tool_tokenizer(HERMES_TEMPLATE)
    )
    assert reply.status_code == 200, reply.text


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    error = refused(
        "/v1/chat/completions", CHAT | {"tools": [tool]}, tokenizer=tool_tokenizer(HERMES_TEMPLATE)
    )
    assert "nested over 64 deep" in error["message"]


def test_tools_are_shown_to_a_model_whose_template_has_none() -> None:
    client = FakeClient(f"<tool_call>\n{PARIS}\n</tool_call>")
    client.info = {**client.info, "limits": {"max_model_len": 2048}}
    (choice,) = chat(client, tools=[WEATHER])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert client.prompt.startswith("<bos>system: You can call these functions.")
    assert json.dumps(WEATHER["function"]) in client.prompt
    first = client.prompt.removesuffix("assistant: ")
    call = choice["message"]["tool_calls"][0]
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    chat(client, tools=[WEATHER], messages=messages)
    assert client.prompt == (
        f"{first}assistant: <tool_call>\n{PARIS}\n</tool_call><eos>"
        "user: <tool_response>\nrain\n</tool_response><eos>assistant: "
    )
