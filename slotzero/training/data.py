"""Training text, written by the target itself, so that no dataset is needed.

A model that gets only the beginning of a user's turn writes a user message (Magpie); then it
answers it. This module uses the engine only as an `LLM`, and knows no hidden states.

The rule: all work per token is the engine's; here is only work per sequence.
"""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slotzero.errors import ConfigError, UnsupportedModelError
from slotzero.sampling.params import SamplingParams
from slotzero.system.progress import prompts_bar
from slotzero.training.samples import MIN_LEN

if TYPE_CHECKING:
    from slotzero.llm import LLM
    from slotzero.text.tokenizer import Tokenizer

_MARK = "SLOTZEROMARK"
_MAX_GROUP = 2048  # `generate` goes through all of its answers in each step


class Answered(NamedTuple):
    tokens: list[int]  # the prompt, then the answer
    first: int  # index of the answer's first token


def self_prompts(
    llm: "LLM",
    num: int,
    seed: int = 0,
    *,
    top_p: float = 1.0,
    max_tokens: int = 256,
    show_progress: bool = True,
) -> list[list[int]]:
    """Return distinct prompts, each a user message in the chat template; without a template,
    random tokens."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        return _random_prompts(llm, num, seed)
    beginning, stop_ids, end = _user_turn(tokenizer)
    max_tokens = min(max_tokens, max(llm.engine.limits.max_model_len // 8, 1))
    prompts: dict[str, list[int]] = {}
    num_asked = 0
    with prompts_bar(show_progress, num) as progress:
        while (missing := num - len(prompts)) > 0:
            params = SamplingParams(
                n=min(missing, _MAX_GROUP),
                seed=seed + num_asked,
                top_p=top_p,
                stop_token_ids=stop_ids,
                max_tokens=max_tokens,
                detokenize=False,
            )
            (output,) = llm.generate(beginning, params, use_tqdm=False)
            num_asked += params.n
            for answer in output.outputs:
                text = tokenizer.decode(answer.token_ids).split(end)[0].strip()
                if text and text not in prompts and (tokens := _rendered(llm, text)):
                    prompts[text] = tokens
            num_new = len(prompts) - (num - missing)
            if num_new == 0:
                raise ConfigError(
                    f"the model wrote {len(prompts)} different user messages in {num_asked} "
                    f"tries: ask for fewer than {num}"
                )
            progress(num_new, sum(len(answer.token_ids) for answer in output.outputs))
    return list(prompts.values())


def answers(
    llm: "LLM",
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    *,
    seed: int = 0,
    show_progress: bool = True,
) -> list[Answered]:
    """Return one answer per prompt; the temperatures are used in turn, so (0.0,) is greedy."""
    made: list[Answered] = []
    params = [
        SamplingParams(temperature=t, seed=seed + i, max_tokens=max_tokens, detokenize=False)
        for i, t in zip(range(len(prompts)), itertools.cycle(temperatures), strict=False)
    ]
    with prompts_bar(show_progress, len(prompts)) as progress:
        for start in range(0, len(prompts), _MAX_GROUP):
            group = slice(start, start + _MAX_GROUP)
            outputs = llm.generate(prompts[group], params[group], use_tqdm=False)
            for output in outputs:
                prompt = output.prompt_token_ids
                made.append(Answered(prompt + output.outputs[0].token_ids, len(prompt)))
            progress(len(outputs), sum(len(o.outputs[0].token_ids) for o in outputs))
    return made


def write_text(file: Path, written: Sequence[Answered], held_out: Sequence[Answered]) -> None:
    """Write one JSON object per line."""
    with file.open("w", encoding="utf-8") as lines:
        for is_held_out, answered in ((False, written), (True, held_out)):
            for tokens, first in answered:
                line = {"tokens": tokens, "first": first, "held_out": is_held_out}
                lines.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_text(file: Path, vocab_size: int) -> tuple[list[Answered], list[Answered]]:
    """Read what write_text wrote; raises ConfigError if a line is not an answer."""
    answered: dict[bool, list[Answered]] = {False: [], True: []}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                stored = json.loads(line)
                one = Answered([int(token) for token in stored["tokens"]], int(stored["first"]))
                answered[bool(stored["held_out"])].append(one)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}, line {number}: not an answer: {error!r}") from None
            if not 1 <= one.first < len(one.tokens):
                raise ConfigError(
                    f"{file}, line {number}: first is {one.first} of {len(one.tokens)} tokens"
                )
            bad = next((token for token in one.tokens if not 0 <= token < vocab_size), None)
            if bad is not None:
                raise ConfigError(
                    f"{file}, line {number}: token id {bad} is not in the vocabulary of "
                    f"{vocab_size}: it is of another model"
                )
    return answered[False], answered[True]


def cut(answered: Sequence[Answered], most: int) -> list[Answered]:
    """Cut sequences to their first `most` tokens, and drop those without an answer then."""
    short = (Answered(tokens[:most], first) for tokens, first in answered)
    return [one for one in short if len(one.tokens) > max(one.first, MIN_LEN - 1)]


def frequent_ids(sequences: Sequence[Answered], size: int) -> Tensor:
    """Return a draft vocabulary of the answers' most frequent tokens as d2t: [size] int64.

    Draft indices are in the order of token ids. If answers have fewer distinct tokens, the lowest
    unused ids fill it up.
    """
    if size < 1 or not sequences:
        raise ConfigError(f"a draft vocabulary of {size} from {len(sequences)} sequences is empty")
    flat = torch.tensor([t for tokens, first in sequences for t in tokens[first:]])
    counts = torch.bincount(flat, minlength=size)
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    return ids - torch.arange(size)


def _user_turn(tokenizer: "Tokenizer") -> tuple[list[int], list[int], str]:
    """Return the tokens before a user message, and the token ids and the text that end it."""
    message = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=False)
    before, mark, after = text.partition(_MARK)
    if not mark or not before:
        raise UnsupportedModelError(
            "the chat template does not mark the beginning of a user's turn"
        )
    specials = filter(tokenizer.is_special, tokenizer.encode(after, add_special_tokens=False))
    # if the end is plain text, the message is cut there afterwards
    return (
        tokenizer.encode(before, add_special_tokens=False),
        list(itertools.islice(specials, 1)),
        after.strip() or _MARK,
    )


def _rendered(llm: "LLM", text: str) -> list[int] | None:
    """Return the rendered prompt, or None if it leaves less than half of the context for an
    answer."""
    prompt: Any
    (prompt,) = llm.chat_prompts([{"role": "user", "content": text}])
    tokens: list[int] = prompt["prompt_token_ids"]
    return tokens if len(tokens) <= llm.engine.limits.max_model_len // 2 else None


def _random_prompts(llm: "LLM", num: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    vocab_size, longest = llm.engine.worker.vocab_size, llm.engine.limits.max_model_len // 2
    lengths = (min(rng.randint(4, 32), longest) for _ in range(num))
    return [rng.choices(range(vocab_size), k=length) for length in lengths]
