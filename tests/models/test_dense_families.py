"""Tests of the configs of dense families: defaults of published files, and what is refused."""

import pytest

from slotzero.checkpoint.tiny import tiny_configs
from slotzero.errors import UnsupportedModelError
from slotzero.models.families.family import parse_config

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, ["'yarn'", "longrope"]),
        ("phi3", {"rope_scaling": {**LONG, "short_factor": [1.0]}}, ["short_factor", "8"]),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": None}}, ["long_factor", "8"]),
        ("phi3", {"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers=[1, 0]", "4 layers"]),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, ["no_rope_layers"]),
        ("llama", {"no_rope_layers": [1, 0]}, ["no_rope_layers=[1, 0]"]),
        ("llama", {"logit_scale": 0.5}, ["logit_scale=0.5"]),
        ("llama", {"use_bias": True}, ["use_bias=True"]),
        ("llama", {"attention_out_bias": True}, ["attention_out_bias=True"]),
        ("cohere2", {"use_qk_norm": True}, ["use_qk_norm=True"]),
        ("cohere2", {"use_parallel_block": False}, ["use_parallel_block=False", "only True"]),
        ("hunyuan", {"use_cla": True}, ["use_cla=True"]),
        ("hunyuan", {"use_qk_norm": False}, ["use_qk_norm=False", "only True"]),
        ("arcee", {"hidden_act": "silu"}, ["hidden_act='silu'", "relu2"]),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LLLG"},
            ["sliding_window_pattern='LLLG'"],
        ),
        ("mistral", {"rope_scaling": {"type": "yarn", "llama_4_scaling_beta": 0.1}}, ["llama_4"]),
    ],
)
def test_fields_that_are_not_implemented_are_refused(model, fields, words):
    with pytest.raises(UnsupportedModelError) as caught:
        parse_config({**tiny_configs()[model], **fields})
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_window_that_hides_nothing_is_ignored():
    """Phi-4-mini has a window of 262,144 tokens in a context of 131,072."""
    config = {**tiny_configs()["phi3"], "sliding_window": 512}
    assert [group.heads.window for group in parse_config(config).groups] == [None]


def test_longrope_before_its_fields_were_in_rope_parameters():
    """Phi-3's first name of it was su, and the original length was beside rope_scaling."""
    scaling = {**LONG, "type": "su"}
    del scaling["rope_type"]
    fields = {"rope_scaling": scaling, "original_max_position_embeddings": 128}
    (group,) = parse_config({**tiny_configs()["phi3"], **fields}).groups
    assert (group.rope.kind, group.rope.original_max_position) == ("longrope", 128)
    assert group.rope.factor == 4.0
    assert group.rope.attention_factor == pytest.approx(1.1338934, abs=1e-6)


def test_defaults_of_published_configs():
    config = dict(tiny_configs()["cohere2"])
    for field in ("layer_norm_eps", "logit_scale", "tie_word_embeddings", "layer_types"):
        del config[field]
    model = parse_config(config)
    assert (model.logits_scale, model.tied_embeddings, model.norm_eps) == (0.0625, True, 1e-5)
    full, sliding = model.groups
    assert (full.layers, sliding.layers) == ((3,), (0, 1, 2))
    assert (full.rope.kind, sliding.rope.kind) == ("none", "default")
