"""The origin of a run: the command, its code in git, the settings of JAX, and where its experiment is defined."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxnn._fingerprints import text_fingerprint
from jaxnn._json import config_from_json
from jaxnn.types import ConfigError, Experiment, named_object

MOST_CODE = 2**20  # bytes of what is not committed that are kept
_PARTS = "data", "task", "optimizer", "step", "params"  # of an experiment, besides its config


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
    return file_names_of(experiment)[0]


def file_names_of(experiment: Experiment[Any]) -> list[str | None]:
    """Returns the names of the files that define the experiment's config class and its functions."""
    parts = (getattr(experiment, part) for part in _PARTS)
    return [_file_name(getattr(part, "__module__", "")) for part in (type(experiment.config), *parts)]


def _file_name(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    # The config class of `jn.train` is jaxnn's.
    return Path(file).stem if file and not module.startswith("jaxnn.") else None


class Definition(NamedTuple):
    """Where another process finds an experiment: a variable of a module, or an entry of a dict there."""

    module: str
    file: str  # the module's
    name: str
    key: str | None  # in the dict of that name

    @staticmethod
    def find(experiment: Experiment[Any]) -> tuple[Definition, Experiment[Any]] | None:
        """The variable that holds an experiment, at any config, and its value; None if no file has one."""
        parts = [getattr(experiment, part) for part in _PARTS]
        names = [getattr(part, "__module__", "") for part in (*parts, type(experiment.config))]
        # Its functions may come from a module that makes experiments.
        for module in filter(None, map(sys.modules.get, dict.fromkeys([*names, "__main__", *sys.modules]))):
            if (file := getattr(module, "__file__", None)) is None:
                continue
            spec: Any = getattr(module, "__spec__", None)  # a script has none
            known = Path(file).stem if spec is None else spec.name
            for name, value in [*vars(module).items()]:
                for key, one in value.items() if isinstance(value, dict) else [(None, value)]:
                    if not isinstance(one, Experiment) or parts != [getattr(one, part) for part in _PARTS]:
                        continue
                    if module.__name__ != "__main__" or name not in _guarded(Path(file)):
                        return Definition(known, str(Path(file).resolve()), name, key), one
        return None

    def load(self, config: dict[str, Any]) -> Experiment[Any]:
        """Imports the experiment, at a ``config``."""
        sys.argv = [self.file, "verify"]  # of a script that runs when it is imported
        sys.path.insert(0, str(Path(self.file).parent))
        with importing():
            found: Any = named_object(f"{self.module}:{self.name}", "the experiment")
        experiment: Experiment[Any] = found if self.key is None else found[self.key]
        return dataclasses.replace(experiment, config=config_from_json(config, experiment.config))


def _guarded(script: Path) -> set[str]:
    """The variables that a script lacks when it is imported: its main guard alone assigns them."""
    guard, others = set[str](), set[str]()
    for statement in ast.parse(script.read_text()).body:
        is_guard = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        names = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        (guard if is_guard else others).update(node.id for node in names)
    return guard - others


_importing = False  # whether a script is imported for its experiment


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Within the block scripts are imported for what they define, and not to run."""
    global _importing
    _importing = True
    try:
        yield
    finally:
        _importing = False


def check_not_imported() -> None:
    """Raises ConfigError in a script that runs when it is imported."""
    if _importing:
        raise ConfigError(
            'the script runs when it is imported: put its last lines under if __name__ == "__main__":, so that its '
            "experiment can be used without."
        )
