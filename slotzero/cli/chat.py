"""`slotzero chat`: a conversation with a model, turn by turn.

In a terminal it edits lines, streams answers, and Ctrl-C ends an answer. If standard input is a
file or a pipe, each line is a turn and only answers are printed.

The rule: the conversation contains only turns that were answered. A turn that could not be answered
(too long, refused by the template, interrupted before its first word) gives one line of error and
is dropped.
"""

import argparse
import contextlib
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from slotzero.cli import flags
from slotzero.cli.main import print_error
from slotzero.errors import RequestError
from slotzero.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slotzero.llm import LLM, StreamChunk

DESCRIPTION = """\
Chat with a model. /help in the conversation lists the commands.

Ctrl-C ends an answer, Ctrl-D ends the conversation. If standard input is not a terminal, each line
is a turn."""
HELP = """\
/reset         forget the conversation
/system TEXT   set the system message; without TEXT, remove it
/help          show this list
/exit          end the conversation, like Ctrl-D; Ctrl-C ends an answer"""
FULL = "the conversation's {used} tokens do not fit into the context of {limit}: use /reset"
FIELDS = tuple(name for name in flags.SAMPLING_FIELDS if name not in ("n", "logprobs"))


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("chat", "[MODEL] [flags]", DESCRIPTION)
    flags.add_model(made)
    made.add_argument("--system", metavar="TEXT", help="the system message")
    flags.add_sampling_flags(made, FIELDS, temperature=0.2, top_p=0.9, max_tokens=1024)
    flags.add_chat_template(made)
    flags.add_engine_flags(made, max_num_seqs=1)
    return made


def run(args: argparse.Namespace) -> int:
    params = flags.sampling_params(args)
    from slotzero.llm import LLM

    llm = LLM(flags.chosen_model(args), **flags.engine_settings(args))
    if llm.get_tokenizer().chat_template is None:
        raise RequestError(
            "this model has no chat template: give --chat-template, or use "
            "`slotzero generate --raw`"
        )
    conversation = ChatSession(llm, params, args.system)
    if not sys.stdin.isatty():
        return _read_lines(conversation)
    limits = llm.engine.limits
    _say(f"{flags.chosen_model(args)} on {limits.backend}, {limits.max_model_len} tokens; /help")
    return _read_terminal(conversation)


class ChatSession:
    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        self._turns.clear()

    def set_system(self, text: str) -> None:
        self._system = text or None

    def ask(self, text: str) -> "Generator[StreamChunk, None, None]":
        """Stream the answer; if the caller stops early, the answer so far is kept."""
        turns = [*self._turns, {"role": "user", "content": text}]
        chunks = self._llm.stream(self._prompt(turns), self._params)
        answer = ""
        try:
            for chunk in chunks:
                answer += chunk.text
                yield chunk
        finally:
            chunks.close()  # cancels the rest if the caller stopped early
            if answer:
                self._turns = [*turns, {"role": "assistant", "content": answer}]

    def _prompt(self, turns: list[dict[str, str]]) -> dict[str, object]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        (prompt,) = self._llm.chat_prompts(system + turns)
        assert isinstance(prompt, dict)
        used, limit = len(prompt["prompt_token_ids"]), self._llm.engine.limits.max_model_len
        if used >= limit:
            raise RequestError(FULL.format(used=used, limit=limit))
        return prompt


def _read_lines(conversation: ChatSession) -> int:
    """Answer each line, and return the exit code of the last turn that failed, or 0."""
    code = 0
    for line in sys.stdin.buffer:
        text = line.decode(errors="replace").strip()
        if text.startswith("/"):
            if _obey(conversation, text):
                break
        elif text:
            try:
                for chunk in conversation.ask(text):
                    print(chunk.text, end="", flush=True)
                print(flush=True)
            except RequestError as error:
                print_error(str(error))
                code = error.exit_code
    return code


def _read_terminal(conversation: ChatSession) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and a history
    while True:
        try:
            text = _input("> ").strip()
        except EOFError:
            _say("")
            return 0
        except KeyboardInterrupt:
            _say("\nuse Ctrl-D or /exit to end the conversation")
            continue
        if text.startswith("/"):
            if _obey(conversation, text):
                return 0
        elif text:
            _answer_at_terminal(conversation, text)


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # standard output is a file
    return input()


def _answer_at_terminal(conversation: ChatSession, text: str) -> None:
    last: StreamChunk | None = None
    with contextlib.closing(conversation.ask(text)) as chunks:
        try:
            for last in chunks:
                print(last.text, end="", flush=True)
        except RequestError as error:
            _say(str(error))
            return
        except KeyboardInterrupt:  # between two steps; the answer so far is kept
            last = None
    print(flush=True)
    if last is not None and last.finish_reason == "length":
        _say("(the answer was cut off: --max-tokens or the context length was reached)")


def _obey(conversation: ChatSession, text: str) -> bool:
    """Run a command, and return whether it ends the conversation."""
    name, _, rest = text.partition(" ")
    match name:
        case "/exit" | "/quit":
            return True
        case "/reset":
            conversation.reset()
        case "/system":
            conversation.set_system(rest.strip())
        case "/help":
            _say(HELP)
        case _:
            _say(f"unknown command {name}; /help lists the commands")
    return False


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
