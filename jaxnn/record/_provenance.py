"""The origin of a run: code, versions, flags, fingerprints of its programs and data, and the shapes of its data."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from jaxnn.data import ArraySource
from jaxnn.types import Examples, Splits


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit, and whether the work tree around ``folder`` differs from it; None without git or a commit."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def script() -> dict[str, Any]:
    """The command that was run, and the git state of its script's folder."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(main).resolve().parent if main else Path.cwd()
    return {"command": sys.argv, "git": git_state(folder)}


def jax_flags() -> dict[str, Any]:
    """The current JAX settings that change numbers."""
    names = (
        "enable_x64 default_matmul_precision default_prng_impl threefry_partitionable numpy_dtype_promotion "
        "random_seed_offset accurate_erf_inv high_dynamic_range_gumbel allow_f16_reductions softmax_custom_jvp"
    )
    return {name: getattr(jax.config, name, None) for name in (f"jax_{word}" for word in names.split())}


def describe_data(splits: Splits, examples: Examples) -> dict[str, Any] | None:
    """Returns the number of examples of each split, and the dtype and shape of one of ``examples [batch, ...]``.

    ``{"splits": {"train": 1437}, "inputs": "float32[64]", "targets": "int32[]"}``; None if the source prepares batches
    in a way of its own, which a record does not hold.
    """
    if getattr(type(splits.train), "as_batch", None) is not ArraySource.as_batch:
        return None
    one = jax.tree.map(lambda rows: f"{rows.dtype}{list(rows.shape[1:])}", examples._asdict())
    return {"splits": {name: source.num_examples for name, source in splits.named().items()}, **one}
