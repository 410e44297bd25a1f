"""The programs of an experiment as pure functions, for one member, and ``vmap``-ed over the members of a population."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxnn._fields import seed_field, seed_for
from jaxnn.data import is_augmented
from jaxnn.engine._digests import state_digests
from jaxnn.engine._feed import DeviceFeed
from jaxnn.engine._prediction import make_predict
from jaxnn.engine._states import MEMBERS, Population, Shape
from jaxnn.optim import evaluation_state, value_and_grad_of
from jaxnn.parallel import SINGLE_DEVICE, Layout
from jaxnn.steps import (
    Totals,
    init_train_state,
    make_evaluate_step,
    make_predict_step,
    make_train_step,
    scan_steps,
)
from jaxnn.tasks import averaged_over, by_rows, own_step, sharded
from jaxnn.types import (
    Array,
    Batch,
    ConfigError,
    Examples,
    Experiment,
    Metrics,
    PyTree,
    Source,
    Task,
    TrainState,
    TrainStep,
)

# Keeps the draws for augmentation and evaluation apart from those for initialisation and dropout.
AUGMENT_STREAM, EVALUATE_STREAM = 1, 2


class GroupSpec(NamedTuple):
    """What the members of one program compute, independent of their number."""

    experiment: Experiment[Any]  # that of any member
    # From the values of the traced fields, which may be tracers, to a member's experiment.
    member: Callable[[Mapping[str, Any]], Experiment[Any]]
    source: Source  # the training split
    feed: DeviceFeed  # how its examples reach the device
    # The devices: members are sharded along the mesh axis ``members``, and each is placed on the other axes as its solo
    # run would be.
    layout: Layout
    in_step: bool = True  # whether all members have done the same number of updates

    @property
    def num_devices(self) -> int:
        """The number of devices that members are sharded over: all, unless several devices share a member."""
        return 1 if self.layout.mesh is None else self.layout.mesh.shape.get(MEMBERS, 1)


@dataclasses.dataclass(frozen=True)
class Initialise:
    """The program that makes the states of ``count`` members; None: the state of a run."""

    count: int | None

    def __str__(self) -> str:
        return "initialise" if self.count is None else f"initialise {self.count} members"


@dataclasses.dataclass(frozen=True)
class Train:
    """The program that trains a population of ``shape``, or a run, by ``num_steps``."""

    shape: Shape | None
    num_steps: int

    def __str__(self) -> str:
        return f"train {self.num_steps} step{'s' if self.num_steps > 1 else ''}{of_members(self.shape)}"


@dataclasses.dataclass(frozen=True)
class TrainPart(Train):
    """The program that trains by some of the ``num_steps`` of a call, from one to another."""

    def __str__(self) -> str:
        return f"train some of {self.num_steps} steps{of_members(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """The program that evaluates a piece of a ``split``, in ``part`` the one that training looks at."""

    shape: Shape | None
    split: str
    part: bool

    def __str__(self) -> str:
        return f"evaluate {self.split}{of_members(self.shape)}"


type Program = Initialise | Train | TrainPart | Evaluate


def of_members(shape: Shape | None) -> str:
    """What the names of programs say of the members; empty for a run."""
    return "" if shape is None else f" of {shape.chunks} × {shape.lanes} members"


def make_step(
    experiment: Experiment[Any], layout: Layout = SINGLE_DEVICE, value_and_grad: Callable[..., Any] | None = None
) -> TrainStep:
    """Returns one training step of ``experiment``; its task and optimizer are made by this call."""
    optimizer, task = experiment.optimizer(experiment.config), _distributed(experiment, layout)
    if hasattr(optimizer, "update_params") and _is_partitioned(layout):
        optimizer = optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)  # type: ignore[union-attr]
    if experiment.step is not None:
        step = own_step(experiment.step, task, optimizer, experiment.config)
        is_sharded = layout.axis_name is None and layout.data_size > 1
        return by_rows(step, 1, layout.constrain, layout.map_rows) if is_sharded else step
    return make_train_step(
        task, optimizer, value_and_grad=value_and_grad or value_and_grad_of(optimizer, layout.axis_name)
    )


def _is_partitioned(layout: Layout) -> bool:
    """Whether XLA partitions the program of a member over devices, which it cannot do with native calls."""
    mesh = layout.mesh
    return mesh is not None and layout.axis_name is None and mesh.size > mesh.shape.get(MEMBERS, 1)


def _distributed(experiment: Experiment[Any], layout: Layout) -> Task:
    """The task of ``experiment`` for batches that are sharded by ``layout``."""
    task = experiment.task(experiment.config)
    if layout.axis_name is not None:
        return averaged_over(task, layout.axis_name)
    return sharded(task, layout.constrain, layout.map_rows) if layout.data_size > 1 else task


def make_init(experiment: Experiment[Any], source: Source) -> Callable[..., TrainState]:
    """Returns a pure function to the state before the first step, without empty arrays.

    From one batch's examples, and the arrays to start from, by path.
    """
    config = experiment.config

    def init(examples: Examples, given: Mapping[str, Array] | None = None) -> TrainState:
        task, optimizer = experiment.task(config), experiment.optimizer(config)
        key = jax.random.key(seed_for(config, "init"))
        state = init_train_state(task, optimizer, key, source.as_batch(examples), given)
        if seed_field(config, "step") != seed_field(config, "init"):  # as if its seed were that of the whole run
            state = state._replace(key=jax.random.split(jax.random.key(seed_for(config, "step")))[1])
        for path, leaf in jax.tree.leaves_with_path(state.params):
            if 0 in leaf.shape:  # which no checkpoint can hold
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ConfigError(f"the parameter {name} is empty, {list(leaf.shape)}: give its layer a unit or more.")
        return state

    return init


def make_batch(source: Source) -> Callable[[Examples, jax.Array, jax.Array], Batch]:
    """Returns a pure function of examples, the indices ``[batch]`` of some, and a key: an augmented batch."""
    return lambda examples, rows, key: source.transform(source.gather(examples, rows), key)


def make_train(
    spec: GroupSpec, num_steps: int, values: Mapping[str, Any] | None = None, *, bounds: Array | None = None
) -> Callable[[TrainState, Totals, Examples], tuple[TrainState, Totals]]:
    """Returns a pure function that trains one member, with ``values`` of its traced fields, ``num_steps`` steps.

    Of these ``bounds [2]`` are the first to do and the one to stop before; the state is that before the first.
    """
    experiment, layout, feed = spec.member(values or {}), spec.layout, spec.feed
    config = experiment.config

    def train(state: TrainState, totals: Totals, examples: Examples) -> tuple[TrainState, Totals]:
        augmented = _augmentation(spec.source, seed_for(config, "step"))

        def make_batch(row: Any, step: jax.Array) -> Any:
            batch = augmented(layout.constrain(feed.batch(examples, row)), step)
            return layout.local_shard(layout.constrain(batch))

        # All batches of the call are chosen at once: far cheaper than one by one inside the scan.
        first = state.step if bounds is None else state.step - bounds[0]
        rows = feed.rows(examples, seed_for(config, "order"), first + jnp.arange(num_steps))
        return scan_steps(make_step(experiment, layout), state, totals, rows, make_batch, bounds)

    return layout.wrap(train)


def make_step_batch(spec: GroupSpec) -> Callable[[Examples, Array], Batch]:
    """Returns a pure function from the examples of a call, and the first step in it, to its augmented batch."""
    config, feed = spec.experiment.config, spec.feed

    def make(examples: Examples, step: Array) -> Batch:
        rows = feed.rows(examples, seed_for(config, "order"), jnp.asarray(step)[None])
        batch = feed.batch(examples, jax.tree.map(lambda leaf: leaf[0], rows))
        return _augmentation(spec.source, seed_for(config, "step"))(batch, step)

    return make


def _augmentation(source: Source, seed: Any) -> Callable[[Batch, Array], Batch]:
    """Returns a pure function from the batch of a step to the augmented one."""
    if not is_augmented(source):  # random numbers take long to lower, also those that are not used
        return lambda batch, step: batch
    key = jax.random.fold_in(jax.random.key(seed), AUGMENT_STREAM)
    return lambda batch, step: source.transform(batch, jax.random.fold_in(key, step))


def make_evaluate(spec: GroupSpec, source: Source, values: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Returns a pure function that evaluates batches under ``mask [batches, batch]``.

    It returns sums ``[batches]`` of each metric; targets and outputs ``[batches, batch, ...]`` if the task has
    `Task.metrics` of them; and what `Task.evaluate_again` keeps of each batch, for ``kept`` of the next evaluation.

    ``indices [batches, batch]`` choose examples; if None, the examples are ``[batches, batch, ...]``. ``numbers
    [batches]`` are those of the batches in the split, which decide their keys.
    """
    experiment, layout = spec.member(values or {}), spec.layout

    def evaluate(
        state: TrainState, examples: Examples, indices: Any, mask: jax.Array, numbers: jax.Array, kept: PyTree
    ) -> Any:
        task = _distributed(experiment, layout)
        step, predict = _make_evaluate_step(task), make_predict_step(task)
        seed_key = jax.random.fold_in(jax.random.key(seed_for(experiment.config, "step")), EVALUATE_STREAM)

        def body(_: None, row: tuple[Any, jax.Array, jax.Array, PyTree]) -> tuple[None, Any]:
            which, counts, number, before = row
            batch = source.as_batch(which, counts) if indices is None else source.gather(examples, which, counts)
            key = jax.random.fold_in(seed_key, number)
            batch = layout.local_shard(layout.constrain(batch))
            seen = (batch.targets, predict(state, batch.inputs)) if task.metrics else ()
            sums, after = step(state, batch, key, before)
            return None, (sums, layout.whole_batch(seen), after)

        return jax.lax.scan(body, None, (examples if indices is None else indices, mask, numbers, kept))[1]

    return layout.wrap(evaluate)


def _make_evaluate_step(task: Task) -> Callable[..., tuple[Metrics, PyTree]]:
    """`make_evaluate_step` that takes and returns what the task keeps of a batch too."""
    if task.evaluate_again is None:
        evaluate = make_evaluate_step(task)
        return lambda state, batch, key, kept: (evaluate(state, batch, key), ())

    def evaluate_again(state: TrainState, batch: Batch, key: jax.Array, kept: PyTree) -> tuple[Metrics, PyTree]:
        used = evaluation_state(state)
        assert task.evaluate_again is not None
        return task.evaluate_again(used.params, used.model_state, batch, key, kept)

    return evaluate_again


def make_population_init(spec: GroupSpec, num_members: int) -> Callable[..., TrainState]:
    """Returns a pure function from ``values [members]`` and one batch's examples to the states before the first step.

    One member after another, so that each draws its parameters as its solo run does, in the same memory.
    """

    def init(values: Mapping[str, Array], examples: Examples, given: Mapping[str, Array]) -> TrainState:
        # The indices serve members that have no traced values.
        rows = jnp.arange(num_members), values
        states: TrainState = jax.lax.map(lambda row: make_init(spec.member(row[1]), spec.source)(examples, given), rows)
        return states

    return init


def make_population_train(
    spec: GroupSpec, num_steps: int, *, bounds: Array | None = None
) -> Callable[..., tuple[Population, Totals]]:
    """Returns a pure function that trains every living member ``num_steps`` steps: ``(population, totals, examples)``.

    A member whose loss is no longer finite keeps its state from before the call; ``bounds`` are as of `make_train`.
    """
    num_done = num_steps if bounds is None else bounds[1] - bounds[0]

    def train_chunk(part: Population, totals: Totals, examples: Examples) -> tuple[Population, Totals]:
        def one(values: Mapping[str, Array], state: TrainState, totals: Totals) -> tuple[TrainState, Totals]:
            return make_train(spec, num_steps, values, bounds=bounds)(state, totals, examples)

        if part.alive.shape[0] == 1 or not spec.in_step:
            states, totals = _vmap_or_squeeze(one, part.alive.shape[0])(part.values, part.members, totals)
        else:
            # Shared parts are not mapped: their batches and random numbers are computed once.
            seeded = seed_field(spec.experiment.config, "step") in part.values
            key = part.members.key if seeded else part.members.key[0]
            shared = part.members._replace(step=jnp.asarray(part.step), key=key)
            axes = TrainState(None, 0, 0, 0, 0 if seeded else None)  # type: ignore[arg-type]
            states, totals = jax.vmap(one, in_axes=(0, axes, 0), out_axes=(axes, 0))(part.values, shared, totals)
        continues = part.alive & (totals.bad_step < 0)

        def kept(new: Array, old: Array) -> jax.Array:
            return jnp.where(continues.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        if spec.in_step:
            step = jnp.broadcast_to(part.step + num_done, part.alive.shape).astype(jnp.int32)
            states = states._replace(step=step)
        members = jax.tree.map(kept, states._replace(key=None), part.members._replace(key=None))  # type: ignore[arg-type]
        return part._replace(members=members, bad_step=jnp.asarray(totals.bad_step)), totals

    def train(population: Population, totals: Totals, examples: Examples) -> tuple[Population, Totals]:
        totals = totals._replace(bad_step=population.bad_step)

        def chunk(index: Array, carry: tuple[Population, Totals]) -> tuple[Population, Totals]:
            before, sums = carry
            part, own = train_chunk(_take_chunk(before, index), _take(sums, index), examples)
            # The keys stay as they are: written again, they would be used twice.
            keyless = before.members._replace(key=None)  # type: ignore[arg-type]
            members = _put(keyless, part.members, index)._replace(key=before.members.key)
            after = before._replace(members=members, bad_step=_put(before.bad_step, part.bad_step, index))
            return after, _put(sums, own, index)

        trained, totals = _over_chunks(population, chunk, (population, totals))
        return trained._replace(step=population.step + num_done), totals

    specs = population_specs(), PartitionSpec(None, MEMBERS)
    return _on_members(spec.layout.mesh, train, (*specs, PartitionSpec()), specs)


def with_digests(
    train: Callable[..., tuple[Any, Totals]], shape: Shape | None, layout: Layout
) -> Callable[..., tuple[Any, Totals]]:
    """Returns ``train`` that also notes digests ``[*shape, parts, 2]`` of the states at the end of a window."""
    num_axes, platform = 0 if shape is None else len(shape), layout.platform
    digests_of = functools.partial(state_digests, num_axes=num_axes, is_sharded=_is_partitioned(layout))

    def noting(state: Any, totals: Totals, examples: Examples) -> tuple[Any, Totals]:
        notes, zeros = totals.notes, totals.digests
        trained, totals = train(state, totals._replace(notes=None, digests=None), examples)
        states = trained if shape is None else trained.members
        # A condition on a GPU waits for the host; on a CPU a pass through the state costs as much as a short call.
        if platform == "cpu" and notes is not None:
            diverged = jnp.any(jnp.asarray(totals.bad_step) >= 0)
            wanted = jnp.max(jnp.asarray(notes)) + diverged > 1
            digests = jax.lax.cond(wanted, lambda: digests_of(states), lambda: jnp.asarray(zeros))
        else:
            # Fused with the last update, a digest would keep the state from before it, for as much memory again.
            digests = digests_of(jax.lax.optimization_barrier(states))
        return trained, totals._replace(digests=digests)

    return noting


def make_population_evaluate(spec: GroupSpec, source: Source) -> Callable[..., Any]:
    """Returns a pure function that evaluates every living member: `make_evaluate`, with axes ``[chunks, lanes]``."""

    def one(own: tuple[Mapping[str, Array], PyTree], state: TrainState, *piece: Any) -> Any:
        (values, kept), (examples, indices, mask, numbers) = own, piece
        return make_evaluate(spec, source, values)(state, examples, indices, jnp.asarray(mask), numbers, kept)

    compute = _over_members(spec, one, 4)

    def evaluate(population: Population, *arguments: Any) -> Any:
        *piece, kept = arguments
        own: Any = (population.values, kept)  # of each member
        return compute(population._replace(values=own), *piece)

    return evaluate


def make_population_predict(spec: GroupSpec) -> Callable[[Population, PyTree], PyTree]:
    """Returns a pure function: ``(population, inputs [batch, ...])`` to outputs ``[chunks, lanes, batch, ...]``."""

    def one(values: Mapping[str, Array], state: TrainState, inputs: PyTree) -> PyTree:
        member = spec.member(values)
        return make_predict(member.task(member.config), spec.source)(state, inputs)

    return _over_members(spec, one, 1)


def _over_members(spec: GroupSpec, one: Callable[..., Any], num_arguments: int) -> Callable[..., Any]:
    """Returns a pure function of a population and ``num_arguments`` arguments that all members share.

    It computes ``one(values, state, *arguments)`` for every living member, with axes ``[chunks, lanes]``.
    """

    def compute(population: Population, *arguments: Any) -> Any:
        def compute_chunk(part: Population) -> Any:
            function = _vmap_or_squeeze(lambda values, state: one(values, state, *arguments), part.alive.shape[0])
            return function(part.values, part.members)

        def chunk(index: Array, results: Any) -> Any:
            return _put(results, compute_chunk(_take_chunk(population, index)), index)

        if population.alive.shape[0] == 1:
            return jax.tree.map(lambda leaf: leaf[None], compute_chunk(_take_chunk(population, 0)))
        shapes = jax.eval_shape(compute_chunk, jax.eval_shape(_take_chunk, population, 0))
        zeros = jax.tree.map(lambda one: jnp.zeros((population.alive.shape[0], *one.shape), one.dtype), shapes)
        return _over_chunks(population, chunk, zeros)

    specs = population_specs(), *[PartitionSpec()] * num_arguments
    return _on_members(spec.layout.mesh, compute, specs, PartitionSpec(None, MEMBERS))


def population_specs() -> Population:
    """How the parts of a population are sharded along the mesh axis ``members``."""
    lanes, replicated = PartitionSpec(None, MEMBERS), PartitionSpec()
    return Population(replicated, lanes, lanes, lanes, lanes, replicated)  # type: ignore[arg-type]


def _vmap_or_squeeze(one: Callable[..., Any], lanes: int) -> Callable[..., Any]:
    """``vmap``, but for one lane the plain function: a convolution with a mapped kernel is slower even for one."""
    if lanes > 1:
        return jax.vmap(one)

    def squeezed(*arguments: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[None], one(*jax.tree.map(lambda leaf: leaf[0], arguments)))

    return squeezed


def _over_chunks[Carry](population: Population, chunk: Callable[[Array, Carry], Carry], carry: Carry) -> Carry:
    """Loops over the chunks that hold a living member; their number is known only when it runs."""
    if population.alive.shape[0] == 1:
        return chunk(0, carry)  # type: ignore[arg-type]
    return jax.lax.fori_loop(0, population.num_chunks, chunk, carry)  # type: ignore[no-any-return]


def _take_chunk(population: Population, index: Array | int) -> Population:
    """One chunk of it, ``[lanes, ...]``."""
    step, *stacked, num_chunks = population
    return Population._make((step, *_take(stacked, index), num_chunks))


def _take(tree: PyTree, index: Array | int) -> PyTree:
    def taken(leaf: Array) -> Any:
        if len(leaf) == 1:  # without slices, which would be half of a small program
            return leaf.reshape(leaf.shape[1:])
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            # As data: JAX's check of keys takes one that a loop indexes for one that is used again.
            data = jax.lax.dynamic_index_in_dim(jax.random.key_data(leaf), index, keepdims=False)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    return jax.tree.map(taken, tree)


def _put(tree: PyTree, part: PyTree, index: Array | int) -> PyTree:
    def put(leaf: Array, own: Array) -> Any:
        return own.reshape(leaf.shape) if len(leaf) == 1 else jax.lax.dynamic_update_index_in_dim(leaf, own, index, 0)

    return jax.tree.map(put, tree, part)


def _on_members(
    mesh: Mesh | None, function: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """``function`` under ``shard_map`` over the members on ``mesh``; they never communicate."""
    if mesh is None:
        return function
    # XLA shards a member over the other axes.
    axes = frozenset({MEMBERS} if mesh.size > mesh.shape[MEMBERS] else mesh.shape)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


@jax.jit
def rows_of(values: dict[str, jax.Array], rows: jax.Array) -> dict[str, jax.Array]:
    """The values of some members; one program for all fields."""
    return {name: value[rows] for name, value in values.items()}
