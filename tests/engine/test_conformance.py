"""What every model and task must do, in a table to which a new one adds a row; devices and tasks of a user's own."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from jaxnn import ConfigError, data, models, observe, tasks, testing
from jaxnn.models import CNN, GPT, MLP, RecurrentClassifier
from jaxnn.nn import GRU, Policy
from jaxnn.steps import init_train_state, make_train_step
from jaxnn.tasks import averaged_over, binary_classification, classification, next_token, regression, supervised
from jaxnn.types import Batch, Task, TrainState
from tests import elsewhere, tiny


class Normed(linen.Module):
    """A user's own module, with batch statistics and dropout."""

    @linen.compact
    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        x = linen.Dense(6, use_bias=False)(x.reshape(x.shape[0], -1))
        x = linen.relu(linen.BatchNorm(use_running_average=not training)(x))
        return linen.Dense(3)(linen.Dropout(0.25)(x, deterministic=not training))


BATCH_SIZE, TIME = 8, 5
ELSEWHERE = elsewhere.models(4 * 4)


def images(seed: int) -> Batch:
    """Small images of three classes."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(BATCH_SIZE, 4, 4, 1)).astype(np.float32)
    return Batch(inputs, rng.integers(0, 3, BATCH_SIZE), np.ones(BATCH_SIZE, np.float32))


def numbers(seed: int) -> Batch:
    """Small images with three numbers each."""
    targets = np.random.default_rng(seed).normal(size=(BATCH_SIZE, 3)).astype(np.float32)
    return images(seed)._replace(targets=targets)


def pictures(seed: int) -> Batch:
    """Small images, each its own target."""
    inputs = 1 / (1 + np.exp(-images(seed).inputs))
    return images(seed)._replace(inputs=inputs, targets=inputs)


def autoencoding(model: models.VAE, policy: Policy | None = None) -> Task:
    """The evidence lower bound of binary pixels."""

    def loss(outputs: models.VAEOutputs, targets: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(outputs.reconstruction, targets).sum((1, 2, 3)) + outputs.kl()

    return supervised(model, loss, {"loss": loss}, policy)


def vectors(seed: int) -> Batch:
    """Vectors with three numbers each."""
    return numbers(seed)._replace(inputs=tiny.points(BATCH_SIZE, seed)[0])


# Of the sequences on two of eight rows, as on each of four devices, 3, 7, 10 and 10 tokens count.
COUNTED = np.arange(TIME) <= np.arange(BATCH_SIZE)[:, None]


def texts(seed: int) -> Batch:
    """Sequences of seven tokens and three classes, some padded with zeros."""
    inputs = np.where(COUNTED, np.random.default_rng(seed).integers(0, 7, (BATCH_SIZE, TIME)), 0)
    return images(seed)._replace(inputs=inputs)


def tables(seed: int) -> Batch:
    """Rows of three numbers and a category, and three classes."""
    categories = np.arange(BATCH_SIZE)[:, None] % 4
    return images(seed)._replace(inputs={"numbers": vectors(seed).inputs, "categories": categories})


def successors(seed: int) -> Batch:
    """Sequences and, for each token, the next one; those of padding and all of the first device's are ignored."""
    batch = texts(seed)
    is_target = COUNTED & (np.arange(BATCH_SIZE) > 1)[:, None]
    return batch._replace(targets=np.where(is_target, np.roll(batch.inputs, -1, axis=1), -1))


class Row(NamedTuple):
    """One model trained for one task."""

    task: Callable[..., Task]  # a factory of ``jaxnn.tasks``
    model: Any
    batch: Callable[[int], Batch]  # from a seed to a batch of ``BATCH_SIZE``
    options: dict[str, Any] = {}  # keyword arguments of the factory
    tolerance: float = 1e-5  # the absolute and relative difference allowed between two ways to compute the same
    products: tuple[str, ...] = ("float32",)  # the dtypes of the matrix products and convolutions in a step


SMOOTHED, HALF, NARROW = {"label_smoothing": 0.1}, {"policy": Policy(compute="bfloat16")}, ("bfloat16",)
CONVOLUTIONS = {"blocks": ((3,),), "dense": ()}
RECURRENT = {"vocabulary_size": 7, "embedding_features": 4, "features": 3}
GENERATOR = {"embedding_features": 4, "features": 3, "hidden": (5,)}
GRUS = {"layer": GRU, "bidirectional": True}
LANGUAGE_MODEL = models.RecurrentLanguageModel(7, features=4, num_layers=1, dropout=0.25)
BOTTLENECKS = {"num_blocks": (1,), "features": 4, "block": models.Bottleneck, "stem": "imagenet"}
STAGES = {"stages": ((2, 4, 1, 1),), "features": 4, "last_features": 6}
TRANSFORMER = {"num_layers": 1, "features": 8, "num_heads": 2, "max_length": TIME + 1}
ENCODER = {"num_layers": 2, "features": 4, "num_heads": 2, "dropout": 0.25, "remat": True, "scan": True}
LATENTS = models.VAE(CNN(4, blocks=((3,),), dense=()), models.ConvDecoder((4, 4, 1), features=(3,)))
BAG = models.FastText(1, vocabulary_size=7, features=4, pad_id=0)
TWO_CLASSES = lambda seed: texts(seed)._replace(targets=np.arange(BATCH_SIZE) % 2)  # noqa: E731
FAST = {
    "MLP": Row(classification, MLP((16, 3), dropout=0.25), images, SMOOTHED),
    "CNN with batch norm": Row(classification, CNN(3, **CONVOLUTIONS, batch_norm=True), images, SMOOTHED),
    "FastText": Row(binary_classification, BAG, TWO_CLASSES, SMOOTHED),
    "a user's module": Row(regression, Normed(), numbers),
    "a plain pair": Row(regression, tiny.MODEL, vectors),
    "MLP in bfloat16": Row(classification, MLP((8, 3)), images, HALF, 2e-2, NARROW),
}
# They take long to compile, and a fast row or another fast test has each of their parts too.
SLOW = {
    **{name: Row(classification, model, images) for name, model in ELSEWHERE.items() if name not in FAST},
    "CNN": Row(classification, CNN(3, **CONVOLUTIONS, dropout=0.25), images),
    "CNN in bfloat16": Row(regression, CNN(3, **CONVOLUTIONS, batch_norm=True), numbers, HALF, 2e-2, NARROW),
    "ResNet": Row(classification, models.ResNet(3, num_blocks=(1, 1), features=2), images),
    "ResNet of bottlenecks": Row(classification, models.ResNet(3, **BOTTLENECKS, remat=True), images),
    "WideResNet": Row(classification, models.WideResNet(3, depth=10, width=1, dropout=0.25), images),
    "ViT": Row(classification, models.ViT(3, **ENCODER, patch_size=2), images),
    "TransformerClassifier": Row(
        classification, models.TransformerClassifier(3, **ENCODER, vocabulary_size=7, pad_id=0, max_length=TIME), texts
    ),
    "UNet": Row(regression, models.UNet(1, features=4, multipliers=(1, 2), num_groups=2, num_heads=2), pictures),
    "TableMLP": Row(classification, models.TableMLP((8, 3), num_categories=(4,), frequencies=2, dropout=0.25), tables),
    "VAE": Row(autoencoding, LATENTS, pictures),
    "MobileNetV2": Row(classification, models.MobileNetV2(3, **STAGES, dropout=0.25), images),
    "GRUs in bfloat16": Row(classification, RecurrentClassifier(3, **RECURRENT, **GRUS), texts, HALF, 2e-2, NARROW),
    "TextGenRNN": Row(classification, models.TextGenRNN(7, **GENERATOR), texts, {"auxiliary_weight": 0.2}),
    "GPT": Row(next_token, GPT(7, **TRANSFORMER, dropout=0.25), successors),
    "RecurrentClassifier": Row(classification, RecurrentClassifier(3, **RECURRENT, pad_id=0, dropout=0.25), texts),
    "RecurrentLanguageModel": Row(next_token, LANGUAGE_MODEL, successors),
    # On a CPU, scores of attention and sums over rows in normalisation are float32.
    "GPT in bfloat16": Row(next_token, GPT(7, **TRANSFORMER), successors, HALF, 2e-2, (*NARROW, "float32")),
}
TABLE = FAST | SLOW
# Compiling for pmap takes the time of three other programs.
PMAPPED = {"MLP", "CNN with batch norm", "FastText", "RecurrentClassifier", "GPT", "CNN in bfloat16", "ResNet", "VAE"}
PMAPPED |= {"RecurrentLanguageModel"}  # whose batch is no first axis
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def start(task: Task, batch: Batch) -> TrainState:
    """A first state with random numbers by NumPy: most of the time to compile initializers is that of their draws."""
    rng = np.random.default_rng(0)

    def fill(lowest: float, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: rng.uniform(lowest, 0.5, leaf.shape).astype(leaf.dtype), tree)

    shapes = jax.eval_shape(functools.partial(init_train_state, task, OPTIMIZER), jax.random.key(0), batch)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.opt_state)
    # Variances are positive.
    states = fill(-0.5, shapes.params), fill(0.1, shapes.model_state)
    return TrainState(np.int32(0), *states, zeros, jax.random.key(0))


def test_every_model_and_task_has_a_row():
    modules = {value for value in vars(models).values() if inspect.isclass(value) and issubclass(value, linen.Module)}
    blocks = {models.Bottleneck, models.ResNetBlock, models.ConvDecoder}
    ours = {name: row for name, row in TABLE.items() if name not in ELSEWHERE}
    assert modules - blocks == {type(row.model) for row in ours.values()} - {Normed, tuple}
    wrappers = {averaged_over, tasks.as_model, tasks.supervised, tasks.freeze, tasks.lora, tasks.merge_lora}
    wrappers |= {tasks.direction_of}
    factories = {getattr(tasks, name) for name in tasks.__all__} - wrappers
    assert factories == {row.task for row in TABLE.values()} - {autoencoding}


def check(name: str, *checks: str) -> None:
    row, batch = TABLE[name], TABLE[name].batch(0)
    task = row.task(row.model, **row.options)
    how: dict[str, Any] = {"optimizer": OPTIMIZER, "state": start(task, batch), "num_devices": 4}
    results = testing.check_task(task, batch, checks=checks, tolerance=row.tolerance, **how)
    assert set(results.values()) == {"passed"}


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_row_conforms(name):
    row, batch = TABLE[name], TABLE[name].batch(0)
    check(name, "trace", "vmap", "parameters", "padding", "padded step", "sums")
    task = row.task(row.model, **row.options)
    step, state = make_train_step(task, OPTIMIZER), start(task, batch)
    outputs = jax.eval_shape(task.predict, state.params, state.model_state, batch.inputs)
    after = jax.tree.leaves((jax.eval_shape(step, state, batch)[0], outputs))
    assert {str(leaf.dtype) for leaf in after if jnp.issubdtype(leaf.dtype, jnp.floating)} == {"float32"}
    assert set(observe.Traced(step, state, batch).product_dtypes) == set(row.products)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_model_sums_many_terms_in_half_precision(dtype):
    for name, row in TABLE.items():
        if row.model in ELSEWHERE.values():
            continue
        batch = jax.tree.map(lambda rows: np.resize(rows, (100, *rows.shape[1:])), row.batch(0))
        task = row.task(row.model, **row.options | {"policy": Policy(compute=dtype)})
        state = jax.eval_shape(functools.partial(init_train_state, task, OPTIMIZER), jax.random.key(0), batch)
        found = observe.half_sums(make_train_step(task, OPTIMIZER), state, batch)
        own = {"a user's module": ["Normed/Dense_1"], "a plain pair": [""]}
        assert [one.where for one in found] == own.get(name, []), f"{name} {found}"


def on_devices() -> Iterator[Any]:
    """Every row by strategy ``data``, and one of each kind of layer and of random number by ``pmap``."""
    for name in TABLE:
        for strategy in ("devices", "pmap") if name in PMAPPED else ("devices",):
            is_slow = (name, strategy) not in (("CNN with batch norm", "devices"), ("FastText", "pmap"))
            yield pytest.param(name, strategy, marks=[pytest.mark.slow] * is_slow)


# Devices share the statistics of a batch, and average a loss; of tokens to predict they have unequal numbers.
@pytest.mark.parametrize(("name", "strategy"), [*on_devices()])
@pytest.mark.several_devices
def test_a_step_on_four_devices_equals_that_on_one(name, strategy):
    check(name, strategy)


# Tasks of a user's own, which know nothing of devices.


def with_loss(value: Any) -> Any:
    """A task that minimises ``value(params, batch, key)``, a number."""
    return tiny.TASK._replace(loss=lambda params, state, batch, key: (value(params, batch, key), (state, {})))


def denoised(params: Any, inputs: jax.Array, key: jax.Array) -> jax.Array:
    """The loss of a diffusion model."""
    noise = jax.random.normal(key, inputs.shape)
    return jnp.square(tiny.apply(params, inputs + noise) - noise).mean(1)


def matched(params: Any, inputs: jax.Array) -> jax.Array:
    """The contrastive loss of SimCLR."""
    outputs = tiny.apply(params, inputs)
    return -jnp.diagonal(jax.nn.log_softmax(outputs @ outputs.T))


def drawing(params: Any, state: Any, batch: Batch, key: Any) -> Any:
    """An evaluation that draws."""
    each = denoised(params, batch.inputs, jax.random.key(0))
    return {"loss": (each * batch.mask).sum(), "count": batch.mask.sum()}


@pytest.mark.several_devices
def test_pmap_refuses_tasks_that_draw_random_numbers_themselves():
    training = with_loss(lambda params, batch, key: denoised(params, batch.inputs, key).mean())
    for task in (training, tiny.TASK._replace(evaluate=drawing)):
        with pytest.raises(ConfigError, match="draws random numbers.*strategy data"):
            tiny.fit(tiny.experiment(task=lambda config, task=task: task), strategy="pmap", devices=2)


@pytest.mark.several_devices
def test_pmap_names_the_check_of_coupled_examples(capsys):
    for strategy, is_named in (("pmap", True), ("data", False)):
        tiny.fit(tiny.experiment(num_steps=5), strategy=strategy, devices=2, progress="plain")
        assert ("jaxnn.testing.check_task" in capsys.readouterr().out) == is_named


@pytest.mark.slow
def test_own_random_numbers_and_coupled_losses_equal_those_of_one_device():
    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return (denoised(params, batch.inputs, key) + matched(params, batch.inputs)).mean()

    train_only = data.arrays(train=tiny.points(tiny.NUM_TRAIN))
    example = tiny.experiment(data=train_only, task=lambda config: with_loss(loss))
    assert tiny.fit(example, strategy="data").final == pytest.approx(tiny.fit(example).final, rel=1e-5)
