"""A run that is tortured, seen from outside: started and resumed as a process, and read without jaxnn."""

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
TIMINGS = ("seconds", "steps_per_second", "examples_per_second")


class Broken(Exception):
    """Something is not as claimed; it says what."""


def claim(holds: object, sentence: str) -> None:
    """Raises Broken with ``sentence`` unless it holds."""
    if not holds:
        raise Broken(sentence)


@dataclasses.dataclass(frozen=True)
class Victim:
    """The script that is run.

    Attributes:
        folder: for its runs and what is compiled.
        num_steps: updates a run.
        checkpoint_every: steps between checkpoints.
    """

    folder: Path
    num_steps: int
    checkpoint_every: int = 20

    def start(self, run_dir: Path, *flags: object) -> "subprocess.Popen[str]":
        """A process that goes on with the run in ``run_dir``, or begins it."""
        begin = ("--run-dir", run_dir, "--num-steps", self.num_steps, *self._cadences(), *flags)
        where = ("--resume", run_dir) if (run_dir / "run.json").exists() else begin
        command = [sys.executable, HERE / "victim.py", *where, "--progress", "none"]
        # All lives share what was compiled, as on any machine.
        surroundings = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
        words = list(map(str, command))
        return subprocess.Popen(words, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, run_dir: Path) -> None:
        """Runs it to its end."""
        process = self.start(run_dir)
        _, said = process.communicate()
        claim(process.returncode == 0, f"a run that nothing befell ended with status {process.returncode}: {said}")

    @functools.cached_property
    def undisturbed(self) -> Path:
        """The run directory of a run that nothing befell."""
        self.finish(self.folder / "undisturbed")
        return self.folder / "undisturbed"

    def _cadences(self) -> tuple[object, ...]:
        every = self.checkpoint_every
        report = ("--report-every", every // 2, "--steps-per-call", every // 2, "--eval-every", 5 * every)
        return ("--checkpoint-every", every, "--keep-last", 3, *report)


def steps_of(run_dir: Path) -> list[int]:
    """The steps that have a folder in the run's checkpoints, in order."""
    folder = run_dir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def remnants_of(run_dir: Path, kind: str) -> list[Path]:
    """What is left of checkpoints that were being written (``unfinished``) or taken away (``removed``)."""
    return list((run_dir / "checkpoints").glob(f"*.{kind}*"))


def check_whole(checkpoint: Path) -> None:
    """Holds each file of a checkpoint against its sum, as ``sha256sum -c`` does, and looks for others."""
    claim((checkpoint / "SHA256SUMS").is_file(), f"{checkpoint} has a step's name and no SHA256SUMS")
    lines = (checkpoint / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines if line[0] != "#")}
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    claim(files.keys() - {"SHA256SUMS"} == sums.keys(), f"{checkpoint} has files other than its SHA256SUMS lists")
    for name, digest in sums.items():
        claim(hashlib.sha256(files[name].read_bytes()).hexdigest() == digest, f"{files[name]} is not as it was saved")


def facts_of(run_dir: Path) -> dict[str, Any]:
    """What run.json says; nothing where there is none yet."""
    file = run_dir / "run.json"
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return facts


def reports_of(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, without what the clock said."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith("\n"))
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in whole]


def check_same(run_dir: Path, other: Path) -> None:
    """Holds the last state and every metric of a run against another's, bit by bit."""
    check_same_reports(run_dir, other)
    with np.load(run_dir / "final.npz", allow_pickle=False) as arrays:
        check_same_arrays(arrays, other)


def check_same_reports(run_dir: Path, other: Path) -> None:
    """Holds every metric of a run against another's, bit by bit."""
    claim(facts_of(run_dir)["status"] == "finished", f"{run_dir} did not finish")
    claim(reports_of(run_dir) == reports_of(other), f"{run_dir} reported other metrics than {other}")


def check_same_arrays(arrays: Mapping[str, np.ndarray], other: Path) -> None:
    """Holds the arrays of a last state against those that another run left, bit by bit."""
    with np.load(other / "final.npz", allow_pickle=False) as expected:
        claim(sorted(arrays) == sorted(expected), f"the last state has other arrays than that in {other}")
        for name in expected:
            same = arrays[name].tobytes() == expected[name].tobytes()
            claim(same, f"{name} of the last state differs from that in {other}")
