"""Compiled grammars of llguidance, and the state of the answers that follow them.

This code runs in worker processes only (worker.py). It does not know requests, or limits of time
and memory: if a call takes minutes or gigabytes, the process is killed.

The rule: an answer fails only because of its own tokens. Answers with the same grammar share a
lexer, which grows. When it reaches a limit, the answer is computed again with its own lexer.
"""

import functools
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slotzero.formats.lark import JSON_SPACE
from slotzero.sampling.structured import Kind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORD_BITS = 32
_NO_END = "<|no end of sequence|>"
_IN_LARK = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
"""Where a schema is in a grammar that Slotzero has written around it."""


class GrammarVocabulary(NamedTuple):
    tokenizer: "LLTokenizer"
    known: int
    """Bit i is set if the model can choose token i."""
    num_bytes: int
    """Length of a mask: one bit for each of the model's logits, in whole words."""
    ends: list[int]
    """Tokens that end a sequence."""


def load_vocabulary(
    tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarVocabulary:
    """Build llguidance's view of a tokenizer; raise ValueError if it cannot be used.

    `vocab_size` is the number of the model's logits.
    """
    from llguidance import LLTokenizer
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer_json)
    ends = [i for i in eos_token_ids if backend.id_to_token(i) is not None]
    known = (1 << vocab_size) - 1
    if not ends:  # llguidance needs one, so add one that the model cannot choose
        backend.add_special_tokens([AddedToken(_NO_END, normalized=False)])
        ends = [backend.get_vocab()[_NO_END]]
        known &= ~(1 << ends[0])
    size = max(vocab_size, 1 + max(backend.get_vocab().values()))
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
    return GrammarVocabulary(tokenizer, known, -(-vocab_size // WORD_BITS) * WORD_BITS // 8, ends)


@dataclass(slots=True)
class _FollowedAnswer:
    matcher: "LLMatcher"
    tokens: list[int] = field(default_factory=list)


class CompiledGrammar:
    def __init__(self, vocabulary: GrammarVocabulary, kind: Kind, text: str) -> None:
        """Compile a grammar; raise ValueError with a message of one line if it is invalid."""
        self._vocabulary = vocabulary
        self._make = _compiler(vocabulary, kind, text)
        self._matcher: LLMatcher | None = self._make()
        self._num_sharing = 0
        self._answers: dict[int, _FollowedAnswer] = {}
        self.first_mask = self._mask(self._matcher)
        """Mask of the first token of an answer: bit i % 8 of byte i // 8 for token i."""
        wrong = self._matcher.get_error() or self._trial()
        if wrong:
            raise ValueError(first_line(wrong))

    def follow(self, number: int, tokens: Sequence[int]) -> bytes:
        """Append tokens to an answer, and return the mask of the next token.

        The first call with a number begins an answer. Raise ValueError if the grammar becomes too
        complex.
        """
        answer = self._answers.get(number)
        if answer is None:
            answer = self._answers[number] = _FollowedAnswer(self._copy())
        answer.tokens += tokens
        mask, wrong = self._advance(answer.matcher, tokens)
        if wrong and self._num_sharing > 1:
            self._matcher, self._num_sharing = None, 0
            answer.matcher = self._copy()
            mask, wrong = self._advance(answer.matcher, answer.tokens)
        if wrong:
            self._matcher, self._num_sharing = None, 0  # its lexer has reached a limit
            raise ValueError(first_line(wrong))
        return mask

    def end(self, number: int) -> None:
        self._answers.pop(number, None)

    def _copy(self) -> "LLMatcher":
        if self._matcher is None:
            self._matcher = self._make()
        self._num_sharing += 1
        return self._matcher.deep_copy()

    def _advance(self, matcher: "LLMatcher", tokens: Sequence[int]) -> tuple[bytes, str]:
        """Return the mask after these tokens, and an error message, empty if there is no error."""
        if not matcher.consume_tokens(list(tokens)):
            return b"", matcher.get_error()
        return self._mask(matcher), matcher.get_error()

    def _mask(self, matcher: "LLMatcher") -> bytes:
        known, num_bytes = self._vocabulary.known, self._vocabulary.num_bytes
        allowed = int.from_bytes(matcher.compute_bitmask(), "little") & known
        return allowed.to_bytes(num_bytes, "little")

    def _trial(self) -> str:
        """Try one token, because some limits are checked only then; return the error or empty."""
        allowed = int.from_bytes(self.first_mask, "little")
        if not allowed:
            return "it allows no token"
        assert self._matcher is not None
        copy = self._matcher.deep_copy()
        copy.consume_token((allowed & -allowed).bit_length() - 1)
        return copy.get_error()


def first_line(error: object) -> str:
    """Return the cause from a message that also shows the position of the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines[:1] == ["NoExtensionBias"]:
        return "no text can match it"
    stated = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return _IN_LARK.sub("", next(stated, lines[0] if lines else "refused"))


def mask_of(tokens: Collection[int], num_bytes: int) -> bytes:
    """Return the mask of these tokens; tokens that do not fit into it are ignored."""
    bits = 0
    for token in tokens:
        if token < num_bytes * 8:
            bits |= 1 << token
    return bits.to_bytes(num_bytes, "little")


def _compiler(vocabulary: GrammarVocabulary, kind: Kind, text: str) -> Callable[[], "LLMatcher"]:
    from llguidance import LLMatcher, LLParserLimits

    try:
        match kind:
            case "regex":
                source = LLMatcher.grammar_from_regex(text)
            case "choice":  # a terminal, because a rule would be slow, and limited to 2,000 texts
                texts = " | ".join(json.dumps(choice) for choice in json.loads(text))
                source = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
            case "json_schema" | "json_object":
                source = LLMatcher.grammar_from_json_schema(
                    text, defaults={"whitespace_pattern": JSON_SPACE}
                )
            case "grammar":
                source = LLMatcher.grammar_from_lark(_lark(text))
    except ValueError as error:
        raise ValueError(first_line(error)) from None
    limits = LLParserLimits(verbose_errors=False)
    return functools.partial(LLMatcher, vocabulary.tokenizer, source, log_level=0, limits=limits)


def _lark(text: str) -> str:
    """Return a grammar in Lark, converted from EBNF if it is written in that."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except ValueError:
        raise
    except Exception as error:  # the converter raises plain exceptions
        raise ValueError(f"not a grammar in Lark or EBNF: {error}") from None
