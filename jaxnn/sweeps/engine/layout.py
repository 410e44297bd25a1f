"""Members between the host, where each has a row, and the devices, where they lie in chunks of lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn.sweeps.engine.population import Population, Shape
from jaxnn.types import Array, PyTree, TrainState

EMPTY = -1


class HostStates(NamedTuple):
    """The states of a group's members on the host, a row each: what is saved, and what blocks are made of.

    Attributes:
        states: ``[members, ...]`` NumPy arrays; in place of PRNG keys their words.
        bad_step: ``[members]`` int32, the first step whose loss was not finite, or -1.
    """

    states: TrainState
    bad_step: np.ndarray


def to_host(states: TrainState) -> HostStates:
    """Fresh states ``[members, ...]`` as rows on the host."""
    rows = jax.tree.map(np.array, key_words(states))
    return HostStates(rows, np.full(len(rows.step), -1, np.int32))


def member_state(host: HostStates, like: TrainState, row: int) -> TrainState:
    """The state of one member, as its solo run would hold it; ``like`` is that without its arrays."""
    return _with_keys(jax.tree.map(lambda leaf: leaf[row], host.states), like)


def arrange(rows: Sequence[int], shape: Shape) -> np.ndarray:
    """Which row lies in which lane, ``[chunks, lanes]``; ``EMPTY`` in the lanes behind them."""
    slots = np.full(shape.chunks * shape.lanes, EMPTY)
    slots[: len(rows)] = rows
    return slots.reshape(shape)


def lay_out(
    host: HostStates,
    like: TrainState,
    values: Mapping[str, Array],
    slots: np.ndarray,
    alive: np.ndarray,
    step: int,
    sharding: Population | None,
) -> Population:
    """The members of ``slots`` on the devices.

    Args:
        host: all rows.
        like: the state of a solo run, without its arrays.
        values: ``[members]`` of each traced field.
        slots: ``[chunks, lanes]`` rows; an empty lane computes what the first member does, and is not alive.
        alive: ``[members]`` bool.
        step: updates done by those that are alive.
        sharding: where it is to lie, as `population_sharding` says.
    """
    rows = np.where(slots == EMPTY, slots.flat[0], slots)
    states = jax.tree.map(lambda leaf: leaf[rows], host.states)
    living = alive[rows] & (slots != EMPTY)
    population = Population(
        step=np.int32(step),
        members=_with_keys(states, like),
        values={name: _weak_take(value, rows) for name, value in values.items()},
        alive=living,
        bad_step=host.bad_step[rows],
        num_chunks=np.int32(living.any(axis=1).sum()),
    )
    placed: Population = _place(population, sharding)
    return placed


def bring_back(host: HostStates, population: Population, slots: np.ndarray) -> HostStates:
    """The rows of ``host`` with those in ``slots`` replaced by what the devices hold; copies, nobody else's memory."""
    lanes = np.flatnonzero(slots != EMPTY)
    rows = slots.reshape(-1)[lanes]
    states = key_words(population.members)

    def replaced(old: np.ndarray, new: Array) -> np.ndarray:
        flat = np.asarray(new).reshape(-1, *old.shape[1:])
        merged = old.copy()
        merged[rows] = flat[lanes]
        return merged

    return HostStates(jax.tree.map(replaced, host.states, states), replaced(host.bad_step, population.bad_step))


def _place(population: Population, sharding: Population | None) -> Any:
    if sharding is None:
        return jax.device_put(population)
    spread = [jax.device_put(part, where) for part, where in zip(population, sharding, strict=True)]
    return Population(*spread)


def _weak_take(value: Array, rows: np.ndarray) -> Array:
    """``value[rows]``; as weakly typed as it was, which NumPy's arrays cannot be."""
    taken: Array = jax.numpy.asarray(value)[rows]
    return taken


def key_words(tree: PyTree) -> PyTree:
    """``tree`` with the words of PRNG keys in place of them: NumPy and files have no keys."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _with_keys(tree: TrainState, like: TrainState) -> TrainState:
    keyed: TrainState = jax.tree.map(
        lambda leaf, model: jax.random.wrap_key_data(leaf) if _is_key(model) else leaf, tree, like
    )
    return keyed


def _is_key(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))
