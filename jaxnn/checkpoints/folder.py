"""A folder of checkpoints, one folder a step: a step's folder has its name only while it is whole."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# What a step's folder is called besides while it is written, and while it is taken away.
UNFINISHED = ".unfinished"
REMOVED = ".removed"
# Where those are moved that are not as they were saved.
DAMAGED = "damaged"
# A step's metrics in its folder, as Orbax writes them.
METRICS = Path("metrics", "metrics")
# A run's folder of checkpoints, and in one of them that of its arrays.
FOLDER = "checkpoints"
ITEM = "default"
# The step whose state it is, and how much of the log of metrics had been written by then.
ABOUT_FILE = "checkpoint.json"


class Log(NamedTuple):
    """The part of a log of metrics that had been written when a state was saved.

    Attributes:
        file: the log, synced to the disk before the checkpoint is complete.
        lines: the number of lines that belong to the checkpoint.
        sha256: the SHA-256 of those lines, in hexadecimal.
    """

    file: Path
    lines: int
    sha256: str


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in ``folder``, in order; none where there is no folder."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies once it is whole."""
    return folder / str(step)


def unfinished_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies until then."""
    return folder / f"{step}{UNFINISHED}"


def metrics_of_step(folder: Path, step: int) -> dict[str, float]:
    """What was measured at ``step``, by name; nothing where that is not known."""
    try:
        metrics = json.loads((step_path(folder, step) / METRICS).read_text())
        return {name: float(value) for name, value in metrics.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_about(folder: Path, step: int, log: Log | None) -> None:
    """Notes in the unfinished checkpoint whose state it is, and syncs the log of metrics that belongs to it."""
    about: dict[str, Any] = {"step": step, "log": None}
    if log is not None:
        about["log"] = {"lines": log.lines, "sha256": log.sha256}
        with log.file.open("rb") as file:
            os.fsync(file.fileno())
        # The names of the log and of the checkpoints' folder.
        _sync(log.file.parent)
    (unfinished_path(folder, step) / ABOUT_FILE).write_text(json.dumps(about) + "\n")


def read_about(folder: Path, step: int) -> dict[str, Any]:
    """What `write_about` noted, in a checkpoint that is as it was saved.

    Raises:
        OSError: it is missing.
    """
    about: dict[str, Any] = json.loads((step_path(folder, step) / ABOUT_FILE).read_text())
    return about


def finish(folder: Path, step: int) -> None:
    """Gives the checkpoint of ``step`` its name, now that all of it is there."""
    give_name(unfinished_path(folder, step), step_path(folder, step))


def give_name(unfinished: Path, whole: Path) -> None:
    """Renames a folder that is whole now, for good."""
    unfinished.rename(whole)
    _sync(whole.parent)


def remove(folder: Path, step: int) -> None:
    """Takes the checkpoint of ``step`` away; whoever looks sees all of it or nothing."""
    removed = folder / f"{step}{REMOVED}"
    step_path(folder, step).rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def set_aside(folder: Path, step: int) -> Path:
    """Moves the checkpoint of ``step`` to where it is not taken for one; returns where.

    Raises:
        OSError: it cannot be moved.
    """
    (folder / DAMAGED).mkdir(exist_ok=True)
    taken = {path.name for path in (folder / DAMAGED).iterdir()}
    names = (str(step) if number == 1 else f"{step}-{number}" for number in range(1, len(taken) + 2))
    target = folder / DAMAGED / next(name for name in names if name not in taken)
    return step_path(folder, step).rename(target)


def clear_remnants(folder: Path) -> None:
    """Takes away what was left by a process that was killed while it wrote or removed a checkpoint."""
    for path in folder.iterdir():
        if any(suffix in path.name for suffix in (UNFINISHED, REMOVED)):
            shutil.rmtree(path, ignore_errors=True)


def clear_unfinished(path: Path) -> None:
    """Takes away ``path``, and what Orbax calls it while it writes it."""
    # Of a save that failed at its start, threads that Orbax does not wait for may write for a moment still.
    for seconds in (0.0, 0.1, 0.4):
        time.sleep(seconds)
        for remnant in path.parent.iterdir() if path.parent.is_dir() else ():
            if remnant.name.startswith(path.name):
                shutil.rmtree(remnant, ignore_errors=True)


def bytes_on_disk(folder: Path) -> int:
    """What the files below ``folder`` take on the disk."""
    return sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in files_below(folder))


def files_below(folder: Path) -> Iterator[str]:
    """The names of all that is below ``folder`` and no folder itself, relative to it."""
    # Without pathlib, which keeps every part of every path in memory (Python 3.12), and these have names of their own.
    above = len(os.path.join(folder, ""))
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in (*files, *links):
            yield os.path.join(place, name)[above:]


def free_bytes(folder: Path) -> int | None:
    """What can still be written where ``folder`` is; None where the file system does not tell."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _sync(folder: Path) -> None:
    """Has the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
