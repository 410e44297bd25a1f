"""The run of a torture test: started and resumed as a process, and read without jaxnn."""

import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
TIMINGS = ("seconds", "steps_per_second", "examples_per_second", "elapsed")


class Broken(Exception):
    """A claim is violated."""


def claim(holds: object, message: str) -> None:
    """Raises Broken with ``message`` unless the claim holds."""
    if not holds:
        raise Broken(message)


@dataclasses.dataclass(frozen=True)
class Victim:
    """The script to run.

    Attributes:
        folder: for its runs and its compile cache.
        num_steps: updates per run.
        checkpoint_every: steps between checkpoints.
        flags: of every process, started or resumed.
    """

    folder: Path
    num_steps: int
    checkpoint_every: int = 20
    flags: tuple[str, ...] = ()

    def start(self, run_dir: Path, *flags: object) -> "subprocess.Popen[str]":
        """Starts a process that resumes the run in ``run_dir``, or starts it."""
        fresh = ("--run-dir", run_dir, "--num-steps", self.num_steps, *self._cadences(), *flags)
        where = ("--resume", run_dir) if (run_dir / "run.json").exists() else fresh
        command = [sys.executable, HERE / "victim.py", *where, "--progress", "none", *self.flags]
        # All processes share the compile cache, as on any machine.
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
        words = list(map(str, command))
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, run_dir: Path) -> None:
        """Runs it to the end."""
        process = self.start(run_dir)
        _, said = process.communicate()
        claim(process.returncode == 0, f"an undisturbed run ended with status {process.returncode}: {said}")

    @functools.cached_property
    def undisturbed(self) -> Path:
        """The run directory of an undisturbed run."""
        self.finish(self.folder / "undisturbed")
        return self.folder / "undisturbed"

    def _cadences(self) -> tuple[object, ...]:
        every = self.checkpoint_every
        report = ("--report-every", every // 2, "--steps-per-call", every // 2, "--eval-every", 5 * every)
        return ("--checkpoint-every", every, "--keep-last", 3, *report)


def steps_of(run_dir: Path) -> list[int]:
    """Returns the steps of the run's checkpoints, in order."""
    folder = run_dir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def remnants_of(run_dir: Path, kind: str) -> list[Path]:
    """Returns remnants of checkpoints whose save (``unfinished``) or removal (``removed``) was interrupted."""
    return list((run_dir / "checkpoints").glob(f"*.{kind}*"))


def check_whole(checkpoint: Path) -> None:
    """Checks each file of a checkpoint against its checksum, like ``sha256sum -c``, and that there are no others."""
    claim((checkpoint / "SHA256SUMS").is_file(), f"{checkpoint} has a step's name and no SHA256SUMS")
    lines = (checkpoint / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines if line[0] != "#")}
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    claim(files.keys() - {"SHA256SUMS"} == sums.keys(), f"{checkpoint} has files other than its SHA256SUMS lists")
    for name, digest in sums.items():
        claim(hashlib.sha256(files[name].read_bytes()).hexdigest() == digest, f"{files[name]} is not as it was saved")


def facts_of(run_dir: Path) -> dict[str, Any]:
    """Returns the content of run.json; empty if there is none yet."""
    file = run_dir / "run.json"
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return facts


def reports_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of metrics.jsonl, without timings."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    complete = (json.loads(line) for line in lines if line.endswith("\n"))
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in complete]


def check_same(run_dir: Path, other: Path) -> None:
    """Checks that the last state and all metrics of two runs are bitwise equal."""
    check_same_reports(run_dir, other)
    with np.load(run_dir / "final.npz", allow_pickle=False) as arrays:
        check_same_arrays(arrays, other)


def check_same_reports(run_dir: Path, other: Path) -> None:
    """Checks that all metrics of two runs are bitwise equal."""
    claim(facts_of(run_dir)["status"] == "finished", f"{run_dir} did not finish")
    claim(reports_of(run_dir) == reports_of(other), f"{run_dir} reported other metrics than {other}")


def check_same_arrays(arrays: Mapping[str, np.ndarray], other: Path) -> None:
    """Checks that the arrays of a last state are bitwise equal to those of another run."""
    with np.load(other / "final.npz", allow_pickle=False) as expected:
        claim(sorted(arrays) == sorted(expected), f"the last state has other arrays than that in {other}")
        for name in expected:
            same = arrays[name].tobytes() == expected[name].tobytes()
            claim(same, f"{name} of the last state differs from that in {other}")
