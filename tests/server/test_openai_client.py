"""End-to-end tests: `slotzero serve` in a process, with OpenAI's own client."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel
from served import ADD, HEADERS, HELLO, KEY, PATIENCE, Server, children, tiny_server, wait_until

from slotzero import LLM, SamplingParams
from slotzero.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with tiny_server(folder) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def llm(folder: Path, server: Server) -> LLM:
    return LLM(str(folder), load_format="dummy", backend="eager", show_progress=False)


def offline(llm: LLM, prompt: str, **params: Any) -> list[str]:
    made = llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return [output.text for output in made[0].outputs]


def test_the_address_is_printed(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert f"curl {server.url}/v1/chat/completions" in server.lines[-1]
    assert KEY not in "".join(server.lines)
    assert httpx.get(f"{server.url}/health").json()["status"] == "ready"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "slotzero"


def test_chat_gives_the_offline_answer(client: OpenAI, llm: LLM) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_completion_tokens=12
    )
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = llm.chat(HELLO, params, use_tqdm=False)[0]
    assert made.choices[0].message.content == expected.outputs[0].text
    assert made.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert made.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_a_stream_gives_the_same_with_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=20
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 16  # a page of the prompt, cached by the previous request


def test_completion_and_echo(client: OpenAI, llm: LLM) -> None:
    (expected,) = offline(llm, "Once", temperature=0, max_tokens=16)
    made = client.completions.create(model="tiny", prompt="Once", temperature=0)
    assert made.choices[0].text == expected
    made = client.completions.create(model="tiny", prompt="Once", temperature=0, echo=True)
    assert made.choices[0].text == "Once" + expected


def test_a_prompt_is_scored_as_offline(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    (output,) = llm.generate("Once upon", params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    expected = output.prompt_logprobs[1:]
    ids = output.prompt_token_ids
    prompts: list[Any] = ["Once upon", ids]
    for prompt in prompts:
        asked: Any = {"model": "tiny", "prompt": prompt, "temperature": 0}
        (choice,) = client.completions.create(**asked, max_tokens=0, echo=True, logprobs=2).choices
        assert (choice.text, choice.finish_reason) == ("Once upon", "length")
        made = choice.logprobs
        assert made is not None and made.tokens == ["<bos>", *"Once upon"]
        assert made.text_offset == [0, *range(len("Once upon"))]
        values = [by_id[token].logprob for token, by_id in zip(ids[1:], expected, strict=True)
                  if by_id is not None]  # fmt: skip
        assert made.token_logprobs == [None, *values]
        body: Any = {"prompt_logprobs": 2}
        (choice,) = client.completions.create(**asked, max_tokens=1, extra_body=body).choices
        shown = choice.model_extra["prompt_logprobs"]  # type: ignore[index]
        for of_token, by_id in zip(shown[1:], expected, strict=True):
            assert by_id is not None
            assert {int(token): entry["logprob"] for token, entry in of_token.items()} == {
                token: entry.logprob for token, entry in by_id.items()
            }


def test_a_seed_gives_what_it_gives_offline(client: OpenAI, llm: LLM) -> None:
    made = client.completions.create(model="tiny", prompt="Once", seed=5, n=3, max_tokens=12)
    expected = offline(llm, "Once", temperature=1, seed=5, n=3, max_tokens=12)
    assert [choice.text for choice in made.choices] == expected
    assert len(set(expected)) == 3


def test_sampling_fields_give_what_they_give_offline(client: OpenAI, llm: LLM) -> None:
    ours = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4,
            "ignore_eos": True}  # fmt: skip
    theirs = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5,
              "seed": 11, "max_tokens": 24}  # fmt: skip
    made = client.completions.create(
        model="tiny", prompt="Once", logit_bias={"65": 5}, extra_body=ours, **theirs
    )
    (expected,) = offline(llm, "Once", logit_bias={65: 5.0}, **ours, **theirs)
    assert made.choices[0].text == expected


def test_logprobs_are_those_of_the_engine(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    (output,) = llm.generate("Once", params, use_tqdm=False)[0].outputs
    assert output.logprobs is not None
    chosen = [
        row[token].logprob for token, row in zip(output.token_ids, output.logprobs, strict=True)
    ]
    made = client.completions.create(
        model="tiny", prompt="Once", temperature=0, max_tokens=6, logprobs=3
    )
    rows = made.choices[0].logprobs
    assert rows is not None
    assert rows.token_logprobs == pytest.approx(chosen)
    chat = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    for row in chat.choices[0].logprobs.content or []:
        assert len(row.top_logprobs) == 3
        assert row.top_logprobs[0].logprob == row.logprob  # greedy


def test_stop_strings(client: OpenAI, llm: LLM) -> None:
    (text,) = offline(llm, "Once", temperature=0, max_tokens=40)
    stop = text[10:13]
    made = client.completions.create(
        model="tiny", prompt="Once", temperature=0, max_tokens=40, stop=[stop, "never"]
    )
    assert made.choices[0].text == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    chunks = client.completions.create(
        model="tiny", prompt="Once", temperature=0, max_tokens=40, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]


def test_errors_are_typed(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-5", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 600, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="x" * (10 << 20))
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError) as token:
        client.completions.create(model="tiny", prompt=[99999], stream=True)
    assert token.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, store=True)
    assert refused.value.param == "store"


ODD = [
    {"top_k": 10**12},
    {"max_tokens": 2**62},
    {"min_tokens": 10**11, "max_tokens": 10**12},
    {"repetition_penalty": 1e-300},
    {"logit_bias": {"3": 1e300}},
    {"temperature": 1e-300},
    {"temperature": 1e300},
    {"top_p": 1e-300},
    {"top_k": 10**30},
    {"seed": -(2**63)},
    {"prompt": [10**30]},
    {"prompt": [-1]},
    {"prompt": []},
    {"stop_token_ids": [2**40]},
    {"logit_bias": {"999999999": 1}},
    {"guided_regex": "("},
    {"guided_json": {"type": "odd"}},
]


@pytest.mark.parametrize("odd", ODD)
def test_extreme_numbers_affect_no_other_request(server: Server, client: OpenAI, odd: dict) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4} | odd
    response = httpx.post(
        f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=PATIENCE
    )
    assert response.status_code in (200, 400)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0]


def test_closing_a_stream_cancels_it(server: Server, client: OpenAI) -> None:
    with client.completions.create(
        model="tiny",
        prompt="Once",
        max_tokens=480,
        stream=True,
        n=2,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
    server.wait_until_idle()


def test_many_at_once_answer_as_one_by_one(server: Server, client: OpenAI) -> None:
    def ask(i: int) -> dict[str, Any]:
        return {"model": "tiny", "prompt": f"Number {i}", "seed": i, "max_tokens": 8 + i % 5}

    async def all_at_once() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE
        ) as many:
            made = await asyncio.gather(*(many.completions.create(**ask(i)) for i in range(24)))
            return [one.choices[0].text for one in made]

    single = [client.completions.create(**ask(i)).choices[0].text for i in range(24)]
    assert asyncio.run(all_at_once()) == single


def test_structured_answers(client: OpenAI) -> None:
    schema = {"name": "x", "schema": ADD["function"]["parameters"]}
    made = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert made.choices[0].finish_reason == "stop"
    assert set(json.loads(made.choices[0].message.content or "")) == {"a", "b"}
    picked = client.completions.create(
        model="tiny", prompt="x", max_tokens=20, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert picked.choices[0].text in ("yes", "no")
    wanted: Any = {"structured_outputs": {"json": ADD["function"]["parameters"]}}
    parts = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, seed=1, extra_body=wanted
    )
    assert set(json.loads(parts.choices[0].text)) == {"a", "b"}


ENDLESS: Any = {"guided_regex": "(a|b){4}c{1000000}"}  # too complex after four letters


def check_endless(error: Any) -> None:
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_regex")
    assert error["code"] is None
    assert "too many expressions constructed" in error["message"]
    assert "\n" not in error["message"]


def test_a_structure_that_becomes_too_complex(server: Server, client: OpenAI) -> None:
    """The error is a client error, because a retry would fail, too."""
    engines = children(server.process.pid)
    asked: Any = {"model": "tiny", "prompt": "x", "max_tokens": 20}
    for n in (1, 2):
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(**asked, n=n, extra_body=ENDLESS)
        check_endless(caught.value.body)
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body=ENDLESS)
    check_endless(caught.value.body)
    text = ""
    with pytest.raises(APIError) as failed:
        for chunk in client.completions.create(**asked, stream=True, extra_body=ENDLESS):
            text += chunk.choices[0].text
    check_endless(failed.value.body)
    assert re.fullmatch("[ab]{4}c", text)
    stopped = client.completions.create(**asked, stop="c", extra_body=ENDLESS).choices[0]
    assert (stopped.finish_reason, len(stopped.text)) == ("stop", 4)
    server.wait_until_idle()
    # one of each request above: with n=2 the second answer may be cancelled before it fails
    assert server.log.read_text().count("a request was aborted: structured_outputs: regex: ") >= 4
    assert children(server.process.pid) == engines


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_tool_calls(client: OpenAI, choice: Any) -> None:
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [ADD],
        "tool_choice": choice,
        "max_tokens": 200,
        "seed": 3,
    }
    made = client.chat.completions.create(**asked).choices[0]
    assert made.finish_reason == "tool_calls"
    (call,) = made.message.tool_calls or []
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments) == ("add", call.function.arguments)


class Pair(BaseModel):
    """Add two numbers."""

    a: Literal[1, 2]
    b: bool


def test_answers_and_calls_are_parsed(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": 3}
    tidy = dict.fromkeys(("9", "10", "13", "32"), -100)  # no white space
    parse = client.chat.completions.parse
    answer = parse(**asked, logit_bias=tidy, response_format=Pair).choices[0].message
    assert isinstance(answer.parsed, Pair)
    tools: Any = [openai.pydantic_function_tool(Pair)]
    forced = parse(**asked, logit_bias=tidy, tools=tools, tool_choice="required")
    (call,) = forced.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Pair)
    free = parse(**asked, logit_bias={"257": 100}, tools=tools)
    assert (free.choices[0].message.content, free.choices[0].finish_reason) == ("", "stop")


class Pairs(BaseModel):
    first: Pair
    second: Pair


def test_schemas_with_definitions(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": 3}
    tidy = dict.fromkeys(("9", "10", "13", "32"), -100)  # no white space
    parse = client.chat.completions.parse
    answer = parse(**asked, logit_bias=tidy, response_format=Pairs).choices[0].message
    assert isinstance(answer.parsed, Pairs)

    def call(there: str) -> Any:
        parameters = {"$ref": there, "$defs": {"Pair": ADD["function"]["parameters"]}}
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        made = client.chat.completions.create(**asked, tools=tools, tool_choice="required")
        (called,) = made.choices[0].message.tool_calls or []
        return json.loads(called.function.arguments)

    assert set(call("#/$defs/Pair")) == {"a", "b"}
    with pytest.raises(openai.BadRequestError, match=r"parameters\.\$ref: .*/\$defs/Gone"):
        call("#/$defs/Gone")


def test_an_answer_can_be_sent_back(client: OpenAI) -> None:
    first = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[ADD], tool_choice="required", max_tokens=200, seed=3
    )
    message = first.choices[0].message
    assert message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    second = client.chat.completions.create(
        model="tiny", messages=[*HELLO, message, result], tools=[ADD], max_tokens=8
    )
    assert second.choices[0].finish_reason


# Start and shutdown


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    words = ["tiny:llama", "--backend", "eager", "--max-num-seqs", "1", "--max-waiting", "1"]
    made = Server(words, tmp_path / "log")
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def test_a_terminated_server_finishes_running_requests(own_server: Server) -> None:
    client = own_server.client()
    long: Any = {"model": "tiny:llama", "prompt": "x", "stream": True,
                 "extra_body": {"ignore_eos": True}}  # fmt: skip
    first = iter(client.completions.create(**long, max_tokens=300))
    next(first)
    (engine,) = children(own_server.process.pid)

    async def too_many() -> list[int]:
        url = f"{own_server.url}/v1/completions"
        body = {"model": "tiny:llama", "prompt": "x", "max_tokens": 1}
        codes = []
        async with httpx.AsyncClient(timeout=PATIENCE) as http:
            for asked in asyncio.as_completed([http.post(url, json=body) for _ in range(4)]):
                reply = await asked
                codes.append(reply.status_code)
                assert reply.status_code == 200 or "retry-after" in reply.headers
                if len(codes) == 3:
                    os.kill(engine, signal.SIGCONT)
        return codes

    # one waits for the only slot, and the queue has no room for others
    os.kill(engine, signal.SIGSTOP)
    assert asyncio.run(too_many()) == [429, 429, 429, 200]

    second = iter(client.completions.create(**long, max_tokens=400))
    next(second)
    with httpx.stream("GET", f"{own_server.url}/live", timeout=PATIENCE):  # this stream never ends
        own_server.process.send_signal(signal.SIGTERM)
        *_, last = second
    assert last.choices[0].finish_reason == "length"
    assert own_server.process.wait(PATIENCE) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{own_server.url}/health")
    assert not os.path.exists(f"/proc/{engine}")


def test_an_engine_that_dies_is_replaced_and_the_reason_is_logged(own_server: Server) -> None:
    def told() -> tuple[str, str | None]:
        info = httpx.get(f"{own_server.url}/server_info").json()
        return info["state"], info["failure"]

    assert told() == ("ready", None)
    (engine,) = children(own_server.process.pid)
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: told() == ("restarting", "signal 9"))
    wait_until(lambda: told() == ("ready", None))
    while own_server.process.poll() is None:  # Ctrl-C until the last moment does no harm
        own_server.process.send_signal(signal.SIGINT)
        time.sleep(0.005)
    assert own_server.process.returncode == 0
    assert "Traceback" not in own_server.log.read_text()


def test_requests_that_do_not_finish_in_time_get_an_error(tmp_path: Path) -> None:
    words = ["tiny:llama", "--backend", "eager", "--grace", "0.2"]
    server = Server(words, tmp_path / "log")
    stream = server.client().completions.create(
        model="tiny:llama", prompt="x", stream=True, max_tokens=500, n=8,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = iter(stream)
    next(chunks)
    assert server.end() == 0
    with pytest.raises(openai.APIError, match="stopping"):
        for _ in chunks:
            pass
    assert "Traceback" not in server.log.read_text()


def test_a_second_ctrl_c_does_not_wait_for_requests(tmp_path: Path) -> None:
    words = ["tiny:llama", "--backend", "eager", "--grace", "1000"]
    server = Server(words, tmp_path / "log")
    stream = server.client().completions.create(
        model="tiny:llama", prompt="x", stream=True, max_tokens=2000, n=8,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = iter(stream)
    next(chunks)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.2)  # a signal that arrives before an equal one was handled is lost
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="stopping"):
        for _ in chunks:
            pass
    assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in server.log.read_text()


def test_ctrl_c_ends_a_loading_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slotzero", "serve", "tiny:llama", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[2].rstrip(",")

    def is_loading() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503
        except httpx.TransportError:
            return False

    wait_until(is_loading)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (["no-such-model"], 3, "no-such-model"),
        (["tiny:llama", "--kv-cache-memory", "1K"], 4, "--kv-cache-memory"),
    ],
)
def test_a_server_that_cannot_start_ends_with_one_line(
    words: list[str], code: int, names: str
) -> None:
    command = [sys.executable, "-m", "slotzero", "serve", *words, "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == code
    lines = [line for line in run.stderr.splitlines() if line.startswith("slotzero: error: ")]
    assert len(lines) == 1
    assert names in lines[0]
    assert run.stderr.count(lines[0].removeprefix("slotzero: error: ")) == 1
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("setting", ["--page-size 3", "--grace -1"])
def test_a_wrong_setting_is_one_line(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No process starts for it."""
    assert main(["serve", "tiny:llama", *setting.split(), "--port", "0"]) == 2
    errors = capsys.readouterr().err
    name = setting.split()[0].removeprefix("--").replace("-", "_")
    assert errors.startswith("slotzero: error: ") and name in errors
    assert errors.count("\n") == 1
