"""What every model and task must do, by one table: a new model or task adds a row and gets all of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxnn import models, observe, tasks
from jaxnn.models import (
    CNN,
    GPT,
    MLP,
    Bottleneck,
    FastText,
    MobileNetV2,
    RecurrentClassifier,
    RecurrentLanguageModel,
    ResNet,
    TextGenRNN,
)
from jaxnn.nn import GRU, Policy
from jaxnn.steps import EvaluateStep, TrainStep, init_train_state, make_evaluate_step, make_train_step
from jaxnn.tasks import binary_classification, classification, next_token, regression
from jaxnn.types import Batch, Metrics, Task, TrainState


class Normed(linen.Module):
    """A user's own module, with batch statistics and dropout."""

    @linen.compact
    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        x = linen.Dense(6, use_bias=False)(x.reshape(x.shape[0], -1))
        x = linen.relu(linen.BatchNorm(use_running_average=not training)(x))
        return linen.Dense(3)(linen.Dropout(0.25)(x, deterministic=not training))


def init_pair(key: jax.Array, inputs: jax.Array) -> dict[str, jax.Array]:
    return {"w": 0.1 * jax.random.normal(key, (inputs[0].size, 3)), "b": jnp.zeros(3)}


def apply_pair(params: Any, inputs: jax.Array) -> jax.Array:
    return jnp.reshape(inputs, (inputs.shape[0], -1)) @ params["w"] + params["b"][None]


BATCH_SIZE, TIME = 8, 5


def images(key: jax.Array) -> jax.Array:
    """Small images."""
    return jax.random.normal(key, (BATCH_SIZE, 4, 4, 1))


def tokens(key: jax.Array) -> jax.Array:
    """Short sequences of seven tokens, some of which end in zeros."""
    ids = jax.random.randint(key, (BATCH_SIZE, TIME), 0, 7)
    return jnp.where(jnp.arange(TIME)[None] <= jnp.arange(BATCH_SIZE)[:, None], ids, 0)


def labels(key: jax.Array, inputs: Callable[[jax.Array], jax.Array] = images) -> Batch:
    """Inputs of three classes."""
    inputs_key, labels_key = jax.random.split(key)
    classes = jax.random.randint(labels_key, (BATCH_SIZE,), 0, 3)
    return Batch(inputs(inputs_key), classes, jnp.ones(BATCH_SIZE))


def texts(key: jax.Array) -> Batch:
    """Sequences of three classes."""
    return labels(key, tokens)


def two_classes(key: jax.Array) -> Batch:
    """Sequences of two classes."""
    batch = texts(key)
    return batch._replace(targets=batch.targets % 2)


def numbers(key: jax.Array) -> Batch:
    """Small images with three numbers each."""
    return labels(key)._replace(targets=jax.random.normal(key, (BATCH_SIZE, 3)))


def successors(key: jax.Array) -> Batch:
    """Sequences and, for each token, another."""
    batch = texts(key)
    return batch._replace(targets=jnp.roll(batch.inputs, -1, axis=1))


class Row(NamedTuple):
    """One model trained for one task.

    Attributes:
        name: what the tests call it.
        task: a factory of ``jaxnn.tasks``.
        model: what it is given.
        batch: from a key to a batch of ``BATCH_SIZE``.
        options: what else the factory is given.
        tolerance: how far two ways to compute the same may differ, absolutely and relatively.
        num_terms: how many terms of the loss an example holds.
        products: the dtypes of the matrix products and convolutions in a step.
    """

    name: str
    task: Callable[..., Task]
    model: Any
    batch: Callable[[jax.Array], Batch]
    options: dict[str, Any] = {}
    tolerance: float = 1e-5
    num_terms: int = 1
    products: tuple[str, ...] = ("float32",)


def both(name: str, model: Any) -> list[Row]:
    """A model for vectors of three, trained to classify and to regress."""
    return [
        Row(f"{name} classifies", classification, model, labels, {"label_smoothing": 0.1}),
        Row(f"{name} regresses", regression, model, numbers),
    ]


HALF, NARROW = {"policy": Policy(compute="bfloat16")}, ("bfloat16",)
CONVOLUTIONS = {"blocks": ((3,),), "dense": ()}
RECURRENT = {"vocabulary_size": 7, "embedding_features": 4, "features": 3}
GRUS = {"layer": GRU, "bidirectional": True}
LANGUAGE_MODEL = RecurrentLanguageModel(7, features=4, num_layers=1, dropout=0.25)
GENERATOR = {"embedding_features": 4, "features": 3, "hidden": (5,)}
BOTTLENECKS = {"num_blocks": (1,), "features": 4, "block": Bottleneck, "stem": "imagenet"}
STAGES = {"stages": ((2, 4, 1, 1),), "features": 4, "last_features": 6}
TRANSFORMER = {"num_layers": 1, "features": 8, "num_heads": 2, "max_length": TIME + 1}
TABLE = [
    *both("MLP", MLP((8, 3), dropout=0.25)),
    *both("CNN", CNN(3, **CONVOLUTIONS, dropout=0.25)),
    *both("CNN with batch norm", CNN(3, **CONVOLUTIONS, batch_norm=True)),
    Row("ResNet", classification, ResNet(3, num_blocks=(1, 1), features=2), labels),
    Row("ResNet of bottlenecks", classification, ResNet(3, **BOTTLENECKS), labels),
    Row("MobileNetV2", classification, MobileNetV2(3, **STAGES, dropout=0.25), labels),
    Row("one logit", binary_classification, FastText(1, vocabulary_size=7), two_classes, {"label_smoothing": 0.1}),
    Row("FastText", classification, FastText(3, vocabulary_size=7, features=4, pad_id=0), texts),
    Row("RecurrentClassifier", classification, RecurrentClassifier(3, **RECURRENT, pad_id=0, dropout=0.25), texts),
    Row("GRUs in bfloat16", classification, RecurrentClassifier(3, **RECURRENT, **GRUS), texts, HALF, 2e-2, 1, NARROW),
    Row("TextGenRNN", classification, TextGenRNN(7, **GENERATOR), texts, {"auxiliary_weight": 0.2}),
    Row("RecurrentLanguageModel", next_token, LANGUAGE_MODEL, successors, num_terms=TIME),
    Row("GPT", next_token, GPT(7, **TRANSFORMER, dropout=0.25), successors, num_terms=TIME),
    *both("a user's module", Normed()),
    *both("a plain pair", (init_pair, apply_pair)),
    Row("MLP in bfloat16", classification, MLP((8, 3)), labels, HALF, 2e-2, products=NARROW),
    Row("CNN in bfloat16", regression, CNN(3, **CONVOLUTIONS), numbers, HALF, 2e-2, products=NARROW),
    # On a CPU, scores of attention and sums over rows in normalisation are float32.
    Row("GPT in bfloat16", next_token, GPT(7, **TRANSFORMER), successors, HALF, 2e-2, TIME, (*NARROW, "float32")),
]
# They take long to compile, and each of their parts stands in a faster row too.
SLOW = {
    *("CNN classifies", "CNN regresses", "CNN with batch norm regresses", "ResNet of bottlenecks", "MobileNetV2"),
    *("GRUs in bfloat16", "RecurrentLanguageModel", "a user's module classifies", "GPT in bfloat16"),
}
# Operation by operation they take longest, and have hardly one that the other rows have not.
SLOW_BY_OPERATION = {*SLOW, "ResNet", "RecurrentClassifier", "TextGenRNN", "GPT"}


def rows_but_slow(names: set[str]) -> pytest.MarkDecorator:
    """Each row, some of them slow."""
    marked = [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name in names)) for row in TABLE]
    return pytest.mark.parametrize("row", marked)


rows = rows_but_slow(SLOW)

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
NUM_SEEDS = 3
NUM_STEPS = 3


class Prepared(NamedTuple):
    """What the tests of a row share, so that each program is compiled once.

    Attributes:
        task: of the row.
        init: ``seed -> state``.
        step: the step as it is.
        compiled: the step, compiled for one batch on one device.
        loss_and_gradient: of a batch and the first state, compiled.
        evaluate: the step of an evaluation, compiled.
        traces: gets an entry whenever ``compiled`` is traced.
        batches: ``NUM_STEPS`` batches.
        states: the states of a loop over ``batches`` from seed 0, the first one before it.
        metrics: what its steps returned.
    """

    task: Task
    init: Callable[[int], TrainState]
    step: TrainStep
    compiled: TrainStep
    loss_and_gradient: Callable[[Batch], tuple[jax.Array, Any]]
    evaluate: EvaluateStep
    traces: list[str]
    batches: list[Batch]
    states: list[TrainState]
    metrics: list[Metrics]


@functools.cache
def prepare(name: str) -> Prepared:
    row = next(row for row in TABLE if row.name == name)
    task = row.task(row.model, **row.options)
    traces: list[str] = []

    def counted(*args: Any) -> Any:
        traces.append(name)
        return task.loss(*args)

    batches = [row.batch(jax.random.key(100 + index)) for index in range(NUM_STEPS)]
    init = functools.cache(lambda seed: init_train_state(task, OPTIMIZER, jax.random.key(seed), batches[0]))
    compiled = jax.jit(make_train_step(task._replace(loss=counted), OPTIMIZER))
    evaluate = jax.jit(make_evaluate_step(task))
    states, metrics = [init(0)], []
    loss = lambda params, batch: task.loss(params, states[0].model_state, batch, states[0].key)[0]  # noqa: E731
    gradient = functools.partial(jax.jit(jax.value_and_grad(loss)), states[0].params)
    for batch in batches:
        state, values = compiled(states[-1], batch)
        states.append(state)
        metrics.append(values)
    step = make_train_step(task, OPTIMIZER)
    return Prepared(task, init, step, compiled, gradient, evaluate, traces, batches, states, metrics)


def trained(prepared: Prepared, seed: int, num_steps: int) -> TrainState:
    """The state after a loop over the first batches."""
    state = prepared.init(seed)
    for batch in prepared.batches[:num_steps]:
        state, _ = prepared.compiled(state, batch)
    return state


def padded(batch: Batch) -> Batch:
    """The batch with its last example masked."""
    return batch._replace(mask=batch.mask.at[-1].set(0.0))


def part(batch: Batch, start: int | None = None, stop: int | None = None) -> Batch:
    return Batch(*(leaf[start:stop] for leaf in batch))


def stack(trees: list[Any]) -> Any:
    # Of keys JAX alone makes a stack, of other arrays NumPy one that need not be compiled.
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda *leaves: (jnp if is_key(leaves[0]) else np).stack(leaves), *trees)


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    def check(path: Any, left: jax.Array, right: jax.Array) -> None:
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        name = jax.tree_util.keystr(path)
        assert (left.shape, left.dtype) == (right.shape, right.dtype), name
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=name)

    jax.tree.map_with_path(check, got, expected)


# The table is whole.


def test_every_model_has_a_row() -> None:
    public = {value for value in vars(models).values() if inspect.isclass(value) and issubclass(value, linen.Module)}
    assert {MLP, CNN, GPT} <= public
    assert public <= {type(row.model) for row in TABLE}


def test_every_task_has_a_row() -> None:
    # A factory makes a task of a model alone; `supervised` needs a loss besides.
    functions = filter(inspect.isfunction, vars(tasks).values())
    factories = {function for function in functions if _makes_task(function)}
    assert {classification, regression, next_token} <= factories
    assert factories <= {row.task for row in TABLE}


def _makes_task(function: Callable[..., Any]) -> bool:
    model, *others = inspect.signature(function).parameters.values()
    returned = inspect.signature(function).return_annotation
    return (
        returned == "Task"
        and model.name == "model"
        and all(other.default is not inspect.Parameter.empty for other in others)
    )


# The ways to run a step agree.


@rows_but_slow(SLOW_BY_OPERATION)
def test_without_jit_it_computes_the_same(row: Row) -> None:
    prepared = prepare(row.name)
    got = prepared.step(prepared.states[0], prepared.batches[0])
    assert_close(got, (prepared.states[1], prepared.metrics[0]), row.tolerance)


@rows
def test_a_scan_is_a_loop(row: Row) -> None:
    prepared = prepare(row.name)
    scan = jax.jit(lambda state, batches: jax.lax.scan(prepared.step, state, batches))
    got = scan(prepared.states[0], stack(prepared.batches))
    assert_close(got, (prepared.states[-1], stack(prepared.metrics)), row.tolerance)


@rows
def test_a_population_is_a_loop(row: Row) -> None:
    prepared = prepare(row.name)
    population = jax.jit(jax.vmap(lambda state: jax.lax.scan(prepared.step, state, stack(prepared.batches[:2]))[0]))
    got = population(stack([prepared.init(seed) for seed in range(NUM_SEEDS)]))
    assert_close(got, stack([trained(prepared, seed, 2) for seed in range(NUM_SEEDS)]), row.tolerance)


@pytest.mark.slow
@rows
def test_members_of_a_population_start_as_they_would_alone(row: Row) -> None:
    prepared = prepare(row.name)
    init = jax.jit(jax.vmap(lambda key: init_train_state(prepared.task, OPTIMIZER, key, prepared.batches[0])))
    got = init(jnp.stack([jax.random.key(seed) for seed in range(NUM_SEEDS)]))
    assert_close(got, stack([prepared.init(seed) for seed in range(NUM_SEEDS)]), row.tolerance)


@rows
def test_two_devices_train_two_runs(row: Row) -> None:
    prepared = prepare(row.name)
    states = stack([prepared.init(seed) for seed in range(2)])
    got, _ = jax.pmap(prepared.step, in_axes=(0, None))(states, prepared.batches[0])
    assert len(got.step.sharding.device_set) == 2
    expected = stack([trained(prepared, seed, 1) for seed in range(2)])
    assert_close(jax.device_get(got), jax.device_get(expected), row.tolerance)


@rows
def test_two_devices_share_one_batch(row: Row) -> None:
    prepared = prepare(row.name)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    state = jax.device_put(prepared.states[0], NamedSharding(mesh, PartitionSpec()))
    batch = jax.device_put(prepared.batches[0], NamedSharding(mesh, PartitionSpec("data")))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves((state, batch))} == {2}
    got = jax.jit(prepared.step)(state, batch)
    assert_close(jax.device_get(got), jax.device_get((prepared.states[1], prepared.metrics[0])), row.tolerance)


@rows
def test_many_steps_are_traced_once(row: Row) -> None:
    prepared = prepare(row.name)
    trained(prepared, seed=5, num_steps=NUM_STEPS)
    assert prepared.traces == [row.name]


# What a step computes makes sense.


@rows
def test_every_parameter_has_a_finite_gradient_that_is_not_zero(row: Row) -> None:
    prepared = prepare(row.name)
    _, gradient = prepared.loss_and_gradient(prepared.batches[0])
    for path, leaf in jax.tree.leaves_with_path(gradient):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        assert np.any(np.asarray(leaf)), name


@rows
def test_everything_stays_finite_and_moves(row: Row) -> None:
    before, *_, after = prepare(row.name).states
    metrics = prepare(row.name).metrics
    floats = [leaf for leaf in jax.tree.leaves((after, metrics)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(np.isfinite(leaf).all() for leaf in floats)
    assert {leaf.dtype.name for leaf in floats} == {"float32"}
    assert int(after.step) == NUM_STEPS
    moved = jax.tree.map(lambda old, new: bool(np.any(np.asarray(old) != new)), before.params, after.params)
    assert all(jax.tree.leaves(moved))


@rows
def test_products_are_computed_in_the_policys_precision(row: Row) -> None:
    prepared = prepare(row.name)
    found = observe.product_dtypes(prepared.step, prepared.states[0], prepared.batches[0])
    assert set(found) == set(row.products)


@rows
def test_what_padding_holds_changes_nothing(row: Row) -> None:
    loss_and_gradient, batch = prepare(row.name).loss_and_gradient, padded(prepare(row.name).batches[0])

    def spoiled(rows: jax.Array) -> jax.Array:
        return rows.at[-1].set(jnp.nan if jnp.issubdtype(rows.dtype, jnp.floating) else 99)

    other = batch._replace(inputs=spoiled(batch.inputs), targets=spoiled(batch.targets))
    assert_close(loss_and_gradient(other), loss_and_gradient(batch), row.tolerance)


@rows
def test_padding_itself_changes_nothing(row: Row) -> None:
    prepared = prepare(row.name)
    batch, state = padded(prepared.batches[0]), prepared.states[0]
    assert_close(prepared.evaluate(state, batch), prepared.evaluate(state, part(batch, stop=-1)), row.tolerance)


@rows
def test_sums_of_an_evaluation_add_up(row: Row) -> None:
    evaluate = prepare(row.name).evaluate
    batch, state = padded(prepare(row.name).batches[0]), prepare(row.name).states[-1]
    first, second = evaluate(state, part(batch, stop=4)), evaluate(state, part(batch, start=4))
    assert_close(jax.tree.map(jnp.add, first, second), evaluate(state, batch), 4 * row.tolerance)
    assert (first["count"], second["count"]) == (4 * row.num_terms, (BATCH_SIZE - 5) * row.num_terms)
