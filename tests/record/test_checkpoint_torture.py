"""The commands that torture a run, in short: what they claim holds, and they would notice if it did not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import shell

BENCHMARKS = shell.ROOT / "experiments" / "benchmarks"


def command(*words: object) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "PYTHONPATH": str(shell.ROOT)}
    line = [sys.executable, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, env=surroundings, cwd=BENCHMARKS, timeout=900)


def figure(said: str, name: str) -> int:
    """The number at the end of the line that begins so."""
    found = re.search(rf"^{re.escape(name)} +(\d+)", said, re.MULTILINE)
    assert found is not None, said
    return int(found[1])


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_loses_nothing() -> None:
    done = command("torture.py", "kills", "--num-kills", 6, "--num-steps", 600)
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "kills") == 6
    assert figure(done.stdout, "… while a checkpoint was written") >= 1
    assert figure(done.stdout, "resumes seen, each from the newest complete checkpoint") >= 3
    assert figure(done.stdout, "runs finished, each bitwise that of an undisturbed one") >= 1


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one() -> None:
    done = command("torture.py", "corruption", "--most-files", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 of 2") == 4


@pytest.mark.slow
def test_a_run_that_goes_on_for_long_does_not_grow() -> None:
    cadences = ("--report-every", 20, "--eval-every", 40, "--checkpoint-every", 20)
    done = command("soak.py", "--num-steps", 4_000, *cadences)
    assert done.returncode == 0, done.stderr
    assert "200 reports, 100 evaluations, 200 checkpoints" in done.stdout


# Each spoils what the commands look at, in a run of two checkpoints, and what they then say.
SPOILT = {
    "a byte": ("(path / 'checkpoints/40/default/_METADATA').write_bytes(b'x')", "is not as it was saved"),
    "no sums": ("(path / 'checkpoints/40/SHA256SUMS').unlink()", "has a step's name and no SHA256SUMS"),
    "a file more": ("(path / 'checkpoints/40/more').touch()", "has files other than its SHA256SUMS lists"),
    "a metric": ("edit(path / 'metrics.jsonl', 'train_loss\": ', 'train_loss\": 1')", "reported other metrics"),
    "the state": ("np.savez(path / 'final.npz', **{**arrays, 'step': arrays['step'] + 1})", "step of the last state"),
    "an array": ("np.savez(path / 'final.npz', step=arrays['step'])", "other arrays"),
}
LOOK = """
import shutil, sys
from pathlib import Path
import numpy as np
from torture_run import Broken, check_same, check_whole
whole, path = Path(sys.argv[1]), Path(sys.argv[2])
arrays = dict(np.load(path / "final.npz", allow_pickle=False))
def edit(file, old, new):
    file.write_text(file.read_text().replace(old, new, 1))
def look():
    check_same(path, whole)
    check_whole(path / "checkpoints" / "40")
look()
for spoil in sys.argv[3:]:
    shutil.rmtree(path)
    shutil.copytree(whole, path)
    exec(spoil)
    try:
        look()
        print("nothing noticed")
    except Broken as broken:
        print(broken)
"""


@pytest.mark.slow
def test_what_is_spoilt_would_be_noticed(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    cadences = ("--checkpoint-every", 20, "--report-every", 20, "--steps-per-call", 20, "--eval-every", 0)
    done = command("victim.py", "--run-dir", whole, "--num-steps", 40, *cadences, "--progress", "none")
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, tmp_path / "copy")
    done = command("-c", LOOK, whole, tmp_path / "copy", *(spoil for spoil, _ in SPOILT.values()))
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == len(SPOILT)
    for line, (_, words) in zip(told, SPOILT.values(), strict=True):
        assert words in line
