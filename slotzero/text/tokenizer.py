"""The tokenizer: conversion of text to token ids and back, and the model's chat template.

It does not know models or requests. It does not import torch, so that a command that only counts
tokens starts quickly.

The rule: text from a chat template contains its special tokens already, so it is encoded with
`add_special_tokens=False`; other text is encoded with `add_special_tokens=True`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from slotzero.errors import CorruptCheckpointError, RequestError, TokenizerMissingError
from slotzero.system.json_file import read_json_if_there
from slotzero.text.chat_template import NOT_BOTH, render_chat, render_unfinished
from slotzero.text.gguf_tokenizer import gguf_tokenizer, token_text

SPECIAL_KINDS = ("bos_token", "eos_token", "unk_token", "pad_token")
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoders return it for an incomplete character
_CONTEXT_LEN = 8
_MAX_WINDOW_LEN = 24
_BYTES_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@final
class Tokenizer:
    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` package.

        `special_tokens` are the texts of `bos_token`, `eos_token` and so on, which templates can
        use. `tool_template` replaces `chat_template` for requests with tools.
        """
        backend.no_truncation()  # some files contain the limits of a training run
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self._tool_template = tool_template
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self._special_texts: dict[str, int] = {
            token.content: index
            for index, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special_ids = frozenset(self._special_texts.values())
        by_length = sorted(self._special_texts, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, by_length)))
        self.byte_ids = _fallback_byte_ids(backend)

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerMissingError(
                f"{file} is missing; download it, or write it with AutoTokenizer.save_pretrained"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise CorruptCheckpointError(f"{file} is broken ({error}); download it again") from None
        config = read_json_if_there(path / "tokenizer_config.json")
        templates = _folder_templates(path, config)
        return cls(
            backend,
            {kind: text for kind in SPECIAL_KINDS if (text := _content(config.get(kind)))},
            templates.get("default"),
            templates.get("tool_use"),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        backend = gguf_tokenizer(metadata)
        kinds = zip(SPECIAL_KINDS, ("bos", "eos", "unknown", "padding"), strict=True)
        return cls(
            backend,
            {kind: text for kind, key in kinds if (text := token_text(metadata, key))},
            metadata.get("tokenizer.chat_template"),
            metadata.get("tokenizer.chat_template.tool_use"),
        )

    @classmethod
    def bytes_tokenizer(cls) -> "Tokenizer":
        """Create a tokenizer with one token per byte, whose id is the byte.

        Further tokens are <bos> (256), <eos> (257) and <pad> (258).
        """
        backend = Backend(models.BPE(vocab=byte_letters(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [AddedToken(text, normalized=False) for text in ("<bos>", "<eos>", "<pad>")]
        )
        backend.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 256)]
        )
        special_tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        return cls(backend, special_tokens, _BYTES_TEMPLATE)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode("utf-8")  # JSON may contain half of a surrogate pair, which is not text
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt has half a surrogate pair at position {error.start}; "
                "send valid Unicode"
            ) from None
        # A batch of one: encode_batch lets other threads run, and a long text takes a second.
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the conversation as text; other keyword arguments are passed to the template.

        With `continue_final_message` the text ends where the last message ends, so that the model
        continues this message instead of beginning a new one. `template` replaces the model's.
        """
        if tokenize:
            raise RequestError(
                "tokenize=True is not supported: encode the returned text with "
                "add_special_tokens=False"
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(f"continue_final_message: {NOT_BOTH}")
        template = template or (self.tool_template if tools else self.chat_template)
        if template is None:
            raise RequestError(
                "this model has no chat template: send a plain prompt, or pass a template with "
                "--chat-template"
            )
        variables = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        render = render_unfinished if continue_final_message else render_chat
        return render(template, {**self.special_tokens, **variables, **kwargs})

    def set_chat_template(self, template: str) -> None:
        """Use this template for all requests, including those with tools."""
        self.chat_template, self._tool_template = template, None

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    @property
    def tool_template(self) -> str | None:
        """The template for requests with tools."""
        return self._tool_template or self.chat_template

    def first_difference(
        self, other: "Tokenizer", num_ids: int
    ) -> tuple[int, str | None, str | None] | None:
        """Return the first id below `num_ids` whose text differs between the tokenizers, or None.

        The result is (id, text here, text in `other`); a text is None if the id is not a token.
        """
        for index in range(num_ids):
            text, other_text = self._backend.id_to_token(index), other._backend.id_to_token(index)
            if text != other_text:
                return index, text, other_text
        return None

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it; empty if it has none."""
        return [self._backend.id_to_token(index) or "" for index in ids]

    def special_pieces(self, text: str) -> list[str | int]:
        """Split text into the ids of special tokens and the plain text between them."""
        pieces: list[str | int] = []
        at = 0
        for found in self._special_pattern.finditer(text) if self._special_texts else ():
            pieces += [text[at : found.start()], self._special_texts[found.group()]]
            at = found.end()
        return [piece for piece in (*pieces, text[at:]) if piece != ""]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether a token has text.

        A model can have more vocabulary rows than its tokenizer has tokens; those have no text.
        """
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None

    def _special_id(self, kind: str) -> int | None:
        text = self.special_tokens.get(kind)
        index: int | None = self._backend.token_to_id(text) if text is not None else None
        return index


@final
class Detokenizer:
    """Incremental detokenizer: converts token ids to text as they arrive. Call `flush` at the end.

    The rule: the results of all calls of `push` and of `flush`, concatenated, equal `decode` of all
    ids, and no result of `push` ends in the middle of a character.

    Decoding all tokens each time would take longer with each token, so only a window of the latest
    tokens is decoded: [context, whose text was returned before][new tokens]. The context is needed
    because decoders look back: the first word loses its space, and a character may span tokens. The
    context is long enough: UTF-8 resynchronises after four bytes, and every token has at least one.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_returned = 0  # number of first characters of the window's text already returned

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is final now."""
        if not self._tokenizer.has_text(token_id, skip_special_tokens=self._skip):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""  # a later byte can change how the bytes before it are decoded
        text = self._decode()
        num_final = len(text) - text.endswith(_INCOMPLETE)
        new = text[self._num_returned : num_final]
        self._num_returned = num_final
        if len(self._window) > _MAX_WINDOW_LEN:
            self._slide(num_held=len(text) - num_final)
        return new

    def held(self) -> str:
        """Return the text of the bytes held back, as if no more bytes followed."""
        if not self._window or self._window[-1] not in self._tokenizer.byte_ids:
            return ""
        return self._decode()[self._num_returned :]

    def flush(self) -> str:
        """Return the remaining text, and reset."""
        rest = self._decode()[self._num_returned :]
        self._window, self._num_returned = [], 0
        return rest

    def _slide(self, num_held: int) -> None:
        self._window = self._window[-_CONTEXT_LEN:]
        self._num_returned = len(self._decode()) - num_held

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)


def _content(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json: a string, or an object with a string."""
    return token.get("content") if isinstance(token, dict) else token


def _folder_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a folder by name.

    They are in a file, or in the config: one template, or a list of named templates.
    """
    file = path / "chat_template.jinja"
    stored = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored}
    return {"default": stored} if stored else {}


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of byte-level BPE.

    A printable byte is represented by itself, any other by a letter with a code from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def _fallback_byte_ids(backend: Backend) -> frozenset[int]:
    """Return the ids of <0x00> to <0xFF> if the decoder treats them as bytes (SentencePiece)."""
    found = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    letter = found[ord("A")]
    if letter is None or backend.decode([letter]) != "A":
        return frozenset()
    return frozenset(index for index in found.values() if index is not None)
