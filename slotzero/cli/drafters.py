"""Other engines' names of the drafters, and vLLM's --speculative-config.

This module does not know flags. The rule: a key that would have no effect is refused by name.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from slotzero.config import DRAFTERS

METHODS = ("eagle", "eagle3", "mtp", "ngram", "draft_model")  # vLLM's names
DRAFT_MODELS = ("draft_model", "standalone")  # vLLM's name of it, and SGLang's
OWN_LAYERS = ("deepseek_mtp", "nextn")
NGRAM_MODELS = ("ngram", "[ngram]")  # vLLM's values of `model` for n-grams
LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
KEYS: Mapping[str, type] = {
    "method": str,
    "model": str,
    "num_speculative_tokens": int,
    **dict.fromkeys(LOOKUPS, int),
}


def drafter(text: str) -> str:
    """Return this engine's name of a drafter: STANDALONE -> draft"""
    name = text.lower()
    return "draft" if name in DRAFT_MODELS else "mtp" if name in OWN_LAYERS else name


def speculative_config(text: str) -> dict[str, Any]:
    """Return the settings for vLLM's JSON object."""
    given = _read(text)
    model = given.get("model")
    if model is None and "method" not in given:
        raise argparse.ArgumentTypeError(f"give method, one of {', '.join(METHODS)}, or model")
    name = drafter(given.get("method", "ngram" if model in NGRAM_MODELS else "draft"))
    if name not in DRAFTERS:
        raise argparse.ArgumentTypeError(
            f"method {given['method']!r} is not supported; use one of {', '.join(METHODS)}"
        )
    _check_lookups(given, name)
    settings = {"speculative": name}
    if model is not None and not (name == "ngram" and model in NGRAM_MODELS):
        settings["speculative_model"] = model
    if "num_speculative_tokens" in given:
        settings["speculative_steps"] = given["num_speculative_tokens"]
    return settings


def _read(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not an object such as {{"method": "ngram", "num_speculative_tokens": 4}}'
        )
    for key, value in given.items():
        if key not in KEYS:
            raise argparse.ArgumentTypeError(f"{key!r} is not supported; known: {', '.join(KEYS)}")
        if type(value) is not KEYS[key]:
            kind = "a string" if KEYS[key] is str else "an integer"
            raise argparse.ArgumentTypeError(f"{key} must be {kind}, got {value!r}")
    return given


def _check_lookups(given: Mapping[str, Any], name: str) -> None:
    lookups = [key for key in LOOKUPS if key in given]
    if not lookups:
        return
    if name != "ngram":
        raise argparse.ArgumentTypeError(f"{lookups[0]} applies to ngram, not to {name}: drop it")
    from slotzero.speculative.ngram import LONGEST, SHORTEST

    for key, fixed in zip(LOOKUPS, (SHORTEST, LONGEST), strict=True):
        if given.get(key, fixed) != fixed:
            raise argparse.ArgumentTypeError(f"{key} is always {fixed}, got {given[key]}: drop it")
