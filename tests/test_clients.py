"""What clients other than OpenAI's send, and what they read of the replies."""

from typing import Any

import pytest
from test_server import FakeClient, stream

ROUTES = ("/v1/chat/completions", "/v1/completions")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": True}])
def test_continuous_usage_counts_what_was_sent(path: str, options: dict[str, bool]) -> None:
    client = FakeClient("Hé!", pace=0.005)
    options = options | {"continuous_usage_stats": True}
    made = stream(client, path, stream_options=options)
    last = made.pop() if options.get("include_usage") else None
    (_, prompt, _), sent = client.submitted[0], ""
    assert len(made) >= 4
    for chunk in made:
        (choice,), counts = chunk["choices"], chunk["usage"]
        sent += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        num_tokens = len(sent.encode()) + (choice["finish_reason"] is not None)  # and the end
        assert counts == {
            "prompt_tokens": len(prompt),
            "completion_tokens": num_tokens,
            "total_tokens": len(prompt) + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
    assert last is None or (last["choices"], last["usage"]) == ([], made[-1]["usage"])


@pytest.mark.parametrize("path", ROUTES)
def test_continuous_usage_is_that_of_all_answers(path: str) -> None:
    client = FakeClient(["ab", "cdef"])
    made = stream(client, path, n=2, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in made]
    assert counts == sorted(counts)
    assert counts[-1] == len("ab") + len("cdef") + 2
    assert all(chunk["choices"] for chunk in made)


def test_continuous_usage_is_a_flag_of_streams() -> None:
    made: Any = stream(FakeClient(), ROUTES[0], stream_options={"continuous_usage_stats": False})
    assert all("usage" not in chunk for chunk in made)
