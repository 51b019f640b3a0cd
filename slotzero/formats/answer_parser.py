"""Parser of one answer: reasoning, text and tool calls, as the model's formats write them.

This module knows no HTTP. It joins the parsers of the formats, which are generators over one input.

The rule: the result depends on the text alone, not on how it was split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slotzero.formats import reasoning, tool_formats
from slotzero.formats.call_parser import CallParser
from slotzero.formats.channels import ChannelParser
from slotzero.formats.event_log import EventLog
from slotzero.formats.events import Event
from slotzero.formats.reasoning import ReasoningFormat, ReasoningStart, read_reasoning
from slotzero.formats.text_input import Reading, TextInput
from slotzero.formats.tool_format import ToolFormat


@dataclass(frozen=True)
class AnswerFormat:
    """How one answer is written."""

    reasoning: ReasoningFormat | None = None
    start: ReasoningStart = ReasoningStart.AFTER
    calls: ToolFormat | None = None
    """None: the answer's text is not searched for calls."""
    tools: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    """The JSON schema of the arguments of each function."""
    is_single: bool = False
    """Whether the answer ends with its first call."""

    @property
    def has_channels(self) -> bool:
        return reasoning.HARMONY is self.reasoning or tool_formats.HARMONY is self.calls

    @property
    def has_markers(self) -> bool:
        """Whether the text may contain markers, which can be special tokens."""
        return self.calls is not None or self.has_reasoning

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None and self.start is not ReasoningStart.AFTER


class AnswerParser:
    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._source = TextInput()
        self._log = EventLog()
        self._run = self._read()

    def push(self, text: str) -> list[Event]:
        if text:
            self._source.text += text
            self._go_on()
        return self._log.take()

    def close(self) -> list[Event]:
        """End the text, and return the remaining events."""
        self._source.is_over = True
        self._go_on()
        self._log.close()
        return self._log.take()

    @property
    def num_calls(self) -> int:
        return self._log.num_calls

    @property
    def num_done(self) -> int:
        return self._log.num_done

    @property
    def num_whole(self) -> int:
        return self._log.num_whole

    @property
    def thought_spans(self) -> list[tuple[int, int]]:
        """Where the reasoning is in the text, with its markers."""
        return self._log.thought_spans

    def _go_on(self) -> None:
        next(self._run, None)

    def _read(self) -> Reading[None]:
        form, source, log = self._form, self._source, self._log
        if form.has_channels:
            yield from ChannelParser(source, log, is_single=form.is_single).run()
            return
        if form.reasoning is not None:
            yield from read_reasoning(form.reasoning, form.start, source, log)
        if form.calls is not None:
            parser = CallParser(form.calls, form.tools, source, log, is_single=form.is_single)
            yield from parser.run()
            return
        while True:
            log.say(source.take(len(source.text)))
            if not (yield from source.more()):
                return
