"""Sixty-four prompts for long answers of the default model, on which no EAGLE head was trained.

The `written` prompts were written by hand. The `held_out` prompts were written by the model while
generating training text for its head, and were held out of training; they are the kind of text that
a head meets most often.
"""

import json
from pathlib import Path

TASKS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "Give me ten tips about {}.",
    "Write an email to a friend about {}.",
    "What are the advantages and disadvantages of {}?",
    "Describe the history of {}.",
    "Write a poem about {}.",
    "How do I get started with {}?",
)
SUBJECTS = (
    "gardening",
    "the moon",
    "learning a language",
    "bicycles",
    "healthy food",
    "old maps",
    "chess",
    "volcanoes",
)


def written() -> list[str]:
    """Return the prompts written by hand; any eight in a row differ in both task and subject."""
    return [TASKS[i % 8].format(SUBJECTS[(i + i // 8) % 8]) for i in range(64)]


def held_out() -> list[str]:
    stored = Path(__file__).with_name("held_out.json").read_text(encoding="utf-8")
    prompts: list[str] = json.loads(stored)
    return prompts
