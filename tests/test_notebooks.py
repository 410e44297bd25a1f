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


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["01_quickstart.ipynb"]


@notebooks
def test_it_runs_from_top_to_bottom(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert any(tmp_path.glob("runs/*/*/run.json"))


@notebooks
def test_its_outputs_are_those_of_one_run(path: pathlib.Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    assert not [output for output in outputs if output.get("name") == "stderr"]


@notebooks
def test_its_outputs_name_no_place_of_this_machine(path: pathlib.Path) -> None:
    for cell in code_cells(path):
        pictures_apart = [{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in cell.outputs]
        found = ABSOLUTE_PATH.search(json.dumps(pictures_apart))
        assert found is None, found


@pytest.mark.parametrize("text", ["in /tmp/runs", '"/home/me/x"', "/root/.cache", r"C:\\Users"])
def test_an_absolute_path_would_be_seen(text: str) -> None:
    assert ABSOLUTE_PATH.search(text)
