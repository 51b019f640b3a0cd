"""A format of tool calls, as data: the parser, the grammar and the writer all read it.

This module knows no format by name (tool_formats.py lists them) and no text.

The rule: a marker is written here with the white space that the model's template writes. The parser
accepts other white space around it, since models vary there.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class JsonArguments:
    """A JSON object."""


@dataclass(frozen=True)
class TagArguments:
    """Parameters between tags. Strings are written as they are, all other values as JSON."""

    opening: str
    middle: str
    closing: str


@dataclass(frozen=True)
class Quote:
    """What a string of a LiteralArguments begins and ends with."""

    mark: str
    has_escapes: bool


@dataclass(frozen=True)
class LiteralArguments:
    """Named values in brackets: Python's keyword arguments, or an object with bare keys."""

    opening: str
    closing: str
    separator: str
    quotes: tuple[Quote, ...]
    """The first one is written; all are read."""
    is_python: bool
    """Whether constants are written True, False and None."""


Arguments = JsonArguments | TagArguments | LiteralArguments


@dataclass(frozen=True)
class ObjectCall:
    """A call as one JSON object with a name and arguments."""

    key: str = "arguments"
    """The key of the arguments, as the template writes it; the parser knows all usual ones."""


@dataclass(frozen=True)
class NamedCall:
    """A call as a name and arguments, between markers."""

    opening: str
    after_name: str
    closing: str
    arguments: Arguments
    name_prefix: str = ""
    """Text before the name that does not belong to it."""
    name_suffix: str = ""
    """Text after the name; {index} stands for the number of the call."""
    id_marker: str = ""
    """Marker of an id that may follow the name."""


@dataclass(frozen=True)
class ToolFormat:
    name: str
    aliases: tuple[str, ...]
    """Names of the same format in vLLM's --tool-call-parser."""
    signs: tuple[str, ...]
    """A chat template that contains one of these texts uses the format."""
    call: ObjectCall | NamedCall
    opening: str = ""
    """What stands before the first call."""
    closing: str = ""
    separator: str = ""
    """What stands between two calls; with `has_many` false, between two pairs of markers."""
    has_many: bool = True
    """Whether several calls may stand between one `opening` and `closing`."""
    is_list: bool = False
    """Whether the calls are in square brackets, separated by commas."""
    is_bare: bool = False
    """Whether calls may begin the answer, or follow other calls, without `opening`. Such a call
    must name a function of the request, or it is text."""

    id_len: int = 0
    """Length of the ids of calls, if the template accepts no other."""

    @property
    def start(self) -> str:
        """The marker by which a call is found in text."""
        if self.opening:
            return self.opening
        return self.call.opening if isinstance(self.call, NamedCall) else ""
