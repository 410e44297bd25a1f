"""What a hit of the persistent compilation cache saved: compile times kept beside it, by the program's text."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import jax

# JAX keeps compile times too, but in whole seconds, and most programs here take less than one.
FOLDER = "compile-seconds"


def saved_seconds(program: str, seconds: float, *, hit: bool) -> float:
    """Remembers how long ``program`` took to compile; after a hit, how much longer than its retrieval that was.

    Args:
        program: its text.
        seconds: what compiling or retrieving it took now.
        hit: whether it came from the cache.

    Returns:
        0.0 unless it was a hit whose compilation is remembered.
    """
    cache = jax.config.jax_compilation_cache_dir
    if cache is None:
        return 0.0
    note = Path(cache) / FOLDER / hashlib.blake2b(program.encode(), digest_size=16).hexdigest()
    try:
        if hit:
            return max(0.0, float(note.read_text()) - seconds)
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(str(seconds))
        temporary.replace(note)
    except (OSError, ValueError):
        # A cache that cannot be written, or was thinned out, costs the figure and nothing else.
        pass
    return 0.0
