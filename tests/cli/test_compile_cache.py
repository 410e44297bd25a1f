"""The compile cache of scripts stays below its limit, and is used only where no other user can have written it."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxnn.cli import enable_compile_cache


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the user's cache; JAX is configured to use none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    return tmp_path / "jaxnn" / "compiled"


def enable(directory: Path | None, limit: int) -> str | None:
    """The directory of JAX's cache after a script enabled one, where ``directory`` was configured before."""
    jax.config.update("jax_compilation_cache_dir", directory and str(directory))
    enable_compile_cache(limit)
    return jax.config.jax_compilation_cache_dir


def test_least_recently_used_programs_are_deleted_down_to_half_the_limit(ours, capsys):
    before = os.umask(0)
    try:
        assert enable(None, 0) == str(ours) and ours.stat().st_mode & 0o777 == 0o700, "for its user alone"
    finally:
        os.umask(before)
    for seconds, name in enumerate(("first", "b", "c", "d", "last")):
        (ours / name).write_bytes(bytes(100))
        os.utime(ours / name, (seconds, 0))
    for directory, limit, left in ((None, 500, 5), (ours.parent, 99, 5), (None, 499, 2)):  # a user's own is left alone
        assert enable(directory, limit) == str(directory or ours)
        assert len(list(ours.iterdir())) == left
    assert {file.name for file in ours.iterdir()} == {"d", "last"} and not capsys.readouterr().err


WRITABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "open to the group": lambda folder, patch: folder.chmod(0o770),
    "in a parent open to all": lambda folder, patch: folder.parent.chmod(0o777),
    "of another user": lambda folder, patch: patch.setattr(os, "getuid", lambda: -1),
    "no directory": lambda folder, patch: (folder.rmdir(), folder.write_text("a file")),
}


@pytest.mark.parametrize("why", WRITABLE)
def test_cache_that_others_may_have_written_is_not_used(why, ours, monkeypatch, capsys):
    ours.mkdir(parents=True, mode=0o700)
    WRITABLE[why](ours, monkeypatch)
    assert enable(None, 99) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "not kept" in line and str(ours) in line
