"""Checkpoints: written in the background, complete or absent, and checked before they are read.

Orbax writes and reads the arrays, one folder per step in the layout of its ``CheckpointManager``, which can read them.
The folders are renamed and removed here: that manager writes two files after its last callback, which checksums would
miss, and deletes an old checkpoint file by file, so that a kill leaves half of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import importlib
import itertools
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxnn._disk import refusals, sync
from jaxnn._text import first_line, format_bytes
from jaxnn.observe import nbytes
from jaxnn.parallel import broadcast_from_primary, is_primary
from jaxnn.record import _state_files as disk
from jaxnn.record._run_directory import FOLDER, LogDigest
from jaxnn.types import PyTree, RecordError

REMOVED = ".removed"  # the suffix of a checkpoint's folder while it is removed
DAMAGED = "damaged"  # the folder that damaged checkpoints are moved to
OVERHEAD_BYTES = 128 * 1024  # an upper bound of the size of Orbax's metadata and the checksums


class Restored[State](NamedTuple):
    """The newest undamaged state."""

    step: int
    state: State
    log: Mapping[str, Any] | None  # the ``lines`` and ``sha256`` of the metrics that belong to it
    damaged: list[tuple[int, str]]  # step and damage, ``its file x is missing``, of newer checkpoints, newest first


@dataclasses.dataclass
class Checkpoints:
    """The checkpoints of one run, to be closed after saving. All processes make the same calls in the same order."""

    folder: Path  # has a folder per step; created at the first save
    keep_last: int = 2  # number of the newest to keep
    keep_best: int = 1  # number of the best to keep in addition
    monitor: str = "loss"  # the metric, among those given to `save`, that ranks them
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxnn_checkpoints")
        self._pending: concurrent.futures.Future[None] | None = None

    @staticmethod
    def preload() -> None:
        """Starts to import Orbax in a background thread, so that the first save does not wait for it."""
        if "orbax.checkpoint" not in sys.modules:
            # No daemon: an interpreter that exits must wait for the import.
            threading.Thread(target=importlib.import_module, args=("orbax.checkpoint",), name="jaxnn_preload").start()

    def save(
        self,
        step: int,
        state: NamedTuple,
        metrics: Mapping[str, float],
        log: LogDigest | None = None,
        search: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts saving ``state``, such as a `TrainState`; returns once the arrays are copied, before they are written.

        An existing checkpoint of the step is kept. ``metrics`` are the values measured for this state, and ``log``
        covers the lines of ``metrics.jsonl`` up to it; ``search`` says whose states
        these are, of a search. RecordError if this save or the one before could not be written.
        """
        self.wait()
        if not broadcast_from_primary(lambda: self._make_room(step, state)):
            return
        about = {
            "step": step,
            "metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            "log": None if log is None else {"lines": log.lines, "sha256": log.sha256},
            "search": search,
        }
        copied = disk.host_copy(state._asdict())
        start = functools.partial(disk.start_writing, self.folder / str(step), copied, about)
        with self._refusals(step):
            # The remaining JAX arrays are sharded over processes, and must not be written in another thread.
            on_devices = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(copied))
            complete = start() if on_devices else lambda: start()()
        self._pending = self._thread.submit(self._write, step, complete, log)

    def wait(self) -> None:
        """Blocks until the current save is on the disk; raises RecordError, once, if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            broadcast_from_primary(pending.result)
            pending.result()

    def close(self, *, wait: bool = True) -> None:
        """Waits, then ends the thread that saves; without ``wait`` the current save may be discarded."""
        try:
            if wait:
                self.wait()
        finally:
            self._thread.shutdown(wait=wait, cancel_futures=not wait)

    def _write(self, step: int, complete: Callable[[], None], log: LogDigest | None) -> None:
        """Completes a checkpoint, then removes old ones; runs in the thread, on copies in host memory."""
        with self._refusals(step):
            for path in (log.file, log.file.parent) if log is not None and is_primary() else ():
                sync(path)
            complete()
            if not is_primary():
                return
            # All but the newest and, among those with a metric, the best; each is renamed before it is deleted.
            scores = {step: self._score(step) for step in disk.steps_in(self.folder)}
            measured = [step for step in scores if scores[step] > -math.inf]
            best = sorted(measured, key=lambda step: (-scores[step], step))[: self.keep_best]
            for old in scores.keys() - {*sorted(scores, reverse=True)[: self.keep_last], *best}:
                self._remove(old)

    def _remove(self, step: int) -> None:
        removed = (self.folder / str(step)).rename(self.folder / f"{step}{REMOVED}")
        shutil.rmtree(removed, ignore_errors=True)

    def forget_after(self, step: int | None) -> None:
        """Removes checkpoints after a step, all for None: of a search that was killed while it saved its groups."""
        for newer in self.steps() if is_primary() else ():
            if step is None or newer > step:
                with self._refusals(newer):
                    self._remove(newer)

    def _make_room(self, step: int, state: PyTree) -> bool:
        """Whether the step is to be saved; RecordError if it will not fit, which Orbax notices halfway."""
        with self._refusals(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Remnants of a process that was killed while it wrote or removed a checkpoint.
            for path in self.folder.iterdir():
                if any(suffix in path.name for suffix in (disk.UNFINISHED, REMOVED)):
                    shutil.rmtree(path, ignore_errors=True)
            steps = disk.steps_in(self.folder)
            if step in steps:
                return False
            needed = nbytes(state) + OVERHEAD_BYTES
            if steps:
                # Arrays are compressed, about as much as the last time.
                last = self.folder / str(steps[-1])
                needed = sum(os.lstat(os.path.join(last, name)).st_blocks * 512 for name in disk.files_below(last))
            system = os.statvfs(self.folder)
            free = system.f_bavail * system.f_frsize
            # No blocks: the file system does not report its size.
            if system.f_blocks and free < needed:
                room = f"it takes {format_bytes(needed)}, {format_bytes(free)} are free"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {room}")
        return True

    def _refusals(self, step: int) -> contextlib.AbstractContextManager[None]:
        return refusals(
            f"the checkpoint of step {step} could not be written to {self.folder}",
            " or choose another --run-dir; older checkpoints are intact.",
        )

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, in order, after the current save."""
        concurrent.futures.wait([self._pending] if self._pending is not None else [])
        return broadcast_from_primary(lambda: disk.steps_in(self.folder))

    def best(self) -> int | None:
        """The step with the best monitored metric, the first of equal ones as for patience; else the newest."""
        scores = {step: self._score(step) for step in self.steps()}
        measured = {step: score for step, score in scores.items() if score > -math.inf}
        return max(measured, key=measured.__getitem__) if measured else max(scores, default=None)

    def newest(self) -> tuple[int | None, dict[str, Any], list[tuple[int, str]]]:
        """The newest undamaged step, what its file says of it, and the damage of newer ones; None if none was saved.

        RecordError if all are damaged.
        """

        def find() -> tuple[int | None, dict[str, Any], list[tuple[int, str]]]:
            damaged: list[tuple[int, str]] = []
            for step in reversed(disk.steps_in(self.folder)):
                checkpoint = self.folder / str(step)
                if (what := disk.find_damage(checkpoint, step)) is None:
                    return step, disk.read_about(checkpoint), damaged
                damaged.append((step, what))
            return None, {}, damaged

        step, about, damaged = broadcast_from_primary(find)
        if step is not None or not damaged:
            return step, about, damaged
        newest, what = damaged[0]
        raise RecordError(
            f"every checkpoint in {self.folder} is damaged, that of step {newest} since {what}: bring one back from a "
            "copy, or start a new run."
        )

    def restore_newest[State: tuple[Any, ...]](self, like: State) -> Restored[State] | None:
        """The newest undamaged state, placed like ``like``; None if none was saved, RecordError if all are damaged."""
        step, about, damaged = self.newest()
        return None if step is None else Restored(step, self.read(step, like), about.get("log"), damaged)

    def read[State: tuple[Any, ...]](self, step: int, like: State) -> State:
        """The state of a step that is undamaged, placed like ``like``; RecordError if it is no such state."""
        return _read_state(self.folder / str(step), like)  # type: ignore[no-any-return]

    def restore_members[State: tuple[Any, ...]](
        self, wanted: Sequence[int], members: Sequence[int], like: Callable[[int], State]
    ) -> tuple[Restored[State], list[int]] | None:
        """As `restore_newest`, the newest state of a group of ``members``, and in which rows the ``wanted`` ones are.

        ``like`` makes it for a number of rows. RecordError if one is in none, whose state a search deleted.
        """
        step, about, damaged = self.newest()
        if step is None:
            return None
        count, rows = self.rows(step, wanted, members)
        return Restored(step, self.read(step, like(count)), about.get("log"), damaged), rows

    def rows(self, step: int, wanted: Sequence[int], members: Sequence[int]) -> tuple[int, list[int]]:
        """The number of rows that the state of a step has, and those of ``wanted`` members, as `restore_members`."""
        found = (disk.read_about(self.folder / str(step)).get("search") or {}).get("members")
        # Of a search only some members have one.
        rows = [*members] if found is None else found.get(self.folder.name, [])
        if lacking := [number for number in wanted if number not in rows]:
            raise RecordError(f"{self.folder / str(step)} holds no state of member {lacking[0]}: it was deleted.")
        return len(rows), [rows.index(number) for number in wanted]

    def set_aside(self, step: int, what: str) -> str:
        """Moves the damaged checkpoint of a step into the folder ``damaged``; returns a message for the user."""

        def move() -> str:
            aside = self.folder / DAMAGED
            names = (f"{step}-{number}" if number > 1 else f"{step}" for number in itertools.count(1))
            subject = f"the damaged checkpoint of step {step} in {self.folder} cannot be moved aside"
            with refusals(subject, ", or move or delete it."):
                aside.mkdir(exist_ok=True)
                free = next(aside / name for name in names if not os.path.lexists(aside / name))
                return str((self.folder / f"{step}").rename(free))

        return f"the checkpoint of step {step} is damaged, {what}, and was moved to {broadcast_from_primary(move)}"

    @staticmethod
    def newest_of_all(
        stores: Mapping[str, Checkpoints],
    ) -> tuple[int | None, dict[str, Any], list[tuple[str, int, str]]]:
        """The newest step of a search whose states are there and undamaged in each of its groups' stores, by name.

        Returns the step, what its files say of it, and the name, step and damage of newer ones; a step that lacks a
        group, because the process was killed while it saved, is passed over. RecordError if there are only damaged
        ones.
        """
        damaged: list[tuple[str, int, str]] = []
        steps = {name: store.steps() for name, store in stores.items()}
        for step in sorted({step for of_group in steps.values() for step in of_group}, reverse=True):
            found = {
                name: disk.find_damage(stores[name].folder / str(step), step) for name in stores if step in steps[name]
            }
            damaged += [(name, step, what) for name, what in found.items() if what is not None]
            intact = [name for name, what in found.items() if what is None]
            about = disk.read_about(stores[intact[0]].folder / str(step)) if intact else {}
            if intact and {*((about.get("search") or {}).get("members") or {"": ()})} <= {*intact}:
                return step, about, damaged
        if not damaged:
            return None, {}, []
        name, step, what = damaged[0]
        raise RecordError(
            f"every checkpoint of the search is damaged, step {step} in {stores[name].folder} since {what}: "
            "bring one back from a copy, or start a new search."
        )

    def _score(self, step: int) -> float:
        """The monitored metric, negated if lower is better; -inf if it was not measured, or is NaN."""
        try:
            value = float(disk.read_about(self.folder / str(step))["metrics"][self.monitor])
        except (OSError, ValueError, TypeError, KeyError):
            return -math.inf
        return -math.inf if math.isnan(value) else value if self.higher_is_better else -value


def load_checkpoint(path: Path | str, like: PyTree | None = None) -> PyTree:
    """Loads a saved state: of `jn.save_checkpoint`, or of a run, without the run's script and data.

    >>> jn.save_checkpoint("state", {"w": np.ones(2)})
    >>> jn.load_checkpoint("state")
    {'w': array([1., 1.])}

    Args:
        path: a directory written by `jn.save_checkpoint`, a checkpoint (``runs/…/checkpoints/4000``), or a run
            directory, whose newest checkpoint is loaded; `Run.best_state` loads the best.
        like: a pytree of the same structure, shapes, dtypes and shardings, also of ``jax.ShapeDtypeStruct``; default:
            NumPy arrays in dicts and lists, with a typed PRNG key as its data.

    Raises:
        RecordError: the path does not exist, the checkpoint is damaged, or it does not match ``like``.
    """
    target = Path(path).absolute()
    if not target.is_dir():
        raise RecordError(f"there is no checkpoint at {target}: check the path.")
    if steps := disk.steps_in(target / FOLDER):
        target = target / FOLDER / str(steps[-1])
    if not (target / disk.SUMS_FILE).is_file():
        raise RecordError(
            f"{target} does not hold a state (it has neither {disk.SUMS_FILE} nor complete {FOLDER}): pass a path that "
            "jn.save_checkpoint wrote, a run directory, or a checkpoint in it."
        )
    in_run = (target / disk.ABOUT_FILE).is_file()
    if damage := disk.find_damage(target, int(target.name) if in_run and target.name.isdecimal() else None):
        raise RecordError(f"{target} is damaged, {damage}: restore it from a copy.")
    found = _read_state(target, like)
    if like is None:
        return found
    return jax.tree.map(lambda a, b: jnp.asarray(a) if isinstance(b, jax.ShapeDtypeStruct) else a, found, like)


def _read_state(checkpoint: Path, like: PyTree) -> PyTree:
    """Loads a state by :func:`disk.read_tree`; a run's checkpoint stores a named tuple, a `TrainState`, as a dict."""
    in_run = (checkpoint / disk.ABOUT_FILE).is_file()
    is_named = in_run and isinstance(like, tuple) and hasattr(like, "_asdict")
    try:
        found = disk.read_tree(checkpoint / disk.ITEM if in_run else checkpoint, like._asdict() if is_named else like)
    except disk.UNREADABLE as error:
        raise RecordError(
            f"{checkpoint} does not hold a state like the requested one ({first_line(error)}): load it with the "
            "model and optimizer it was saved with."
        ) from error
    return type(like)(**found) if is_named else found
