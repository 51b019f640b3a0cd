"""Tests that no config field is ignored which changes what transformers computes.

Every field of every family's config.json is changed. The change must be refused, or reach the
ModelConfig, or leave the logits of transformers as they were.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle import FAMILIES, Oracle

from slotzero.errors import UnsupportedModelError
from slotzero.models.families.family import parse_config

pytestmark = pytest.mark.slow

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
NUM_TOKENS = 40
# Fields of transformers itself, which are not read from a config.json of a published model or say
# how transformers runs, not what it computes.
OURS = ("dtype", "torch_dtype", "transformers_version", "architectures", "model_type", "vocab_size")


def changed(name: str, value: Any) -> Iterator[Any]:
    """Yield other values of a field."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, 2 * value + 2)
        case float():
            yield from (1.5 * value + 0.25, 0.5 * value)
        case str():
            yield "relu" if name in ACTIVATIONS else "another"
        case None:
            yield from (True, 3, 0.5)
        case [_, *_] if value[::-1] != value:
            yield value[::-1]


@torch.no_grad()
def logits_of(model: Any, change: dict[str, Any]) -> torch.Tensor | None:
    """Return transformers' logits with another config and the model's weights; None if the config
    is invalid, or needs weights of other shapes."""
    try:
        parsed = type(model.config).from_dict({**model.config.to_dict(), **change})
        parsed._attn_implementation = "eager"
        other = type(model)(parsed).eval()
        other.load_state_dict(model.state_dict())
        ids = torch.arange(3, 3 + NUM_TOKENS)[None]
        logits = other(ids, position_ids=torch.arange(NUM_TOKENS)[None], use_cache=False).logits
    except Exception:  # whatever transformers raises for a value that makes no sense
        return None
    assert isinstance(logits, torch.Tensor)
    return logits


def is_ignored(base: dict[str, Any], config: dict[str, Any]) -> bool:
    try:
        return parse_config(config) == parse_config(base)
    except UnsupportedModelError:
        return False


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_that_changes_results_is_ignored(family: str, oracles: Any) -> None:
    oracle: Oracle = oracles(family)
    base = json.loads((oracle.folder / "config.json").read_text())
    right, wrong, num_ignored = logits_of(oracle.model, {}), [], 0
    assert right is not None
    for name, value in base.items():
        if name in OURS:
            continue
        for other in changed(name, value):
            if not is_ignored(base, {**base, name: other}):
                continue
            theirs = logits_of(oracle.model, {name: other})
            if theirs is not None:
                num_ignored += 1
                if not torch.allclose(theirs, right, rtol=1e-4, atol=1e-4):
                    wrong.append((name, other))
    assert num_ignored > 5  # such as use_cache: configs are compared at all
    assert not wrong
