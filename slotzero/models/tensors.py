"""The tensors that a checkpoint must have by its config.

Real checkpoints are validated against them, and random checkpoints are created from them.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.distributed.ranks import ALONE
from slotzero.models.cache_scales import scale_names
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import parse_config
from slotzero.models.families.gemma4_assistant import MODEL_TYPE, parse_assistant
from slotzero.models.mtp import mtp_params
from slotzero.models.stacks import StackedParam, model_params


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a checkpoint with this config, by Hugging Face name."""
    if config.get("model_type") == MODEL_TYPE:
        assistant = parse_assistant(config, MODEL_TYPE)
        return _shapes(model_params(assistant.model, ALONE)) | assistant.tensors()
    model: ModelConfig = parse_config(config)
    params = model_params(model, ALONE)
    for index in range(model.num_mtp_layers):
        params += mtp_params(model, index, ALONE)
    return _shapes(params)


def scales_of_cache(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the scales of an FP8 KV cache that such a checkpoint may have."""
    if config.get("model_type") == MODEL_TYPE:
        return {}  # an assistant keeps no KV
    return dict.fromkeys(scale_names(parse_config(config)), ())


def _shapes(params: list[StackedParam]) -> dict[str, tuple[int, ...]]:
    return {stored.name: stored.shape for param in params for stored in param.stored()}
