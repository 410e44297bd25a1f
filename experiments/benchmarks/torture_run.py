"""The run or sweep of a torture test: started and resumed as a process; only last states are read by jaxnn."""

import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import jaxnn as jn

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
        words: the script and the first flags of every process, started or resumed.
    """

    folder: Path
    num_steps: int
    checkpoint_every: int = 20
    words: tuple[str, ...] = ("victim.py",)

    def start(self, run_dir: Path, *flags: object) -> "subprocess.Popen[str]":
        """Starts a process that resumes the run in ``run_dir``, or starts it."""
        fresh = ("--run-dir", run_dir, "--num-steps", self.num_steps, *self._cadences(), *flags)
        where = ("--resume", run_dir) if facts_of(run_dir) else fresh
        script, *words = self.words
        command = [*map(str, (sys.executable, HERE / script, *words, *where, "--progress", "none"))]
        # All processes share the compile cache, as on any machine.
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

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


def stores_of(run_dir: Path) -> dict[str, list[Path]]:
    """Returns the checkpoints of a run, or of each group of a sweep, by their folder, in order."""
    folders = sorted([*run_dir.glob("checkpoints"), *run_dir.glob("groups/*")])
    return {
        folder.name: sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
        for folder in folders
    }


def steps_of(run_dir: Path) -> list[int]:
    """Returns the steps of the run's checkpoints, in order; of a sweep's groups one after another."""
    return [int(path.name) for paths in stores_of(run_dir).values() for path in paths]


def remnants_of(run_dir: Path, kind: str) -> list[Path]:
    """Returns remnants of checkpoints whose save (``unfinished``) or removal (``removed``) was interrupted."""
    return [*run_dir.glob(f"checkpoints/*.{kind}*"), *run_dir.glob(f"groups/*/*.{kind}*")]


def check_all_whole(run_dir: Path) -> int:
    """Checks every checkpoint of a run or sweep; returns their number."""
    checkpoints = [path for paths in stores_of(run_dir).values() for path in paths]
    for checkpoint in checkpoints:
        _check_whole(checkpoint)
    return len(checkpoints)


def _check_whole(checkpoint: Path) -> None:
    """Checks each file of a checkpoint against its checksum, like ``sha256sum -c``, and that there are no others."""
    claim((checkpoint / "SHA256SUMS").is_file(), f"{checkpoint} has a step's name and no SHA256SUMS")
    lines = (checkpoint / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines if line[0] != "#")}
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    claim(files.keys() - {"SHA256SUMS"} == sums.keys(), f"{checkpoint} has files other than its SHA256SUMS lists")
    for name, digest in sums.items():
        claim(hashlib.sha256(files[name].read_bytes()).hexdigest() == digest, f"{files[name]} is not as it was saved")


def facts_of(run_dir: Path) -> dict[str, Any]:
    """Returns the content of record.json; empty if there is none yet."""
    file = run_dir / "record.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def reports_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of metrics.jsonl, without timings."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    complete = (json.loads(line) for line in lines if line.endswith("\n"))
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in complete]


def updates_of(run_dir: Path) -> tuple[int, int]:
    """Returns the updates, of all members together, that reports show, and that checkpoints hold."""
    reported = {line.get("member"): line["step"] for line in reports_of(run_dir)}
    return sum(reported.values()), sum(int(paths[-1].name) for paths in stores_of(run_dir).values() if paths)


def logs_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Returns what the newest checkpoint in each folder notes of the reports up to it: ``lines`` and ``sha256``."""
    newest = {name: paths[-1] / "checkpoint.json" for name, paths in stores_of(run_dir).items() if paths}
    return {name: json.loads(file.read_text())["log"] for name, file in newest.items()}


def check_kept(run_dir: Path, logs: dict[str, dict[str, Any]]) -> None:
    """Checks that reports are those noted, timings included: after a resume from an older checkpoint they differ."""
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True) if logs else []
    for name, log in logs.items():
        members = facts_of(run_dir)["groups"][int(name)]["members"] if name.isdigit() else [0]
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line).get("member") in members]
        digest = hashlib.sha256(b"".join(kept[: log["lines"]])).hexdigest()
        claim(digest == log["sha256"], f"{run_dir} has other reports up to the newest checkpoint in {name} than before")


def check_same(run_dir: Path, other: Path) -> None:
    """Checks that the last states and all metrics of two runs, or of the members of two sweeps, are bitwise equal."""
    claim(facts_of(run_dir)["status"] == "finished", f"{run_dir} did not finish")
    found, expected = (sorted(reports_of(path), key=_place) for path in (run_dir, other))
    claim(found == expected, f"{run_dir} reported other metrics than {other}")
    for file in other.glob("members.jsonl"):
        claim((run_dir / file.name).read_bytes() == file.read_bytes(), f"{run_dir} has other members than {other}")
    ends, expected_ends = stores_of(run_dir), stores_of(other)
    claim(ends.keys() == expected_ends.keys(), f"{run_dir} has other groups than {other}")
    for name, paths in expected_ends.items():
        claim(ends[name][-1].name == paths[-1].name, f"{ends[name][-1]} is of another step than {paths[-1]}")
        _check_same_arrays(ends[name][-1], paths[-1])


def _place(line: dict[str, Any]) -> tuple[int, int]:
    return line.get("member", 0), line["step"]


def _check_same_arrays(checkpoint: Path, other: Path) -> None:
    """Checks that the arrays of two checkpoints are bitwise equal."""
    found, expected = (jax.tree_util.tree_leaves_with_path(jn.load_checkpoint(path)) for path in (checkpoint, other))
    claim([path for path, _ in found] == [path for path, _ in expected], f"{checkpoint} has other arrays than {other}")
    for (path, array), (_, same) in zip(found, expected, strict=True):
        equal = array.dtype == same.dtype and array.tobytes() == same.tobytes()
        claim(equal, f"{jax.tree_util.keystr(path, simple=True, separator='.')} of {checkpoint} differs from {other}")
