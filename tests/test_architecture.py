"""Rules of the architecture: imports go down, modules are private, names are unique; other libraries' private names."""

import ast
import collections
import functools
import importlib
import logging
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jaxnn
import jaxnn as jn
from jaxnn import _compat
from tests import processes, shell

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "jaxnn").rglob("*.py"))
LEVELS = (
    "types > _batch_context _clock _compat _equations _fields _fingerprints _json _statistics > _checked_json _text"
    " > _disk _figures _provenance _signals _transfers > kernels > nn data optim observe search > models > tasks"
    " > steps > parallel > record > engine > run > trees > sweeps > proof > decisions > advice plans testing estimators"
    " > cli > __init__ > __main__"
)
LEVEL = {package: level for level, packages in enumerate(LEVELS.split(" > ")) for package in packages.split()}
LAZY = (
    *(
        "sklearn",
        "matplotlib",
        "orbax",
        "tyro",
        "pooch",
        "PIL",
        "chex",
        "ray",
        "grain",
        "equinox",
        "flax.nnx",
        "optuna",
    ),
    *("tensorboardX", "wandb", "mlflow", "pandas"),
)
# The second and the last set the environment of other processes; the third switches kernels; the fourth the compiler's
# options; the fifth reads a secret; the sixth notes what an experiment reads.
ENVIRONMENT = (
    *("data/_files.py", "data/_grain.py", "kernels/_package.py", "observe/_compiler_options.py", "parallel/_link.py"),
    *("proof/_conditions.py", "proof/_fresh.py"),
)
MOST_TOP_LEVEL_NAMES = 48
# These may only fall: names that packages import from each other beside those in `__all__`, and circles of modules.
MOST_HIDDEN_NAMES = 117
MOST_CIRCLES = 3


def package_of(path: pathlib.Path) -> str:
    """``jaxnn/data/_files.py`` -> ``data``."""
    return path.relative_to(ROOT / "jaxnn").parts[0].removesuffix(".py")


@functools.cache
def nodes(path: pathlib.Path) -> list[ast.AST]:
    """Of a file's syntax, also within functions."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: pathlib.Path) -> Iterator[str]:
    """The modules that a file imports: ``jaxnn.data`` for ``from jaxnn import data``."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            module = node.module or ""
            yield from (f"jaxnn.{alias.name}" for alias in node.names) if module == "jaxnn" else (module,)


def test_imports_go_strictly_down():
    packages = {path: package_of(path) for path in LIBRARY}
    assert not [f"{own} has no level" for own in packages.values() if own not in LEVEL]
    found = ((path, module) for path in LIBRARY for module in imports(path) if module.startswith("jaxnn."))
    others = ((path, other) for path, module in found if (other := module.split(".")[1]) != packages[path])
    assert not [f"{path} imports {other}" for path, other in others if LEVEL[other] >= LEVEL[packages[path]]]


def test_packages_are_imported_as_a_whole():
    packages = {path: package_of(path) for path in LIBRARY}
    paths = [*LIBRARY, *(ROOT / "experiments").rglob("*.py")]
    inner = ((path, name) for path in paths for name in imports(path) if re.match(r"jaxnn\.\w+\.", name))
    assert not [f"{path} imports {name}" for path, name in inner if name.split(".")[1] != packages.get(path)]


def test_packages_list_their_public_names():
    packages = [package_of(path) for path in LIBRARY if path.name == "__init__.py" and path.parent.name != "jaxnn"]
    modules = {package: importlib.import_module(f"jaxnn.{package}") for package in packages}
    assert not [package for package, module in modules.items() if "__all__" not in vars(module)]
    assert len(jaxnn.__all__) <= MOST_TOP_LEVEL_NAMES


def test_tests_import_no_private_modules():
    private = re.compile(r"jaxnn\.[a-z]+\._[a-z]")
    tests = {path.relative_to(ROOT / "tests").as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert not [name for name, text in tests.items() if private.search(text)]


def test_modules_of_a_package_are_private_and_named_once():
    modules = [path for path in LIBRARY if path.parent != ROOT / "jaxnn" and path.name != "__init__.py"]
    assert not [str(path) for path in modules if not path.name.startswith("_")]
    files = collections.Counter(path.name for path in modules)
    classes = collections.Counter(
        node.name
        for path in LIBRARY
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in (files + classes).items() if count > 1]


def test_folders_and_files_stay_small():
    folders = collections.Counter(path.parent for path in LIBRARY if path.name != "__init__.py")
    assert max(folders.values()) <= 20
    assert not [str(path) for path in LIBRARY if len(path.read_text().splitlines()) > 500]


def test_doors_of_packages_become_no_wider():
    doors = {
        path.parent.name: vars(importlib.import_module(f"jaxnn.{path.parent.name}"))["__all__"]
        for path in (ROOT / "jaxnn").glob("*/__init__.py")
    }
    hidden = set()
    for path in LIBRARY:
        names: dict[str, str] = {}
        for node in nodes(path):
            used = []
            if isinstance(node, ast.ImportFrom) and node.module == "jaxnn":
                names |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in doors}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxnn."):
                used = [((node.module or "").split(".")[1], alias.name) for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                used = [(names[node.value.id], node.attr)]
            others = [(package, name) for package, name in used if package != package_of(path)]
            hidden |= {f"{package}.{name}" for package, name in others if name not in doors.get(package, [name])}
    assert len(hidden) <= MOST_HIDDEN_NAMES, sorted(hidden)


def test_modules_import_each_other_in_few_circles():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in LIBRARY}
    reach = {name: {module for module in imports(path) if module in modules} for name, path in modules.items()}
    for _ in range(len(modules).bit_length()):  # paths of twice the length each time
        reach = {name: found.union(*(reach[other] for other in found)) for name, found in reach.items()}
    circles = {frozenset(other for other in found if name in reach[other]) for name, found in reach.items()}
    assert len(circles - {frozenset()}) <= MOST_CIRCLES, circles


def test_native_kernels_choose_instructions_in_one_place():
    """So the one limit in the environment holds for every kernel."""
    own = re.compile(r"target_clones|__builtin_cpu|cpuid|effective_cpu_isa|getenv|-m(avx|fma|arch)|__(AVX|FMA)")
    sources = [path for path in (ROOT / "native").rglob("*") if path.suffix in (".cc", ".h", ".txt")]
    found = {path.name for path in sources if own.search(path.read_text())}
    assert found == {"instructions.cc", "onednn.h"}, found  # the second asks oneDNN, which has the limit too


def test_private_modules_of_other_libraries_are_imported_in_one_file():
    found = ((path, name.split(".")) for path in LIBRARY if path.name != "_compat.py" for name in imports(path))
    others = ((path, *parts) for path, parts in found if parts[0] != "jaxnn")
    assert not [one for one in others if one[1] == "jaxlib" or any(part.startswith("_") for part in one[2:])]


def test_the_environment_is_read_in_few_places():
    for path in LIBRARY:
        if str(path.relative_to(ROOT / "jaxnn")) in ENVIRONMENT or package_of(path) == "cli":
            continue
        used = {ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Attribute)}
        assert not used & {"os.environ", "os.getenv", "os.putenv"}, path


def test_importing_jaxnn_is_light_and_touches_no_device():
    probe = (
        "import sys, jaxnn\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a backend was started'\n"
        f"heavy = [name for name in {LAZY} if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    done = shell.python("-c", probe)
    assert done.returncode == 0, done.stderr


def test_private_name_of_orbax_exists_and_is_optional(tmp_path, monkeypatch):
    """If this fails, find how Orbax now counts the bytes that TensorStore wrote: that leaks 16 KiB per checkpoint."""
    utilities = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
    assert hasattr(utilities, "get_tensorstore_raw_bytes")
    jn.save_checkpoint(tmp_path / "state", {"w": np.arange(3.0)})
    assert utilities.get_tensorstore_raw_bytes() == 0
    monkeypatch.setitem(sys.modules, "orbax.checkpoint._src.serialization.tensorstore_utils", None)
    jn.save_checkpoint(tmp_path / "without", {"w": np.arange(3.0)})
    assert jn.load_checkpoint(tmp_path / "without")["w"].tolist() == [0, 1, 2]


def test_missing_private_names_of_jax_are_named(monkeypatch):
    assert _compat.coordination_client() is None
    for name in [name for name in os.environ if name.startswith(processes.FOREIGN)]:
        monkeypatch.delenv(name)
    assert _compat.detect_cluster(1) == (None, None, None)
    for module, call in (("distributed", _compat.coordination_client), ("clusters", lambda: _compat.detect_cluster(1))):
        monkeypatch.setitem(sys.modules, f"jax._src.{module}", None)
        with pytest.raises(jn.ConfigError, match=r"several processes do not work with jax .*: install jax"):
            call()


def test_writes_of_orbax_that_fail_together_are_reported_once(tmp_path, caplog, monkeypatch):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    for name in ("a", "b"):
        jn.save_checkpoint(tmp_path / name, {"w": np.arange(3.0)})
    closed = types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
    others = [
        types.SimpleNamespace(object=None, exc_value=RuntimeError("mine")),
        types.SimpleNamespace(object=print, exc_value=RuntimeError("Event loop is closed")),
    ]
    for unraisable in (closed, *others):
        sys.unraisablehook(unraisable)  # type: ignore[arg-type]
    assert reported == others, "errors of others must be reported, and once"
    asyncio_log = logging.getLogger("asyncio")
    for path in ("/site-packages/orbax/checkpoint/x.py", "/home/me/mine.py"):
        try:
            exec(compile("raise OSError(28, 'No space left on device')", path, "exec"))
        except OSError as error:
            asyncio_log.error(f"never retrieved: {path}", exc_info=error)
    # As in a future of TensorStore that is never awaited: the error has no traceback.
    refused = ValueError("Failed to write 211 bytes: No space left on device [tensorstore_spec='{}']")
    asyncio_log.error("never retrieved", exc_info=(ValueError, refused, None))
    asyncio_log.error("without an error")
    messages = [record.getMessage() for record in caplog.records if record.name == "asyncio"]
    assert messages == ["never retrieved: /home/me/mine.py", "without an error"]
