"""The text on which accuracy is measured, and its cut into windows of tokens.

The default text is the prose of Python's own documentation, which is part of every installation of
Python. Its words differ between versions of Python.

The rule: every token of the text after the first is predicted once, in exactly one window.
"""

from collections.abc import Sequence
from pathlib import Path

from slotzero.errors import ConfigError
from slotzero.text.tokenizer import Tokenizer

PYTHON_TEXT = "pydoc_data.topics"
_SHORTEST = 200  # characters of a paragraph: shorter ones are often headings and items of lists


def read_text(file: Path | None) -> str:
    if file is None:
        return python_text()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"--text {file}: cannot be read ({why}); give a file of plain text"
        ) from None


def python_text() -> str:
    """Return the prose of Python's documentation: paragraphs of sentences, without code, grammar
    and lists."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            f"this Python has no {PYTHON_TEXT}, the default text: give a file with --text"
        ) from None
    every = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    prose = [" ".join(part.split()) for part in every if _is_prose(part)]
    return "\n\n".join(dict.fromkeys(prose))


def _is_prose(part: str) -> bool:
    is_indented = not part[:1].isalpha() or "\n " in part
    return len(part) >= _SHORTEST and not is_indented and part.rstrip().endswith(".")


def cut(
    tokenizer: Tokenizer, text: str, context: int, max_tokens: int, what: str
) -> list[list[int]]:
    """Cut a text into windows of at most `context` tokens, in which at most `max_tokens` tokens are
    predicted: all but each window's first.

    A window begins with the tokenizer's BOS token, or if it has none with the last token of the
    window before.
    """
    begin = tokenizer.encode("")[:1]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if len(begin) + len(tokens) < context:
        raise ConfigError(
            f"{what}: {len(tokens)} tokens are too few for one window of {context}: give a longer "
            "--text or lower --context"
        )
    return windows(tokens, begin, context, max_tokens)


def windows(
    tokens: Sequence[int], begin: Sequence[int], context: int, max_tokens: int
) -> list[list[int]]:
    stride = context - 1
    shared = 0 if begin else 1  # tokens that a window shares with the one before
    end = min(len(tokens), max_tokens + shared)
    return [
        [*begin, *tokens[start : min(start + stride + shared, end)]]
        for start in range(0, end - shared, stride)
    ]
