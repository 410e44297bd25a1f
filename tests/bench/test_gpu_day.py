"""The script of the first minutes on a GPU, tried on a CPU."""

import json
from pathlib import Path

import pytest

from tests.shell import python

SCRIPT = "experiments/benchmarks/gpu_day.py"


@pytest.mark.slow
def test_gpu_day_records_parts_and_skips_complete_ones(tmp_path: Path) -> None:
    options = ("--small", "--device", "cpu", "--out", tmp_path)
    done = python(SCRIPT, *options, "--parts", "widths,bench")
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu_day.json").read_text())
    assert {name: part["complete"] for name, part in parts.items()} == {"widths": True, "bench": True}
    assert all(row["observed"]["member-steps/s"] > 0 for row in parts["widths"]["rows"])
    assert parts["widths"]["machine"]["label"].startswith("CPU")
    assert "| mlp | 4 |" in (tmp_path / "gpu_day.md").read_text()

    again = python(SCRIPT, *options, "--parts", "widths")
    assert again.stdout == "widths: complete, skipped\n"
    other = python(SCRIPT, "--device", "cpu", "--out", tmp_path, "--parts", "widths")
    assert other.returncode == 2 and "another device or size" in other.stderr
