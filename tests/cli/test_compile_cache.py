"""The compile cache of scripts stays below its limit, and is used only where no other user can have written it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxnn.cli import enable_compile_cache


def fill(folder: Path, *used: str) -> None:
    """Creates files of 100 bytes, least recently used first."""
    for seconds, name in enumerate(used):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_bytes(bytes(100))
        os.utime(file, (seconds, 0))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_once: None) -> Path:
    """The place of the user's cache; JAX is configured to use none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    return tmp_path / "jaxnn" / "compiled"


def test_least_recently_used_programs_are_deleted_down_to_half_the_limit(ours: Path) -> None:
    ours.mkdir(parents=True, mode=0o700)
    fill(ours, "below/first", "b", "c", "d", "last")
    for limit, left in ((500, {"first", "b", "c", "d", "last"}), (499, {"d", "last"})):
        jax.config.update("jax_compilation_cache_dir", None)
        enable_compile_cache(limit)
        assert names(ours) == left and jax.config.jax_compilation_cache_dir == str(ours)
    # A cache that JAX is configured to use is left alone.
    jax.config.update("jax_compilation_cache_dir", str(ours.parent))
    enable_compile_cache(99)
    assert names(ours) == left and jax.config.jax_compilation_cache_dir == str(ours.parent)


WRITABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "open to the group": lambda folder, patch: folder.chmod(0o770),
    "in a parent open to all": lambda folder, patch: folder.parent.chmod(0o777),
    "of another user": lambda folder, patch: patch.setattr(os, "getuid", lambda: -1),
    "no directory": lambda folder, patch: (folder.rmdir(), folder.write_text("a file")),
}


@pytest.mark.parametrize("why", WRITABLE)
def test_cache_that_others_may_have_written_is_not_used(
    why: str, ours: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours.mkdir(parents=True, mode=0o700)
    WRITABLE[why](ours, monkeypatch)
    enable_compile_cache()
    assert jax.config.jax_compilation_cache_dir is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "not kept" in line and str(ours) in line


def test_cache_is_made_for_its_user_alone(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0)
    try:
        enable_compile_cache()
    finally:
        os.umask(before)
    assert ours.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(ours)
    assert not capsys.readouterr().err
