"""Grammars: which tokens may follow in an answer of a given shape, on the host, by llguidance.

`Grammars` belongs to a model: it compiles what requests ask for and remembers it. A `Grammar` is
one answer's place in one of them. Neither knows slots, steps or torch.

The rule: `allowed` is what the tokens taken so far leave open, so it is known as soon as a token
is, and a request that is computed again after a preemption finds it as it left it.
"""

import functools
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from slotzero.errors import RequestError, SlotzeroError
from slotzero.sampling.structured import Kind, StructuredOutputs
from slotzero.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 256  # compiled grammars
_WORD_BITS = 32
# JSON allows any space between its tokens, and a weak model can write it for ever
_JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_NO_END = "<|no end of sequence|>"


@final
class Grammar:
    """The answer so far, as a state of its grammar; `allowed` is [words] uint32, bit i % 32 of word
    i // 32 for token i."""

    def __init__(self, kind: Kind, start: "_Start", vocabulary: "_Vocabulary") -> None:
        self._kind = kind
        self._start = start
        self._matcher = start.copy()
        self._vocabulary = vocabulary
        self.allowed = start.allowed
        self.failure = ""
        """Why no token can follow one that was allowed: the grammar has become too complex."""

    def advance(self, token: int) -> bool:
        """The answer has one token more. False: it was not allowed, or there is a `failure`."""
        word, bit = divmod(token, _WORD_BITS)
        if not int(self.allowed[word]) >> bit & 1:
            return False
        if self._matcher.consume_token(token):
            self.allowed = self._vocabulary.allowed(self._matcher)
        if self._matcher.is_error():
            self._start.is_spent = True
            self.failure = (
                f"structured_outputs: {self._kind}: the answer cannot go on "
                f"({_line(self._matcher.get_error())}): ask for a simpler one"
            )
        return not self.failure

    def restarted(self) -> "Grammar":
        """The same grammar before its first token."""
        return Grammar(self._kind, self._start, self._vocabulary)

    def can_go_on(self, banned: Collection[int] = ()) -> bool:
        """Whether anything but the end of the sequence and these tokens is allowed."""
        rest = self.allowed & ~self._vocabulary.end
        if banned:
            rest &= ~_words_of(banned, len(rest))
        return bool(rest.any())


class Grammars:
    def __init__(
        self,
        make_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """`vocab_size` is the model's: a mask has one bit for each of its logits."""
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiled = functools.lru_cache(MAX_CACHED)(self._compile)

    def begin(self, asked: StructuredOutputs) -> Grammar:
        """A new answer; raises RequestError where this is no grammar, or none that we can keep."""
        start = self._compiled(asked.kind, asked.text)
        if isinstance(start, str):
            raise RequestError(start)
        return Grammar(asked.kind, start, self._vocabulary)

    def prepare(self) -> None:
        """Builds what the first request would wait for: most of a second for 50,000 tokens."""
        with suppress(SlotzeroError):  # whoever asks for a grammar is told
            _ = self._vocabulary

    @functools.cached_property
    def _vocabulary(self) -> "_Vocabulary":
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                "structured_outputs: llguidance is missing: pip install 'slotzero[server]'"
            ) from None
        backend = Backend.from_str(self._make_tokenizer().to_json())
        ends = [i for i in self._eos_token_ids if backend.id_to_token(i) is not None]
        num_words = -(-self._vocab_size // _WORD_BITS)
        known = _words_of(range(self._vocab_size), num_words)
        if not ends:  # llguidance wants one: add one that the model cannot choose
            backend.add_special_tokens([AddedToken(_NO_END, normalized=False)])
            ends = [backend.get_vocab()[_NO_END]]
            known &= ~_words_of(ends, num_words)
        size = max(self._vocab_size, 1 + max(backend.get_vocab().values()))
        try:
            tokenizer = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise RequestError(
                f"structured_outputs: this model's tokenizer cannot be used ({_line(error)})"
            ) from None
        return _Vocabulary(tokenizer, known, _words_of(ends, num_words))

    def _compile(self, kind: Kind, text: str) -> "_Start | str":
        """-> or why not: to find out may take a second, and is remembered too"""
        vocabulary = self._vocabulary
        from llguidance import LLMatcher, LLParserLimits

        try:
            match kind:
                case "regex":
                    source = LLMatcher.grammar_from_regex(text)
                case "choice":  # as one terminal: as a rule it would be slow, and 2,000 at most
                    texts = " | ".join(json.dumps(choice) for choice in json.loads(text))
                    source = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
                case "json_schema" | "json_object":
                    source = LLMatcher.grammar_from_json_schema(
                        text, defaults={"whitespace_pattern": _JSON_SPACE}
                    )
            limits = LLParserLimits(verbose_errors=False)
            make = functools.partial(
                LLMatcher, vocabulary.tokenizer, source, log_level=0, limits=limits
            )
            matcher = make()
            start = _Start(make, matcher, vocabulary.allowed(matcher))
            wrong = matcher.get_error() or start.trial()
        except ValueError as error:
            wrong = str(error)
        if wrong:
            return f"structured_outputs: {kind}: {_line(wrong)}"
        return start


@dataclass(slots=True)
class _Start:
    """A grammar before its first token; its matcher is copied, never moved."""

    make: Callable[[], "LLMatcher"]
    matcher: "LLMatcher"
    allowed: np.ndarray
    is_spent: bool = False
    """Copies share a lexer, and one of them has brought it to its limits."""

    def copy(self) -> "LLMatcher":
        if self.is_spent:
            self.matcher, self.is_spent = self.make(), False
        return self.matcher.deep_copy()

    def trial(self) -> str:
        """What is wrong after one token: some limits of a grammar show only then."""
        tokens = np.flatnonzero(np.unpackbits(self.allowed.view(np.uint8), bitorder="little"))
        if not len(tokens):
            return "nothing is allowed"
        copy = self.matcher.deep_copy()
        copy.consume_token(int(tokens[0]))
        return copy.get_error()


class _Vocabulary(NamedTuple):
    tokenizer: "LLTokenizer"
    known: np.ndarray  # [words]: the tokens that the model can choose
    end: np.ndarray  # [words]: those that end a sequence

    def allowed(self, matcher: "LLMatcher") -> np.ndarray:
        words = np.zeros(-(-self.tokenizer.vocab_size // _WORD_BITS), np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed: np.ndarray = words[: len(self.known)] & self.known
        return allowed


def _words_of(tokens: Collection[int], num_words: int) -> np.ndarray:
    """Those bits alone, of the tokens that fit."""
    bits = np.zeros(num_words * _WORD_BITS, np.uint8)
    bits[[token for token in tokens if token < len(bits)]] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _line(error: object) -> str:
    """What is wrong, of a message that also draws where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines[:1] == ["NoExtensionBias"]:
        return "no text can match it"
    stated = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return next(stated, lines[0] if lines else "refused")
