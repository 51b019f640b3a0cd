"""Opening of checkpoints: a model's name becomes a `Checkpoint`.

place.py says where the model is, and the module of each format reads what is there. The rule: an
architecture or quantisation that is not supported is refused before weights are opened or
downloaded.
"""

from functools import partial

from slotzero.checkpoint.bare_model import whole_model
from slotzero.checkpoint.dummy import DummyCheckpoint
from slotzero.checkpoint.folder import (
    FolderCheckpoint,
    folder_config,
    folder_eos_token_ids,
    folder_modules,
)
from slotzero.checkpoint.gguf import GgufCheckpoint
from slotzero.checkpoint.joint_experts import separate_experts
from slotzero.checkpoint.place import GgufFile, ModelFolder, TinyModel, find_model
from slotzero.checkpoint.text_part import text_part
from slotzero.checkpoint.tiny import tiny_checkpoint
from slotzero.config import LOAD_FORMATS, EngineConfig
from slotzero.errors import ConfigError
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.implementation import refuse_unknown
from slotzero.quantization.quantization import CHOICE


def checkpoint_of(config: EngineConfig) -> Checkpoint:
    """Open the checkpoint of an engine's model."""
    return open_checkpoint(
        config.model,
        config.load_format,
        quantization=config.quantization,
        model_impl=config.model_impl,
    )


def open_checkpoint(
    model: str,
    load_format: str = "auto",
    is_model: bool = True,
    quantization: str = "auto",
    model_impl: str = "auto",
) -> Checkpoint:
    """Open a checkpoint by the name of its model.

    The architecture is checked for the implementation `model_impl`, unless `is_model` is false: the
    callers that open draft heads and assistants check them themselves. `quantization` is the user's
    choice; it becomes part of the config.
    """
    checkpoint = _open(model, load_format, model_impl if is_model else None)
    if quantization != "auto":
        checkpoint.config = {**checkpoint.config, CHOICE: quantization}
    return checkpoint


def _open(model: str, load_format: str, model_impl: str | None) -> Checkpoint:
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load format {load_format!r} is unknown; use one of {', '.join(LOAD_FORMATS)}"
        )
    is_dummy = load_format == "dummy"
    match find_model(model):
        case TinyModel(name):
            return tiny_checkpoint(name)
        case GgufFile() as file:
            return _open_gguf(file, is_dummy)
        case ModelFolder() as folder:
            return _open_folder(folder, is_dummy, model_impl)


def _open_folder(folder: ModelFolder, is_dummy: bool, model_impl: str | None) -> Checkpoint:
    if model_impl is not None:
        refuse_unknown(folder_config(folder.path), model_impl)
    if not is_dummy:
        stored = FolderCheckpoint(folder.with_weights(), folder.name)
        return separate_experts(whole_model(text_part(stored)))
    return DummyCheckpoint(
        folder_config(folder.path),
        folder.name,
        eos_token_ids=folder_eos_token_ids(folder.path),
        make_tokenizer=folder.tokenizer,
        sampling=folder.sampling,
        modules=partial(folder_modules, folder.path),
    )


def _open_gguf(file: GgufFile, is_dummy: bool) -> Checkpoint:
    checkpoint = GgufCheckpoint(file.path, file.name)
    if not is_dummy:
        return checkpoint
    return DummyCheckpoint(
        checkpoint.config,
        checkpoint.name,
        eos_token_ids=checkpoint.eos_token_ids,
        make_tokenizer=checkpoint.tokenizer,
    )
