"""Saving in the background, one state after another: each appears whole and with its checksums, or not at all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxnn.checkpoints import folder as folders
from jaxnn.checkpoints.quiet import tame_orbax
from jaxnn.checkpoints.sums import write_sums
from jaxnn.checkpoints.team import Team
from jaxnn.checkpoints.trees import UNWRITABLE, all_processes, detached, folders_first, refusal
from jaxnn.observe import format_bytes, nbytes
from jaxnn.types import PyTree, RecordError

# What a checkpoint takes besides its arrays, at most: Orbax's files about them, and the sums.
OVERHEAD_BYTES = 128 * 1024


class Writer:
    """Writes checkpoints into a folder; a thread of its own finishes each and then tidies up.

    Args:
        folder: where they go; what a killed process left unfinished there is taken away.
        tidy: called in that thread whenever a checkpoint is whole.
        team: the processes that write together.

    Raises:
        RecordError: the folder cannot be made.
    """

    def __init__(self, folder: Path, tidy: Callable[[], None], team: Team) -> None:
        import orbax.checkpoint as ocp

        tame_orbax()
        self._folder, self._tidy, self._team = folder, tidy, team
        team.from_leader(self._make_folder)
        # The names and layout of Orbax's CheckpointManager, so that it reads them.
        everyone = all_processes()
        in_order = folders_first()
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=everyone, async_options=in_order),
            default=ocp.StandardCheckpointHandler(multiprocessing_options=everyone),
            metrics=ocp.JsonCheckpointHandler(filename=folders.METRICS.name, multiprocessing_options=everyone),
        )
        self._checkpointer = ocp.AsyncCheckpointer(handler, multiprocessing_options=everyone, async_options=in_order)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxnn_checkpoints")
        self._pending: concurrent.futures.Future[None] | None = None

    def start(self, step: int, state: PyTree, metrics: Mapping[str, float], log: folders.Log | None) -> None:
        """Starts saving ``state``; returns once its arrays are copied, before they are written.

        Raises:
            RecordError: the disk refused, in this save or the one before it.
        """
        import orbax.checkpoint as ocp

        self.wait()
        self._team.from_leader(lambda: self._check_room(step, state))
        saved = ocp.args.StandardSave(detached(state))
        arguments = ocp.args.Composite(default=saved, metrics=ocp.args.JsonSave(dict(metrics)))
        try:
            self._checkpointer.save(folders.unfinished_path(self._folder, step), args=arguments, force=True)
        except UNWRITABLE as error:
            raise self._failure(step, error) from error
        self._pending = self._thread.submit(self._finish, step, log)

    def settle(self) -> None:
        """Blocks until the save under way is over, however it went."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])

    def wait(self) -> None:
        """Blocks until the save under way is on the disk.

        Raises:
            RecordError: the disk refused; it is said once.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._team.from_leader(pending.result)
            pending.result()

    def close(self, *, wait: bool = True) -> None:
        """Waits, then ends the threads; or ends them as soon as they are done, whatever becomes of a save under way."""
        if not wait:
            self._thread.shutdown(wait=False, cancel_futures=True)
            return
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._checkpointer.close()

    def _finish(self, step: int, log: folders.Log | None) -> None:
        """Waits for Orbax, adds the sums, gives the checkpoint its name: from then on it is there."""
        try:
            self._checkpointer.wait_until_finished()
            if not self._team.leads:
                return
            folders.write_about(self._folder, step, log)
            write_sums(folders.unfinished_path(self._folder, step))
            folders.finish(self._folder, step)
            self._tidy()
        except UNWRITABLE as error:
            raise self._failure(step, error) from error

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason, cure = refusal(error)
            raise RecordError(
                f"the checkpoints' folder {self._folder} cannot be made ({reason}): {cure} or choose another --run-dir."
            ) from error
        folders.clear_remnants(self._folder)

    def _check_room(self, step: int, state: PyTree) -> None:
        """Refuses what will not fit, before anything is written: Orbax finds out halfway, and with many words."""
        there = folders.steps_in(self._folder)
        # Arrays are compressed, as much as they were the last time.
        last = folders.bytes_on_disk(folders.step_path(self._folder, there[-1])) if there else None
        needed = nbytes(state) + OVERHEAD_BYTES if last is None else last
        free = folders.free_bytes(self._folder)
        if free is not None and free < needed:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            reason, cure = refusal(full)
            about = f"{reason}: it takes {format_bytes(needed)}, {format_bytes(free)} are free"
            raise RecordError(self._sentence(step, about, cure))

    def _failure(self, step: int, error: BaseException) -> RecordError:
        """The sentence for a save that failed, once what it left is taken away: others need the room."""
        with contextlib.suppress(*UNWRITABLE):  # what Orbax would say again
            self._checkpointer.wait_until_finished()
        if self._team.leads:
            folders.clear_unfinished(folders.unfinished_path(self._folder, step))
        return RecordError(self._sentence(step, *refusal(error)))

    def _sentence(self, step: int, reason: str, cure: str) -> str:
        return (
            f"the checkpoint of step {step} could not be written to {self._folder} ({reason}): {cure} or choose "
            "another --run-dir; older checkpoints are intact."
        )
