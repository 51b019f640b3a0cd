"""Tests of a read-only or full cache folder: the error is one line with folder and remedy."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slotzero.errors import CapacityError, ConfigError, SlotzeroError
from slotzero.kernels.cpu import build
from slotzero.system import cache_dir as cache
from slotzero.system.cache_dir import writable, writing

COMPILER = """#!/bin/sh
echo "/tmp/x.s: warning: something else" >&2
echo "x.cpp:1: fatal error: error writing to x.s: {}" >&2
exit 1
"""


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder that not even root can create, since a file is in its place."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("SLOTZERO_CACHE", str(file / "cache"))
    return file / "cache"


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    compiler = folder / "cxx"
    compiler.write_text(COMPILER.format(says))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SLOTZERO_CACHE", str(folder / "cache"))


def test_kernels_are_not_built_in_a_read_only_folder(blocked: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        build._build(build._library_path("common"), build._sources("common"))
    assert str(blocked / "kernels") in str(caught.value)
    assert "set SLOTZERO_CACHE" in str(caught.value)


@pytest.mark.slow
def test_a_command_ends_with_one_line(blocked: Path) -> None:
    words = ["generate", "tiny:llama", "--prompt", "Hello", "--max-tokens", "2"]
    command = [sys.executable, "-m", "slotzero", *words]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("slotzero: error: ")]
    assert str(blocked) in line
    assert "SLOTZERO_CACHE" in line


@pytest.mark.slow
def test_a_compiler_that_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(tmp_path, monkeypatch, os.strerror(errno.ENOSPC))
    with pytest.raises(CapacityError) as caught:
        build._build(build._library_path("common"), build._sources("common"))
    (line,) = str(caught.value).splitlines()
    assert "No space left on device" in line
    assert str(tmp_path / "cache" / "kernels") in line
    assert "SLOTZERO_CACHE" in line
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


@pytest.mark.slow
def test_any_other_error_of_the_compiler_is_in_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(tmp_path, monkeypatch, "no such thing")
    with pytest.raises(CapacityError) as caught:
        build._build(build._library_path("common"), build._sources("common"))
    first = str(caught.value).splitlines()[0]
    assert first.startswith("building the CPU kernels failed: x.cpp:1: fatal error")
    assert "no such thing" in first


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, CapacityError, "is full (No space left on device): free some space"),
        (errno.EDQUOT, CapacityError, "is full (Disk quota exceeded)"),
        (errno.EROFS, ConfigError, "cannot be written (Read-only file system): set SLOTZERO_CACHE"),
        (errno.EACCES, ConfigError, "cannot be written (Permission denied)"),
    ],
)
def test_errors_are_distinguished(
    tmp_path: Path, number: int, kind: type[SlotzeroError], says: str
) -> None:
    with pytest.raises(kind) as caught, writing(tmp_path / "new"):
        raise OSError(number, os.strerror(number))
    assert says in str(caught.value)
    assert str(tmp_path / "new") in str(caught.value)


def test_an_existing_folder_is_tested_by_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert writable(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == []

    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        writable(tmp_path)


@pytest.mark.slow
def test_kernels_share_the_cxx_library_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compiler that links the C++ library statically by default, an exception would
    crash."""
    compiler = tmp_path / "cxx"
    compiler.write_text(f'#!/bin/sh\nexec {build.compiler()} -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    source = tmp_path / "kernel.cpp"
    source.write_text('#include <stdexcept>\nvoid refuse() { throw std::runtime_error("no"); }\n')
    build._build(tmp_path / "kernel.so", [source])
    dump = subprocess.run(
        ("readelf", "--dynamic", str(tmp_path / "kernel.so")), capture_output=True, text=True
    )
    assert "[libstdc++.so.6]" in dump.stdout
