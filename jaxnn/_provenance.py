"""The origin of a run: the command, its code in git, and the settings of JAX."""

import contextlib
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxnn._fingerprints import text_fingerprint
from jaxnn.types import Experiment

MOST_CODE = 2**20  # bytes of what is not committed that are kept


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit, and whether the work tree around ``folder`` differs from it; None without git or a commit."""
    try:
        commit, status = _ask_git(folder, ["rev-parse", "HEAD"], ["status", "--porcelain"])
        return {"commit": commit.strip(), "dirty": bool(status.strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def _ask_git(folder: Path, *commands: Sequence[str]) -> list[str]:
    """The outputs of git for ``commands``, which run side by side; of each a byte more than `MOST_CODE` at most."""
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        started = []
        for words, output in zip(commands, outputs, strict=True):
            git = ["git", "-C", str(folder), *words]
            started.append(stack.enter_context(subprocess.Popen(git, stdout=output, stderr=subprocess.DEVNULL)))
            stack.callback(started[-1].kill)  # one that is over stays as it is
        for process in started:
            if (code := process.wait(timeout=10)) != 0:
                raise subprocess.CalledProcessError(code, "git")
        for output in outputs:
            output.seek(0)
        return [output.read(MOST_CODE + 1).decode(errors="replace") for output in outputs]


def script() -> dict[str, Any]:
    """The command that was run, the git state of its script's folder, and the text of what is not committed.

    ``patch`` is that text, and ``code`` its digest, its size in bytes and whether it was cut to `MOST_CODE`.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    file = None if main is None else Path(main).resolve()
    folder, git, patch, root = Path.cwd() if file is None else file.parent, None, "", None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        where, status, patch, known = _ask_git(
            folder,
            ["rev-parse", "HEAD", "--show-toplevel"],
            ["status", "--porcelain"],
            # No program is run that the repository's settings name.
            ["diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color"],
            ["ls-files", "--", str(file or folder)],
        )
        commit, root = where.splitlines()[:2]
        git = {"commit": commit, "dirty": bool(status.strip())}
        file = None if known else file
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            lines = file.read_text(errors="replace").splitlines(keepends=True)
            name = file.name if root is None else os.path.relpath(file, root)
            patch += "".join(difflib.unified_diff([], lines, "/dev/null", f"b/{name}"))
    content = patch.encode()
    patch = content[:MOST_CODE].decode(errors="ignore")
    code = {"digest": text_fingerprint(patch), "bytes": len(patch.encode()), "cut": len(content) > MOST_CODE}
    return {"command": sys.argv, "git": git, "code": code, "patch": patch}


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
