"""Checkpoints: written in the background, complete or absent, and checked before they are read.

Orbax writes and reads the arrays, one folder a step in the layout of its ``CheckpointManager``, which can read them.
The folders get their names here: that manager writes two files between its last callback and its rename, which
checksums would miss, and it deletes an old checkpoint file by file under its name, so that a kill leaves half of it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import functools
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnn.observe import format_bytes, nbytes
from jaxnn.parallel import broadcast_from_primary, is_primary
from jaxnn.record._state_files import (
    ABOUT_FILE,
    FREE_SPACE,
    ITEM,
    SUMS_FILE,
    UNFINISHED,
    UNREADABLE,
    UNWRITABLE,
    files_below,
    find_damage,
    first_line,
    host_copy,
    read_about,
    read_tree,
    refusal,
    start_writing,
    step_damage,
    steps_in,
    sync,
)
from jaxnn.types import PyTree, RecordError

# A run's folder of checkpoints.
FOLDER = "checkpoints"
# What a step's folder is named while it is removed, and where damaged ones are moved.
REMOVED = ".removed"
DAMAGED = "damaged"
# The most that a checkpoint takes besides its arrays: Orbax's files about them, and the sums.
OVERHEAD_BYTES = 128 * 1024


class Log(NamedTuple):
    """The part of ``metrics.jsonl`` that had been written when a state was saved.

    Attributes:
        file: the log, synced to the disk before the checkpoint is complete.
        lines: the number of lines that belong to the checkpoint.
        sha256: the SHA-256 of those lines, in hexadecimal.
    """

    file: Path
    lines: int
    sha256: str


class Damage(NamedTuple):
    """A checkpoint that is not as it was saved.

    Attributes:
        step: its step.
        what: what is wrong with it, as ``its file default/_METADATA is missing``.
    """

    step: int
    what: str


class Restored[State](NamedTuple):
    """The newest state that is as it was saved.

    Attributes:
        step: its step.
        state: the state.
        log: the ``lines`` and ``sha256`` of the metrics that belong to it, or None.
        damaged: the newer checkpoints, newest first, all of them damaged.
    """

    step: int
    state: State
    log: Mapping[str, Any] | None
    damaged: tuple[Damage, ...]


@dataclasses.dataclass
class Checkpoints:
    """The checkpoints of one run; close them after saving.

    Attributes:
        folder: where they are, a folder a step; made at the first save.
        keep_last: number of the newest to keep.
        keep_best: number of the best to keep in addition.
        monitor: the metric, among those given to ``save``, that ranks them.
        mode: ``"min"`` if less of it is better, ``"max"`` if more.
        together: whether all processes save and restore together, calling the same in the same order.
    """

    folder: Path
    keep_last: int = 2
    keep_best: int = 1
    monitor: str = "loss"
    mode: str = "min"
    together: bool = False

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[None] | None = None

    # --- saving ---

    def save(self, step: int, state: NamedTuple, metrics: Mapping[str, float], log: Log | None = None) -> None:
        """Starts saving ``state``, such as a `TrainState`; returns once the arrays are copied, before they are written.

        A step that has a checkpoint keeps the one it has.

        Args:
            step: its number.
            state: what is saved.
            metrics: what was measured of it, by name.
            log: the part of the run's metrics that belongs to it.

        Raises:
            RecordError: the disk refused, in this save or the one before it.
        """
        self.wait()
        if self._thread is None:
            self._on_leader(self._make_folder)
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxnn_checkpoints")
        if step in self.steps():
            return
        self._on_leader(lambda: self._check_room(step, state))
        about = {
            "step": step,
            "metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            "log": None if log is None else {"lines": log.lines, "sha256": log.sha256},
        }
        copied, leads = host_copy(state._asdict()), not self.together or is_primary()
        start = functools.partial(start_writing, self.folder / str(step), copied, about, leads=leads)
        try:
            # What is left of JAX's arrays is sharded over processes, and not for another thread.
            on_devices = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(copied))
            complete = start() if on_devices else lambda: start()()
        except UNWRITABLE as error:
            raise self._refused(step, *refusal(error)) from error
        self._pending = self._thread.submit(self._write, step, complete, log, leads)

    def wait(self) -> None:
        """Blocks until the save under way is on the disk.

        Raises:
            RecordError: the disk refused; it is reported once.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._on_leader(pending.result)
            pending.result()

    def close(self, *, wait: bool = True) -> None:
        """Waits, then ends the thread that saves; without ``wait`` a save under way may come to nothing."""
        thread, self._thread = self._thread, None
        try:
            if wait:
                self.wait()
        finally:
            if thread is not None:
                thread.shutdown(wait=wait, cancel_futures=not wait)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason, cure = refusal(error)
            raise RecordError(
                f"the checkpoints' folder {self.folder} cannot be made ({reason}): {cure} or choose another --run-dir."
            ) from error
        # What a process left that was killed while it wrote or removed a checkpoint.
        for path in self.folder.iterdir():
            if any(suffix in path.name for suffix in (UNFINISHED, REMOVED)):
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, step: int, complete: Callable[[], None], log: Log | None, leads: bool) -> None:
        """Completes a checkpoint, then removes superfluous ones; in the thread, without a call of JAX's."""
        try:
            for path in (log.file, log.file.parent) if log is not None and leads else ():
                sync(path)
            complete()
            if not leads:
                return
            # All but the newest, and the best of those that were measured; each loses its name first.
            scores = {step: self._score(step) for step in steps_in(self.folder)}
            measured = [step for step in scores if scores[step] > -math.inf]
            best = sorted(measured, key=lambda step: (scores[step], step), reverse=True)[: self.keep_best]
            for old in scores.keys() - {*sorted(scores, reverse=True)[: self.keep_last], *best}:
                removed = (self.folder / str(old)).rename(self.folder / f"{old}{REMOVED}")
                shutil.rmtree(removed, ignore_errors=True)
        except UNWRITABLE as error:
            raise self._refused(step, *refusal(error)) from error

    def _check_room(self, step: int, state: PyTree) -> None:
        """Refuses what will not fit, before anything is written: Orbax notices halfway."""
        needed = nbytes(state) + OVERHEAD_BYTES
        if there := steps_in(self.folder):
            # Arrays are compressed, as much as they were the last time.
            last = self.folder / str(there[-1])
            needed = sum(os.lstat(os.path.join(last, name)).st_blocks * 512 for name in files_below(last))
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        # No blocks: a file system that does not tell.
        if disk.f_blocks and free < needed:
            words = os.strerror(errno.ENOSPC)
            about = f"{words}: it takes {format_bytes(needed)}, {format_bytes(free)} are free"
            raise self._refused(step, about, FREE_SPACE)

    def _refused(self, step: int, reason: str, cure: str) -> RecordError:
        return RecordError(
            f"the checkpoint of step {step} could not be written to {self.folder} ({reason}): {cure} or choose "
            "another --run-dir; older checkpoints are intact."
        )

    # --- restoring ---

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, in order; a save under way is waited for."""

        def there() -> list[int]:
            concurrent.futures.wait([self._pending] if self._pending is not None else [])
            return steps_in(self.folder)

        return self._on_leader(there)

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best monitored metric, the newest of equal and of unmeasured ones."""
        return max(self.steps(), key=lambda step: (self._score(step), step), default=None)

    def restore[State: tuple[Any, ...]](self, step: int, like: State) -> State:
        """The state saved at ``step``, with the shapes, dtypes and placement of the named tuple ``like``.

        Raises:
            RecordError: there is none, it is damaged, or it does not fit ``like``.
        """
        if step not in (there := self.steps()):
            raise RecordError(f"there is no checkpoint of step {step} in {self.folder}: there are those of {there}.")
        if (what := step_damage(self.folder / str(step))) is not None:
            raise RecordError(
                f"the checkpoint of step {step} in {self.folder} is damaged, {what}: bring it back from a copy, or "
                "take another one."
            )
        return self._read(step, like)

    def restore_newest[State: tuple[Any, ...]](self, like: State) -> Restored[State] | None:
        """The newest state that is as it was saved; None if none was saved.

        Raises:
            RecordError: all are damaged, or the newest that is not does not fit ``like``.
        """

        def find() -> tuple[int | None, dict[str, Any] | None, list[Damage]]:
            damaged: list[Damage] = []
            for step in reversed(steps_in(self.folder)):
                if (what := step_damage(self.folder / str(step))) is None:
                    return step, read_about(self.folder / str(step))["log"], damaged
                damaged.append(Damage(step, what))
            return None, None, damaged

        step, log, found = self._on_leader(find)
        damaged = tuple(Damage(*one) for one in found)
        if step is not None:
            return Restored(step, self._read(step, like), log, damaged)
        if not damaged:
            return None
        raise RecordError(
            f"every checkpoint in {self.folder} is damaged, that of step {damaged[0].step} since {damaged[0].what}: "
            "bring one back from a copy, or start a new run."
        )

    def set_aside(self, damage: Damage) -> str:
        """Moves a damaged checkpoint to where it is not taken for one; returns what to tell the user.

        Raises:
            RecordError: it cannot be moved.
        """

        def move() -> str:
            aside, step = self.folder / DAMAGED, damage.step
            try:
                aside.mkdir(exist_ok=True)
                taken = {path.name for path in aside.iterdir()}
                names = (str(step) if number == 1 else f"{step}-{number}" for number in range(1, len(taken) + 2))
                return str((self.folder / str(step)).rename(aside / next(name for name in names if name not in taken)))
            except OSError as error:
                raise RecordError(
                    f"the damaged checkpoint of step {step} in {self.folder} cannot be moved aside "
                    f"({error.strerror or error}): move or delete it."
                ) from error

        target = self._on_leader(move)
        return f"the checkpoint of step {damage.step} is damaged, {damage.what}, and was moved to {target}"

    def _read[State: tuple[Any, ...]](self, step: int, like: State) -> State:
        try:
            return type(like)(**read_tree(self.folder / str(step) / ITEM, like._asdict()))  # type: ignore[attr-defined]
        except UNREADABLE as error:
            raise RecordError(
                f"the checkpoint of step {step} in {self.folder} cannot be read back into this experiment's "
                f"state ({first_line(error)}): was it saved with another model or optimizer?"
            ) from error

    def _score(self, step: int) -> float:
        """More is better; what was not measured is worse than everything that was."""
        try:
            value = float(read_about(self.folder / str(step))["metrics"][self.monitor])
        except (OSError, ValueError, TypeError, KeyError):
            return -math.inf
        return -value if self.mode == "min" else value

    def _on_leader[Value](self, function: Callable[[], Value]) -> Value:
        """What ``function`` returns or raises in the process that leads, in all of them."""
        return broadcast_from_primary(function) if self.together else function()


def load(path: Path | str, like: PyTree | None = None) -> PyTree:
    """Reads a saved state: of `jn.save`, or of a run, without the run's script and data.

    >>> jn.load("runs/digits/…")["params"]  # doctest: +SKIP
    {'dense_0': {'bias': array([...], dtype=float32), ...

    Args:
        path: a directory that `jn.save` wrote, the checkpoint of a step (``runs/…/checkpoints/4000``), or the directory
            of a run, whose newest checkpoint is read; its best is that of `Run.best_state`.
        like: a pytree of the same structure, shapes, dtypes and placement (``jax.eval_shape`` of its maker will do);
            default: NumPy arrays in dicts and lists, wherever they were saved, with a typed key as its data.

    Raises:
        RecordError: nothing is there, it is damaged, or it does not fit ``like``.
    """
    target = Path(path).absolute()
    if not target.is_dir():
        raise RecordError(f"there is no checkpoint at {target}: check the path.")
    if steps := steps_in(target / FOLDER):
        target = target / FOLDER / str(steps[-1])
    in_run = (target / ABOUT_FILE).is_file()
    if not (target / SUMS_FILE).is_file():
        raise RecordError(
            f"{target} does not hold a state (it has neither {SUMS_FILE} nor complete {FOLDER}): give what jn.save "
            "wrote, the directory of a run, or a checkpoint in it."
        )
    what = step_damage(target) if in_run and target.name.isdecimal() else find_damage(target)
    if what is not None:
        raise RecordError(f"{target} is damaged, {what}: bring it back from a copy.")
    in_fields = in_run and isinstance(like, tuple) and hasattr(like, "_asdict")
    try:
        found = read_tree(target / ITEM if in_run else target, like._asdict() if in_fields else like)
        found = type(like)(**found) if in_fields else found
        shapes = jax.ShapeDtypeStruct
        return jax.tree.map(
            lambda a, b: jnp.asarray(a) if isinstance(b, shapes) else a, found, found if like is None else like
        )
    except UNREADABLE as error:
        raise RecordError(
            f"{target} does not hold a state like the one asked for ({first_line(error)}): load it with the model "
            "and optimizer it was saved with."
        ) from error
