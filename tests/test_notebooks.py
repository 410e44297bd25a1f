"""Notebooks run from top to bottom, and are committed with what they showed."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# A folder within a folder of the root, unless it ends a URL or a tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w.)<:/])/\w+/[\w.]|[A-Z]:\\\\")


def code_cells(path: pathlib.Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def outputs_of(cells: list[Any]) -> list[Any]:
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def num_pictures(cells: list[Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs_of(cells))


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["01_quickstart.ipynb"]


@pytest.mark.slow
@notebooks
def test_it_runs_from_top_to_bottom(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert any(tmp_path.glob("runs/**/run.json"))
    assert num_pictures(notebook.cells) == num_pictures(code_cells(path))


@notebooks
def test_its_outputs_are_those_of_one_run(path: pathlib.Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = outputs_of(cells)
    assert num_pictures(cells) > 0
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@notebooks
def test_nothing_spills_its_insides(path: pathlib.Path) -> None:
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs_of(code_cells(path))
    ]
    assert max(map(len, texts)) < 2000


@notebooks
def test_its_outputs_name_no_place_of_this_machine(path: pathlib.Path) -> None:
    for cell in code_cells(path):
        pictures_apart = [{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in cell.outputs]
        found = ABSOLUTE_PATH.search(json.dumps(pictures_apart))
        assert found is None, found


@pytest.mark.parametrize("text", ["in /tmp/runs", '"/home/me/x"', "/root/.cache", r"C:\\Users"])
def test_an_absolute_path_would_be_seen(text: str) -> None:
    assert ABSOLUTE_PATH.search(text)
