"""The checkpoints of one run: the newest few and the best few, each checked before it is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.checkpoints import folder as folders
from jaxnn.checkpoints.sums import step_damage
from jaxnn.checkpoints.team import ALONE, Team
from jaxnn.checkpoints.trees import UNREADABLE, first_line, read_tree
from jaxnn.checkpoints.writer import Writer
from jaxnn.types import PyTree, RecordError


class Damage(NamedTuple):
    """A checkpoint that is not as it was saved.

    Attributes:
        step: whose it is.
        what: what is wrong with it, as ``its file default/_METADATA is missing``.
    """

    step: int
    what: str


class Restored[State](NamedTuple):
    """The newest state that is as it was saved.

    Attributes:
        step: whose it is.
        state: the state.
        log: the ``lines`` and ``sha256`` of the log of metrics that belong to it, or None.
        damaged: the newer checkpoints, newest first, which are not.
    """

    step: int
    state: State
    log: Mapping[str, Any] | None
    damaged: tuple[Damage, ...]


@dataclasses.dataclass
class Checkpoints:
    """The checkpoints of one run; only what saves must be closed.

    Attributes:
        folder: where they are, a folder a step; made at the first save.
        keep_last: how many of the newest are kept.
        keep_best: how many of the best are kept besides.
        monitor: the evaluation metric that says which are best.
        mode: ``"min"`` or ``"max"``.
        team: the processes that save and restore together.
    """

    folder: Path
    keep_last: int
    keep_best: int
    monitor: str
    mode: str
    team: Team = ALONE
    _writer: Writer | None = None

    def save(self, step: int, state: NamedTuple, metrics: Mapping[str, float], log: folders.Log | None = None) -> None:
        """Starts saving ``state``, such as a `TrainState`; returns once the arrays are copied, before they are written.

        A step that has a checkpoint keeps the one it has.

        Args:
            step: its number.
            state: what is saved.
            metrics: what was measured of it, by name.
            log: what of the run's metrics belongs to it.

        Raises:
            RecordError: the disk refused, in this save or the one before it.
        """
        if self._writer is None:
            self._writer = Writer(self.folder, self._remove_superfluous, self.team)
        if step not in self.steps():
            known = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
            self._writer.start(step, state._asdict(), known, log)

    def wait(self) -> None:
        """Blocks until the save under way is on the disk."""
        if self._writer is not None:
            self._writer.wait()

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads that save, once they are done; without ``wait`` a save under way may come to nothing."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close(wait=wait)

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, in order; a save under way is waited for."""

        def there() -> list[int]:
            if self._writer is not None:
                self._writer.settle()
            return folders.steps_in(self.folder)

        steps: list[int] = self.team.from_leader(there)
        return steps

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best monitored metric among those kept, the newest of equals and of unmeasured ones."""
        scores = {step: self._score(step) for step in self.steps()}
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def restore[State: tuple[Any, ...]](self, step: int, like: State) -> State:
        """The state saved at ``step``, with the shapes, dtypes and placement of the named tuple ``like``.

        Raises:
            RecordError: there is none, it is damaged, or it is no state like that.
        """
        if step not in (there := self.steps()):
            raise RecordError(f"there is no checkpoint of step {step} in {self.folder}: there are those of {there}.")
        if (what := step_damage(self.folder, step)) is not None:
            raise RecordError(
                f"the checkpoint of step {step} in {self.folder} is damaged, {what}: bring it back from a copy, or "
                "take another one."
            )
        return self._read(step, like)

    def restore_newest[State: tuple[Any, ...]](self, like: State) -> Restored[State] | None:
        """The newest state that is as it was saved; None where none was saved.

        Raises:
            RecordError: all are damaged, or the newest that is not is no state like ``like``.
        """
        step, log, found = self.team.from_leader(self._newest_whole)
        damaged = tuple(Damage(*one) for one in found)
        if step is not None:
            return Restored(step, self._read(step, like), log, damaged)
        if not damaged:
            return None
        first = damaged[0]
        raise RecordError(
            f"every checkpoint in {self.folder} is damaged, that of step {first.step} since {first.what}: bring "
            "one back from a copy, or start a new run."
        )

    def _newest_whole(self) -> tuple[int | None, dict[str, Any] | None, list[Damage]]:
        """The newest step whose checkpoint is as it was saved, its log, and the newer ones that are not."""
        damaged: list[Damage] = []
        for step in reversed(folders.steps_in(self.folder)):
            what = step_damage(self.folder, step)
            if what is None:
                return step, folders.read_about(self.folder, step)["log"], damaged
            damaged.append(Damage(step, what))
        return None, None, damaged

    def set_aside(self, damage: Damage) -> str:
        """Moves a damaged checkpoint to where it is not taken for one; returns what to tell the user.

        Raises:
            RecordError: it cannot be moved.
        """

        def move() -> str:
            try:
                return str(folders.set_aside(self.folder, damage.step))
            except OSError as error:
                raise RecordError(
                    f"the damaged checkpoint of step {damage.step} in {self.folder} cannot be moved aside "
                    f"({error.strerror or error}): move or delete it."
                ) from error

        target = self.team.from_leader(move)
        return f"the checkpoint of step {damage.step} is damaged, {damage.what}, and was moved to {target}"

    def _read[State: tuple[Any, ...]](self, step: int, like: State) -> State:
        try:
            path = folders.step_path(self.folder, step) / folders.ITEM
            fields: PyTree = read_tree(path, like._asdict())  # type: ignore[attr-defined]
        except UNREADABLE as error:
            raise RecordError(
                f"the checkpoint of step {step} in {self.folder} cannot be read back into this experiment's "
                f"state ({first_line(error)}): was it saved with another model or optimizer?"
            ) from error
        return type(like)(**fields)

    def _remove_superfluous(self) -> None:
        scores = {step: self._score(step) for step in folders.steps_in(self.folder)}
        for step in scores.keys() - kept_steps(scores, self.keep_last, self.keep_best):
            folders.remove(self.folder, step)

    def _score(self, step: int) -> float:
        """More is better; what was not measured is worse than all that was."""
        value = folders.metrics_of_step(self.folder, step).get(self.monitor)
        if value is None:
            return -math.inf
        return -value if self.mode == "min" else value


def open_checkpoints(
    directory: Path,
    *,
    keep_last: int = 2,
    keep_best: int = 1,
    monitor: str = "loss",
    mode: str = "min",
    team: Team = ALONE,
) -> Checkpoints:
    """The checkpoints in ``directory``, for restoring and saving.

    Args:
        directory: where they are or will be, one folder a step.
        keep_last: how many of the newest are kept.
        keep_best: how many of the best by ``monitor`` are kept besides.
        monitor: a name in the metrics given to ``save``.
        mode: ``"min"`` if less is better, ``"max"`` if more is.
        team: the processes that save and restore together.
    """
    return Checkpoints(directory.absolute(), keep_last, keep_best, monitor, mode, team)


def kept_steps(scores: Mapping[int, float], keep_last: int, keep_best: int) -> set[int]:
    """Which of the steps with these scores are kept: the newest, and the best of those that were measured."""
    measured = [step for step in scores if scores[step] > -math.inf]
    best = sorted(measured, key=lambda step: (scores[step], step), reverse=True)
    return {*sorted(scores, reverse=True)[:keep_last], *best[:keep_best]}
