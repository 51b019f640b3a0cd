"""Text that arrives in pieces, for parsers that are generators: they yield where it has run out.

This module knows no format. `taken` is what was read since `mark`, so that a parser can say it as
text if it turns out not to be what it seemed.

The rule: a method decides only when further text cannot change the decision, so a parser's result
depends on the text alone, not on how it was split.
"""

import re
from collections.abc import Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A parser, or a part of one: it yields when it needs more text, and returns its result."""

SPACE = " \t\r\n"
_BETWEEN_TAGS = re.compile("(?<=>)(?=<)")


class TextInput:
    def __init__(self) -> None:
        self.text = ""
        """What has arrived and was not read yet."""
        self._taken: list[str] = []
        self.num_read = 0
        """Number of characters that were read so far."""
        self.is_over = False
        """Whether nothing follows `text`."""

    @property
    def taken(self) -> str:
        return "".join(self._taken)

    def mark(self) -> None:
        self._taken.clear()

    def take(self, num_chars: int) -> str:
        taken, self.text = self.text[:num_chars], self.text[num_chars:]
        self._taken.append(taken)
        self.num_read += len(taken)
        return taken

    def more(self) -> Reading[bool]:
        """Wait for more text; return False at its end."""
        num_known = len(self.text)
        while len(self.text) == num_known and not self.is_over:
            yield
        return len(self.text) > num_known

    def space(self, chars: str = SPACE) -> Reading[None]:
        while True:
            self.take(len(self.text) - len(self.text.lstrip(chars)))
            if self.text or not (yield from self.more()):
                return

    def begins(self, marker: str) -> Reading[bool]:
        """Return whether the text begins with the marker."""
        while len(self.text) < len(marker) and marker.startswith(self.text):
            if not (yield from self.more()):
                return False
        return self.text.startswith(marker)

    def skip(self, marker: str) -> Reading[bool]:
        """Read a marker with any white space around it and within it; return False if another text
        follows, of which only white space is read then."""
        words = words_of(marker)
        for i, word in enumerate(words):
            yield from self.space()
            if not (yield from self.begins(word)):
                return False
            self.take(len(word))
            if i == len(words) - 1 and marker[-1] in SPACE:
                yield from self.space()
        return True

    def drop_rest(self) -> Reading[None]:
        while True:
            self.take(len(self.text))
            if not (yield from self.more()):
                return

    def word(self, pattern: re.Pattern[str], max_len: int) -> Reading[str]:
        """Read as many characters of this pattern as follow, but no more than `max_len`."""
        while True:
            found = pattern.match(self.text)
            num = found.end() if found else 0
            if num < len(self.text) or num >= max_len or not (yield from self.more()):
                return self.take(min(num, max_len))

    def until(self, marker: str, max_len: int) -> Reading[str | None]:
        """Read up to the marker and the marker too; return the text before it, or None without
        reading if it does not follow within `max_len` characters."""
        while (at := self.text.find(marker)) < 0:
            if len(self.text) > max_len or not (yield from self.more()):
                return None
        if at > max_len:
            return None
        found = self.take(at)
        self.take(len(marker))
        return found


@cache
def words_of(marker: str) -> tuple[str, ...]:
    """Return the parts of a marker between which a model may write white space."""
    return tuple(_BETWEEN_TAGS.sub(" ", marker).split())


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of the text that is a proper prefix of the marker."""
    return next(
        (n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0
    )
