"""`slotzero generate`: answers prompts and ends.

One prompt streams its answer; many are answered together and printed in order. It does not know how
prompts are read (prompts.py) or run (LLM).

The rule: every prompt is accounted for. A bad one is one error line that names its place, the
others are answered all the same, and the exit code says that not all went well.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags, prompts
from slotzero.cli.main import print_error
from slotzero.cli.prompts import STDIN, Ask
from slotzero.errors import ConfigError, RequestError, outcome_of
from slotzero.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slotzero.llm import LLM, CompletionOutput, Logprob, Prompt, RequestOutput

DESCRIPTION = """\
Answer one or more prompts.

A prompt is sent as a user message through the model's chat template; --raw continues it as plain
text. Sampling is greedy unless --temperature is given.

  slotzero generate --prompt 'What is the capital of France?'
  slotzero generate --prompt-file questions.txt --json > answers.jsonl
  echo 'Tell me a joke.' | slotzero generate tiny:llama"""


@dataclass(frozen=True)
class Ready:
    """An ask that passed every check."""

    ask: Ask
    prompt: "Prompt"


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("generate", "[MODEL] [-] [flags]", DESCRIPTION)
    flags.add_model(made)
    made.add_argument("source", nargs="?", metavar=STDIN, help="read prompts from standard input")
    group = made.add_argument_group("prompts")
    group.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be given again; - is all of standard input as one prompt",
    )
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="one prompt a line, - for standard input; in a .jsonl file a line is "
        '{"prompt": TEXT} or {"messages": [...]}',
    )
    group.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    group.add_argument("--raw", action="store_true", help="plain completion, no chat template")
    group.add_argument("--json", action="store_true", help="print one JSON object an answer")
    flags.add_sampling_flags(made, temperature=0.0, max_tokens=256)
    flags.add_chat_template(made)
    flags.add_engine_flags(made)
    return made


def run(args: argparse.Namespace) -> int:
    params = _params(args)
    asks = _read(args)
    good = [ask for ask in asks if not ask.error]
    if not good:
        return _report(asks, args.json)
    model = flags.chosen_model(args)
    settings = flags.fit_rows(flags.engine_settings(args), len(good) * params.n)
    from slotzero.llm import LLM

    llm = LLM(model, **settings)
    if not args.raw and llm.get_tokenizer().chat_template is None:
        raise RequestError("this model has no chat template: give --chat-template, or use --raw")
    checked = [_check(llm, ask, args, params) for ask in asks]
    if args.json or len(asks) > 1 or params.n > 1:
        return _answer_all(llm, checked, params, args)
    return _stream(llm, checked[0], params)


def _params(args: argparse.Namespace) -> SamplingParams:
    params = flags.sampling_params(args)
    if params.logprobs is not None and not args.json:
        raise ConfigError("--logprobs shows in --json only: add it")
    if args.raw and args.system is not None:
        raise ConfigError("--system is part of a chat and --raw is none: drop one")
    if args.raw and "chat_template" in args:
        raise ConfigError("--chat-template is for chats and --raw is none: drop one")
    return params


def _read(args: argparse.Namespace) -> list[Ask]:
    wants_stdin = args.source == STDIN
    if args.source is not None and not wants_stdin:
        raise ConfigError(f"{args.source!r} is no flag: a prompt is given with --prompt TEXT")
    if args.model == STDIN:  # `generate -`: the model was left out
        args.model, wants_stdin = None, True
    given = (bool(args.prompt), args.prompt_file is not None, wants_stdin)
    if sum(given) > 1:
        raise ConfigError("prompts come from one place: --prompt, --prompt-file or standard input")
    if args.prompt:
        return prompts.from_arguments(args.prompt)
    if args.prompt_file is not None:
        return prompts.from_file(args.prompt_file)
    if not wants_stdin and sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe text in")
    return prompts.from_stdin()


def _check(llm: "LLM", ask: Ask, args: argparse.Namespace, params: SamplingParams) -> Ready | Ask:
    """The prompt with its tokens, or the ask with its error."""
    if ask.error:
        return ask
    try:
        prompt = _encode(llm, ask, args.system, args.raw)
        llm.engine.validate("", prompt["prompt_token_ids"], params)
    except RequestError as error:
        return Ask(ask.place, ask.text, ask.messages, str(error))
    return Ready(ask, prompt)


def _encode(llm: "LLM", ask: Ask, system: str | None, raw: bool) -> Any:
    if raw:
        if ask.text is None:
            raise RequestError("messages need the chat template: drop --raw")
        return {"prompt": ask.text, "prompt_token_ids": llm.get_tokenizer().encode(ask.text)}
    messages = list(ask.messages or [{"role": "user", "content": ask.text}])
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat_prompts(messages)[0]


def _stream(llm: "LLM", checked: Ready | Ask, params: SamplingParams) -> int:
    if isinstance(checked, Ask):
        return _report([checked], as_json=False)
    for chunk in llm.stream(checked.prompt, params):
        print(chunk.text, end="", flush=True)
    print()
    return 0


def _answer_all(
    llm: "LLM", checked: Sequence[Ready | Ask], params: SamplingParams, args: argparse.Namespace
) -> int:
    ready = [one.prompt for one in checked if isinstance(one, Ready)]
    code = _report((one for one in checked if isinstance(one, Ask)), as_json=False)
    show_progress = flags.engine_settings(args).get("show_progress", True)
    outputs = iter(llm.generate(ready, params, use_tqdm=show_progress) if ready else ())
    is_first = True
    for one in checked:
        if isinstance(one, Ready):
            output = next(outputs)
            for answer in output.outputs:
                _print_answer(one.ask, output, answer, args.json, is_first)
                is_first = False
        elif args.json:
            _print_json({"prompt": _as_given(one), "error": one.error})
    return code


def _report(asks: Iterable[Ask], as_json: bool) -> int:
    """-> exit code"""
    code = 0
    for ask in asks:
        print_error(f"{ask.place}: {ask.error}" if ask.place else ask.error)
        if as_json:
            _print_json({"prompt": _as_given(ask), "error": ask.error})
        code = outcome_of(RequestError).exit_code
    return code


def _print_answer(
    ask: Ask, output: "RequestOutput", answer: "CompletionOutput", as_json: bool, is_first: bool
) -> None:
    if not as_json:
        print(answer.text if is_first else f"\n{answer.text}")
        return
    entry = {
        "prompt": _as_given(ask),
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
    }
    if answer.logprobs is not None:
        rows = zip(answer.token_ids, answer.logprobs, strict=True)
        entry["logprobs"] = [_logprobs(token, by_id) for token, by_id in rows]
    _print_json(entry)


def _logprobs(token: int, by_id: "dict[int, Logprob]") -> dict[str, Any]:
    top = sorted((e.rank, t) for t, e in by_id.items() if e.rank is not None)
    return _logprob(token, by_id[token]) | {"top": [_logprob(t, by_id[t]) for _, t in top]}


def _logprob(token: int, entry: "Logprob") -> dict[str, Any]:
    value = entry.logprob if math.isfinite(entry.logprob) else None  # JSON has no infinity
    return {"token_id": token, "token": entry.decoded_token, "logprob": value}


def _as_given(ask: Ask) -> Any:
    return ask.messages if ask.messages is not None else ask.text


def _print_json(entry: dict[str, Any]) -> None:
    print(json.dumps(entry, ensure_ascii=False), flush=True)
