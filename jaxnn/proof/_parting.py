"""The first step at which two recorded runs differ, found by a replay of both, and what of it differs."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxnn.proof._leaf_differences import LeafDifference, leaf_differences
from jaxnn.proof._replay import Replay, replay
from jaxnn.types import Experiment, RecordError, TrainState


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first update after which the states of two runs differ.

    Attributes:
        step: its number, from 1; 0: the initial values differ.
        batch: the first array of its batch that differs; None: the batches are equal.
        has_other_key: whether its random key differs.
        state: the first array of the state after it that differs.
        num_leaves: the number of arrays of that state that differ.
    """

    step: int
    batch: LeafDifference | None
    has_other_key: bool
    state: LeafDifference
    num_leaves: int

    def headline(self) -> str:
        """Returns until which step the runs are equal, and what differs then."""
        if self.step == 0:
            return f"Different before the first step: the initial {self.state} differs"
        what = f"its batch is another: {self.batch}" if self.batch is not None else f"from the same batch, {self.state}"
        if self.batch is None and self.has_other_key:
            what = f"its random key is another, and then {self.state}"
        until = f"until step {self.step - 1:,}" if self.step > 1 else "before the first step"
        return f"Equal {until} (replayed); step {self.step:,} differs, {what}"

    def lines(self) -> list[str]:
        """Returns what differs at the step, line by line."""
        others = f", the first of {self.num_leaves} arrays that differ" if self.num_leaves > 1 else ""
        if self.step == 0:
            return [f"before step 1: {self.state}{others}"]
        lines = [f"after step {self.step:,}: {self.state}{others}"]
        lines.append(f"its batch: {'equal' if self.batch is None else self.batch}")
        return [*lines, f"its random key: {'another' if self.has_other_key else 'equal'}"]


type Side = tuple[Path, int | None, Experiment[Any]]


def find_parting(a: Side, b: Side, first: int, last: int) -> Parting:
    """Returns the update of the steps ``first`` to ``last`` after which the states of two runs differ, by bisection.

    The states before ``first`` are equal, or the initial values differ; those after ``last`` differ. RecordError if a
    run cannot be replayed to the bit.
    """
    runs = [_exact(replay(path, experiment, first, member=member), path) for path, member, experiment in (a, b)]
    if before := leaf_differences(runs[0].state, runs[1].state):
        if first > 1:
            raise RecordError(f"the states after step {first - 1} differ, and the digests of the records are equal.")
        return Parting(0, None, False, before[0], len(before))
    low, high, after = first, last, list[LeafDifference]()
    while low < high:
        middle = (low + high) // 2
        states = [_exact(run.at(middle + 1), run.dir).state for run in runs]
        if found := leaf_differences(*states):
            high, after = middle, found
        else:
            low = middle + 1
    sides = [_exact(run.at(low), run.dir) for run in runs]
    if not after:  # of the last step of the window
        after = leaf_differences(*(_state_after(side) for side in sides))
    if not after:
        raise RecordError(f"step {low} computes the same again, and the digests of the records differ after it.")
    batch = leaf_differences(*(side.batch._asdict() for side in sides))
    keys = leaf_differences(*({"key": side.key} for side in sides))
    return Parting(low, next(iter(batch), None), bool(keys), after[0], len(after))


def _exact(found: Replay, path: Path) -> Replay:
    if not found.exact:
        raise RecordError(f"the run in {path} is replayed to rounding only, since {found.why}.")
    return found


def _state_after(side: Replay) -> TrainState:
    """The state after a replayed update; of the last step that was reported, by a program of one step."""
    if side.reports[-1]["step"] > side.step:
        return side.at(side.step + 1).state
    return side.update()[0]
