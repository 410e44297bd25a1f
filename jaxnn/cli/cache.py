"""The persistent compile cache, on for scripts: what was compiled once is read from the disk next time."""

from __future__ import annotations

from pathlib import Path

import jax


def enable_compile_cache() -> None:
    """Keeps compiled programs in the user's cache directory, unless JAX was told of another place.

    A process-wide setting of JAX, which is why only command lines make it.
    """
    if jax.config.jax_compilation_cache_dir is None:
        import platformdirs

        directory = Path(platformdirs.user_cache_dir("jaxnn")) / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX keeps only what took a second to compile; small programs add up too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
