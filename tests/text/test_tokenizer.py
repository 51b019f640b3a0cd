"""Tests of tokenizers, incremental detokenisation, and chat templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotzero.checkpoint.source import open_checkpoint
from slotzero.engine.output_text import OutputText
from slotzero.errors import (
    CorruptCheckpointError,
    RequestError,
    TokenizerMissingError,
    UnsupportedModelError,
)
from slotzero.sampling.params import SamplingParams
from slotzero.text.gguf_tokenizer import gguf_tokenizer
from slotzero.text.tokenizer import Detokenizer, Tokenizer, byte_letters

BYTES = Tokenizer.bytes_tokenizer()
SMOLLM2 = open_checkpoint("smollm2").tokenizer()


def sentence_piece_metadata(**more: Any) -> dict[str, Any]:
    """Return a SentencePiece vocabulary: special tokens, all bytes, letters, and a few pieces."""
    specials = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = list("▁abcdehlorw")
    pieces = ["he", "ll", "▁he", "hell", "▁hell", "lo", "▁w", "or", "▁wor", "ld", "▁world", "ab"]
    tokens = specials + fallback + letters + pieces
    num_normal = len(letters) + len(pieces)
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * num_normal,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


PIECES = Tokenizer.from_gguf(sentence_piece_metadata())
TOKENIZERS = {"bytes": BYTES, "smollm2": SMOLLM2, "pieces": PIECES}

# Ids by transformers from the same file: AutoTokenizer.from_pretrained(gguf_file=...).
FROZEN = [
    ("Hello, world!", [19556, 28, 905, 17]),
    ("The capital of France is", [504, 3575, 282, 4649, 314]),
    ("  two  spaces\n\n\ttab", [216, 827, 216, 5600, 1116, 197, 15999]),
    (
        "don't I'LL we've 12345 3.14",
        [12420, 982, 339, 23, 16421, 392, 3543, 216, 33, 34, 35, 36, 37, 216, 35, 30, 33, 36],
    ),
    ("naïve café — Ünï", [3546, 46494, 37366, 1841, 5549, 246, 94, 25972]),
    ("👩‍👩", [10813, 235, 119, 321, 231, 10813, 235, 119]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("x<|endoftext|>y", [104, 0, 105]),
    ("٣٤ 中文2024年", [164, 113, 164, 114, 216, 28589, 29184, 34, 32, 34, 36, 32090, 129]),
    ("a\r\nb", [81, 201, 198, 82]),
    (" ", [216]),
    ("", []),
]


@pytest.mark.parametrize(("text", "ids"), FROZEN)
def test_the_default_model_has_the_ids_of_transformers(text: str, ids: list[int]) -> None:
    assert SMOLLM2.encode(text) == ids
    assert SMOLLM2.decode(ids, skip_special_tokens=False) == text


def test_smollm_splits_digits_before_spaces() -> None:
    """Here the original tokenizer differs from transformers' version of the GGUF file: the original
    splits off digits first, so the two spaces are one piece (and one token)."""
    assert [SMOLLM2.decode([token]) for token in SMOLLM2.encode("a  1")] == ["a", "  ", "1"]


def test_special_tokens_of_the_default_model() -> None:
    assert (SMOLLM2.vocab_size, SMOLLM2.bos_token_id, SMOLLM2.eos_token_id) == (49152, 1, 2)
    assert SMOLLM2.is_special(2)
    assert not SMOLLM2.is_special(19556)
    assert SMOLLM2.decode([1, 19556, 2]) == "Hello"
    assert SMOLLM2.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"


def test_the_id_of_a_byte_is_the_byte() -> None:
    text = "aé\n\x00中"
    assert BYTES.encode(text) == [256, *text.encode()]
    assert BYTES.encode(text, add_special_tokens=False) == list(text.encode())
    assert BYTES.vocab_size == 259
    assert [BYTES.decode([byte]) for byte in (0, 10, 32, 127)] == ["\x00", "\n", " ", "\x7f"]
    assert (BYTES.bos_token_id, BYTES.eos_token_id) == (256, 257)


def test_half_a_character_in_a_prompt_is_an_error_of_the_request() -> None:
    with pytest.raises(RequestError, match="half a surrogate pair at position 2"):
        SMOLLM2.encode("ab\ud800c")


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


# The default model has no token for these bytes; its vocabulary drops them in every engine.
UNKNOWN_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
KNOWN_TEXT = st.text(
    st.characters(codec="utf-8").filter(lambda char: not UNKNOWN_BYTES & set(char.encode())),
    max_size=80,
)


@pytest.mark.parametrize("name", ["bytes", "smollm2"])
@settings(max_examples=150, deadline=None)
@given(text=KNOWN_TEXT)
def test_any_text_survives_a_stream(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    parts = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip=False)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_stream_to_what_decode_gives(name: str, skip: bool, data: st.DataObject) -> None:
    """Random ids are mostly invalid UTF-8, special tokens and unknown ids."""
    tokenizer = TOKENIZERS[name]
    token = st.integers(0, min(tokenizer.vocab_size + 20, 400))
    run = st.lists(token, max_size=70) | st.lists(st.sampled_from([3, 100, 240, 258]), max_size=70)
    ids = [*data.draw(run), *data.draw(run)]
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def byte_id(name: str, byte: int) -> int:
    if name == "smollm2":
        letter = next(letter for letter, value in byte_letters().items() if value == byte)
        return int(SMOLLM2._backend.token_to_id(letter))
    return byte + 3 if name == "pieces" else byte  # three special tokens come first


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("cycle", ["f09f98", "80", "e4b8", "f09f9880", "c3", "e4b8ad80f0"])
def test_long_junk_streams_to_what_decode_gives(name: str, cycle: str) -> None:
    """Windows begin and end inside characters, and inside bytes that never become one."""
    tokenizer = TOKENIZERS[name]
    ids = [byte_id(name, byte) for byte in bytes.fromhex(cycle) * 60 + b"abc"]
    assert "".join(stream(tokenizer, ids, skip=True)) == tokenizer.decode(ids)


def test_a_character_of_four_tokens_is_returned_whole() -> None:
    assert stream(BYTES, list("a🎉b".encode()), skip=True) == ["a", "", "", "", "🎉", "b", ""]


def test_flush_returns_the_remaining_half_character() -> None:
    assert stream(BYTES, list("a🎉".encode()[:-1]), skip=True)[-1] == "\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", ["\n", "a\n", "\n\n", "中"])
def test_a_stop_string_of_bytes_is_found_with_its_last_one(name: str, stop: str) -> None:
    """A decoder that decodes bytes only at the end of a run would find it a token later, or
    never."""
    before = b"" if stop.startswith("a") else b"a"
    ids = [byte_id(name, byte) for byte in before + stop.encode()]
    output = OutputText(TOKENIZERS[name], SamplingParams(stop=stop), eos_token_ids=())
    for token in ids:
        assert output.stop is None
        output.extend([token], None)
    assert output.stop == stop
    assert output.text == output.take() == before.decode()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_string_of_bytes_before_min_tokens_has_no_effect(name: str) -> None:
    early, later = (byte_id(name, byte) for byte in b"\n!")
    params = SamplingParams(stop="\n", min_tokens=2)
    output = OutputText(TOKENIZERS[name], params, eos_token_ids=())
    output.extend([early, later], None)
    assert output.stop is None
    assert len(output.extend([early, later], None)) == 1  # tokens after a stop string are dropped
    assert (output.stop, output.text) == ("\n", "\n!")


def test_special_tokens_are_hidden_by_default() -> None:
    ids = [256, 97, 257]
    assert stream(BYTES, ids, skip=True) == ["", "a", "", ""]
    assert "".join(stream(BYTES, ids, skip=False)) == "<bos>a<eos>"


def test_the_cost_of_a_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    for ids in (list(b"word " * 400), [0x80] * 2000, [256, 97] * 1000):
        lengths.clear()
        stream(BYTES, ids, skip=True)
        assert max(lengths) <= 25
        assert sum(lengths) < 20 * len(ids)


def test_pieces_merge_by_score_and_fall_back_to_bytes() -> None:
    def texts(text: str) -> list[str]:
        tokens = sentence_piece_metadata()["tokenizer.ggml.tokens"]
        return [tokens[token] for token in PIECES.encode(text)]

    # "he" and "ll" come before "lo", so the word ends in a single "o".
    assert texts("hello world") == ["<s>", "▁hell", "o", "▁world"]
    assert texts("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert texts("ab</s>") == ["<s>", "▁", "ab", "</s>"]
    for text in ("hello world", "é 中🎉 hello", " two  spaces"):
        assert PIECES.decode(PIECES.encode(text)) == text


def test_flags_of_the_file_are_honoured() -> None:
    plain = sentence_piece_metadata(
        **{
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    tokenizer = Tokenizer.from_gguf(plain)
    ids = tokenizer.encode("hello")
    assert [plain["tokenizer.ggml.tokens"][token] for token in ids] == ["hell", "o", "</s>"]
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[:-1]
    assert tokenizer.decode(ids) == "hello"


def byte_level_metadata(pre: str, **more: Any) -> dict[str, Any]:
    tokens = [*byte_letters(), "he", "llo", "hello", "<|bos|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 259 + [3, 4],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 259,
        **more,
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĠI", "'", "LL", "Ċ", "Ċ", "x"]),
        ("gpt-2", ["it", "'s", "Ġ1234", "ĠI", "'", "LL", "Ċ", "Ċ", "x"]),
        ("default", ["it", "'s", "Ġ1234", "ĠI", "'", "LL", "Ċ", "Ċ", "x"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "ĠI", "'LL", "ĊĊ", "x"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĠI", "'LL", "ĊĊ", "x"]),
    ],
)
def test_text_is_split_as_the_file_says(pre: str, pieces: list[str]) -> None:
    backend = gguf_tokenizer(byte_level_metadata(pre))
    cut = backend.pre_tokenizer.pre_tokenize_str("it's 1234 I'LL\n\nx")
    assert [piece for piece, _ in cut] == pieces


def test_other_effects_of_a_pre_tokenizer() -> None:
    llama, gpt2 = (Tokenizer.from_gguf(byte_level_metadata(pre)) for pre in ("llama-bpe", "gpt-2"))
    assert llama.encode("hello") == [259, 258]  # the BOS token, and a word that no merge produces
    assert gpt2.encode("hello")[0] == 256
    assert len(gpt2.encode("hello")) == 4
    qwen = Tokenizer.from_gguf(byte_level_metadata("qwen2"))
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"
    assert gpt2.encode("a<tool>")[-1] == 260
    assert not gpt2.is_special(260)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModelError, "'tekken'"),
        ({"tokenizer.ggml.model": None}, TokenizerMissingError, "no tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, TokenizerMissingError, "token_type"),
    ],
)
def test_other_tokenizers_are_refused_by_name(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(byte_level_metadata("gpt-2", **change))


USER = [{"role": "user", "content": "Hi"}]


def with_template(template: str | None, tool_template: str | None = None) -> Tokenizer:
    return Tokenizer(BYTES._backend, {"bos_token": "<bos>"}, template, tool_template)


def test_the_chat_template_of_the_default_model() -> None:
    """The result equals that of transformers' apply_chat_template on the same file."""
    assert SMOLLM2.apply_chat_template(USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert SMOLLM2.apply_chat_template(USER, add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_templates_get_the_functions_that_hugging_face_documents() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ mood }}{{ tools | length }}"
    )
    text = with_template(template).apply_chat_template(
        [{"role": "user", "content": "<é>"}, {"role": "x"}], tools=[{}, {}], mood="!"
    )
    assert text == '<bos>{"role": "user", "content": "<é>"}4!2'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "rejects these messages"),
        ("{% if %}", "rejects these messages"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_an_error_in_a_template_is_an_error_of_the_request(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        with_template(template).apply_chat_template(USER)
    assert "\n" not in str(caught.value)


def test_a_model_without_template_names_the_way_around() -> None:
    with pytest.raises(RequestError, match="no chat template: send a plain prompt, or pass"):
        with_template(None).apply_chat_template(USER)


def test_the_template_for_tools_is_used_for_tools() -> None:
    tokenizer = with_template("plain", "tools")
    assert tokenizer.apply_chat_template(USER) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "tools"


def write_folder(path: Path, config: dict[str, Any] | None, jinja: str | None = None) -> Path:
    backend = Tokenizer.bytes_tokenizer()._backend
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    backend.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


def test_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "chat_template": "one"}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.encode("hello") == [256, *b"hello"]  # neither truncated nor padded
    assert tokenizer.chat_template == "one"


def test_the_places_of_a_template_in_a_folder(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template(USER) == "two"
    assert tokenizer.apply_chat_template(USER, tools=[{}]) == "three"
    assert Tokenizer.from_folder(write_folder(tmp_path, {}, "file")).chat_template == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).chat_template is None


def test_a_folder_with_a_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissingError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json is broken"):
        Tokenizer.from_folder(tmp_path)
