"""Tests that a draft model must have the target's tokenizer, or is refused by name at load."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from slotzero import LLM
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.text.tokenizer import Tokenizer, byte_letters

SPECIAL = ("<bos>", "<eos>", "<pad>")
TEXTS = {index: text for text, index in byte_letters().items()}


def make_tokenizer(
    texts: Mapping[int, str] = TEXTS, special: tuple[str, ...] = SPECIAL
) -> Tokenizer:
    backend = Backend(models.BPE(vocab={text: i for i, text in texts.items()}, merges=[]))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return Tokenizer(backend, {}, None)


def write_model(folder: Path, tokenizer: Tokenizer | None, vocab_size: int = 259) -> str:
    folder.mkdir()
    config = {**tiny_configs()["llama"], "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return str(folder)


def load(target: str, draft: str) -> LLM:
    return LLM(
        target, load_format="dummy", speculative="draft", speculative_model=draft, backend="eager",
        skip_tokenizer_init=True, show_progress=False, lazy_recording=True, max_num_seqs=2,
        max_model_len=64, kv_cache_memory=1 << 22,
    )  # fmt: skip


def swapped(one: int, other: int) -> dict[int, str]:
    return TEXTS | {one: TEXTS[other], other: TEXTS[one]}


OTHERS = {
    "text": (make_tokenizer(TEXTS | {7: "new"}), f"token 7 is 'new', the target's {TEXTS[7]!r}"),
    "order": (
        make_tokenizer(swapped(200, 90)),
        f"token 90 is {TEXTS[200]!r}, the target's {TEXTS[90]!r}",
    ),
    "special": (
        make_tokenizer(special=("<bos>", "<end>", "<pad>")),
        "token 257 is '<end>', the target's '<eos>'",
    ),
    "one less": (
        make_tokenizer(special=("<bos>", "<eos>")),
        "token 258 is missing, the target's '<pad>'",
    ),
    "one more": (
        make_tokenizer(special=(*SPECIAL, "<tool>")),
        "token 259 is '<tool>', the target's missing",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_tokenizer_is_refused_by_name(tmp_path: Path, what: str) -> None:
    target = write_model(tmp_path / "target", make_tokenizer(), vocab_size=260)
    tokenizer, message = OTHERS[what]
    draft = write_model(tmp_path / "small", tokenizer, vocab_size=260)
    with pytest.raises(UnsupportedModelError) as caught:
        load(target, draft)
    assert str(caught.value) == (
        f"draft model small: its {message}: "
        "a draft model needs the target's tokenizer; choose one of the same family"
    )


def test_an_equal_tokenizer_from_another_folder_is_accepted(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", Tokenizer.bytes_tokenizer())
    assert load(target, write_model(tmp_path / "small", make_tokenizer())).engine.speculation


def test_without_a_tokenizer_an_equal_vocabulary_size_is_enough(tmp_path: Path) -> None:
    bare, other = (write_model(tmp_path / name, None) for name in ("bare", "other"))
    target = write_model(tmp_path / "target", make_tokenizer())
    for one, draft in ((target, bare), (bare, target), (bare, other)):
        assert load(one, draft).engine.speculation
    draft = write_model(tmp_path / "small", None, vocab_size=97)
    with pytest.raises(UnsupportedModelError, match="draft model small has 97 tokens, the target"):
        load(target, draft)


def test_a_broken_tokenizer_does_not_count_as_missing(tmp_path: Path) -> None:
    target, draft = (write_model(tmp_path / name, make_tokenizer()) for name in ("a", "small"))
    (tmp_path / "small" / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"small/tokenizer\.json is broken"):
        load(target, draft)
