"""The compile cache of scripts stays below its limit."""

from __future__ import annotations

import os
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
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told") if told else None)
    cache.enable_compile_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "told" if told else ours)
    assert names(ours) == ({"old"} if told else set())
