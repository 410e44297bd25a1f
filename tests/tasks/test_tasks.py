"""Tasks: losses and metrics by hand, padding that cannot count, and every form of model behind one signature."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from losses import KEY, SCALE, batch_of, gradient_of, loss_of, sums_of

from jaxnn import observe, tasks
from jaxnn.models import CNN, MLP
from jaxnn.nn import Policy
from jaxnn.tasks import as_model
from jaxnn.types import Batch, ConfigError

# Probabilities 1/8, 2/8, 5/8, twice: with label 2 the first is right, with label 0 the second is wrong.
LOGITS = np.log(np.array([[1, 2, 5], [1, 2, 5]], np.float32))
LABELS = np.array([2, 0], np.int32)


# Classification.


def test_cross_entropy_and_accuracy_by_hand() -> None:
    # -ln(5/8) = ln 1.6 and -ln(1/8) = ln 8, their mean; one of two is right.
    metrics = loss_of(tasks.classification(SCALE), batch_of(LOGITS, LABELS))
    assert metrics == pytest.approx({"loss": (math.log(1.6) + math.log(8)) / 2, "accuracy": 0.5}, rel=1e-6)


def test_evaluation_gives_sums_and_their_count() -> None:
    sums = sums_of(tasks.classification(SCALE), batch_of(LOGITS, LABELS))
    expected = {"loss": math.log(1.6) + math.log(8), "accuracy": 1.0, "count": 2.0}
    assert sums == pytest.approx(expected, rel=1e-6)


def test_label_smoothing_by_hand() -> None:
    # Of the share 0.3 each of 3 classes gets 0.1: 0.7 ln 1.6 + 0.1 (ln 8 + ln 4 + ln 1.6).
    task = tasks.classification(SCALE, label_smoothing=0.3)
    loss = loss_of(task, batch_of(LOGITS[:1], LABELS[:1]))["loss"]
    assert loss == pytest.approx(0.7 * math.log(1.6) + 0.1 * math.log(8 * 4 * 1.6), rel=1e-6)


def test_evaluation_is_not_smoothed() -> None:
    batch = batch_of(LOGITS, LABELS)
    assert sums_of(tasks.classification(SCALE, label_smoothing=0.3), batch) == sums_of(
        tasks.classification(SCALE), batch
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_traced_label_smoothing_equals_the_plain_one(smoothing: float) -> None:
    batch = batch_of(LOGITS, LABELS)

    def traced(smoothing: jax.Array) -> jax.Array:
        task = tasks.classification(SCALE, label_smoothing=smoothing)
        return task.loss({"scale": jnp.ones(())}, {}, batch, KEY)[0]

    plain = loss_of(tasks.classification(SCALE, label_smoothing=smoothing), batch)["loss"]
    assert float(jax.jit(traced)(smoothing)) == pytest.approx(plain, rel=1e-6)
    assert jax.jit(jax.vmap(traced))(jnp.array([0.5, smoothing]))[1] == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("task", [tasks.classification, tasks.binary_classification])
@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_a_label_smoothing_out_of_range_is_named(smoothing: float, task: Any) -> None:
    with pytest.raises(ConfigError, match=f"label_smoothing is {smoothing}, and must be at least 0 and below 1"):
        task(SCALE, label_smoothing=smoothing)


@pytest.mark.parametrize(
    ("inputs", "targets", "sentence"),
    [
        (LOGITS, [0.0, 1.0], r"needs targets of integers \[batch\], not float\d+ \[2\]: .*tasks.regression"),
        (LOGITS, [[0], [1]], r"needs targets of integers \[batch\], not int\d+ \[2, 1\]"),
        (LOGITS[:, 0], LABELS, r"outputs are logits \[batch, classes\], not \[2\] for 2 labels"),
        (LOGITS[:, None], LABELS, r"outputs are logits \[batch, classes\], not \[2, 1, 3\] for 2 labels"),
        # Of a single class the cross-entropy would be 0 whatever the logit.
        (LOGITS[:, :1], LABELS, r"the model has one, \[2, 1\]: give it more, or use tasks.binary_classification"),
    ],
)
def test_what_cannot_be_classified_is_named(inputs: Any, targets: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loss_of(tasks.classification(SCALE), batch_of(inputs, targets))


# Regression.


def test_squared_and_absolute_error_by_hand() -> None:
    # Errors 1 and -3: squares 1 and 9, absolute 1 and 3.
    batch = batch_of([3.0, 1.0], [2.0, 4.0])
    assert loss_of(tasks.regression(SCALE), batch) == {"loss": 5.0, "mean_absolute_error": 2.0}
    assert sums_of(tasks.regression(SCALE), batch) == {"loss": 10.0, "mean_absolute_error": 4.0, "count": 2.0}


def test_components_of_a_target_are_averaged() -> None:
    # One example with errors 1, 2, 3, 6: squares (1 + 4 + 9 + 36) / 4, absolute 12 / 4.
    batch = batch_of([[[1.0, 2.0], [3.0, 6.0]]], np.zeros((1, 2, 2), np.float32))
    assert loss_of(tasks.regression(SCALE), batch) == {"loss": 12.5, "mean_absolute_error": 3.0}


def test_outputs_with_a_last_axis_of_one_fit_plain_targets() -> None:
    # Broadcast to [2, 2] the mean square would be (1 + 1 + 1 + 9) / 4 = 3.
    flat, column = batch_of([3.0, 1.0], [2.0, 4.0]), batch_of([[3.0], [1.0]], [2.0, 4.0])
    assert loss_of(tasks.regression(SCALE), column) == loss_of(tasks.regression(SCALE), flat)


@pytest.mark.parametrize(
    ("outputs", "targets"), [((2, 3), (2,)), ((2,), (2, 1)), ((2, 3), (2, 2)), ((2, 1, 1), (2,)), ((2, 2), (2, 1))]
)
def test_outputs_unlike_the_targets_are_named(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    sentence = rf"not outputs \{list(outputs)} for targets \{list(targets)}: change the model's last layer"
    with pytest.raises(ConfigError, match=sentence.replace("]", r"\]")):
        loss_of(tasks.regression(SCALE), batch_of(np.zeros(outputs), np.zeros(targets, np.float32)))


# Padding.


def test_a_masked_mean_divides_by_the_examples_alone() -> None:
    # Errors 1 and 3 count, 100 does not: (1 + 9) / 2 and (1 + 3) / 2.
    batch = batch_of([1.0, 100.0, 3.0], [0.0, 0.0, 0.0], mask=[1, 0, 1])
    assert loss_of(tasks.regression(SCALE), batch) == {"loss": 5.0, "mean_absolute_error": 2.0}
    assert sums_of(tasks.regression(SCALE), batch)["count"] == 2.0


@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_padding_changes_neither_value_nor_gradient(kind: str, garbage: float) -> None:
    inputs = np.asarray(jax.random.normal(KEY, (3, 4)))
    if kind == "classification":
        task, targets, other = tasks.classification(MLP((5, 3)), label_smoothing=0.1), np.array([0, 2, 1]), 99
    else:
        task, targets, other = tasks.regression(MLP((5, 1))), np.array([0.5, -1.0, 2.0], np.float32), garbage
    padded = batch_of(
        np.concatenate([inputs, np.full((2, 4), garbage)]), np.append(targets, [other] * 2), mask=[1, 1, 1, 0, 0]
    )
    padded = padded._replace(targets=padded.targets.astype(targets.dtype))
    whole = batch_of(inputs, targets)
    assert loss_of(task, padded) == pytest.approx(loss_of(task, whole), rel=1e-6)
    assert sums_of(task, padded) == pytest.approx(sums_of(task, whole), rel=1e-6)
    jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7),
        gradient_of(task, padded),
        gradient_of(task, whole),
    )


def test_padding_of_token_inputs_stays_integer() -> None:
    class Embedded(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return linen.Embed(7, 3)(tokens).mean(axis=1)

    batch = Batch(np.array([[1, 2], [10**6, -5]], np.int32), LABELS, np.array([1.0, 0.0], np.float32))
    assert math.isfinite(loss_of(tasks.classification(Embedded()), batch)["loss"])


def test_nothing_but_padding_is_no_loss() -> None:
    batch = batch_of([5.0, 7.0], [0.0, 0.0], mask=[0, 0])
    assert loss_of(tasks.regression(SCALE), batch) == {"loss": 0.0, "mean_absolute_error": 0.0}
    assert float(gradient_of(tasks.regression(SCALE), batch)["scale"]) == 0.0


# Models in any form.


class TakesTrain(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return 2 * x if train else x


class TakesTraining(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, *, training: bool = True) -> jax.Array:
        return 2 * x if training else x


class TakesDeterministic(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return x if deterministic else 2 * x


@pytest.mark.parametrize(
    "model",
    [
        TakesTrain(),
        TakesTraining(),
        TakesDeterministic(),
        (lambda key, x: {}, lambda params, x, is_training: 2 * x if is_training else x),
        (lambda key, x: {}, lambda params, x, train=False: 2 * x if train else x),
    ],
)
def test_a_model_is_told_whether_it_trains(model: Any) -> None:
    # Each doubles its inputs in training.
    init, apply = as_model(model)
    inputs = jnp.array([[1.0, 2.0]])
    params, model_state = init(KEY, inputs)
    assert apply(params, model_state, inputs, KEY)[0].tolist() == [[2.0, 4.0]]
    assert apply(params, model_state, inputs, None)[0].tolist() == [[1.0, 2.0]]


def test_flaxs_own_dropout_drops_in_training_alone() -> None:
    init, apply = as_model(linen.Dropout(0.5))
    inputs = jnp.ones((4, 8))
    params, model_state = init(KEY, inputs)
    dropped = apply(params, model_state, inputs, KEY)[0]
    assert set(np.unique(dropped)) == {0.0, 2.0}  # kept ones are scaled by 1 / (1 - 0.5)
    assert np.array_equal(apply(params, model_state, inputs, None)[0], inputs)


def test_a_sequence_of_layers_needs_no_flag() -> None:
    model = linen.Sequential([linen.Dense(4), linen.relu, linen.Dense(3)])
    init, apply = as_model(model)
    inputs = jnp.ones((2, 5))
    params, model_state = init(KEY, inputs)
    assert model_state == {}
    assert params["layers_0"]["kernel"].shape == (5, 4)
    expected = model.apply({"params": params}, inputs)
    for key in (KEY, None):
        assert np.array_equal(apply(params, model_state, inputs, key)[0], expected)


def test_batch_statistics_move_in_training_and_rest_in_evaluation() -> None:
    # Of 0 and 4 the mean is 2 and the variance 4; at momentum 0.9 from 0 and 1: 0.2, and 0.9 + 0.4 = 1.3.
    init, apply = as_model(linen.BatchNorm(momentum=0.9, epsilon=0.0))
    inputs = jnp.array([[0.0], [4.0]])
    params, before = init(KEY, inputs)
    assert (before["batch_stats"]["mean"], before["batch_stats"]["var"]) == (0.0, 1.0)
    outputs, after = apply(params, before, inputs, KEY)
    np.testing.assert_allclose(outputs, [[-1.0], [1.0]], rtol=1e-6)  # (x - 2) / sqrt(4)
    np.testing.assert_allclose(after["batch_stats"]["mean"], [0.2], rtol=1e-6)
    np.testing.assert_allclose(after["batch_stats"]["var"], [1.3], rtol=1e-6)
    outputs, still = apply(params, after, inputs, None)
    np.testing.assert_allclose(outputs[0], [-0.2 / math.sqrt(1.3)], rtol=1e-6)
    assert still is after


def test_a_task_carries_the_models_state() -> None:
    task = tasks.classification(CNN(3, blocks=((2,),), dense=(), batch_norm=True))
    batch = batch_of(jax.random.normal(KEY, (4, 4, 4, 1)), [0, 1, 2, 0])
    params, before = task.init(KEY, batch)
    _, (after, _) = task.loss(params, before, batch, KEY)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert not np.array_equal(after["batch_stats"]["BatchNorm_0"]["mean"], [0.0, 0.0])
    # Evaluation looks at the state it is given.
    assert sums_of(task, batch)["loss"] != float(task.evaluate(params, after, batch)["loss"])


def test_what_a_module_only_shows_is_no_state() -> None:
    class Telling(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow("intermediates", "seen", x)
            self.sow("losses", "penalty", x)
            return linen.Dense(2)(x)

    init, apply = as_model(Telling())
    params, model_state = init(KEY, jnp.ones((1, 3)))
    assert model_state == {}
    assert apply(params, model_state, jnp.ones((1, 3)), KEY)[1] == {}


def test_a_module_may_draw_under_any_name() -> None:
    class Noisy(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            return x + jax.random.normal(self.make_rng("noise"), x.shape) if train else x

    init, apply = as_model(Noisy())
    params, model_state = init(KEY, jnp.zeros(4))
    first, again, other = (apply(params, model_state, jnp.zeros(4), jax.random.key(seed))[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_plain_pair_may_take_a_key() -> None:
    def apply(params: Any, inputs: jax.Array, key: jax.Array | None) -> jax.Array:
        return inputs if key is None else jax.random.normal(key, inputs.shape)

    model = as_model((lambda key, inputs: {}, apply))
    params, model_state = model.init(KEY, jnp.zeros(3))
    assert np.array_equal(model.apply(params, model_state, jnp.zeros(3), KEY)[0], jax.random.normal(KEY, (3,)))
    assert np.array_equal(model.apply(params, model_state, jnp.zeros(3), None)[0], jnp.zeros(3))


def test_a_plain_pair_gets_the_key_and_inputs_at_initialisation() -> None:
    model = as_model((lambda key, inputs: jax.random.normal(key, inputs.shape[1:]), lambda params, inputs: inputs))
    params, model_state = model.init(KEY, jnp.zeros((2, 5)))
    assert np.array_equal(params, jax.random.normal(KEY, (5,)))
    assert model_state == {}


def test_a_model_made_ready_is_taken_as_it_is() -> None:
    model = as_model(SCALE)
    assert as_model(model) is model


@pytest.mark.parametrize("model", ["mlp", linen.Dense, None, (len,), (len, "apply"), lambda inputs: inputs])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"a model must be a Flax Linen module or a pair \(init, apply\) of functions"
    ):
        tasks.classification(model)


# Mixed precision.

HALF = Policy(compute="bfloat16")


def test_under_a_policy_products_are_narrow_and_parameters_wide() -> None:
    task = tasks.classification(MLP((5, 3)), policy=HALF)
    batch = batch_of(jax.random.normal(KEY, (2, 4)), LABELS)
    params, model_state = task.init(KEY, batch)
    gradient = jax.value_and_grad(lambda params: task.loss(params, model_state, batch, KEY)[0])
    assert set(observe.product_dtypes(gradient, params)) == {"bfloat16"}
    value, slope = gradient(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, value, slope))} == {"float32"}


def test_outputs_meet_the_loss_in_the_policys_precision() -> None:
    outputs = tasks.regression(SCALE, policy=HALF).predict({"scale": jnp.ones(())}, {}, jnp.ones((2, 3)))
    assert outputs.dtype == jnp.float32


def test_a_models_state_keeps_its_precision_under_a_policy() -> None:
    task = tasks.classification(CNN(3, blocks=((2,),), dense=(), batch_norm=True), policy=HALF)
    batch = batch_of(jax.random.normal(KEY, (4, 4, 4, 1)), [0, 1, 2, 0])
    params, before = task.init(KEY, batch)
    _, (after, _) = task.loss(params, before, batch, KEY)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves((before, after))}
    assert dtypes == {"float32"}
