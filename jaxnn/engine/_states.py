"""The states of members: one row per member on the host, chunks of lanes on the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn.record import is_key
from jaxnn.types import Array, PyTree, TrainState

MEMBERS = "members"
"""The mesh axis that members are sharded along."""
EMPTY = -1


class Population(NamedTuple):
    """The members of one block, ``[chunks, lanes, ...]`` each; lanes are those of all devices together."""

    step: Array | np.int32  # ``[]`` int32, updates done by every member that is alive
    members: TrainState  # their states, stacked; ``step`` and ``key`` too
    values: Mapping[str, Array]  # the values of each traced field
    alive: Array  # bool; False for members that have ended and for empty lanes
    bad_step: Array  # int32, the first step whose loss was not finite, or -1
    # ``[]`` int32, the number of chunks with a living member; they are the first ones.
    num_chunks: Array | np.int32


class Shape(NamedTuple):
    """How the members of a block are arranged: ``chunks`` one after another, ``lanes`` of each under ``vmap``."""

    chunks: int
    lanes: int


class HostStates(NamedTuple):
    """The states of a population on the host, one row per member, as they are saved."""

    states: TrainState  # ``[members, ...]`` NumPy arrays; PRNG keys as integers
    bad_step: np.ndarray  # ``[members]`` int32, the first step whose loss was not finite, or -1


def to_host(states: TrainState) -> HostStates:
    """Fresh states ``[members, ...]`` as rows on the host."""
    rows = jax.tree.map(np.array, _key_words(states))
    return HostStates(rows, np.full(len(rows.step), -1, np.int32))


def host_shapes(like: TrainState, num_members: int) -> HostStates:
    """The shapes of the rows of ``num_members``, to read saved ones into; ``like`` are those of one state."""

    def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_members, *leaf.shape), leaf.dtype)

    states = jax.tree.map(stacked, jax.eval_shape(_key_words, like))
    return HostStates(states, stacked(jax.ShapeDtypeStruct((), np.int32)))  # type: ignore[arg-type]


def member_state(host: HostStates, like: TrainState, row: int) -> TrainState:
    """The state of one member, as its solo run would hold it; ``like`` are the shapes of one state."""
    return with_keys(jax.tree.map(lambda leaf: leaf[row], host.states), like)


def arrange(rows: Sequence[int], shape: Shape) -> np.ndarray:
    """Which row is in which lane, ``[chunks, lanes]``; ``EMPTY`` in the lanes behind them."""
    slots = np.full(shape.chunks * shape.lanes, EMPTY)
    slots[: len(rows)] = rows
    return slots.reshape(shape)


def shape_of(num_members: int, vmap_size: int, num_devices: int) -> Shape:
    """The shape of ``num_members`` in chunks of ``vmap_size`` on each device."""
    return Shape(-(-num_members // (vmap_size * num_devices)), vmap_size * num_devices)


def bring_back(host: HostStates, population: Population, slots: np.ndarray) -> HostStates:
    """The rows of ``host`` with those in ``slots`` replaced by copies from the devices."""
    lanes = np.flatnonzero(slots != EMPTY)
    rows = slots.reshape(-1)[lanes]

    def replaced(old: np.ndarray, new: Array) -> np.ndarray:
        merged = old.copy()
        merged[rows] = np.asarray(new).reshape(slots.size, *old.shape[1:])[lanes]
        return merged

    states = jax.tree.map(replaced, host.states, _key_words(population.members))
    return HostStates(states, replaced(host.bad_step, population.bad_step))


def _key_words(tree: PyTree) -> PyTree:
    """``tree`` with PRNG keys as integers: NumPy and files have no keys."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def with_keys(tree: TrainState, like: TrainState) -> TrainState:
    """``tree`` with integers as PRNG keys wherever ``like`` has keys."""
    keyed: TrainState = jax.tree.map(
        lambda leaf, model: jax.random.wrap_key_data(leaf) if is_key(model) else leaf, tree, like
    )
    return keyed
