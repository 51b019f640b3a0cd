"""Parser of gpt-oss's harmony format, in which an answer is a sequence of messages in channels.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT

A header names a channel and may name a recipient: "analysis" is reasoning, a message to
functions.NAME is a tool call, and everything else is text for the reader. The template ends the
prompt with <|start|>assistant, so an answer begins with a header.

The rule: headers are read whole, since models order their parts differently; text and arguments are
emitted as they come.
"""

import re

from slotzero.formats.arguments import Emit, read_json
from slotzero.formats.event_log import EventLog
from slotzero.formats.text_input import Reading, TextInput, overlap

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_MAX_HEADER_LEN = 400
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")


class ChannelParser:
    def __init__(self, source: TextInput, log: EventLog, *, is_single: bool = False) -> None:
        self._source = source
        self._log = log
        self._is_single = is_single

    def run(self) -> Reading[None]:
        while True:
            header = yield from self._source.until(_MESSAGE, _MAX_HEADER_LEN)
            if header is None:
                yield from self._rest()
                return
            yield from self._message(header)
            if self._is_single and self._log.num_calls:
                yield from self._source.drop_rest()
                return
            if not self._source.text and not (yield from self._source.more()):
                return

    def _message(self, header: str) -> Reading[None]:
        log, source = self._log, self._source
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            log.call(recipient.group(1))
            yield from source.space()
            if (yield from source.begins("{")):
                is_whole = yield from read_json(source, log.argue)
                yield from self._content(_drop)
            else:
                is_whole = yield from self._content(log.argue)
            if is_whole:
                log.end_call()
        elif channel is not None and channel.group(1) == "analysis":
            log.begin_thought(source.num_read - len(header) - len(_MESSAGE))
            yield from self._content(log.think)
            log.end_thought(source.num_read)
        else:
            yield from self._content(log.say)

    def _content(self, emit: Emit) -> Reading[bool]:
        """Emit a message up to its end; return False if the text ends before that."""
        source = self._source
        while True:
            ends = [(at, end) for end in _ENDS if (at := source.text.find(end)) >= 0]
            if ends:
                at, end = min(ends)
                emit(source.take(at))
                source.take(0 if end == "<|start|>" else len(end))
                return True
            held = max(overlap(source.text, end) for end in _ENDS)
            emit(source.take(len(source.text) - held))
            if not (yield from source.more()):
                emit(source.take(len(source.text)))
                return False

    def _rest(self) -> Reading[None]:
        """Emit text without a header; a header that is cut off has no text."""
        yield from self._source.space()
        yield from self._content(_drop if self._source.text.startswith("<|") else self._log.say)


def _drop(text: str) -> None:
    pass
