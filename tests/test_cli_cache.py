"""The compile cache of scripts stays below its limit, and is used only where no other user can have written it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxnn.cli import cache


def entry(folder: Path, name: str, *, used: float, size: int = 100) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    os.utime(file, (used, 0))
    return file


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*") if file.is_file()}


def test_what_went_unused_for_longest_goes_until_half_is_free(tmp_path: Path) -> None:
    for used, name in enumerate(["compile-seconds/first", "b", "c", "d", "last"]):
        entry(tmp_path, name, used=used)
    cache.thin_out(tmp_path, 499)
    assert names(tmp_path) == {"d", "last"}


def test_up_to_the_limit_nothing_goes(tmp_path: Path) -> None:
    entry(tmp_path, "only", used=0)
    cache.thin_out(tmp_path, 100)
    cache.thin_out(tmp_path / "not there", 0)
    assert names(tmp_path) == {"only"}


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("told", [True, False])
def test_only_the_users_cache_is_thinned_out(told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "LIMIT", 99)
    ours = tmp_path / "jaxnn" / "compiled"
    entry(ours, "old", used=0)
    ours.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told") if told else None)
    cache.enable_compile_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "told" if told else ours)
    assert names(ours) == ({"old"} if told else set())


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_once: None) -> Path:
    """Where the user's cache belongs; JAX has been given no place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    return tmp_path / "jaxnn" / "compiled"


def open_to_the_group(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.chmod(0o770)


def in_a_parent_open_to_all(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.parent.chmod(0o777)


def of_another_user(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)


def no_directory(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.rmdir()
    ours.write_text("a file")


@pytest.mark.parametrize("spoil", [open_to_the_group, in_a_parent_open_to_all, of_another_user, no_directory])
def test_a_cache_that_others_may_have_written_is_not_used(
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    ours: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours.mkdir(parents=True, mode=0o700)
    spoil(ours, monkeypatch)
    cache.enable_compile_cache()
    assert jax.config.jax_compilation_cache_dir is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "not kept" in line and str(ours) in line


@pytest.mark.parametrize("system", ["POSIX", "without users"])
def test_the_cache_is_made_for_its_user_alone(
    system: str, ours: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if system != "POSIX":
        monkeypatch.delattr(os, "getuid")
    before = os.umask(0)
    try:
        cache.enable_compile_cache()
    finally:
        os.umask(before)
    assert ours.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(ours)
    assert not capsys.readouterr().err
