"""The script of the first minutes on a GPU, tried on a CPU."""

import json

import pytest

from tests.shell import python

SCRIPT = "experiments/benchmarks/gpu_day.py"


@pytest.mark.slow
def test_gpu_day_records_parts_and_skips_complete_ones(tmp_path):
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

    # Results of another commit are kept aside, and a case that hung comes last.
    path = tmp_path / "parts" / "widths.json"
    part = json.loads(path.read_text())
    hung = part["rows"].pop(0)["what"]
    path.write_text(json.dumps(part | {"complete": False, "hung": [hung]}))
    assert python(SCRIPT, *options, "--parts", "widths").returncode == 0
    assert [row["what"] for row in json.loads(path.read_text())["rows"]][-1] == hung
    old = json.loads(path.read_text())
    path.write_text(json.dumps(old | {"machine": old["machine"] | {"commit": "another"}}))
    assert python(SCRIPT, *options, "--parts", "widths").returncode == 0
    (kept,) = (tmp_path / "earlier").glob("widths-*.json")
    assert json.loads(kept.read_text())["rows"] == old["rows"]
    assert json.loads(path.read_text())["machine"]["commit"] == old["machine"]["commit"]


@pytest.mark.slow
def test_gpu_day_fails_where_there_is_no_gpu(tmp_path):
    done = python(SCRIPT, "--small", "--out", tmp_path, "--parts", "peers")
    parts = json.loads((tmp_path / "gpu_day.json").read_text())
    assert done.returncode == 1 and not parts["peers"]["complete"] and not parts["peers"]["rows"]
    assert "device is 'gpu', which JAX cannot open" in parts["peers"]["stopped"]
