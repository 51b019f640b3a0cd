"""Tests of reasoning: found from prompts, parsed in random pieces, in every format."""

import pytest
from call_texts import as_values, parsed, pieces_of
from hypothesis import given, settings
from hypothesis import strategies as st

from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.reasoning import (
    DEEPSEEK_R1,
    HARMONY,
    REASONING_FORMATS,
    REASONING_NAMES,
    THINK,
    ReasoningFormat,
    ReasoningStart,
    reasoning_format_of,
    start_of,
)
from slotzero.formats.tool_formats import HERMES, TOOL_FORMAT_NAMES
from slotzero.formats.written_calls import WrittenCall, written_calls

TAGGED = [pytest.param(f, id=f.name) for f in REASONING_FORMATS if f is not HARMONY]
TEXTS = st.one_of(st.text(max_size=30), st.sampled_from(["<", "</th", "[/", "\n\n", "a </b> c"]))


@pytest.mark.parametrize("form", TAGGED)
@settings(max_examples=20, deadline=None)
@given(thought=TEXTS, said=TEXTS, start=st.sampled_from(list(ReasoningStart)), data=st.data())
def test_reasoning_is_parted_from_the_answer(
    form: ReasoningFormat, thought: str, said: str, start: ReasoningStart, data: st.DataObject
) -> None:
    opening = form.opening if start is ReasoningStart.BEFORE else ""
    text = said if start is ReasoningStart.AFTER else f"{opening}{thought}{form.closing}{said}"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    found = parsed(AnswerFormat(reasoning=form, start=start), pieces_of(text, cuts))
    assert found == parsed(AnswerFormat(reasoning=form, start=start), [text])
    if start is ReasoningStart.AFTER:
        assert (found.thought, found.said) == ("", said)
    else:
        assert found.thought == thought.strip(" \t\r\n")
        assert found.said.strip(" \t\r\n") == said.strip(" \t\r\n")


def test_an_answer_without_reasoning_is_text() -> None:
    for text in ("Hello", " <thin", "<b>", "", "  Hi "):
        found = parsed(AnswerFormat(reasoning=THINK, start=ReasoningStart.BEFORE), list(text))
        assert (found.thought, found.said) == ("", text)


def test_reasoning_that_breaks_off_has_no_answer() -> None:
    for text in ("<think>Hm, so", "<think>Hm, so</thi", "<think>Hm, so</think>"):
        found = parsed(AnswerFormat(reasoning=THINK, start=ReasoningStart.BEFORE), list(text))
        assert found.thought.startswith("Hm, so")
        assert found.said == ""


def test_a_prompt_shows_where_the_answer_begins() -> None:
    assert start_of(THINK, "<|im_start|>assistant\n<think>\n") is ReasoningStart.WITHIN
    assert start_of(THINK, "assistant\n<think>\n\n</think>\n\n") is ReasoningStart.AFTER
    assert start_of(THINK, "<|im_start|>assistant\n") is ReasoningStart.BEFORE
    assert start_of(DEEPSEEK_R1, "<|im_start|>assistant\n") is ReasoningStart.WITHIN
    assert start_of(DEEPSEEK_R1, "assistant<think></think>") is ReasoningStart.AFTER


def test_a_template_shows_the_format() -> None:
    for name, sign in (
        ("think", "{{ '<think>\\n' }}"),
        ("mistral", "[THINK]"),
        ("gemma4", "<|channel>thought\n<channel|>"),
        ("harmony", "<|channel|>analysis<|message|>"),
        ("seed_oss", "<seed:think>"),
    ):
        found = reasoning_format_of(f"{{{{ messages }}}} {sign}")
        assert found is REASONING_NAMES[name]
    assert reasoning_format_of("{{ messages }}") is None


def test_calls_follow_reasoning() -> None:
    calls = written_calls(HERMES, [WrittenCall("f", {"a": 1})])
    form = AnswerFormat(THINK, ReasoningStart.WITHIN, HERMES, {"f": None})
    for pieces in ([f"Use <tool_call>?</think>\n\nSo:\n{calls}"],
                   list(f"Use <tool_call>?</think>\n\nSo:\n{calls}")):  # fmt: skip
        found = parsed(form, pieces)
        assert (found.thought, found.said) == ("Use <tool_call>?", "So:")
        assert as_values(found.calls) == [("f", {"a": 1})]


CHANNELS = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=8))
def test_channels_of_harmony(cuts: list[int]) -> None:
    form = AnswerFormat(HARMONY, ReasoningStart.BEFORE, TOOL_FORMAT_NAMES["harmony"], {"f": None})
    call = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    text = f'{CHANNELS}{call}{{"a": "<|x"}}<|call|>'
    found = parsed(form, pieces_of(text, [min(cut, len(text)) for cut in cuts]))
    assert (found.thought, found.said) == ("Let me see.\n\nMore.", "I look.")
    assert as_values(found.calls) == [("f", {"a": "<|x"})]
    final = f"{CHANNELS}<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    found = parsed(form, pieces_of(final, [min(cut, len(final)) for cut in cuts]))
    assert (found.thought, found.said) == ("Let me see.\n\nMore.", "I look.Done.")
    cut_off = parsed(form, list(text[:-12]))
    assert (len(cut_off.calls), cut_off.num_done) == (1, 0)
    assert parsed(form, list("No channels at all")).said == "No channels at all"
    assert parsed(form, list(f"{CHANNELS}<|start|>assistant<|chan")).said == "I look."
