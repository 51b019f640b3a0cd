"""Tests of requests that clients other than OpenAI's send, and of the replies they read."""

from typing import Any

import pytest
from fake_engine import FakeClient, ask, refused, stream, tool_tokenizer

from slotzero.text.tokenizer import Tokenizer

CHAT, COMPLETION = ROUTES = ("/v1/chat/completions", "/v1/completions")
USER = {"role": "user", "content": "Hi"}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add", "parameters": {"type": "object"}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
# Bodies that these clients send, without the model
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "guidellm 0.8.1",
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "stream": True,
            "stream_options": CONTINUOUS,
            "max_completion_tokens": 12,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    (
        "guidellm 0.8.1",
        COMPLETION,
        {
            "prompt": "Hi",
            "stream": True,
            "stream_options": CONTINUOUS,
            "max_tokens": 12,
            "stop": None,
            "ignore_eos": True,
        },
    ),
    (
        "aiperf 0.13.0",
        CHAT,
        {
            "messages": [USER],
            "stream": True,
            "stream_options": CONTINUOUS,
            "max_completion_tokens": 12,
            "min_tokens": 12,
            "ignore_eos": True,
        },
    ),
    ("aiperf 0.13.0", COMPLETION, {"prompt": ["Hi", "Ho"], "stream": False, "max_tokens": 12}),
    (
        "lm-eval 0.4.13",
        CHAT,
        {
            "messages": [USER],
            "max_tokens": 12,
            "temperature": 0,
            "stop": ["\n\n", "Q:"],
            "seed": 1234,
        },
    ),
    (
        "lm-eval 0.4.13",
        COMPLETION,
        {
            "prompt": [[72, 105], [72, 111]],
            "max_tokens": 12,
            "temperature": 0,
            "stop": ["\n\n", "<eos>"],
            "seed": 1234,
        },
    ),
    (  # a choice among given continuations: their log probabilities
        "lm-eval 0.4.13",
        COMPLETION,
        {
            "prompt": [[72, 105], [72, 111]],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    ),
    (
        "litellm 1.109.1",
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "Hello!",
                    "tool_calls": None,
                    "function_call": None,
                    "provider_specific_fields": {"refusal": None},
                },
                USER,
            ],
            "max_tokens": 12,
        },
    ),
    (
        "langchain-openai 1.7.4",
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be nice."},
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "call_1"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "max_completion_tokens": 12,
        },
    ),
    ("langchain-openai 1.7.4", COMPLETION, {"prompt": ["Hi"], "n": 2, "best_of": 2, "top_p": 1}),
]


@pytest.mark.parametrize(("client", "path", "body"), BODIES)
def test_bodies_of_other_clients(client: str, path: str, body: dict[str, Any]) -> None:
    tokenizer = tool_tokenizer("{{ tools }} <tool_call> {{ messages }}")
    response = ask(FakeClient(), path, {"model": "tiny", **body}, tokenizer=tokenizer)
    assert response.status_code == 200, (client, response.text)


def test_unsupported_parameters_are_refused_by_name() -> None:
    best = {"prompt": "Hi", "n": 2, "best_of": 3}
    assert refused(COMPLETION, {"model": "tiny", **best})["param"] == "best_of"
    for name, value in (
        ("provider_specific_fields", {"citations": [1]}),
        ("reasoning_content", 5),
        ("reasoning", ["Hm"]),
    ):
        message = {"role": "assistant", "content": "Hello!", name: value}
        error = refused(CHAT, {"model": "tiny", "messages": [message]})
        assert error["param"].startswith(f"messages[0].{name}")


def test_tokenizer_info() -> None:
    """lm-eval builds prompts itself, with the server's tokenizer."""
    info = ask(FakeClient(), "/tokenizer_info").json()
    template = Tokenizer.bytes_tokenizer().chat_template
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": None, "pad_token": "<pad>"}
    assert info == {"chat_template": template, **special}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": True}])
def test_continuous_usage_counts_the_tokens_sent(path: str, options: dict[str, bool]) -> None:
    client = FakeClient("Hé!", pace=0.005)
    options = options | {"continuous_usage_stats": True}
    made = stream(client, path, stream_options=options)
    last = made.pop() if options.get("include_usage") else None
    (_, prompt, _), sent = client.submitted[0], ""
    assert len(made) >= 4
    for chunk in made:
        (choice,), counts = chunk["choices"], chunk["usage"]
        sent += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        # plus the end token
        num_tokens = len(sent.encode()) + (choice["finish_reason"] is not None)
        assert counts == {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_tokens,
            "total_tokens": len(prompt) + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
    assert last is None or (last["choices"], last["usage"]) == ([], made[-1]["usage"])


@pytest.mark.parametrize("path", ROUTES)
def test_continuous_usage_covers_all_answers(path: str) -> None:
    client = FakeClient(["ab", "cdef"])
    made = stream(client, path, n=2, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in made]
    assert counts == sorted(counts)
    assert counts[-1] == len("ab") + len("cdef") + 2
    assert all(chunk["choices"] for chunk in made)


def test_continuous_usage_needs_a_stream() -> None:
    made: Any = stream(FakeClient(), ROUTES[0], stream_options={"continuous_usage_stats": False})
    assert all("usage" not in chunk for chunk in made)
