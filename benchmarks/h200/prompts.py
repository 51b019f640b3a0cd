"""Asks the default model to speak at length: sixty-four prompts that no head was trained on.

`written` are by hand. `held_out` are messages that the model wrote itself when text to train its
head on was made, and that were held out: what a head meets most often.
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
    """Of any eight in a row, no two have the task or the subject in common."""
    return [TASKS[i % 8].format(SUBJECTS[(i + i // 8) % 8]) for i in range(64)]


def held_out() -> list[str]:
    stored = Path(__file__).with_name("held_out.json").read_text(encoding="utf-8")
    prompts: list[str] = json.loads(stored)
    return prompts
