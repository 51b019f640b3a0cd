"""Tests of the flags for chat templates and model names, and of flags that are given twice."""

from pathlib import Path
from typing import Any

import pytest
from command import Run, is_one_error_line
from fake_engine import FakeClient, ask, stream

from slotzero import LLM
from slotzero.cli import chat, flags, generate, serve
from slotzero.errors import ConfigError, outcome_of
from slotzero.text.tokenizer import Tokenizer

TINY = ["tiny:llama", "--backend", "eager", "--max-tokens", "4"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


# --chat-template


@pytest.fixture
def template_file(tmp_path: Path) -> Path:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    return file


def test_a_template_is_a_file_or_text(template_file: Path) -> None:
    settings: Any = {"backend": "eager", "show_progress": False, "max_num_seqs": 1}
    for given in (TEMPLATE, str(template_file), template_file):
        llm = LLM("tiny:llama", chat_template=given, **settings)
        (prompt,) = llm.chat_prompts([{"role": "user", "content": "Hi"}])
        assert isinstance(prompt, dict)
        assert prompt["prompt"] == "<user> Hi\n"


def test_a_template_replaces_the_one_for_tools_too() -> None:
    plain = Tokenizer.bytes_tokenizer()
    tokenizer = Tokenizer(plain._backend, plain.special_tokens, "own", "own for tools")
    tokenizer.set_chat_template(TEMPLATE)
    assert tokenizer.chat_template == tokenizer.tool_template == TEMPLATE


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("no/such/file.jinja", "'no/such/file.jinja' cannot be read: No such file or directory"),
        (".", "'.' cannot be read"),
        ("x" * 5000, "cannot be read"),
        ("one\n{% for %}", "chat_template: line 2 is not valid Jinja"),
    ],
)
def test_an_invalid_template_is_refused(run: Run, given: str, why: str) -> None:
    for words in (["generate", *TINY, "--prompt", "x"], ["serve", "tiny:llama", "--port", "0"]):
        result = run(*words, "--chat-template", given)
        assert result.code == outcome_of(ConfigError).exit_code
        assert is_one_error_line(result.err)
        assert why in result.err


def test_a_template_file_that_is_not_text_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"{{ '\xe9' }}")
    words = ["generate", *TINY, "--prompt", "x", "--chat-template", str(tmp_path / "latin")]
    assert "is not UTF-8 text" in run(*words).err


def test_a_template_is_refused_where_it_has_no_effect(run: Run) -> None:
    result = run("generate", *TINY, "--prompt", "x", "--raw", "--chat-template", TEMPLATE)
    assert result.code == outcome_of(ConfigError).exit_code
    assert "--chat-template has no effect with --raw" in result.err
    with pytest.raises(ConfigError, match="contradicts skip_tokenizer_init"):
        LLM("tiny:llama", chat_template=TEMPLATE, skip_tokenizer_init=True)
    assert "unrecognized arguments: --chat-template" in run("certify", "--chat-template", "x").err


def test_chat_commands_take_a_template(run: Run, template_file: Path) -> None:
    words = ["--chat-template", str(template_file)]
    for command in (serve, chat, generate):
        given = command.parser().parse_args(words)
        assert flags.engine_settings(given)["chat_template"] == str(template_file)
    own = run("generate", *TINY, "--prompt", "x", "--json").objects[0]["prompt_tokens"]
    made = run("generate", *TINY, "--prompt", "x", "--json", *words).objects[0]["prompt_tokens"]
    assert (own, made) == (len("BuserE: xassistant: "), len("<user> x\n"))


# --served-model-name


@pytest.mark.parametrize(
    "words",
    [
        ["MODEL", "--served-model-name", "a", "b", "--port", "1"],
        ["MODEL", "--served-model-name", "a", "--served-model-name", "b"],
        ["--served-model-name", "a", "b", "--model", "MODEL"],
    ],
)
def test_several_names_after_one_flag(words: list[str]) -> None:
    args = serve.parser().parse_intermixed_args(words)
    flags.refuse_swallowed_model(args)
    assert flags.server_settings(args).served_model_name == ("a", "b")
    assert flags.chosen_model(args) == "MODEL"


@pytest.mark.parametrize("model", ["tiny:llama", "org/name", "smollm2", "model.gguf", "tests"])
def test_a_model_after_served_names_is_explained(run: Run, model: str) -> None:
    result = run("serve", "--served-model-name", "mine", model)
    assert result.code == outcome_of(ConfigError).exit_code
    assert f"is {model!r} the model? Then give it first" in result.err


def test_names_of_the_default_model() -> None:
    args = serve.parser().parse_intermixed_args(["--served-model-name", "a", "b"])
    flags.refuse_swallowed_model(args)
    assert flags.chosen_model(args) == "smollm2"


def test_any_name_is_accepted_and_replies_have_the_first() -> None:
    names: Any = {"served_model_name": ("first", "second")}
    listed = ask(FakeClient(), "/v1/models", **names).json()["data"]
    assert [card["id"] for card in listed] == ["first", "second"]
    bodies = (
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
        (COMPLETION, {"prompt": "Hi"}),
    )
    for path, body in bodies:
        for name in ("first", "second"):
            made = ask(FakeClient(), path, body | {"model": name}, **names).json()
            assert made["model"] == "first"
        assert ask(FakeClient(), path, body | {"model": "third"}, **names).status_code == 404
        chunks = stream(FakeClient(), path, model="other/name")  # served as tiny and other/name
        assert {chunk["model"] for chunk in chunks} == {"tiny"}


# One flag, two values


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--seed 1 --seed 2", "--seed 1 and --seed 2"),
        ("--seed 1 --random-seed 2", "--seed 1 and --random-seed 2"),
        ("--tp 2 --port 5 -tp 4", "--tp 2 and -tp 4"),
        ("--page-size=16 --block-size=32", "--page-size 16 and --block-size 32"),
        ("--enforce-eager --no-enforce-eager", "--enforce-eager and --no-enforce-eager"),
        ("--disable-cuda-graph --no-enforce-eager", "--disable-cuda-graph and --no-enforce-eager"),
        ("--model a --model-path b", "--model a and --model-path b"),
        ("--host ::1 --host ::", "--host ::1 and --host ::"),
        ("--seed 1 --seed 1 --seed 2", "--seed 1 and --seed 2"),
    ],
)
def test_two_values_for_one_flag(run: Run, words: str, named: str) -> None:
    result = run("serve", *words.split())
    assert result.code == 2
    assert f"{named}: two values for one setting; drop one" in result.err


def test_two_values_for_flags_of_a_command(run: Run) -> None:
    result = run("generate", *TINY, "--prompt", "x", "--system", "a", "--system", "b")
    assert "--system a and --system b" in result.err


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--seed 1 --random-seed 1", "seed", 1),
        ("--kv-cache-memory 1G --kv-cache-memory 1024M", "kv_cache_memory", 1 << 30),
        ("--disable-cuda-graph --enforce-eager", "enforce_eager", True),
        ("--api-key a --api-key b", "api_key", ["a", "b"]),
    ],
)
def test_flags_that_may_be_repeated(words: str, name: str, value: Any) -> None:
    assert getattr(serve.parser().parse_intermixed_args(words.split()), name) == value


def test_a_default_of_the_command_does_not_count_as_given(run: Run) -> None:
    assert chat.parser().parse_args(["--max-num-seqs", "3"]).max_num_seqs == 3
