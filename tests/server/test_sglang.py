"""Tests of SGLang's native routes over a fake engine."""

import asyncio
import base64
import json
import pickle
from typing import Any

import httpx
import pytest
import torch
from fake_engine import EOS, FakeClient, app_of, ask, refused

from slotzero.server.messages import (
    AbortAll,
    Pause,
    ResetPrefixCache,
    Resume,
    StagePickled,
    UpdateWeights,
)

ON = {"enable_admin": True}


def generate(client: FakeClient | None = None, **body: Any) -> Any:
    response = ask(client or FakeClient(), "/generate", {"text": "Hi"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_is_continued() -> None:
    client = FakeClient("Hello", step=2)
    made = generate(client, sampling_params={"max_new_tokens": 9, "temperature": 0.5}, rid="a")
    assert made == {
        "text": "Hello",
        "output_ids": [*b"Hello", EOS],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "cached_tokens": 3,
            "weight_version": "",
        },
    }
    assert client.params == {"max_tokens": 9, "temperature": 0.5}


def test_sampling_parameters_have_other_names() -> None:
    client = FakeClient("Hello!", ends_with_eos=False)
    sampling = {
        "max_new_tokens": 4,
        "min_new_tokens": 2,
        "sampling_seed": 7,
        "top_k": -1,
        "stop": ["zz"],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "ebnf": 'root ::= "a"',
    }
    made = generate(client, text=None, input_ids=[72, 105], sampling_params=sampling)
    assert made["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert client.submitted[0][1] == [72, 105]
    assert client.params == {
        "max_tokens": 4,
        "min_tokens": 2,
        "seed": 7,
        "top_k": -1,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "structured_outputs": {"grammar": 'root ::= "a"'},
    }
    assert generate(client)["meta_info"]["completion_tokens"] == 6
    assert client.params == {"max_tokens": 128}


def test_batches_and_several_answers_are_lists() -> None:
    made = generate(text=["a", "b"], rid=["x", "y"], sampling_params={"n": 2})
    assert [one["meta_info"]["id"] for one in made] == ["x", "x", "y", "y"]
    (made,) = generate(text=["a"])
    assert made["text"] == "Hello!"
    made = generate(text=None, input_ids=[[1], [2, 3]])
    assert [one["meta_info"]["prompt_tokens"] for one in made] == [1, 2]


def test_log_probabilities() -> None:
    """There is one for every token, also for those that a stop string removes."""
    body = {"return_logprob": True, "sampling_params": {"stop": "lo"}}
    made = generate(FakeClient("Hello"), **body)
    assert made["text"] == "Hel"
    assert made["output_ids"] == [*b"Hello"]
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": "lo"}
    assert made["meta_info"]["output_token_logprobs"] == [[-0.5, t, None] for t in b"Hello"]
    assert made["meta_info"]["input_token_logprobs"] == []
    assert "output_top_logprobs" not in made["meta_info"]
    more = {"logprob_start_len": 1, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    made = generate(FakeClient("o"), **body | more)["meta_info"]
    assert made["input_token_logprobs"] == [[None, 72, "H"], [-0.5, 105, "i"]]
    assert made["input_top_logprobs"] == [None, [[-0.5, 105, "i"], [-1.5, 120, "x"]]]
    assert made["output_top_logprobs"][0] == [[-0.5, 111, "o"], [-1.5, 120, "x"]]


def test_streams_have_the_whole_text() -> None:
    response = ask(FakeClient("abcd", step=2), "/generate", {"text": "Hi", "stream": True})
    *events, end = [line[6:] for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    made = [json.loads(event) for event in events]
    assert all("abcd".startswith(one["text"]) for one in made)
    assert made[-1]["text"] == "abcd"
    ends = [one["meta_info"]["finish_reason"] for one in made]
    assert ends == [None] * (len(made) - 1) + [{"type": "stop", "matched": EOS}]
    assert "index" not in made[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": ["a", "b"], "rid": "x"}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex"),
        ({"input_ids": [1] * 600}, "input_ids"),
    ],
)
def test_bad_input(body: Any, param: str) -> None:
    assert refused("/generate", body)["param"] == param


def test_one_request_is_aborted_by_its_id() -> None:
    async def run() -> None:
        client = FakeClient("abcdef", hangs_at=3)
        transport = httpx.ASGITransport(app_of(client, **ON))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            body = {"text": ["a", "b"], "rid": ["x", "y"]}
            asked = asyncio.create_task(http.post("/generate", json=body))
            while len(client.submitted) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            again = await http.post("/generate", json={"text": "c", "rid": "x"})
            assert again.json()["error"]["param"] == "rid"
            assert (await http.post("/abort_request", json={"rid": "other"})).status_code == 200
            for rid in ("x", "y"):
                assert not asked.done()
                assert (await http.post("/abort_request", json={"rid": rid})).status_code == 200
            made = (await asked).json()
            assert [one["meta_info"]["finish_reason"]["type"] for one in made] == ["abort"] * 2
            assert (await http.post("/abort_request", json={})).status_code == 400

    asyncio.run(run())


def pickled(*tensors: tuple[str, Any]) -> str:
    return base64.b64encode(pickle.dumps(list(tensors))).decode()


def test_actions_of_trainers() -> None:
    """Tensors that wait are applied together, before the cache is flushed or generation goes on."""
    client = FakeClient()

    async def run() -> None:
        transport = httpx.ASGITransport(app_of(client, **ON))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def post(path: str, body: Any = None) -> list[Any]:
                response = await http.post(path, json=body)
                assert response.status_code == 200, response.text
                actions, client.actions = client.actions, []
                return actions

            assert await post("/pause_generation") == [Pause("abort")]
            assert await post("/pause_generation", {"mode": "retract"}) == [Pause("hold")]
            data = pickled(("a", torch.ones(1)))
            stage = StagePickled(base64.b64decode(data))
            waits = {"serialized_named_tensors": [data], "flush_cache": False}
            path = "/update_weights_from_tensor"
            assert await post(path, waits | {"weight_version": "s1"}) == [stage]
            update = UpdateWeights(None, True, "hold", "s1")
            assert await post("/continue_generation") == [update, Resume()]
            assert await post("/continue_generation", {}) == [Resume()]
            assert await post(path, waits | {"flush_cache": True}) == [
                stage,
                UpdateWeights(None, True, "hold", "2"),
            ]
            await post(path, waits)
            assert await post("/flush_cache") == [
                UpdateWeights(None, True, "hold", "3"),
                ResetPrefixCache(),
            ]
            body = {"model_path": "/x", "abort_all_requests": True, "weight_version": "s2"}
            assert await post("/update_weights_from_disk", body) == [
                AbortAll(),
                UpdateWeights("/x", False, "hold", "s2"),
            ]
            assert await post("/abort_request", {"abort_all": True}) == [AbortAll()]
            version = (await http.get("/get_weight_version")).json()
            assert version == {"weight_version": "s2"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "a", "is_async": True}, "is_async"),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["?"]},
            "serialized_named_tensors",
        ),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["aa=="], "load_format": "flattened_bucket"},
            "load_format",
        ),
        ("/pause_generation", {"mode": "keep"}, "mode"),
    ],
)
def test_bad_actions(path: str, body: Any, param: str) -> None:
    assert refused(path, body, **ON)["param"] == param
