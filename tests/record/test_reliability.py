"""Loading a record executes nothing; and short versions of the benchmarks that kill, damage and prolong runs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxnn as jn
from tests import shell, tiny

PACKAGE = shell.ROOT / "jaxnn"
# Modules that execute what they load.
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch", "yaml", "msgpack"}
# The files that may use one, and for what.
IMPORTS = {"importlib.import_module"}
EXCEPTIONS = {
    "data/_grain.py": {"cloudpickle"},  # a function of this process on its way to its own workers; no file
    # Tables of jaxnn's own names, and the MODULE:NAME that a user writes on the command line; nothing from a file.
    **dict.fromkeys(("__init__.py", "_compat.py", "bench/_study.py", "parallel/_strategies.py", "types.py"), IMPORTS),
}
# Calls that execute text, by name; and methods that write the files of an archive.
RUNNERS = {"eval", "exec", "compile", "__import__", "execfile"}
UNPACKERS = {"extract", "extractall", "unpack_archive"}


def violations(source: str, allowed: set[str] = frozenset()) -> Iterator[str]:  # type: ignore[assignment]
    """Names of what in ``source`` could execute what is loaded, or write where an archive says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in UNPICKLERS - allowed)
        if isinstance(node, ast.Call):
            yield from (name for name in unsafe_calls(node) if name.partition(" ")[0] not in allowed)


def unsafe_calls(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if name.removeprefix("builtins.") in RUNNERS or (last in UNPACKERS and not name.startswith("traceback.")):
        yield name
    if last == "import_module" and not isinstance(node.args[0], ast.Constant):
        yield f"{name} of a name that is computed"
    if last == "load" and name.partition(".")[0] in ("np", "numpy", "jnp"):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if given.get("allow_pickle") != "False":
            yield f"{name} without allow_pickle=False"


UNSAFE = (
    *("import pickle", "def f():\n    from torch.serialization import load", "import cloudpickle as inert"),
    *("eval(text)", "builtins.exec(open(path).read())", "importlib.import_module(name)", "np.load(path)"),
    *("np.load(path, allow_pickle=True)", "tarfile.open(path).extractall(folder)", "shutil.unpack_archive(path)"),
)
SAFE = (
    *("jax.eval_shape(f)", "re.compile(x)", "np.load(path, allow_pickle=False)", "archive.extractfile(member)"),
    "builtins.zip(a, b)",
)


def test_no_module_of_jaxnn_executes_what_it_loads() -> None:
    assert all(any(violations(source)) for source in UNSAFE)
    assert not any(any(violations(source)) for source in SAFE)
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    found = {name: list(violations(path.read_text(), EXCEPTIONS.get(name, set()))) for name, path in files.items()}
    assert len(found) > 90 and not {name: names for name, names in found.items() if names}


# Audit events report each name that is unpickled, and each shell.
WATCHED = """
import sys
from pathlib import Path
import numpy as np
import jaxnn as jn
from tests import tiny

seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, arguments)) if event in EVENTS else None)
EVENTS = ("pickle.find_class", "os.system", "os.exec", "ctypes.call_function")
folder = Path(sys.argv[1])
run = tiny.fit(tiny.experiment(), resume=folder / "run")
run.best_state()
jn.load_checkpoint(folder / "state", {"w": np.zeros(3)})
print(run.summary.status, seen)
"""


@pytest.mark.slow
def test_loading_a_run_and_a_state_unpickles_nothing(tmp_path: Path) -> None:
    tiny.fit(tiny.experiment(), tmp_path / "run")
    jn.save_checkpoint(tmp_path / "state", {"w": np.ones(3)})
    done = shell.python("-c", WATCHED, tmp_path)
    assert done.stdout.splitlines()[-1:] == ["finished []"], done.stderr


# --- benchmarks of reliability ---

BENCHMARKS = shell.ROOT / "experiments" / "benchmarks"


def benchmark(script: str, *words: object) -> str:
    """The output of a benchmark that succeeded."""
    done = shell.python(BENCHMARKS / script, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_run_loses_nothing() -> None:
    output = benchmark("torture.py", "kills", "--num-kills", 4, "--num-steps", 400)

    def figure(name: str) -> int:
        found = re.search(rf"^{re.escape(name)} +(\d+)", output, re.MULTILINE)
        assert found is not None, output
        return int(found[1])

    assert figure("kills") == 4
    assert figure("… while a checkpoint was written") >= 1
    assert figure("resumes seen, each from the newest complete checkpoint") >= 2
    assert figure("runs finished, each bitwise that of an undisturbed one") >= 1


@pytest.mark.slow
def test_run_resumes_from_the_checkpoint_before_a_damaged_one() -> None:
    assert benchmark("torture.py", "corruption", "--most-files", 1).count("1 of 1") == 4


@pytest.mark.slow
def test_long_run_does_not_grow() -> None:
    cadences = ("--report-every", 20, "--eval-every", 40, "--checkpoint-every", 20)
    output = benchmark("soak.py", "--num-steps", 3_000, *cadences)
    assert "150 reports, 75 evaluations, 150 checkpoints" in output


@pytest.mark.slow
def test_run_on_a_full_disk_ends_and_resumes() -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here: `unshare --user --map-root-user --mount` is not permitted")
    assert benchmark("torture.py", "disk-full").count("No space left on device") == 4
