"""Tests of continue_final_message: the prompt ends with the last message."""

import inspect
from typing import Any

import pytest
from fake_engine import FakeClient, ask, refused

from slotzero import LLM, SamplingParams
from slotzero.errors import RequestError, TokenizerMissingError
from slotzero.text.chat_template import RESERVED
from slotzero.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
BEGUN: list[dict[str, Any]] = [
    {"role": "user", "content": "Count."},
    {"role": "assistant", "content": "One, two, "},
]
GO_ON: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<end>{% endfor %}"
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
FIRST_ONLY = "{{ messages[0].content }}"


def tokenizer(template: str) -> Tokenizer:
    plain = Tokenizer.bytes_tokenizer()
    return Tokenizer(plain._backend, plain.special_tokens, template)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PLAIN, "[user] Count.<end>[assistant] One, two, "),
        (TRIMMED, "[user] Count.<end>[assistant] One, two,"),
        (PLAIN + "[assistant] One, two, ", "[user] Count.<end>[assistant] One, two, "),
    ],
)
def test_the_prompt_ends_with_the_last_message(template: str, text: str) -> None:
    assert tokenizer(template).apply_chat_template(BEGUN, **GO_ON) == text


def test_equal_messages_are_distinguished() -> None:
    again = [*BEGUN, *BEGUN]
    made = tokenizer(PLAIN).apply_chat_template(again, **GO_ON)
    whole = tokenizer(PLAIN).apply_chat_template(again, add_generation_prompt=False)
    assert made + "<end>" == whole


def test_an_empty_message_and_one_of_the_user() -> None:
    made = tokenizer(PLAIN)
    empty = [{"role": "assistant", "content": ""}]
    assert made.apply_chat_template(empty, **GO_ON) == "[assistant] "
    assert made.apply_chat_template(BEGUN[:1], **GO_ON) == "[user] Count."


def test_messages_that_cannot_be_continued() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for template, messages, why in (
        (FIRST_ONLY, BEGUN, "omits the last message"),
        (PLAIN, [{"role": "assistant", "content": "", "tool_calls": [call]}], "tool_calls"),
    ):
        with pytest.raises(RequestError, match=f"continue_final_message: .*{why}"):
            tokenizer(template).apply_chat_template(messages, **GO_ON)
    with pytest.raises(RequestError, match="continue_final_message: cannot be used with add_g"):
        tokenizer(PLAIN).apply_chat_template(BEGUN, continue_final_message=True)


def test_continuation_over_http() -> None:
    client = FakeClient("three")
    body = {"model": "tiny", "messages": BEGUN}
    made = ask(client, CHAT, body | GO_ON, tokenizer=tokenizer(PLAIN)).json()
    assert client.prompt == "[user] Count.<end>[assistant] One, two, "
    assert made["choices"][0]["message"]["content"] == "three"
    told = ask(client, "/tokenize", {"messages": BEGUN} | GO_ON, tokenizer=tokenizer(PLAIN)).json()
    assert told["tokens"] == client.submitted[0][1]
    for path in (CHAT, "/tokenize"):
        error = refused(path, body | {"continue_final_message": True})
        assert error["param"] == "continue_final_message"
        assert "add_generation_prompt" in error["message"]
    error = refused(CHAT, body | GO_ON, tokenizer=tokenizer(FIRST_ONLY))
    assert "continue_final_message: " in error["message"]


def test_continuation_offline() -> None:
    settings: Any = {"backend": "eager", "show_progress": False, "max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=8)
    llm = LLM("tiny:llama", **settings)
    (made,) = llm.chat(BEGUN, params, use_tqdm=False, **GO_ON)
    assert made.prompt == "<bos>user: Count.<eos>assistant: One, two, "
    with pytest.raises(RequestError, match="continue_final_message"):
        llm.chat(BEGUN, params, continue_final_message=True)
    with pytest.raises(TokenizerMissingError, match="has no tokenizer"):
        LLM("tiny:llama", skip_tokenizer_init=True, **settings).chat(BEGUN, params, **GO_ON)


def test_every_argument_is_reserved() -> None:
    """Or a client's template variable of this name would be a second value for it."""
    names = inspect.signature(Tokenizer.apply_chat_template).parameters
    assert set(names) - {"kwargs"} <= set(RESERVED)
