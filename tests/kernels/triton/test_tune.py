"""Tests of tuned choices: the shipped ones are valid, and a corrupt cache file is ignored."""

import json

import pytest

from slotzero.kernels.triton.linear import tune
from slotzero.kernels.triton.linear.tiles import LIBRARY, float8_tiles_for, padded_rows, ways_for


def test_shipped_choices_name_existing_tiles():
    shipped = json.loads(tune.SHIPPED.read_text())
    assert shipped
    for key, name in shipped.items():
        kind, shape, padded = key.split("/")[1:]
        rows, inner = int(padded), int(shape.partition("x")[2])
        assert padded_rows(rows) == rows, key
        ways = ways_for(rows, inner, kind)
        if kind.startswith("float8 "):
            ways = LIBRARY, *float8_tiles_for(rows, kind.removeprefix("float8 "))
        assert name in map(str, ways), key


@pytest.mark.parametrize("content", ["", "[]", "null", '{"key": 3}', "{", "\x00"])
def test_an_invalid_file_is_ignored(tmp_path, monkeypatch, content):
    monkeypatch.setenv("SLOTZERO_CACHE", str(tmp_path))
    tune.Choices()._file.write_text(content)
    assert tune.Choices().known("key", ["a"]) is None


def test_a_choice_is_remembered_and_forgotten_with_its_candidate(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "_seconds", lambda run, weights: run(weights[0]))
    seconds = {"slow": 3.0, "fast": 1.0, "other": 2.0}
    weight = pytest.importorskip("torch").zeros(4, 4)
    found = tune.Choices().find("key", list(seconds), weight, lambda name, _: seconds[name])
    assert found == "fast"
    assert tune.Choices().known("key", ["slow", "fast"]) == "fast"
    assert tune.Choices().known("key", ["slow"]) is None


def test_a_read_only_folder_only_prevents_remembering(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("SLOTZERO_CACHE", str(blocked / "cache"))
    monkeypatch.setattr(tune, "_seconds", lambda run, weights: run(weights[0]))
    choices = tune.Choices()
    weight = pytest.importorskip("torch").zeros(4, 4)
    assert (
        choices.find("key", ["a", "b"], weight, lambda name, _: {"a": 1.0, "b": 2.0}[name]) == "a"
    )
    assert choices.known("key", ["a"]) == "a"


def test_the_choices_of_similar_sizes_are_likely(tmp_path, monkeypatch):
    monkeypatch.setenv("SLOTZERO_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "SHIPPED", tmp_path / "shipped.json")
    candidates = ["cublas", "a", "b", "c", "d"]
    assert tune.Choices().likely("card/add/4096x4096/8", candidates) == candidates
    shipped = {
        "other card/add/4096x4096/8": "a",
        "card/add/4096x2048/8": "d",
        "card/add/512x512/8": "b",
        "card/add/4096x8192/8": "gone",
        "card/add/4096x14336/8": "cublas",
        "card/add/4096x4096/16": "c",
        "card/linear/4096x4096/8": "c",
    }
    tune.SHIPPED.write_text(json.dumps(shipped))
    assert tune.Choices().likely("card/add/4096x4096/8", candidates) == ["cublas", "b", "d"]
    assert tune.Choices().likely("new card/add/4096x4096/8", candidates) == ["cublas", "a", "d"]
    monkeypatch.setattr(tune, "NEIGHBOURS", 1)
    choices = tune.Choices()
    assert choices.likely("card/add/4096x4096/8", candidates) == ["cublas", "d"]
    assert choices.likely("card/add/600x512/8", candidates) == ["cublas", "b"]
    assert choices.likely("card/add/4096x16384/8", candidates) == ["cublas"]
    assert choices.likely("card/gated/4096x4096/8", candidates) == candidates
    choices._remember("card/add/4096x4096/8", "c")
    assert choices.likely("card/add/4096x4095/8", candidates) == ["cublas", "d"]
