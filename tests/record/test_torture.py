"""Short versions of the benchmarks that kill, damage and prolong runs."""

from __future__ import annotations

import re

import pytest

from tests import shell

BENCHMARKS = shell.ROOT / "experiments" / "benchmarks"


def benchmark(script: str, *words: object) -> str:
    """The output of a benchmark that succeeded."""
    done = shell.python(BENCHMARKS / script, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_run_loses_nothing() -> None:
    output = benchmark("torture.py", "kills", "--num-kills", 4, "--num-steps", 400)

    def figure(name: str) -> int:
        found = re.search(rf"^{re.escape(name)} +(\d+)", output, re.MULTILINE)
        assert found is not None, output
        return int(found[1])

    assert figure("kills") == 4
    assert figure("… while a checkpoint was written") >= 1
    assert figure("resumes seen, each from the newest complete checkpoint") >= 2
    assert figure("runs finished, each bitwise that of an undisturbed one") >= 1


@pytest.mark.slow
def test_run_resumes_from_the_checkpoint_before_a_damaged_one() -> None:
    assert benchmark("torture.py", "corruption", "--most-files", 1).count("1 of 1") == 4


@pytest.mark.slow
def test_long_run_does_not_grow() -> None:
    cadences = ("--report-every", 20, "--eval-every", 40, "--checkpoint-every", 20)
    output = benchmark("soak.py", "--num-steps", 3_000, *cadences)
    assert "150 reports, 75 evaluations, 150 checkpoints" in output
