"""The first step at which two recorded runs differ, found by a replay of both, and what of it differs."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.proof._replay import Replay, replay
from jaxnn.types import Experiment, RecordError, TrainState, is_key, named_leaves


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """An array that differs."""

    leaf: str  # its path, such as ``params/Dense_0/kernel``
    numbers: int  # how many of its numbers differ
    of: int  # how many it has
    ulp: int | None  # the largest distance in units of the last place; None: it has no floats, or another shape
    shapes: tuple[str, str] | None = None  # both, if they differ; None: they are equal

    def __str__(self) -> str:
        if self.shapes is not None:
            return f"{self.leaf} ({self.shapes[0]} → {self.shapes[1]})"
        apart = "" if self.ulp is None else f", by up to {self.ulp:,} ulp"
        return f"{self.leaf} ({self.numbers:,} of {self.of:,} numbers{apart})"


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
    if before := _differences(runs[0].state, runs[1].state):
        if first > 1:
            raise RecordError(f"the states after step {first - 1} differ, and the digests of the records are equal.")
        return Parting(0, None, False, before[0], len(before))
    low, high, after = first, last, list[LeafDifference]()
    while low < high:
        middle = (low + high) // 2
        states = [_exact(run.at(middle + 1), run.dir).state for run in runs]
        if found := _differences(*states):
            high, after = middle, found
        else:
            low = middle + 1
    sides = [_exact(run.at(low), run.dir) for run in runs]
    if not after:  # of the last step of the window
        after = _differences(*(_state_after(side) for side in sides))
    if not after:
        raise RecordError(f"step {low} computes the same again, and the digests of the records differ after it.")
    batch = _differences(*(side.batch._asdict() for side in sides))
    keys = _differences(*({"key": side.key} for side in sides))
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


def _differences(one: Any, other: Any) -> list[LeafDifference]:
    """The arrays that differ in two states, but for their keys, or in two other trees."""
    nothing: Any = None
    trees = [
        tree._replace(step=nothing, key=nothing) if isinstance(tree, TrainState) else tree for tree in (one, other)
    ]
    leaves = [{name: _plain(leaf) for name, leaf in named_leaves(tree).items()} for tree in trees]
    found = []
    for name in dict.fromkeys([*leaves[0], *leaves[1]]):
        a, b = (each.get(name, np.zeros(0)) for each in leaves)
        if a.shape != b.shape or a.dtype != b.dtype:
            size, (old, new) = max(a.size, b.size), (f"{x.dtype}{list(x.shape)}" for x in (a, b))
            found.append(LeafDifference(name, size, size, None, (old, new)))
        elif wrong := int(np.count_nonzero(_bits(a) != _bits(b))):
            found.append(LeafDifference(name, wrong, a.size, _most_ulp(a, b)))
    return found


def _plain(leaf: Any) -> np.ndarray:
    return np.atleast_1d(np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{min(8, array.dtype.itemsize)}")


def _most_ulp(a: np.ndarray, b: np.ndarray) -> int | None:
    """The largest distance of two arrays of floats, counted in numbers of their format between them."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return None
    half = 1 << (8 * a.dtype.itemsize - 1)
    # Of different ones only: Python's integers have the bits for a difference of two of 64.
    places = [_bits(each)[_bits(a) != _bits(b)].astype(object) for each in (a, b)]
    ordered = [np.where(each >= half, half - each, each) for each in places]
    return int(np.abs(ordered[0] - ordered[1]).max())
