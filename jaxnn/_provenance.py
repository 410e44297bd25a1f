"""The origin of a run: the command, its code in git, and the settings of JAX."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from jaxnn.types import Experiment


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


def file_name_of(experiment: Experiment[Any]) -> str | None:
    """Returns the name of the file that defines the experiment's config class; None if there is none."""
    module = type(experiment.config).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    # The config class of `jn.train` is jaxnn's.
    return Path(file).stem if file and not module.startswith("jaxnn.") else None
