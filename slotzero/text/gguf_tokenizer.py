"""The tokenizer inside a GGUF file: its tokens and merges, converted to a `tokenizers` object.

It does not know chat templates or streaming. Two kinds are supported: byte-level BPE ("gpt2"), and
SentencePiece BPE ("llama"), which stores scores instead of merges; merges are derived from scores.

The rule: an unknown pre-tokenizer (`tokenizer.ggml.pre` in the file) raises an error. A similar one
would give plausible token ids and silently worse answers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from slotzero.errors import TokenizerMissingError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"  # SentencePiece's character for a space
# Contractions, words, numbers (at most {digits} long), punctuation, line ends, spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Create the tokenizer that a GGUF file's metadata describes."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or "tokenizer.ggml.tokens" not in metadata:
        raise TokenizerMissingError(
            "this GGUF file has no tokenizer; use a file that contains its vocabulary"
        )
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata)
    else:
        raise UnsupportedModelError(
            f"GGUF tokenizer model {kind!r} is not implemented; "
            "implemented: gpt2 (byte-level BPE), llama (SentencePiece BPE)"
        )
    tokenizer.add_tokens(_added_tokens(metadata))
    _add_bos_and_eos(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    # A merge is split at its first space after the first character, which may itself be a space.
    cuts = ((merge, merge.index(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ()))
    model = models.BPE(
        vocab={token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])},
        merges=[(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts],
        ignore_merges=pre == "llama-bpe",  # a word that is itself a token is not split
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(
        pre, bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    )
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer(pre: str, space_prefix: bool) -> Any:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=space_prefix, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=space_prefix, use_regex=True)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, gpt2])
    if pre in ("llama-bpe", "qwen2"):
        words = Regex(_WORDS.format(digits="{1,3}" if pre == "llama-bpe" else ""))
        return pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), whole])
    if pre in ("gpt-2", "gpt2", "default"):  # default: files from before the field existed
        return gpt2
    raise UnsupportedModelError(
        f"GGUF metadata tokenizer.ggml.pre={pre!r} is not implemented; "
        "implemented: smollm, llama-bpe, qwen2, gpt-2, default"
    )


def _sentence_piece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise TokenizerMissingError(
            "GGUF metadata tokenizer.ggml.scores is missing; convert the file again"
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges_by_score(tokens, scores, _token_types(metadata)),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_piece = [normalizers.Prepend(_SPACE)] if prefix else []
    to_text = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*to_piece, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *to_text]
    )
    return tokenizer


def _merges_by_score(
    tokens: list[str], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Derive merges from scores.

    SentencePiece joins the two neighbours whose joined piece has the best score. So the merges are
    all splits of a piece into two pieces, in order of the score of the whole piece.
    """
    normal = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}

    def cuts(piece: str) -> Iterator[tuple[int, int, str, str]]:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                yield normal[left], normal[right], left, right

    best_first = sorted(normal, key=lambda piece: -scores[normal[piece]])
    return [(left, right) for piece in best_first for *_, left, right in sorted(cuts(piece))]


def _added_tokens(metadata: Mapping[str, Any]) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(
            metadata["tokenizer.ggml.tokens"], _token_types(metadata), strict=True
        )
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _token_types(metadata: Mapping[str, Any]) -> list[int]:
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * num_tokens)
    if len(types) != num_tokens:
        raise TokenizerMissingError(
            f"GGUF metadata tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} "
            "tokens; convert the file again"
        )
    return types


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    spaced = metadata["tokenizer.ggml.model"] == "llama"
    bos_by_default = spaced or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    defaults = {"bos": bos_by_default, "eos": False}
    used = {
        kind: token_text(metadata, kind)
        for kind, default in defaults.items()
        if metadata.get(f"tokenizer.ggml.add_{kind}_token", default)
    }
    texts = {kind: text for kind, text in used.items() if text is not None}
    if texts:
        parts = [texts.get("bos"), "$A", texts.get("eos")]
        tokenizer.post_processor = TemplateProcessing(
            single=[part for part in parts if part],
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in texts.values()],
        )


def token_text(metadata: Mapping[str, Any], kind: str) -> str | None:
    """Return the text of the file's `bos`, `eos`, `unknown` or `padding` token."""
    index = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None
