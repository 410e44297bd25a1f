"""What every model and task must do, as one table: a new model or task adds a row and is tested by all of it."""

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
from jaxnn.steps import TrainStep, init_train_state, make_evaluate_step, make_train_step
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


def images(rng: np.random.Generator) -> np.ndarray:
    """Small images."""
    return rng.normal(size=(BATCH_SIZE, 4, 4, 1)).astype(np.float32)


def tokens(rng: np.random.Generator) -> np.ndarray:
    """Short sequences of seven tokens, some padded with zeros."""
    return np.where(np.arange(TIME) <= np.arange(BATCH_SIZE)[:, None], rng.integers(0, 7, (BATCH_SIZE, TIME)), 0)


def labels(seed: int, inputs: Callable[[np.random.Generator], np.ndarray] = images) -> Batch:
    """Inputs of three classes."""
    rng = np.random.default_rng(seed)
    return Batch(inputs(rng), rng.integers(0, 3, BATCH_SIZE), np.ones(BATCH_SIZE, np.float32))


def texts(seed: int) -> Batch:
    """Sequences of three classes."""
    return labels(seed, tokens)


def two_classes(seed: int) -> Batch:
    """Sequences of two classes."""
    return texts(seed)._replace(targets=np.arange(BATCH_SIZE) % 2)


def numbers(seed: int) -> Batch:
    """Small images with three numbers each."""
    targets = np.random.default_rng(seed).normal(size=(BATCH_SIZE, 3)).astype(np.float32)
    return labels(seed)._replace(targets=targets)


def successors(seed: int) -> Batch:
    """Sequences and, for each token, the next one."""
    batch = texts(seed)
    return batch._replace(targets=np.roll(batch.inputs, -1, axis=1))


class Row(NamedTuple):
    """One model trained for one task.

    Attributes:
        name: its name in the tests.
        task: a factory of ``jaxnn.tasks``.
        model: its model.
        batch: from a seed to a batch of ``BATCH_SIZE``.
        options: keyword arguments of the factory.
        tolerance: the absolute and relative difference allowed between two ways to compute the same.
        num_terms: the number of terms of the loss per example.
        products: the dtypes of the matrix products and convolutions in a step.
    """

    name: str
    task: Callable[..., Task]
    model: Any
    batch: Callable[[int], Batch]
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
# They take long to compile, and a faster row has each of their parts too.
SLOW = {
    *("CNN classifies", "CNN regresses", "CNN with batch norm regresses", "ResNet of bottlenecks", "MobileNetV2"),
    *("GRUs in bfloat16", "RecurrentLanguageModel", "a user's module classifies", "GPT in bfloat16"),
    *("a plain pair classifies", "MLP regresses", "ResNet", "TextGenRNN", "CNN in bfloat16"),
}
marked = [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name in SLOW)) for row in TABLE]
rows = pytest.mark.parametrize("row", marked)

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
NUM_SEEDS, NUM_STEPS = 2, 3


class Prepared(NamedTuple):
    """What the tests of a row share: each program is compiled once.

    Attributes:
        task: of the row.
        compiled: from a state and a batch to what a step and an evaluation return.
        step: the step as it is.
        traces: gets an entry whenever ``compiled`` is traced.
        batches: ``NUM_STEPS`` batches.
        population: the first states of ``NUM_SEEDS`` seeds, the last states and the metrics, by a scan under ``vmap``.
        states: the states of a loop over ``batches`` from seed 0, the first one before it.
    """

    task: Task
    compiled: Callable[[TrainState, Batch], tuple[tuple[TrainState, Metrics], Metrics]]
    step: TrainStep
    traces: list[str]
    batches: list[Batch]
    population: tuple[TrainState, tuple[TrainState, Metrics]]
    states: list[TrainState]


@functools.cache
def prepare(name: str) -> Prepared:
    row = next(row for row in TABLE if row.name == name)
    task = row.task(row.model, **row.options)
    step, evaluate = make_train_step(task, OPTIMIZER), make_evaluate_step(task)
    traces: list[str] = []

    @jax.jit
    def compiled(state: TrainState, batch: Batch) -> Any:
        traces.append(name)
        return step(state, batch), evaluate(state, batch)

    def train(key: jax.Array, batches: Batch) -> Any:
        start = init_train_state(task, OPTIMIZER, key, jax.tree.map(lambda rows: rows[0], batches))
        return start, jax.lax.scan(step, start, batches)

    batches = [row.batch(seed) for seed in range(NUM_STEPS)]
    keys = jax.vmap(jax.random.key)(np.arange(NUM_SEEDS))
    population = jax.jit(jax.vmap(train, (0, None)))(keys, jax.tree.map(lambda *rows: np.stack(rows), *batches))
    states = [member(population[0], 0)]
    for batch in batches:
        states.append(compiled(states[-1], batch)[0][0])
    return Prepared(task, compiled, step, traces, batches, population, states)


def member(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


def masked(batch: Batch, counts: np.ndarray) -> Batch:
    return batch._replace(mask=counts.astype(np.float32))


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    def check(path: Any, left: jax.Array, right: jax.Array) -> None:
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        name = jax.tree_util.keystr(path)
        assert (left.shape, left.dtype) == (right.shape, right.dtype), name
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance, err_msg=name)

    jax.tree.map_with_path(check, got, expected)


def test_every_model_has_a_row() -> None:
    modules = {value for value in vars(models).values() if inspect.isclass(value) and issubclass(value, linen.Module)}
    public = modules - {models.Bottleneck, models.ResNetBlock}  # blocks of ResNet
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


@rows
def test_vmapped_scan_equals_a_loop_that_is_traced_once(row: Row) -> None:
    prepared = prepare(row.name)
    starts, (ends, metrics) = prepared.population
    for seed in range(NUM_SEEDS):
        state = member(starts, seed)
        for index, batch in enumerate(prepared.batches):
            (state, values), _ = prepared.compiled(state, batch)
            assert_close(values, member(member(metrics, seed), index), row.tolerance)
        assert_close(state, member(ends, seed), row.tolerance)
    assert prepared.traces == [row.name]


@rows
def test_every_parameter_has_a_finite_gradient_and_moves(row: Row) -> None:
    prepared = prepare(row.name)
    before, first, *_, after = prepared.states
    # Momentum holds the gradient after the first step.
    for path, gradient in jax.tree.leaves_with_path(first.opt_state[0].trace):
        assert np.isfinite(gradient).all() and np.any(np.asarray(gradient)), jax.tree_util.keystr(path)
    floats = [leaf for leaf in jax.tree.leaves(after) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(np.isfinite(leaf).all() for leaf in floats)
    assert {leaf.dtype.name for leaf in floats} == {"float32"}
    assert int(after.step) == NUM_STEPS
    moved = jax.tree.map(lambda old, new: bool(np.any(np.asarray(old) != new)), before.params, after.params)
    assert all(jax.tree.leaves(moved))
    assert set(observe.product_dtypes(prepared.step, before, prepared.batches[0])) == set(row.products)


@rows
def test_padding_changes_nothing_and_sums_add_up(row: Row) -> None:
    prepared, index = prepare(row.name), np.arange(BATCH_SIZE)
    batch, state = masked(prepared.batches[0], index < BATCH_SIZE - 1), prepared.states[-1]

    def spoiled(rows: Any) -> np.ndarray:
        value = np.nan if np.issubdtype(rows.dtype, np.floating) else 99
        return np.concatenate([rows[:-1], np.full_like(rows[-1:], value)])

    stepped, sums = prepared.compiled(state, batch)
    other = batch._replace(inputs=spoiled(batch.inputs), targets=spoiled(batch.targets))
    assert_close(prepared.compiled(state, other), (stepped, sums), row.tolerance)
    alone = jax.jit(make_evaluate_step(prepared.task))(state, Batch(*(rows[:-1] for rows in batch)))
    assert_close(alone, sums, row.tolerance)
    parts = [prepared.compiled(state, masked(batch, counts))[1] for counts in (index < 4, (index >= 4) & (index < 7))]
    assert_close(jax.tree.map(np.add, *jax.device_get(parts)), jax.device_get(sums), 4 * row.tolerance)
    assert [float(part["count"]) for part in parts] == [4 * row.num_terms, 3 * row.num_terms]
