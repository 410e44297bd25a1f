"""Verification: what is equal passes, what is not is named with its part and cause; scripts of users."""

import importlib
import json
import re
from pathlib import Path

import pytest

import jaxnn as jn
from jaxnn.cli import command
from tests import shell, tiny

SCRIPT = """
from tests import tiny
import jaxnn as jn
experiment = tiny.experiment()
if __name__ == "__main__":
    jn.main(experiment)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script in a folder of its own, where the tests run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(shell.ROOT)
    path = tmp_path / "verified.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_a_clean_experiment_passes_and_leaves_one_file(script, capsys):
    command(["verify", script.name, "--steps", "4", "--json", "--batch-size", "6"])
    found = json.loads(capsys.readouterr().out)
    results = {check["name"]: check["result"] for check in found["checks"]}
    assert found["passed"] and found["steps"] == 4
    assert {results[name] for name in ("same run twice", "killed and resumed", "batches", "made twice")} == {"pass"}
    assert set(results.values()) <= {"pass", "to rounding"}
    written = json.loads(Path("runs/verified/verify.json").read_text())
    assert written["checks"] == found["checks"] and written["config"]["batch_size"] == 6
    assert [path.name for path in Path().rglob("*.*") if "__pycache__" not in path.parts] == [
        script.name,
        "verify.json",
    ]


def test_what_cannot_be_verified_is_one_line(script, capsys):
    with pytest.raises(jn.ConfigError, match="no file has it as a variable.*jaxnn verify script.py"):
        jn.verify(tiny.experiment())
    script.with_name("unguarded.py").write_text(f"{SCRIPT.partition('if')[0]}jn.verify(experiment, steps=4)\n")
    done = shell.python(script.with_name("unguarded.py"))
    assert done.returncode == 1
    assert re.search(r"in a fresh process: .*put its last lines under if __name__", done.stderr.splitlines()[-1])
    assert "steps must be an integer >= 2" in shell.fails(capsys, command, "verify", script, "--steps", 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["set_order", "host_callback", "resumes_wrongly", "mutable_default"])
def test_a_planted_cause_is_named(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(shell.ROOT / "experiments" / "benchmarks")
    planted = importlib.import_module("planted_nondeterminism")
    assert planted.main([name]) == 0, capsys.readouterr().out
