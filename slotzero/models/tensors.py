"""The tensors that a config promises: real checkpoints are compared with them, random ones made."""

from collections.abc import Mapping
from typing import Any

from slotzero.distributed.ranks import ALONE
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import parse_config
from slotzero.models.families.gemma4_assistant import MODEL_TYPE, parse_assistant
from slotzero.models.mtp import mtp_params
from slotzero.models.stacks import StackedParam, model_params


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a checkpoint with this config: Hugging Face name to shape."""
    if config.get("model_type") == MODEL_TYPE:
        assistant = parse_assistant(config, MODEL_TYPE)
        return _shapes(model_params(assistant.model, ALONE)) | assistant.tensors()
    model: ModelConfig = parse_config(config)
    params = model_params(model, ALONE)
    for index in range(model.num_mtp_layers):
        params += mtp_params(model, index, ALONE)
    return _shapes(params)


def _shapes(params: list[StackedParam]) -> dict[str, tuple[int, ...]]:
    return {stored.name: stored.shape for param in params for stored in param.stored()}
