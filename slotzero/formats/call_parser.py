"""Incremental parser of tool calls in the text that a model generates.

This module does not know HTTP or templates, nor a format by name: ToolFormat is data, and one
parser reads them all.

The rule: text and calls are emitted in the order in which they were written, and nothing is lost.
What begins like a call but is none is emitted as text; only white space around calls is dropped.
Arguments are emitted as the model writes them, as soon as the function's name is known.

The result depends on the text alone, not on how it was split, so a stream and a whole reply agree:

- What was emitted as a call stays a call. In a JSON object, an unknown key after the arguments is
  ignored; before them, in a call without a tag, it makes the object text (see call_object.py).
- A call that is cut off by the end of the text is emitted as far as it goes if its name and the
  beginning of its arguments are known, and is text otherwise. It is incomplete, as is a call whose
  arguments are not valid JSON: only an answer whose calls are all complete ends with finish_reason
  "tool_calls".
- Text after a call that is not a call is emitted as text; with `is_single`, everything after the
  first call is dropped.
"""

import re
from collections.abc import Mapping
from typing import Any

from slotzero.formats.arguments import LiteralReader, read_json, read_tags
from slotzero.formats.call_object import CallObject
from slotzero.formats.event_log import EventLog
from slotzero.formats.text_input import SPACE, Reading, TextInput, overlap
from slotzero.formats.tool_format import JsonArguments, NamedCall, TagArguments, ToolFormat
from slotzero.formats.value_types import ParameterTypes

_NAME = re.compile(r"[A-Za-z0-9_.:-]+")
_ID = re.compile(r"[A-Za-z0-9_-]+")
_MAX_NAME_LEN = 128
_INDEX = re.compile(r":\d+$")
_SEPARATORS = SPACE + ";"
Tools = Mapping[str, Mapping[str, Any] | None]
"""The JSON schema of the arguments of each function that may be called."""


class CallParser:
    def __init__(
        self,
        form: ToolFormat,
        tools: Tools,
        source: TextInput,
        log: EventLog,
        *,
        is_single: bool = False,
    ) -> None:
        """A tagged call of a function that is not in `tools` is emitted too."""
        self._form = form
        self._tools = tools
        self._source = source
        self._log = log
        self._is_single = is_single

    def run(self) -> Reading[None]:
        """Read to the end of the text."""
        may_be_bare = self._form.is_bare
        while True:
            is_bare = may_be_bare and (yield from self._bare_call_ahead())
            if not is_bare and not (yield from self._say_text()):
                return
            self._source.mark()
            may_be_bare = (yield from self._section(is_bare)) and self._form.is_bare
            if self._is_single and self._log.num_calls:
                yield from self._source.drop_rest()
                return

    def _bare_call_ahead(self) -> Reading[bool]:
        """Return whether a call without a tag may come next: at the beginning, or after a call."""
        source, chars = self._source, _SEPARATORS if self._log.num_calls else SPACE
        while not (ahead := source.text.lstrip(chars)):
            if not (yield from source.more()):
                if self._log.num_calls:
                    source.take(len(source.text))  # nothing follows the calls
                return False
        return ahead[0] == ("[" if self._form.is_list else "{")

    def _say_text(self) -> Reading[bool]:
        """Emit the text before the next call's opening marker; return False at the end."""
        source, log, start = self._source, self._log, self._form.start.strip()
        while True:
            at = source.text.find(start) if start else -1
            if at >= 0:
                log.say(source.take(at))
                return True
            log.say(source.take(len(source.text) - overlap(source.text, start)))
            if not (yield from source.more()):
                log.say(source.take(len(source.text)))
                return False

    def _section(self, is_bare: bool) -> Reading[bool]:
        """Read calls between one opening and closing marker; return False if none is found there,
        or if the last one breaks off. What is no call is emitted as text."""
        source, form = self._source, self._form
        if not is_bare and form.opening:
            yield from source.skip(form.opening.strip())
        yield from source.space(_SEPARATORS if is_bare else SPACE)
        is_list = form.is_list and (yield from source.skip("["))
        while True:
            if not (yield from self._call(is_bare)):
                return False
            source.mark()
            if self._is_single:
                return True
            if is_list and (yield from source.skip(",")):
                continue
            if is_list or not form.has_many or not (yield from self._call_ahead()):
                break
        if is_list:
            yield from source.skip("]")
        if form.closing:
            yield from self._skip_closing(form.closing.strip())
        source.mark()
        return True

    def _call_ahead(self) -> Reading[bool]:
        """Return whether another call follows within the same markers."""
        opening = self._form.call.opening if isinstance(self._form.call, NamedCall) else ""
        if not opening:
            return False
        yield from self._source.space()
        return (yield from self._source.begins(opening))

    def _skip_closing(self, marker: str) -> Reading[None]:
        """Read a closing marker, or the part of it before the end of the text."""
        source = self._source
        if not (yield from source.skip(marker)) and source.is_over:
            source.take(len(source.text) if marker.startswith(source.text) else 0)

    def _call(self, is_bare: bool) -> Reading[bool]:
        """Read one call, to its end; emit what is no call as text."""
        num_before = self._log.num_calls
        if isinstance(self._form.call, NamedCall):
            is_whole = yield from self._named_call(self._form.call, is_bare)
        else:
            is_whole = yield from self._object_call(is_bare)
        if is_whole:
            self._log.end_call()
        elif self._log.num_calls == num_before:
            self._log.say(self._source.taken)
        return is_whole

    def _object_call(self, is_bare: bool) -> Reading[bool]:
        source, log = self._source, self._log
        yield from source.space()
        if not (yield from source.begins("{")):
            return False
        call = CallObject(self._tools if is_bare or not self._form.opening else None)
        num_argued, is_reported = 0, False
        while True:
            rest = call.feed(source.text)
            source.take(len(source.text) - len(rest))
            if call.is_call:
                if not is_reported:
                    log.call(call.name or "", id_len=self._form.id_len)
                    is_reported = True
                log.argue(call.arguments[num_argued:])
                num_argued = len(call.arguments)
            if call.is_over or call.is_wrong:
                return call.is_call
            if not (yield from source.more()):
                return False

    def _named_call(self, syntax: NamedCall, is_bare: bool) -> Reading[bool]:
        source, log = self._source, self._log
        yield from source.space()
        if not (yield from source.skip(syntax.opening.rstrip())):
            return False
        written = yield from source.word(_NAME, _MAX_NAME_LEN)
        name = _plain_name(written, syntax)
        call_id = written if syntax.name_suffix and written != name else ""
        if not name or not source.text or (is_bare and name not in self._tools):
            return False  # at the end of the text, a name may be cut off
        if syntax.id_marker and (yield from source.begins(syntax.id_marker)):
            yield from source.skip(syntax.id_marker)
            call_id = yield from source.word(_ID, _MAX_NAME_LEN)
        if not (yield from source.skip(syntax.after_name.rstrip())):
            return False
        arguments = syntax.arguments
        if isinstance(arguments, TagArguments):
            log.call(name, call_id, self._form.id_len)
            types = ParameterTypes(self._tools.get(name))
            return (yield from read_tags(source, arguments, syntax.closing, types, log.argue))
        yield from source.space()
        opening = "{" if isinstance(arguments, JsonArguments) else arguments.opening
        if not (yield from source.begins(opening)):
            return False
        log.call(name, call_id, self._form.id_len)
        if isinstance(arguments, JsonArguments):
            is_whole = yield from read_json(source, log.argue)
        else:
            is_whole = yield from LiteralReader(source, arguments, log.argue).read()
        if is_whole and syntax.closing and not self._is_single:
            yield from self._skip_closing(syntax.closing.strip())
        return is_whole


def _plain_name(name: str, syntax: NamedCall) -> str:
    name = name.removeprefix(syntax.name_prefix)
    return _INDEX.sub("", name) if syntax.name_suffix else name
