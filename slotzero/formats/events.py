"""What an answer consists of, in the order in which the model wrote it.

Arguments are JSON text: all parts of one call together are one object, if the call is complete.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """A part of the reasoning."""

    text: str


@dataclass(frozen=True)
class Said:
    """A part of the text for the reader."""

    text: str


@dataclass(frozen=True)
class Called:
    """The beginning of a tool call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Argued:
    """A further part of a call's arguments."""

    index: int
    text: str


Event = Thought | Said | Called | Argued
