"""The persistent compile cache, on for scripts: what was compiled once is read from the disk next time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxnn.record import files_below

# Bytes: thousands of small networks' programs. JAX's own limit, unset by default, looks at the whole cache for each
# program that it adds: 0.3 s where there are 5,000.
LIMIT = 2 << 30


def enable_compile_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX was told of another place.

    A process-wide setting of JAX, which is why only command lines make it. The user's cache is kept to ``LIMIT`` bytes;
    another place is its owner's. JAX runs the programs that are there: without a directory that only the user can
    write, there is no cache, and standard error has a line about it.
    """
    if jax.config.jax_compilation_cache_dir is None:
        import platformdirs

        directory = Path(platformdirs.user_cache_dir("jaxnn")) / "compiled"
        if reason := _make_private(directory):
            print(f"jaxnn: compiled programs are not kept: {reason}", file=sys.stderr)
            return
        thin_out(directory, LIMIT)
        jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX keeps only what took a second to compile; small programs add up too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _make_private(directory: Path) -> str | None:
    """Makes a directory that only this user can write, if it is not there; or returns why it cannot be used."""
    try:
        for folder in (directory.parent, directory):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Whoever can write the parent can put another directory in its place.
        parent, known = directory.parent.stat(), directory.stat()
    except OSError as error:
        return f"{directory} cannot be made ({error.strerror or error})."
    # Windows has no such owners, and its cache directory is the user's alone.
    if not hasattr(os, "getuid"):
        return None
    if {parent.st_uid, known.st_uid} != {os.getuid()}:
        return f"{directory} or its parent belongs to another user: set JAX_COMPILATION_CACHE_DIR to one of yours."
    if known.st_mode & 0o022 or parent.st_mode & 0o002:
        return f"other users can write {directory} or its parent: delete it, or restrict its permissions."
    return None


def thin_out(directory: Path, limit: int) -> None:
    """Deletes what went unused for longest from a folder that outgrew ``limit`` bytes, down to half of it.

    Half, so that the next scripts have nothing to delete. What cannot be deleted stays.
    """
    files = sorted(_files(directory))
    size = sum(size for _, size, _ in files)
    if size <= limit:
        return
    for _, freed, file in files:
        if size <= limit // 2:
            return
        with contextlib.suppress(OSError):
            os.unlink(file)
        size -= freed


def _files(directory: Path) -> Iterator[tuple[float, int, str]]:
    """When each was last used, in seconds; its bytes; its path."""
    for name in files_below(directory):
        file = os.path.join(directory, name)
        # Another process may thin out the same folder.
        with contextlib.suppress(FileNotFoundError):
            known = os.stat(file)
            # File systems note a first reading in a day, at most; some none: then the writing is what is known.
            yield max(known.st_atime, known.st_mtime), known.st_size, file
