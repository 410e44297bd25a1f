"""Notebooks run from top to bottom, and are committed with the outputs of one run."""

import json
import pathlib
import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# A folder inside a folder of the root, unless it ends a URL or a tag.
ABSOLUTE_PATH = re.compile(r"(?<![\w.)<:/])/\w+/[\w.]|[A-Z]:\\\\")


def code_cells(path: pathlib.Path) -> list[Any]:
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
    assert any(tmp_path.glob("runs/**/run.json"))
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
