"""Tests of request fields: those that reach the engine, and those that are refused by name."""

import json
from typing import Any

import pytest
from fake_engine import (
    CHAT,
    COMPLETION,
    FakeClient,
    ask,
    chat,
    complete,
    refused,
    refused_chat,
    refused_completion,
    stream,
    structure_refusal,
)
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from slotzero.errors import (
    RequestRefusedError,
)
from slotzero.server.protocol import NEUTRAL, ChatRequest, CompletionRequest
from slotzero.text.tokenizer import Tokenizer


def test_parameters_reach_the_engine() -> None:
    client = FakeClient()
    same = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "frequency_penalty": 1.5,
        "presence_penalty": -1, "repetition_penalty": 1.1, "seed": 7, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [1], "skip_special_tokens": False,
        "include_stop_str_in_output": True, "cache_salt": "mine", "priority": -3,
        "prompt_logprobs": 2,
    }  # fmt: skip
    chat(client, **same, max_completion_tokens=9, logit_bias={"5": -100})
    assert client.params == same | {"max_tokens": 9, "logit_bias": {5: -100.0}}
    chat(client, max_tokens=5)
    assert client.params == {"max_tokens": 5}
    ask(client, "/v1/completions", {"model": "tiny", "prompt": [1, 2]})
    assert client.params == {"max_tokens": 16}
    assert client.submitted[-1][1] == [1, 2]


def test_every_field_of_openai_is_known() -> None:
    for theirs, ours in (
        (chat_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_params.CompletionCreateParamsStreaming, CompletionRequest),
    ):
        assert set(theirs.__annotations__) - set(ours.model_fields) == set()
    mine = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert set(NEUTRAL) <= mine


@pytest.mark.parametrize("name", NEUTRAL)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    is_chat = name in ChatRequest.model_fields
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    base = CHAT if is_chat else COMPLETION
    for value in ("odd", 5, True, {"a": 1}, ["x"]):
        assert refused(path, base | {name: value})["param"] == name
    for value in (None, *NEUTRAL[name]):
        assert ask(FakeClient(), path, base | {name: value}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "k"},
        {"response_format": {"type": "text"}, "tool_choice": "none", "logprobs": False},
        {"stream": None, "n": None, "stop": None, "logit_bias": None, "seed": None},
        {"parallel_tool_calls": True, "tools": None, "top_logprobs": None},
    ],
)
def test_fields_without_effect_are_accepted(body: dict[str, Any]) -> None:
    client = FakeClient()
    chat(client, **body)
    assert client.params == {"max_tokens": None}


WRONG_FIELDS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": -5}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.0}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 65, "max_tokens": 64}, "min_tokens"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [str(i) for i in range(100_000)]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"model": 3}, "model"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [str(i) for i in range(100_000)]}, "guided_choice"),
    ({"guided_regex": "a" * 100_001}, "guided_regex"),
    ({"guided_json": {"enum": ["a" * 100_000]}}, "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
    ({"bad_words": ["word", ""]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"request_id": "a b"}, "request_id"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**63}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), WRONG_FIELDS)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    client = FakeClient()
    for error in (refused_chat(client=client, **body), refused_completion(client=client, **body)):
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert client.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "x" * 65}}]},
            "tools[0].function.name",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "often"}, "reasoning_effort"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": [{"role": "user", "content": ""}] * 2049}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(body: dict[str, Any], param: str) -> None:
    assert refused_chat(**body)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
        ({"prompt": [[1, 2], [3, "4"]]}, "prompt[1][1]"),
        ({"prompt": [1.5] * 100_000}, "prompt[0]"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(body: dict[str, Any], param: str) -> None:
    assert refused_completion(**body)["param"] == param


def test_a_field_that_is_missing_is_named() -> None:
    assert refused("/v1/chat/completions", {"model": "tiny"})["param"] == "messages"
    assert refused("/v1/completions", {"model": "tiny"})["param"] == "prompt"


def test_the_model_may_be_left_out() -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        sent = {key: value for key, value in body.items() if key != "model"}
        assert ask(FakeClient(), path, sent).json()["model"] == "tiny"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_of_vllm(path: str) -> None:
    client, base = FakeClient("ab"), CHAT if "chat" in path else COMPLETION
    fields = {"request_id": "mine", "return_token_ids": True, "truncate_prompt_tokens": 3}
    reply = ask(client, path, base | fields).json()
    (_, prompt, _) = client.submitted[-1]
    assert len(prompt) == 3
    (choice,) = reply["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([*b"ab", 257], prompt)
    assert reply["id"].endswith("-mine")
    streamed = stream(client, path, **fields)
    sent = [token for chunk in streamed for token in chunk["choices"][0].get("token_ids", ())]
    assert sent == [*b"ab", 257]


def test_bad_words_are_kept_out() -> None:
    vocabulary = {"a": 0, "b": 1, "\u0120a": 2, "\u0120": 3, "c": 4, "<unk>": 5}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("\u0120", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    client, tokenizer = FakeClient("ab"), Tokenizer(backend, {}, None)
    body = {"prompt": [0], "bad_words": ["a"], "logit_bias": {"4": 1}}
    assert ask(client, "/v1/completions", body, tokenizer=tokenizer).status_code == 200
    assert client.params["logit_bias"] == {4: 1.0, 0: -1e9, 2: -1e9}
    assert "banned_sequences" not in client.params
    body |= {"bad_words": ["a", "ab"]}
    assert ask(client, "/v1/completions", body, tokenizer=tokenizer).status_code == 200
    assert client.params["logit_bias"] == {4: 1.0, 0: -1e9, 2: -1e9}
    assert client.params["banned_sequences"] == [[0, 1], [2, 1]]


def test_a_requests_own_template() -> None:
    client = FakeClient()
    body = CHAT | {"chat_template": "Own: {{ messages[0].content }} {{ documents[0].text }}",
                   "documents": [{"text": "doc"}]}  # fmt: skip
    path = "/v1/chat/completions"
    assert ask(client, path, body, trust_request_chat_template=True).status_code == 200
    assert client.prompt == "Own: Hi doc"
    error = refused("/v1/chat/completions", body)
    assert "--trust-request-chat-template" in error["message"]


def test_documents_that_the_template_would_not_show_are_refused() -> None:
    error = refused_chat(documents=[{"text": "doc"}])
    assert error["param"] == "documents"
    assert "does not show them" in error["message"]


@pytest.mark.parametrize(
    ("asked", "structure"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "strict": True, "schema": {"type": "object"}}}},
            {"json_schema": {"type": "object"}},
        ),
        ({"guided_json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": {"a": 1}}}, {"json_schema": {"a": 1}}),
        ({"structured_outputs": {"json": '{"a": 1}', "regex": None}}, {"json_schema": {"a": 1}}),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ],
)  # fmt: skip
def test_structure_reaches_the_engine(asked: dict[str, Any], structure: dict[str, Any]) -> None:
    client = FakeClient()
    chat(client, **asked)
    assert client.params["structured_outputs"] == structure
    complete(client, **asked)
    assert client.params["structured_outputs"] == structure


def test_an_answer_that_its_grammar_ends_is_complete() -> None:
    client = FakeClient("yes", ends_with_eos=False)  # it ends with "stop", but without a stop token
    made = chat(client, guided_choice=["yes", "no"])
    assert made["choices"][0]["message"]["content"] == "yes"


def test_a_structure_that_is_refused_is_named() -> None:
    refusal = structure_refusal("no such type", "json_schema")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}
    error = refused_chat(client=FakeClient(refusal=refusal), response_format=schema)
    assert error["param"] == "response_format"
    refusal = RequestRefusedError("RequestError", "too hard")
    error = refused_completion(client=FakeClient(refusal=refusal), guided_regex="a")
    assert error["param"] == "guided_regex"


@pytest.mark.parametrize(
    ("asked", "kind", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        ({"guided_json": {}}, "json_schema", "guided_json"),
        ({"guided_regex": "a"}, "regex", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", "guided_choice"),
        ({"structured_outputs": {"json": {}}}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "structured_outputs.regex"),
    ],
)
def test_errors_name_a_structure_as_the_client_does(
    asked: dict[str, Any], kind: str, name: str
) -> None:
    for refusal, shown in (
        (structure_refusal("wrong: regex", kind), f"{name}: wrong: regex"),
        (structure_refusal("no token can begin"), f"{name}: no token can begin"),
    ):
        client = FakeClient(refusal=refusal)
        for error in (
            refused_chat(client=client, **asked),
            refused_completion(client=client, **asked),
        ):
            assert (error["param"], error["message"]) == (name, shown)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens=0: must be at least 1; "),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1; "),
        (
            {"max_completion_tokens": 3, "min_tokens": 5},
            "min_tokens=5: must be at least 0 and at most 3, the limit",
        ),
        ({"guided_choice": []}, "guided_choice=[] is empty; "),
        ({"guided_regex": "a" * 100_001}, "guided_regex: 100001 characters, at most 100000"),
        ({"guided_json": "[1]"}, "guided_json=[1] must be a JSON object"),
        (
            {"guided_regex": "a\ud800"},
            "guided_regex has half a surrogate pair at position 1; send valid Unicode",
        ),
        (
            {"structured_outputs": {"choice": ["a", "\ud800"]}},
            "structured_outputs.choice[1] has half a surrogate pair at position 0; ",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs: give one of json, json_object, regex, choice, grammar, "
            "got json and regex",
        ),
    ],
)
def test_the_text_of_an_error_names_what_was_sent(body: dict[str, Any], message: str) -> None:
    content = json.dumps(CHAT | body).encode()
    response = ask(FakeClient(), "/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)]
)
def test_default_sampling_parameters_are_those_of_the_model(path: str, body: Any) -> None:
    client, own = FakeClient(), {"temperature": 0.6, "top_k": 20}
    reply = ask(client, f"/v1/{path}", body | {"temperature": 0.0}, sampling=own)
    assert reply.status_code == 200
    assert client.params["top_k"] == 20
    assert client.params["temperature"] == 0.0
