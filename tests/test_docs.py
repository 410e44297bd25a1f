"""The documentation: code of pages, examples of docstrings and notebooks run; links and API pages are complete."""

import ast
import doctest
import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import harness
import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
from flax import linen
from nbclient import NotebookClient

import jaxnn as jn
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]


def blocks(page: Path, *languages: str) -> list[str]:
    """The code of a page: ``python`` runs, ``py`` is only shown."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PROGRAMS if blocks(page, "python")])
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec", dont_inherit=True), names)


def test_code_of_all_pages_is_python():
    for page in PAGES:
        for code in blocks(page, "python", "py"):
            ast.parse(code.replace("->", "") if code.startswith("step(") else code, str(page))


def test_links_and_names_of_tests_lead_to_files_and_headings():
    wrong = []
    for page in PAGES:
        wrong += [name for name in re.findall(r"tests/\w+/\w+\.py", page.read_text()) if not (ROOT / name).exists()]
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!https?:)([^)]*)\)", prose):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    docs = ROOT / "docs"
    assert [str(page) for page in PAGES[1:] if str(page.relative_to(docs)) not in navigation] == []


def test_api_pages_cover_every_public_name():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    # The page of `jaxnn` lists what is defined below it; a module has a page of its own.
    modules = {getattr(jn, name).__name__ for name in jn.__all__ if isinstance(getattr(jn, name), ModuleType)}
    by_name = {f"jaxnn.{name}" for name in ("parallel", "record", "sweeps", "plans")}
    assert modules | by_name | {"jaxnn"} <= documented
    for name in documented:  # pages are made from the source, where a name that is only imported on demand is not seen
        module = importlib.import_module(name) if name != "jaxnn.schedules" else jn.schedules
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        stated = {getattr(node, key, None) for node in nodes for key in ("name", "asname", "id")}
        assert {*module.__all__} <= stated, name


PACKAGES = "data models nn observe optim search steps tasks testing trees parallel record sweeps estimators"
MODULES = {name: importlib.import_module(name) for name in ("jaxnn", *(f"jaxnn.{name}" for name in PACKAGES.split()))}
MODULES |= {"jaxnn.schedules": jn.schedules, "harness": harness}
# Public functions and classes, each once, by their shortest name; exceptions are seen where they are raised.
PUBLIC: dict[str, Any] = {}
for module_name, module in MODULES.items():
    for name in module.__all__:
        value = getattr(module, name)
        is_ours = getattr(value, "__module__", "").startswith(("jaxnn", "harness"))
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        if is_ours and (inspect.isclass(value) or inspect.isfunction(value)) and not is_error:
            if not any(value is other for other in PUBLIC.values()):
                PUBLIC[f"{module_name}.{name}"] = value


@functools.cache
def experiment() -> jn.Experiment[tiny.Config]:
    sgd = lambda config: optax.sgd(config.learning_rate)  # noqa: E731
    return tiny.experiment(data=jn.data.digits(), model=jn.models.MLP((8, 10)), optimizer=sgd, batch_size=32)


@functools.cache
def run() -> jn.Run:
    return jn.fit(experiment(), record=False, progress="none", steps_per_call=5)


@functools.cache
def swept() -> jn.Sweep:
    points = jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1])
    how: Any = {"record": False, "progress": "none", "steps_per_call": 5, "vmap_size": 4, "devices": 1}
    return jn.sweep(experiment(), points, eval_every=5, **how)


@functools.cache
def batch() -> jn.Batch:
    examples = jn.data.digits().train.examples
    assert examples is not None
    return jn.Batch(examples.inputs[:32], examples.targets[:32], np.ones(32, np.float32))


# Values that examples name.
SHARED: dict[str, Callable[[], Any]] = {"experiment": experiment, "run": run, "swept": swept, "batch": batch}
# Examples with these calls need the folder of a real data set.
SETS = ("mnist", "fashion_mnist", "cifar10", "cats_vs_dogs", "imdb", "ptb", "sms_spam")
REAL = {f"jn.data.{name}(": name for name in SETS} | {"jn.data.ag_news(": "ag_news_test"}
# Examples with these calls need an optional library.
OPTIONAL = {"search.optuna": "optuna", "run.export(": "flatbuffers", "_weights(": "safetensors"}
NAMES = dict(jax=jax, jnp=jnp, np=np, optax=optax, linen=linen, jn=jn, Path=Path, harness=harness)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, tmp_path, monkeypatch, real_data):
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [found for found in finder.find(PUBLIC[name], name, globs={}) if found.examples]
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    report: list[str] = []
    for test in tests:
        source = "".join(example.source for example in test.examples)
        if needed := [folder for call, folder in REAL.items() if call in source]:
            if real_data is None or not all((real_data / folder).is_dir() for folder in needed):
                pytest.skip(f"no real data: {', '.join(needed)}")
            monkeypatch.setenv("JAXNN_DATA", str(real_data))
        for module in (module for call, module in OPTIONAL.items() if call in source):
            pytest.importorskip(module)
        test.globs = NAMES | {shared: make() for shared, make in SHARED.items() if shared in source}
        doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not report, "".join(report)
    assert tests, f"{name} has no example in its docstring"


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# A folder inside a folder of the root, unless it ends a URL or a tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w.)<:/])/\w+/[\w.]|[A-Z]:\\\\")


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def outputs_of(cells: list[Any]) -> list[Any]:
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def num_pictures(cells: list[Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs_of(cells))


@pytest.mark.slow
@notebooks
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert any(tmp_path.glob("runs/**/metrics.jsonl"))
    assert num_pictures(notebook.cells) == num_pictures(code_cells(path))


@notebooks
def test_committed_outputs_are_of_one_clean_run(path):
    cells = code_cells(path)
    outputs = outputs_of(cells)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)) and num_pictures(cells) > 0
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    for output in outputs:
        assert len(output.get("text") or output.get("data", {}).get("text/plain", "")) < 2000
        without_picture = {**output, "data": {**output.get("data", {}), "image/png": ""}}
        assert not (found := ABSOLUTE_PATH.search(json.dumps(without_picture))), found
