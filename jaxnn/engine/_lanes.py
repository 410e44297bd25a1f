"""Members at different steps: each has a lane of one program, which another member takes when it ends or pauses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxnn.engine._compiler import FEW_AT_ONCE
from jaxnn.engine._loop import MemberBlock, WindowReport, process
from jaxnn.engine._states import EMPTY, HostStates, Population, Shape, to_host, with_keys
from jaxnn.engine._trainer import RUNNING, Trainer
from jaxnn.engine._windows import run_windows, with_tails
from jaxnn.types import Array, PyTree, TrainState


class Lanes(MemberBlock):
    """The members that are on the devices: a lane each, until they leave; rows are those of the trainer's logs."""

    AT_ONCE = FEW_AT_ONCE  # members that enter at a time, at most

    def __init__(self, trainer: Trainer) -> None:
        shape = trainer.shape(trainer.block)
        assert shape is not None
        self.trainer: Trainer = trainer
        self.shape: Shape = shape
        self.slots = np.full(shape, EMPTY)
        self.steps: dict[int, int] = {}  # that each member in a lane has done
        self.state: Any = None  # the population on the devices, None before the first member
        every = trainer.plan.eval_every
        self.plan = with_tails(trainer.plan._replace(num_steps=every, report_every=every, checkpoint_every=0))
        sharding = trainer.programs.sharding(shape)
        how: Any = {"donate_argnums": 0, "out_shardings": sharding}
        self._insert: Callable[..., Population] = jax.jit(_inserted, **how)
        self._permute: Callable[..., Population] = jax.jit(_permuted, **how)
        self.kept: dict[Any, Any] = {}  # of each split, by lane, for the next evaluation

    @property
    def rows(self) -> list[int]:  # type: ignore[override]
        """The members in lanes, by lane."""
        return [int(row) for row in self.slots.flat if row != EMPTY]

    @property
    def num_free(self) -> int:
        """The number of lanes without a member."""
        return self.slots.size - len(self.rows)

    def step_of(self, row: int, step: int) -> int:
        """The number of updates that a member has done."""
        return self.steps[row]

    def enter(
        self,
        rows: Sequence[int],
        host: HostStates,
        values: Mapping[str, Array],
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Gives free lanes, those of ``numbers`` or the first, to at most `FEW_AT_ONCE` members.

        Their states are those of ``host``, in order; the ``values`` of traced fields are filled up to `FEW_AT_ONCE`, so
        that one program serves any number.
        """
        free = np.flatnonzero(self.slots == EMPTY) if numbers is None else np.asarray(numbers)
        places = np.stack(np.unravel_index(free[: len(rows)], self.shape), axis=1)
        for place, row, step in zip(places, rows, host.states.step, strict=True):
            self.slots[tuple(place)], self.steps[row] = row, int(step)
        programs = self.trainer.programs
        # What was kept of the members before is not of these: at first it is zero.
        self._change_kept(_emptied, _padded(places, self.shape))
        if self.state is None:
            order = np.full(self.shape, EMPTY)
            order[tuple(places.T)] = range(len(rows))
            self.state = programs.lay_out(host, order, np.ones(len(rows), np.bool_), 0, values)
            return
        filled = np.minimum(np.arange(FEW_AT_ONCE), len(rows) - 1)
        states = with_keys(jax.tree.map(lambda leaf: leaf[filled], host.states), programs.shapes)
        self.state = self._insert(self.state, _padded(places, self.shape), states, dict(values))

    def states(self, rows: Sequence[int]) -> HostStates:
        """Copies of the states of members in lanes, in this order."""
        places = np.array([np.argwhere(self.slots == row)[0] for row in rows]).reshape(-1, 2)
        parts = []
        for first in range(0, len(rows), FEW_AT_ONCE):
            few = places[first : first + FEW_AT_ONCE]
            found = to_host(_taken(self.state.members, np.minimum(_padded(few, self.shape), _last(self.shape))))
            parts.append(jax.tree.map(lambda leaf, few=few: leaf[: len(few)], found))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)  # type: ignore[no-any-return]

    def leave(self, rows: Sequence[int]) -> None:
        """Frees the lanes of members."""
        self.slots[np.isin(self.slots, rows)] = EMPTY
        for row in rows:
            del self.steps[row]

    def train_window(self) -> WindowReport:
        """Trains all members in lanes by one window, evaluates them, and records and settles what they reported."""
        trainer, plan = self.trainer, self.plan
        self._close_ranks()
        running = [row for row in self.rows if trainer.logs[row].status == RUNNING]
        alive = np.isin(self.slots, running)
        last = max(np.flatnonzero(alive.any(axis=1)), default=-1)
        part = {"step": np.int32(0), "alive": alive, "num_chunks": np.int32(last + 1)}
        programs = {length: trainer.programs.train(self.shape, length, "start") for length in plan.call_lengths()}
        feed, zeros = trainer.programs.spec.feed, trainer.programs.zeros(self.shape)
        windows = run_windows(
            *(programs, plan, feed, self.state._replace(**part), zeros, lambda step: True),
            clock=trainer.clock,
            flight=trainer.flight,
        )
        result = next(windows)
        windows.close()  # type: ignore[attr-defined]
        for row in running:
            self.steps[row] += plan.num_steps
        return process(self, result, evaluates=True)

    def _close_ranks(self) -> None:
        """Moves members to the first chunks if fewer hold all of them: chunks without a member are not computed."""
        taken = self.slots != EMPTY
        if -(-int(taken.sum()) // self.shape.lanes) < 1 + max(np.flatnonzero(taken.any(axis=1)), default=-1):
            order = np.argsort(~taken.reshape(-1), kind="stable")
            self.slots = self.slots.reshape(-1)[order].reshape(self.shape)
            places = np.stack(np.unravel_index(order, self.shape)).astype(np.int32)
            self.state = self._permute(self.state, places)
            self._change_kept(_reordered, places)

    def _change_kept(self, change: Callable[[PyTree, Array], PyTree], places: Array) -> None:
        """Applies a ``change`` of lanes to what was kept of the members in them, on the devices where it is."""
        for split, kept in self.kept.items() if self.trainer.programs.task.evaluate_again is not None else ():
            shardings = jax.tree.map(lambda leaf: leaf.sharding, kept)
            self.kept[split] = jax.device_put(change(kept, places), shardings)


def _last(shape: Shape) -> np.ndarray:
    return np.array([shape.chunks - 1, shape.lanes - 1])


def _padded(places: np.ndarray, shape: Shape) -> np.ndarray:
    """``places [n, 2]``, chunk and lane, filled up to `FEW_AT_ONCE` with one behind all."""
    padding = np.full((FEW_AT_ONCE - len(places), 2), [shape.chunks, shape.lanes])
    return np.concatenate([places, padding]).astype(np.int32)


def _inserted(population: Population, places: Array, states: TrainState, values: Mapping[str, Array]) -> Population:
    """The population with other members in the lanes at ``places [n, 2]``; those behind all are dropped."""

    def put(every: Any, new: Any) -> Any:
        return every.at[places[:, 0], places[:, 1]].set(new, mode="drop")

    return population._replace(
        members=jax.tree.map(put, population.members, states),
        values=jax.tree.map(put, dict(population.values), dict(values)),
        bad_step=put(population.bad_step, np.full(len(places), -1, np.int32)),
    )


def _permuted(population: Population, places: Array) -> Population:
    """The population with the lane at ``places [2, lanes of all chunks]``, chunk and lane, as the first, and so on."""
    return population._replace(
        members=_reordered(population.members, places),
        values=_reordered(dict(population.values), places),
        bad_step=_reordered(population.bad_step, places),
    )


@jax.jit
def _reordered(tree: PyTree, places: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[places[0], places[1]].reshape(leaf.shape), tree)


@jax.jit
def _emptied(tree: PyTree, places: Array) -> Any:
    return jax.tree.map(lambda leaf: leaf.at[places[:, 0], places[:, 1]].set(0, mode="drop"), tree)


@jax.jit
def _taken(members: TrainState, places: Array) -> TrainState:
    return jax.tree.map(lambda leaf: leaf[places[:, 0], places[:, 1]], members)  # type: ignore[no-any-return]
