"""Loading a run, a checkpoint, a state or a data set executes nothing, and an archive writes nowhere."""

from __future__ import annotations

import ast
import io
import pathlib
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import pytest

import jaxnn as jn
from jaxnn.data import cifar10
from jaxnn.types import DataError
from tests import shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

PACKAGE = shell.ROOT / "jaxnn"
# Modules that run what they read.
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch", "yaml", "msgpack"}
# Where one is allowed, and what for.
IMPORTS = {"importlib.import_module"}
EXCEPTIONS = {
    "data/_grain.py": {"cloudpickle"},  # a function of this process on its way to its own workers; no file
    # Tables of jaxnn's own names, and the MODULE:NAME that a user writes on the command line; nothing from a file.
    **dict.fromkeys(("__init__.py", "_compat.py", "bench/_study.py"), IMPORTS),
    **dict.fromkeys(("parallel/_strategies.py", "types.py"), IMPORTS),
}
# Calls that run text, by name; and methods that write what an archive holds where it says.
RUNNERS = {"eval", "exec", "compile", "__import__", "execfile"}
UNPACKERS = {"extract", "extractall", "unpack_archive"}


def offences(source: str, allowed: set[str] = frozenset()) -> Iterator[str]:  # type: ignore[assignment]
    """What in ``source`` could run what is read, or write where an archive says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in UNPICKLERS - allowed)
        if isinstance(node, ast.Call):
            yield from (name for name in _called(node) if name.partition(" ")[0] not in allowed)


def _called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if name in RUNNERS or name.startswith("builtins."):
        yield name
    if last in UNPACKERS and not name.startswith("traceback."):
        yield name
    if last == "import_module" and not isinstance(node.args[0], ast.Constant):
        yield f"{name} of what is not written there"
    if last == "load" and name.partition(".")[0] in ("np", "numpy", "jnp"):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if given.get("allow_pickle") != "False":
            yield f"{name} without allow_pickle=False"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from torch.serialization import load",
        "import cloudpickle as inert",
        "eval(text)",
        "exec(open(path).read())",
        "importlib.import_module(name)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "tarfile.open(path).extractall(folder)",
        "shutil.unpack_archive(path)",
    ],
)
def test_an_offence_is_seen(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    ["jax.eval_shape(f)", "re.compile(x)", "np.load(path, allow_pickle=False)", "archive.extractfile(member)"],
)
def test_what_runs_nothing_is_let_pass(source: str) -> None:
    assert not list(offences(source))


def test_nothing_in_jaxnn_runs_what_it_reads() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    found = {name: list(offences(path.read_text(), EXCEPTIONS.get(name, set()))) for name, path in files.items()}
    assert len(found) > 100 and not {name: told for name, told in found.items() if told}


# --- seen from inside the interpreter, which tells of each name that is unpickled, and of each shell ---

WATCHED = """
import sys
from pathlib import Path

import jax.numpy as jnp

import jaxnn as jn
from tests import tiny

seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, arguments)) if event in EVENTS else None)
EVENTS = ("pickle.find_class", "os.system", "os.exec", "ctypes.call_function")
folder = Path(sys.argv[1])
run = tiny.fit(tiny.experiment(), resume=folder / "run")
run.best_state()
jn.load_checkpoint(folder / "state", {"w": jnp.zeros(3)})
print(run.summary.status, seen)
"""


def test_no_name_is_unpickled_when_a_run_and_a_state_are_loaded(tmp_path: Path) -> None:
    tiny.fit(tiny.experiment(), tmp_path / "run")
    jn.save_checkpoint(tmp_path / "state", {"w": jnp.ones(3)})
    done = shell.python("-c", WATCHED, tmp_path)
    assert done.stdout.splitlines()[-1:] == ["finished []"], done.stderr


# --- archives ---

NAMES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def hostile_archive(path: Path, target: Path, folders: Sequence[str]) -> None:
    """CIFAR-10's binary archive, whose members would be written over ``target`` by one who unpacked it."""
    record = bytes(1 + 3072)
    with tarfile.open(path, "w:gz") as archive:
        for number, name in enumerate(NAMES):
            member = tarfile.TarInfo(f"{folders[number % len(folders)]}/{name}")
            member.size = len(record)
            archive.addfile(member, io.BytesIO(record))
        link = tarfile.TarInfo("cifar/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(target)
        archive.addfile(link)
        through = tarfile.TarInfo("cifar/link/planted")
        archive.addfile(through, io.BytesIO())


def below(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("folder", ["cifar", "../..", "/absolute"])
def test_an_archive_is_read_where_it_is_and_writes_nothing(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data_dir := tmp_path / "a" / "data").mkdir(parents=True)
    (target := tmp_path / "target").mkdir()
    outside = folder.replace("/absolute", str(target))
    hostile_archive(data_dir / "cifar-10-binary.tar.gz", target, ["cifar", outside])
    monkeypatch.chdir(data_dir)
    before = below(tmp_path)
    if folder == "cifar":
        assert cifar10(data_dir).train.num_examples == 5
    else:
        with pytest.raises(DataError, match="would be outside of it"):
            cifar10(data_dir)
    assert below(tmp_path) == before and not list(target.iterdir())


def test_a_link_in_an_archive_leads_to_no_file_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(1 + 3072))
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in NAMES:
            link = tarfile.TarInfo(f"cifar/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
            archive.addfile(link)
    with pytest.raises(DataError, match="a link or the like at cifar/data_batch_1"):
        cifar10(tmp_path)
