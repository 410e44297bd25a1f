"""The persistent compile cache, on for scripts: what was compiled once is read from the disk next time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxnn.checkpoints.folder import files_below

# Bytes: thousands of small networks' programs. JAX's own limit, unset by default, looks at the whole cache for each
# program that it adds: 0.3 s where there are 5,000.
LIMIT = 2 << 30


def enable_compile_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX was told of another place.

    A process-wide setting of JAX, which is why only command lines make it. The user's cache is kept to ``LIMIT`` bytes;
    another place is its owner's.
    """
    if jax.config.jax_compilation_cache_dir is None:
        import platformdirs

        directory = Path(platformdirs.user_cache_dir("jaxnn")) / "compiled"
        thin_out(directory, LIMIT)
        jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX keeps only what took a second to compile; small programs add up too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


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
