"""The formats of reasoning, how a model's format follows from its chat template, and its parser.

This module knows neither tools nor HTTP. Whether an answer begins within the reasoning follows from
the prompt, which the template has ended with the opening marker, with both markers (reasoning is
off), or with neither: then the model may begin its answer with the opening marker.

The rule: nothing is guessed from the answer. An answer whose reasoning never ends is all reasoning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from slotzero.formats.event_log import EventLog
from slotzero.formats.text_input import SPACE, Reading, TextInput, overlap


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    aliases: tuple[str, ...]
    """Names in vLLM's --reasoning-parser of models that use this format."""
    signs: tuple[str, ...]
    """A chat template that contains one of these texts uses the format."""
    opening: str
    closing: str
    answer_opening: str = ""
    """A marker between the reasoning and the answer, for grammars."""
    is_implied: bool = False
    """Whether an answer begins within the reasoning even if no opening marker is there."""


THINK = ReasoningFormat(
    name="think",
    aliases=(
        "qwen3", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3", "ernie45",
        "hunyuan_a13b", "granite",
    ),
    signs=("<think>", "</think>"),
    opening="<think>\n",
    closing="\n</think>\n\n",
)  # fmt: skip
DEEPSEEK_R1 = ReasoningFormat(
    name="deepseek_r1",
    aliases=(),
    signs=(),  # the template is that of THINK: only --reasoning-parser chooses it
    opening="<think>\n",
    closing="\n</think>\n\n",
    is_implied=True,
)
SEED_OSS = ReasoningFormat(
    name="seed_oss",
    aliases=(),
    signs=("<seed:think>",),
    opening="<seed:think>",
    closing="</seed:think>",
)
MISTRAL = ReasoningFormat(
    name="mistral", aliases=("magistral",), signs=("[THINK]",), opening="[THINK]",
    closing="[/THINK]",
)  # fmt: skip
GEMMA4 = ReasoningFormat(
    name="gemma4",
    aliases=(),
    signs=("<|channel>thought",),
    opening="<|channel>thought\n",
    closing="<channel|>",
)
HARMONY = ReasoningFormat(  # channels.py parses it
    name="harmony",
    aliases=("openai_gptoss", "gptoss"),
    signs=("<|channel|>",),
    opening="<|channel|>analysis<|message|>",
    closing="<|end|><|start|>assistant",
    answer_opening="<|channel|>final<|message|>",
)
REASONING_FORMATS = (HARMONY, GEMMA4, MISTRAL, SEED_OSS, THINK, DEEPSEEK_R1)
REASONING_NAMES: Mapping[str, ReasoningFormat] = {
    name: form for form in REASONING_FORMATS for name in (form.name, *form.aliases)
}
"""Formats by all names that --reasoning-parser accepts."""


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    return next(
        (form for form in REASONING_FORMATS if any(s in template for s in form.signs)), None
    )


class ReasoningStart(Enum):
    """Where an answer begins."""

    WITHIN = "within the reasoning"
    BEFORE = "before the reasoning, if there is any"
    AFTER = "after the reasoning, or reasoning is off"


def start_of(form: ReasoningFormat, prompt: str) -> ReasoningStart:
    """Return where the answer to this rendered prompt begins."""
    if form.answer_opening:
        return ReasoningStart.BEFORE  # every message names its channel
    end = prompt[-200:].rstrip(SPACE)
    if end.endswith(form.opening.strip()):
        return ReasoningStart.WITHIN
    if end.endswith(form.closing.strip()):
        return ReasoningStart.AFTER
    return ReasoningStart.WITHIN if form.is_implied else ReasoningStart.BEFORE


def read_reasoning(
    form: ReasoningFormat, start: ReasoningStart, source: TextInput, log: EventLog
) -> Reading[None]:
    """Read the reasoning at the beginning of an answer, if there is any."""
    if start is ReasoningStart.AFTER:
        return
    opening, closing = form.opening.strip(), form.closing.strip()
    # a model may repeat the marker that ends its prompt
    is_open = yield from _marker_ahead(source, opening)
    if not is_open and start is ReasoningStart.BEFORE:
        return
    log.begin_thought(0)
    while (at := source.text.find(closing)) < 0:
        log.think(source.take(len(source.text) - overlap(source.text, closing)))
        if not (yield from source.more()):
            log.think(source.take(len(source.text)))
            log.end_thought(source.num_read)
            return
    log.think(source.take(at))
    source.take(len(closing))
    log.end_thought(source.num_read)


def _marker_ahead(source: TextInput, marker: str) -> Reading[bool]:
    """Read the marker and the white space before it, if it comes next; else read nothing."""
    while True:
        ahead = source.text.lstrip(SPACE)
        if len(ahead) >= len(marker) or not marker.startswith(ahead):
            break
        if not (yield from source.more()):
            break
    if not ahead.startswith(marker):
        return False
    source.take(len(source.text) - len(ahead) + len(marker))
    return True
