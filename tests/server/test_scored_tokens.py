"""Tests of what trainers read: token ids, and one log probability for every generated token."""

import json
from typing import Any

import msgspec
import pytest
from fake_engine import CHAT, COMPLETION, EOS, FakeClient, FakeStream, ask, chat, complete

from slotzero.server.messages import ABORTED

IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0}


def test_completions_name_tokens_by_their_ids() -> None:
    """The shape is that of vLLM, as TRL reads it."""
    made = complete(FakeClient("Hi"), **IDS)["choices"][0]
    assert made["token_ids"] == [*b"Hi", EOS]
    assert made["prompt_token_ids"] == [256, *b"Hi"]
    names = [f"token_id:{token}" for token in made["token_ids"]]
    assert made["logprobs"]["tokens"] == names
    assert made["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert made["logprobs"]["top_logprobs"] == [{name: -0.5} for name in names]


def test_every_token_is_scored_although_a_stop_string_removes_it() -> None:
    made = complete(FakeClient("Hello"), **IDS, stop="lo")["choices"][0]
    assert made["text"] == "Hel"
    assert made["token_ids"] == [*b"Hello"]
    assert len(made["logprobs"]["tokens"]) == 5
    plain = complete(FakeClient("Hello"), logprobs=0, stop="lo")["choices"][0]
    assert len(plain["logprobs"]["tokens"]) == 3


def test_chats_have_the_same() -> None:
    body = IDS | {"logprobs": True, "top_logprobs": 1}
    made = chat(FakeClient("Hi"), **body)
    choice = made["choices"][0]
    assert made["prompt_token_ids"] == choice["prompt_token_ids"]
    names = [f"token_id:{token}" for token in (*b"Hi", EOS)]
    assert [row["token"] for row in choice["logprobs"]["content"]] == names
    assert choice["logprobs"]["content"][0]["top_logprobs"] == [
        {"token": names[0], "logprob": -0.5, "bytes": None}
    ]


class VersionedClient(FakeClient):
    """An engine whose weights change during each answer, and that an administrator ends."""

    def submit(self, request_id: str, prompt: list[int], params: Any) -> FakeStream:
        stream = super().submit(request_id, prompt, params)
        *first, last = stream._grown
        first = [msgspec.structs.replace(grown, weight_version="a") for grown in first]
        last = msgspec.structs.replace(
            last, weight_version="b", finish_reason="abort", stop_reason=ABORTED
        )
        return FakeStream(self, request_id, [*first, last])


@pytest.mark.parametrize(
    ("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)]
)
def test_answers_name_their_weights(path: str, body: Any) -> None:
    made = ask(VersionedClient("Hi"), f"/v1/{path}", body)
    assert made.headers["x-weight-version"] == "b"
    choice = made.json()["choices"][0]
    assert (choice["weight_version"], choice["finish_reason"]) == ("b", "abort")
    made = ask(VersionedClient("Hi", pace=0.01), f"/v1/{path}", body | {"stream": True})
    assert made.headers["x-weight-version"] == "a"
    *_, last, _ = [line for line in made.text.split("\n\n") if line]
    assert json.loads(last[6:])["choices"][0]["weight_version"] == "b"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/generate"])
def test_other_apis_answer_what_was_aborted(path: str) -> None:
    bodies = {
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": CHAT["messages"]},
        "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
    }
    made = ask(VersionedClient("Hi"), path, bodies[path])
    assert made.status_code == 200
    assert made.headers["x-weight-version"] == "b"
