"""Tests that the package's folders are layers: modules import only from their folder and below.

Every import counts, including those inside functions and under TYPE_CHECKING. No module imports a
private name of another, and no two modules define public classes of the same name.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import slotzero

LAYERS = (
    "__main__",
    "cli",
    "server",
    "training",
    "bench",
    "llm",
    "vectors",
    "certify",
    "engine",
    "executor",
    "speculative",
    "runners",
    "checkpoint",
    "models",
    "step",
    "request",
    "pools",
    "quantization",
    "kernels",
    "grammars",
    "formats",
    "sampling",
    "distributed",
    "graph",
    "text",
    "system",
    "config",
    "tree_shape",
    "errors",
)
"""The layers from top to bottom: folders, and single modules."""

ROOT = Path(slotzero.__file__).parent


class Import(NamedTuple):
    importer: str  # models/rope.py
    module: str  # slotzero.errors
    name: str  # ConfigError


def imports_of(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield Import(str(path.relative_to(ROOT)), node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(str(path.relative_to(ROOT)), alias.name, "")


def all_imports() -> list[Import]:
    modules = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    return [found for path in modules for found in imports_of(path)]


def layer_of(found: Import) -> str | None:
    """Return the imported layer, or None for another package or the public names of this one."""
    parts = [*found.module.split("."), found.name]
    return parts[1] if parts[0] == "slotzero" and parts[1] in LAYERS else None


def breaks_layers(found: Import) -> bool:
    own, other = Path(found.importer).parts[0].removesuffix(".py"), layer_of(found)
    return other is not None and other != own and LAYERS.index(other) < LAYERS.index(own)


def is_private(found: Import) -> bool:
    is_ours = found.module.partition(".")[0] == "slotzero"
    return is_ours and found.name.startswith("_") and not found.name.startswith("__")


def test_every_folder_and_module_has_a_layer() -> None:
    found = {path.stem for path in ROOT.glob("*.py")} | {
        path.parent.name for path in ROOT.glob("*/*.py")
    }
    assert found - {"__init__"} == set(LAYERS)


def test_no_import_points_up() -> None:
    """Therefore there is no cycle between folders either."""
    assert [found for found in all_imports() if breaks_layers(found)] == []


def test_no_module_imports_a_private_name() -> None:
    assert [found for found in all_imports() if is_private(found)] == []


def test_a_class_name_means_one_thing() -> None:
    found = [
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name, times in Counter(found).items() if times > 1] == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Import("models/rope.py", "slotzero.engine.engine", "Engine"), True),
        (Import("models/rope.py", "slotzero", "engine"), True),
        (Import("models/rope.py", "slotzero.kernels.types", "Heads"), False),
        (Import("models/rope.py", "slotzero.models.config", "ModelConfig"), False),
        (Import("config.py", "slotzero.models.config", "ModelConfig"), True),
        (Import("models/rope.py", "torch.cli", "engine"), False),
    ],
)
def test_an_import_that_points_up_is_detected(found: Import, expected: bool) -> None:
    assert breaks_layers(found) is expected
