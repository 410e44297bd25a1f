"""The house stands: imports go strictly down the floors, and importing jaxnn is light."""

import ast
import graphlib
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxnn"
FLOORS = {
    0: {"types", "_importing"},
    1: {"_compat", "nn", "data", "optim", "observe"},
    2: {"models"},
    3: {"tasks"},
    4: {"steps"},
    5: {"parallel"},
    6: {"record"},
    7: {"loop"},
    8: {"sweeps", "verify", "profile"},
    9: {"bench", "advise"},
    10: {"cli"},
    11: {"__init__"},
    12: {"__main__"},
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
LAZY = ("sklearn", "matplotlib", "orbax", "tyro", "pooch", "PIL", "chex", "ray", "grain")


def room_of(module: str) -> str:
    """``jaxnn.data.files`` -> ``data``; ``jaxnn`` itself -> ``__init__``."""
    return (module.split(".") + ["__init__"])[1]


def imported(source: str, module: str, is_package: bool = False) -> set[str]:
    """Every module ``source`` imports, in functions too, and what it takes from each, dotted."""
    package = module if is_package else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def owner(name: str, modules: set[str]) -> str:
    """The module that ``jaxnn.data.files.load`` is in: its longest start that is a module."""
    starts = itertools.accumulate(name.split("."), "{}.{}".format)
    return max((start for start in starts if start in modules), key=len, default=name)


def edges() -> Iterator[tuple[str, str]]:
    for module, path in MODULES.items():
        for name in imported(path.read_text(), module, path.name == "__init__.py"):
            if name.partition(".")[0] == "jaxnn":
                yield module, owner(name, set(MODULES))


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES} <= set(FLOOR)


def test_imports_go_strictly_down() -> None:
    wrong = [
        f"{importer} imports {target}"
        for importer, target in edges()
        if room_of(importer) != room_of(target) and FLOOR[room_of(importer)] <= FLOOR[room_of(target)]
    ]
    assert not wrong


def test_no_cycles_within_a_room() -> None:
    graph: dict[str, set[str]] = {}
    for importer, target in edges():
        if importer != target:
            graph.setdefault(importer, set()).add(target)
    graphlib.TopologicalSorter(graph).prepare()


def test_nothing_imports_the_roof() -> None:
    for module, path in MODULES.items():
        tops = {name.partition(".")[0] for name in imported(path.read_text(), module)}
        assert not tops & {"experiments", "notebooks", "tests"}, module


def test_environment_is_read_in_few_places_only() -> None:
    reads = {"os.environ", "os.getenv", "os.putenv"}
    for module, path in MODULES.items():
        # The second gives worker processes an environment of their own; the third reads a secret.
        places = ("jaxnn.data.files", "jaxnn.data.streaming.environment", "jaxnn.parallel.processes.wire")
        if module in places or room_of(module) == "cli":
            continue
        tree = ast.parse(path.read_text())
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not reads & (used | imported(path.read_text(), module)), module


def test_import_is_light_and_touches_no_device() -> None:
    probe = (
        "import sys, jaxnn\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a backend was started'\n"
        f"heavy = [name for name in {LAZY} if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jaxnn.data.files as f", {"jaxnn.data.files"}),
        ("def g():\n    from jaxnn import types", {"jaxnn.types"}),
        ("from . import clock", {"jaxnn.observe.clock"}),
        ("from .clock import Clock", {"jaxnn.observe.clock.Clock"}),
        ("from ..types import Batch", {"jaxnn.types.Batch"}),
    ],
)
def test_imports_are_seen(source: str, expected: set[str]) -> None:
    assert imported(source, "jaxnn.observe.memory") == expected
