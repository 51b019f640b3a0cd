"""`slotzero generate`: answers prompts and exits.

The answer to a single prompt is streamed; several prompts are answered together and printed in
order. prompts.py reads prompts, and LLM runs them.

The rule: every prompt is accounted for. A bad prompt gives one error line with its place and a
nonzero exit code, and the others are still answered.
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
from slotzero.cli.prompts import STDIN, PromptInput
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
class EncodedPrompt:
    """A prompt that passed every check, with its tokens."""

    prompt_input: PromptInput
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
        help="a prompt; may be repeated; - reads all of standard input as one prompt",
    )
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="file with one prompt per line, - for standard input; in a .jsonl file each line is "
        '{"prompt": TEXT} or {"messages": [...]}',
    )
    group.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    group.add_argument(
        "--raw", action="store_true", help="continue the prompt as plain text, no chat template"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object per answer")
    flags.add_sampling_flags(made, temperature=0.0, max_tokens=256)
    flags.add_chat_template(made)
    flags.add_engine_flags(made)
    return made


def run(args: argparse.Namespace) -> int:
    params = _params(args)
    inputs = _read(args)
    good = [prompt_input for prompt_input in inputs if not prompt_input.error]
    if not good:
        return _report(inputs, args.json)
    model = flags.chosen_model(args)
    settings = flags.fit_rows(flags.engine_settings(args), len(good) * params.n)
    from slotzero.llm import LLM

    llm = LLM(model, **settings)
    if not args.raw and llm.get_tokenizer().chat_template is None:
        raise RequestError("this model has no chat template: give --chat-template, or use --raw")
    checked = [_check(llm, prompt_input, args, params) for prompt_input in inputs]
    if args.json or len(inputs) > 1 or params.n > 1:
        return _answer_all(llm, checked, params, args)
    return _stream(llm, checked[0], params)


def _params(args: argparse.Namespace) -> SamplingParams:
    params = flags.sampling_params(args)
    if params.logprobs is not None and not args.json:
        raise ConfigError("--logprobs is shown only with --json: add it")
    if args.raw and args.system is not None:
        raise ConfigError("--system needs the chat template and --raw does not use it: drop one")
    if args.raw and "chat_template" in args:
        raise ConfigError("--chat-template has no effect with --raw: drop one")
    return params


def _read(args: argparse.Namespace) -> list[PromptInput]:
    wants_stdin = args.source == STDIN
    if args.source is not None and not wants_stdin:
        raise ConfigError(f"unexpected argument {args.source!r}: give a prompt with --prompt TEXT")
    if args.model == STDIN:  # `generate -`: the model was left out
        args.model, wants_stdin = None, True
    sources = (bool(args.prompt), args.prompt_file is not None, wants_stdin)
    if sum(sources) > 1:
        raise ConfigError("give prompts only once: --prompt, --prompt-file or standard input")
    if args.prompt:
        return prompts.from_arguments(args.prompt)
    if args.prompt_file is not None:
        return prompts.from_file(args.prompt_file)
    if not wants_stdin and sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe text in")
    return prompts.from_stdin()


def _check(
    llm: "LLM", prompt_input: PromptInput, args: argparse.Namespace, params: SamplingParams
) -> EncodedPrompt | PromptInput:
    """Return the prompt with its tokens, or the input with its error."""
    if prompt_input.error:
        return prompt_input
    try:
        prompt = _encode(llm, prompt_input, args.system, args.raw)
        llm.engine.validate("", prompt["prompt_token_ids"], params)
    except RequestError as error:
        return PromptInput(prompt_input.place, prompt_input.text, prompt_input.messages, str(error))
    return EncodedPrompt(prompt_input, prompt)


def _encode(llm: "LLM", prompt_input: PromptInput, system: str | None, raw: bool) -> Any:
    if raw:
        if prompt_input.text is None:
            raise RequestError("messages need the chat template: drop --raw")
        return {
            "prompt": prompt_input.text,
            "prompt_token_ids": llm.get_tokenizer().encode(prompt_input.text),
        }
    messages = list(prompt_input.messages or [{"role": "user", "content": prompt_input.text}])
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return llm.chat_prompts(messages)[0]


def _stream(llm: "LLM", checked: EncodedPrompt | PromptInput, params: SamplingParams) -> int:
    if isinstance(checked, PromptInput):
        return _report([checked], as_json=False)
    for chunk in llm.stream(checked.prompt, params):
        print(chunk.text, end="", flush=True)
    print()
    return 0


def _answer_all(
    llm: "LLM",
    checked: Sequence[EncodedPrompt | PromptInput],
    params: SamplingParams,
    args: argparse.Namespace,
) -> int:
    ready = [one.prompt for one in checked if isinstance(one, EncodedPrompt)]
    code = _report((one for one in checked if isinstance(one, PromptInput)), as_json=False)
    show_progress = flags.engine_settings(args).get("show_progress", True)
    outputs = iter(llm.generate(ready, params, use_tqdm=show_progress) if ready else ())
    is_first = True
    for one in checked:
        if isinstance(one, EncodedPrompt):
            output = next(outputs)
            for answer in output.outputs:
                _print_answer(one.prompt_input, output, answer, args.json, is_first)
                is_first = False
        elif args.json:
            _print_json({"prompt": _as_given(one), "error": one.error})
    return code


def _report(inputs: Iterable[PromptInput], as_json: bool) -> int:
    """Print the errors of these inputs, and return the exit code."""
    code = 0
    for prompt_input in inputs:
        print_error(
            f"{prompt_input.place}: {prompt_input.error}"
            if prompt_input.place
            else prompt_input.error
        )
        if as_json:
            _print_json({"prompt": _as_given(prompt_input), "error": prompt_input.error})
        code = outcome_of(RequestError).exit_code
    return code


def _print_answer(
    prompt_input: PromptInput,
    output: "RequestOutput",
    answer: "CompletionOutput",
    as_json: bool,
    is_first: bool,
) -> None:
    if not as_json:
        print(answer.text if is_first else f"\n{answer.text}")
        return
    entry = {
        "prompt": _as_given(prompt_input),
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


def _as_given(prompt_input: PromptInput) -> Any:
    return prompt_input.messages if prompt_input.messages is not None else prompt_input.text


def _print_json(entry: dict[str, Any]) -> None:
    print(json.dumps(entry, ensure_ascii=False), flush=True)
