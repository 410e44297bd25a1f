"""The states of members: one row per member on the host, chunks of lanes on the devices; what they start from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn._transfers import fetching
from jaxnn.record import as_key_like
from jaxnn.types import Array, ConfigError, Experiment, PyTree, TrainState, is_key

MEMBERS = "members"
"""The mesh axis that members are sharded along."""
EMPTY = -1


class Population(NamedTuple):
    """The members of one block, ``[chunks, lanes, ...]`` each; lanes are those of all devices together."""

    step: Array | np.int32  # ``[]`` int32, updates done by every member that is alive; of members in lanes, in a window
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

    @staticmethod
    def of(num_members: int, vmap_size: int, num_devices: int) -> Shape:
        """Returns the shape of ``num_members`` in chunks of ``vmap_size`` on each device."""
        return Shape(-(-num_members // (vmap_size * num_devices)), vmap_size * num_devices)

    def arrange(self, rows: Sequence[int]) -> np.ndarray:
        """Which row is in which lane, ``[chunks, lanes]``; ``EMPTY`` in the lanes behind them."""
        slots = np.full(self.chunks * self.lanes, EMPTY)
        slots[: len(rows)] = rows
        return slots.reshape(self)


class HostStates(NamedTuple):
    """The states of a population on the host, one row per member, as they are saved."""

    states: TrainState  # ``[members, ...]`` NumPy arrays; PRNG keys as integers
    bad_step: np.ndarray  # ``[members]`` int32, the first step whose loss was not finite, or -1

    @staticmethod
    def shapes(like: TrainState, num_members: int) -> HostStates:
        """Returns the shapes of the rows of ``num_members``, to read saved ones into; ``like`` are those of one."""

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_members, *leaf.shape), leaf.dtype)

        states = jax.tree.map(stacked, jax.eval_shape(key_words, like))
        return HostStates(states, stacked(jax.ShapeDtypeStruct((), np.int32)))  # type: ignore[arg-type]

    def member(self, row: int, like: TrainState) -> TrainState:
        """The state of one member, as its solo run would hold it; ``like`` are the shapes of one state."""
        return with_keys(jax.tree.map(lambda leaf: leaf[row], self.states), like)


def to_host(states: TrainState) -> HostStates:
    """Fresh states ``[members, ...]`` as rows on the host."""
    rows = jax.tree.map(np.array, fetching(key_words(states)))
    return HostStates(rows, np.full(len(rows.step), -1, np.int32))


def bring_back(host: HostStates, population: Population, slots: np.ndarray) -> HostStates:
    """The rows of ``host`` with those in ``slots`` replaced by copies from the devices."""
    lanes = np.flatnonzero(slots != EMPTY)
    rows = slots.reshape(-1)[lanes]
    in_order = np.array_equal(slots.reshape(-1)[: len(host.bad_step)], np.arange(len(host.bad_step)))

    def replaced(old: np.ndarray, new: Array) -> np.ndarray:
        if in_order:  # all of them
            return np.array(new).reshape(slots.size, *old.shape[1:])[: len(old)]
        merged = old.copy()
        merged[rows] = np.asarray(new).reshape(slots.size, *old.shape[1:])[lanes]
        return merged

    states = jax.tree.map(replaced, host.states, fetching(key_words(population.members)))
    return HostStates(states, replaced(host.bad_step, population.bad_step))


def key_words(tree: PyTree) -> PyTree:
    """``tree`` with PRNG keys as integers: NumPy and files have no keys."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def with_keys(tree: TrainState, like: TrainState) -> TrainState:
    """``tree`` with integers as PRNG keys wherever ``like`` has keys."""
    return jax.tree.map(as_key_like, tree, like)  # type: ignore[no-any-return]


class Start(NamedTuple):
    """Arrays to start from, by path in ``params`` and ``model_state``, and how they match a state."""

    arrays: Mapping[str, np.ndarray]  # those that are taken
    new: tuple[str, ...] = ()  # those of the state that are drawn
    unused: tuple[str, ...] = ()  # given, and not in the state
    fingerprint: str | None = None  # a digest of those taken

    def __str__(self) -> str:
        parts = [f"{len(self.arrays)} arrays given ({self.fingerprint})"]
        for names, what in ((self.new, "drawn"), (self.unused, "given and unused")):
            if names:
                shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
                parts.append(f"{len(names)} {what}: {shown}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """The matches, for a record."""
        return {"fingerprint": self.fingerprint, "taken": [*self.arrays], "new": self.new, "unused": self.unused}


def find_start(experiment: Experiment[Any], shapes: TrainState) -> Start:
    """Loads what ``experiment.params`` returns, if not None, and matches it with a state of ``shapes``.

    ConfigError if nothing matches, or an array has another shape than the state's. A parameter that `tasks.freeze`
    keeps in the model state has the path that it had before.
    """
    if experiment.params is None or (made := experiment.params(experiment.config)) is None:
        return Start({})
    if isinstance(made, TrainState):
        given = _named({"params": made.params, "model_state": made.model_state})
    else:
        if hasattr(made, "state"):
            raise ConfigError("the experiment's params returned a run: return run.state, or run.state.params.")
        given = _named({"params": made})
    if any(name.startswith("params/adapters/") for name in given) and "adapters" not in shapes.params:
        raise ConfigError("the experiment's params hold adapters of lora: merge them first, by jn.tasks.merge_lora.")
    state = _named({"params": shapes.params, "model_state": shapes.model_state})
    places = {name.replace("model_state/frozen/", "params/", 1): name for name in state}
    places |= {name: name for name in state}
    arrays, unused = {}, []
    for name, array in given.items():
        # From a task that froze them, perhaps to one that does not.
        place = places.get(name) or places.get(name.replace("model_state/frozen/", "params/", 1))
        if place is None:
            unused.append(name)
            continue
        if (shape := np.shape(array)) != state[place].shape:
            raise ConfigError(
                f"the experiment's params have {name} {list(shape)}, and the task {list(state[place].shape)}: leave it "
                "out to draw it, or change the model."
            )
        arrays[place] = np.asarray(array)
    if not arrays:
        known = next(iter(state), "nothing")
        raise ConfigError(
            f"no array of the experiment's params is in the task's: it has {known}, and given is "
            f"{next(iter(given), 'nothing')}."
        )
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    new = tuple(name for name in state if name not in arrays)
    return Start(arrays, new, tuple(unused), digest.hexdigest()[:16])


def _named(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}
