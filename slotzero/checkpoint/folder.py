"""A folder in Hugging Face's format: config.json, safetensors (one file or an index), a tokenizer.

Opening a folder reads the header of each file, but no weights; `read` maps one tensor.

The rule: opening fails, and names the file, unless all files are present and complete and contain
the tensors that the index lists. So an incomplete download is found in milliseconds, not after
minutes of loading. Tensors that the index does not list are available too; the caller decides
which tensors are allowed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open

from slotzero.checkpoint.bare_model import causal_config
from slotzero.checkpoint.generation_config import default_sampling, generation_eos_token_ids
from slotzero.checkpoint.text_part import text_config
from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.models.checkpoint import Checkpoint, Part
from slotzero.system.json_file import (
    read_json,
    read_json_if_there,
    read_json_list,
    token_ids,
)
from slotzero.text.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MODULES = "modules.json"
_MODELOPT = "hf_quant_config.json"  # of older exports; newer ones have it in config.json


@final
class FolderCheckpoint(Checkpoint):
    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or path.resolve().name
        self.config = folder_config(path)
        self.eos_token_ids = folder_eos_token_ids(path)
        self._path = path
        self._handles: dict[Path, Any] = {}
        self._file_of = self._find_tensors()

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def read(self, name: str) -> torch.Tensor:
        with self._opened(name) as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor

    def read_part(self, name: str, *wanted: slice) -> Part:
        with self._opened(name) as handle:
            stored = handle.get_slice(name)
            whole = tuple(stored.get_shape())
            return Part(stored[wanted] if len(whole) == len(wanted) else stored[:0], whole)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """Open the file that holds a tensor."""
        file = self._file_of.get(name)
        if file is None:
            raise CorruptCheckpointError(
                f"{self._path} has no tensor {name}; download the folder again"
            )
        try:
            yield self._handles[file]
        except (SafetensorError, OSError) as error:
            raise _broken(file, error) from None

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self._path)

    def sampling(self) -> Mapping[str, Any]:
        return default_sampling(self._path)

    def modules(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        return folder_modules(self._path)

    def _find_tensors(self) -> dict[str, Path]:
        if (self._path / _INDEX).is_file():
            return self._follow_index(self._path / _INDEX)
        file = _single_file(self._path)
        return dict.fromkeys(self._open(file), file)

    def _follow_index(self, index: Path) -> dict[str, Path]:
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise CorruptCheckpointError(f"{index} has no weight_map; download it again")
        for name, file in file_of.items():
            if not isinstance(file, str):
                raise CorruptCheckpointError(
                    f"{index}: {name} is in {file!r}, which is not a file name; download it again"
                )
        stored = {file: self._open(self._path / file) for file in sorted(set(file_of.values()))}
        for name, file in file_of.items():
            if name not in stored[file]:
                raise CorruptCheckpointError(
                    f"{self._path / file} has no tensor {name}, but {index.name} lists it; "
                    "download both again"
                )
        unlisted = {name: file for file, names in stored.items() for name in names}
        return {name: self._path / file for name, file in (unlisted | file_of).items()}

    def _open(self, file: Path) -> frozenset[str]:
        if not file.is_file():
            raise CorruptCheckpointError(f"{file} is missing; download it again")
        try:
            # Reads the header only, and checks that the last tensor ends where the file ends.
            self._handles[file] = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise _broken(file, error) from None
        return frozenset(self._handles[file].keys())


def folder_config(path: Path) -> dict[str, Any]:
    """Read the config of the text model in a folder."""
    config = causal_config(text_config(read_json(path / "config.json")))
    exported = read_json_if_there(path / _MODELOPT)
    if exported and "quantization_config" not in config:
        config["quantization_config"] = {"quant_method": "modelopt", **exported}
    return config


def folder_eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a folder.

    generation_config.json lists more of them (end of turn, end of message) than config.json.
    """
    return generation_eos_token_ids(path) or token_ids(folder_config(path).get("eos_token_id"))


def folder_modules(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Read the modules of sentence-transformers from modules.json, if it exists."""
    file = path / _MODULES
    found: list[tuple[str, Mapping[str, Any]]] = []
    for module in read_json_list(file) if file.is_file() else ():
        kind, folder = module.get("type"), module.get("path")
        if not isinstance(kind, str) or not isinstance(folder, str) or ".." in Path(folder).parts:
            raise CorruptCheckpointError(
                f"{file}: the module {module} needs a type and a path; download it again"
            )
        found.append((kind, read_json_if_there(path / folder / "config.json") if folder else {}))
    return found


def _single_file(path: Path) -> Path:
    files = sorted(path.glob("*.safetensors"))
    if path / _SINGLE in files:
        return path / _SINGLE
    if len(files) == 1:
        return files[0]
    if files:
        raise CorruptCheckpointError(
            f"{path / _INDEX} is missing, although there are {len(files)} safetensors files; "
            "download it again"
        )
    if any(path.glob("*.bin")):
        raise UnsupportedModelError(
            f"{path} has its weights in *.bin files, which can run code when they are loaded; "
            "convert them to safetensors"
        )
    raise CorruptCheckpointError(
        f"{path / _SINGLE} is missing; download it, or use --load-format dummy"
    )


def _broken(file: Path, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{file} is broken or truncated ({error}); download it again")
