"""A group's members as one state and one program: chunk after chunk of members, vmapped within a chunk.

A member's program is that of its solo run, ``vmap``-ed over the values of its traced fields; nothing of the training
step is written anew here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnn.loop import Feed, Totals, TrainProgram, make_evaluate, make_init, make_train
from jaxnn.parallel import Layout
from jaxnn.sweeps.search import with_values
from jaxnn.types import Array, Examples, Experiment, Metrics, PyTree, Source, TrainState

MEMBERS = "members"
"""The mesh axis that members are spread over."""


class Population(NamedTuple):
    """The members of one block, ``[chunks, lanes, ...]`` each; lanes are those of all devices together.

    Attributes:
        step: ``[]`` int32, updates done by every member that is alive.
        members: their states, stacked; ``step`` and ``key`` too.
        values: the values of each traced field.
        alive: bool; False for members that are over, and for lanes that hold none.
        bad_step: int32, the first step whose loss was not finite, or -1.
        num_chunks: ``[]`` int32: so many chunks, the first ones, hold a member that is alive.
    """

    step: Array | np.int32
    members: TrainState
    values: Mapping[str, Array]
    alive: Array
    bad_step: Array
    num_chunks: Array | np.int32


class Shape(NamedTuple):
    """How the members of a block lie: ``chunks`` one after another, ``lanes`` of each side by side."""

    chunks: int
    lanes: int


class Formula(NamedTuple):
    """What a group computes, free of how many members there are.

    Attributes:
        experiment: that of any member; its traced fields are replaced.
        traced: the names of these fields.
        source: the training split.
        feed: how its examples reach the device.
        layout: the devices: members are spread over the mesh axis ``members``, and each lies on what is left as a run
            of its own would.
    """

    experiment: Experiment[Any]
    traced: tuple[str, ...]
    source: Source
    feed: Feed
    layout: Layout

    @property
    def num_devices(self) -> int:
        """How many parts members are spread over: the devices, unless several share a member."""
        return 1 if self.layout.mesh is None else self.layout.mesh.shape[MEMBERS]


def make_population_init(formula: Formula, num_members: int) -> Callable[[Mapping[str, Array], Examples], TrainState]:
    """A pure function from ``values [members]`` and one batch's examples to the states before the first step.

    One member after another, so that each draws its parameters as its solo run does, in the same memory.
    """

    def init(values: Mapping[str, Array], examples: Examples) -> TrainState:
        def one(row: tuple[Array, Mapping[str, Array]]) -> TrainState:
            return make_init(with_values(formula.experiment, row[1]), formula.source)(examples)

        # The numbers are there for members without values of their own.
        states: TrainState = jax.lax.map(one, (jnp.arange(num_members), values))
        return states

    return init


def make_population_train(formula: Formula, num_steps: int) -> Callable[..., tuple[Population, Totals]]:
    """A pure function that trains every living member ``num_steps`` steps: ``(population, totals, examples)``.

    A member whose loss is no longer finite keeps the state it had before the call, and is trained no more.
    """

    def train_chunk(part: Population, totals: Totals, examples: Examples) -> tuple[Population, Totals]:
        states, totals = _map_lanes(formula, part, totals, _train_one(formula, num_steps, examples))
        goes_on = part.alive & (totals.bad_step < 0)
        step = jnp.broadcast_to(part.step + num_steps, part.alive.shape).astype(jnp.int32)
        states = states._replace(step=step, key=part.members.key)
        members = jax.tree.map(lambda new, old: _where(goes_on, new, old), states, part.members)
        return part._replace(members=members, bad_step=jnp.asarray(totals.bad_step)), totals

    def train(population: Population, totals: Totals, examples: Examples) -> tuple[Population, Totals]:
        totals = totals._replace(bad_step=population.bad_step)

        def chunk(index: Array, carry: tuple[Population, Totals]) -> tuple[Population, Totals]:
            before, sums = carry
            part, own = train_chunk(_take(before, index), _take_all(sums, index), examples)
            return _put(before, part, index), _put_all(sums, own, index)

        trained, totals = _over_chunks(population, chunk, (population, totals))
        return trained._replace(step=population.step + num_steps), totals

    return _spread(
        formula.layout.mesh,
        train,
        (_population_spec(), _lanes_spec(), PartitionSpec()),
        (_population_spec(), _lanes_spec()),
    )


def make_population_evaluate(formula: Formula, source: Source) -> Callable[..., Metrics]:
    """A pure function that evaluates every living member: sums ``[chunks, lanes, batches]`` of each metric."""

    def evaluate(population: Population, examples: Examples, indices: Array, mask: Array) -> Metrics:
        def one(values: Mapping[str, Array], state: TrainState) -> Metrics:
            member = with_values(formula.experiment, values)
            return make_evaluate(member, source, formula.layout)(state, examples, indices, jnp.asarray(mask))

        def evaluate_chunk(part: Population) -> Metrics:
            sums: Metrics = _vmap_or_squeeze(one, part.alive.shape[0])(part.values, part.members)
            return sums

        def chunk(index: Array, sums: Metrics) -> Metrics:
            updated: Metrics = _put_all(sums, evaluate_chunk(_take(population, index)), index)
            return updated

        shapes = jax.eval_shape(evaluate_chunk, jax.eval_shape(_take, population, 0))
        zeros = {name: jnp.zeros((population.alive.shape[0], *sums.shape), sums.dtype) for name, sums in shapes.items()}
        return _over_chunks(population, chunk, zeros)

    whole = PartitionSpec()
    return _spread(formula.layout.mesh, evaluate, (_population_spec(), whole, whole, whole), _lanes_spec())


def population_sharding(mesh: Mesh | None, member: Any) -> Population | None:
    """Where a population lies on ``mesh``: a pytree of shardings; None on one device.

    Args:
        mesh: the devices.
        member: the shardings of a run's state on it, where nothing is split over members.
    """
    if mesh is None:
        return None
    where: Population = _named(mesh, _population_spec())
    spread = jax.tree.map(lambda one: NamedSharding(mesh, PartitionSpec(None, MEMBERS, *one.spec)), member)
    return where._replace(members=spread)


def totals_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Where the totals of a population lie."""
    return None if mesh is None else NamedSharding(mesh, _lanes_spec())


def _train_one(formula: Formula, num_steps: int, examples: Examples) -> Callable[..., tuple[TrainState, Totals]]:
    def train(values: Mapping[str, Array], state: TrainState, totals: Totals) -> tuple[TrainState, Totals]:
        member = with_values(formula.experiment, values)
        program: TrainProgram = make_train(member, formula.source, formula.feed, num_steps, formula.layout)
        return program(state, totals, examples)

    return train


def _map_lanes(
    formula: Formula, part: Population, totals: Totals, one: Callable[..., tuple[TrainState, Totals]]
) -> tuple[TrainState, Totals]:
    """``one`` for every lane of a chunk. What all lanes share is not mapped: its batches and draws are made once."""
    seeded = "seed" in formula.traced
    lanes = part.alive.shape[0]
    if lanes == 1:
        states, totals = _vmap_or_squeeze(one, 1)(part.values, part.members, totals)
        return states, totals
    shared = part.members._replace(step=jnp.asarray(part.step), key=part.members.key if seeded else part.members.key[0])
    axes = TrainState(None, 0, 0, 0, 0 if seeded else None)  # type: ignore[arg-type]
    mapped = jax.vmap(one, in_axes=(0, axes, 0), out_axes=(axes, 0))
    states, totals = mapped(part.values, shared, totals)
    return states, totals


def _vmap_or_squeeze(one: Callable[..., Any], lanes: int) -> Callable[..., Any]:
    """``vmap``, but for one lane the plain function: a convolution with a mapped kernel is slower even for one."""
    if lanes > 1:
        return jax.vmap(one)

    def squeezed(*arguments: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[None], one(*jax.tree.map(lambda leaf: leaf[0], arguments)))

    return squeezed


def _over_chunks[Carry](population: Population, chunk: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
    """``jax.lax.map`` over the chunks that hold a living member.

    Written as a loop, because how many do is known only when it runs: members that stop free their chunk without a
    compilation.
    """
    if population.alive.shape[0] == 1:
        return chunk(0, carry)  # type: ignore[arg-type]
    looped: Carry = jax.lax.fori_loop(0, population.num_chunks, chunk, carry)
    return looped


def _take(population: Population, index: Array | int) -> Population:
    """One chunk of it, ``[lanes, ...]``."""
    rest = (population.members, population.values, population.alive, population.bad_step)
    members, values, alive, bad_step = _take_all(rest, index)
    return Population(population.step, members, values, alive, bad_step, population.num_chunks)


def _put(population: Population, part: Population, index: Array | int) -> Population:
    members = _put_all(population.members, part.members, index)
    return population._replace(members=members, bad_step=_put_all(population.bad_step, part.bad_step, index))


def _take_all(tree: PyTree, index: Array | int) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _put_all(tree: PyTree, part: PyTree, index: Array | int) -> PyTree:
    return jax.tree.map(lambda leaf, own: jax.lax.dynamic_update_index_in_dim(leaf, own, index, 0), tree, part)


def _where(condition: Array, new: Array, old: Array) -> jax.Array:
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _population_spec() -> Population:
    lanes, whole = _lanes_spec(), PartitionSpec()
    return Population(whole, lanes, lanes, lanes, lanes, whole)  # type: ignore[arg-type]


def _lanes_spec() -> PartitionSpec:
    return PartitionSpec(None, MEMBERS)


def _named(mesh: Mesh, specs: PyTree) -> PyTree:
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def _spread(mesh: Mesh | None, function: Callable[..., Any], in_specs: PyTree, out_specs: PyTree) -> Callable[..., Any]:
    """``function`` on every part of ``mesh`` for the lanes that lie there; members never speak to each other."""
    if mesh is None:
        return function
    # The other axes, over which a member may be split, are XLA's.
    own = frozenset({MEMBERS} if math.prod(mesh.shape.values()) > mesh.shape[MEMBERS] else mesh.shape)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=own, check_vma=False)
