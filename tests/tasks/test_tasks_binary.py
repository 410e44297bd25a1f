"""Binary classification: one logit by hand, two logits' numbers, stability, and what cannot be told apart."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import tasks
from jaxnn.models import MLP
from jaxnn.types import Batch, ConfigError, Task
from tests import tiny

KEY = jax.random.key(0)
# The outputs are the inputs times a parameter of 1: what a test feeds in is what the loss sees.
SCALE = (lambda key, inputs: {"scale": jnp.ones(())}, lambda params, inputs: inputs * params["scale"])

# The odds of 1 are 3 to 1, 1 to 4 and 2 to 1: probabilities 3/4, 1/5 and 2/3.
LOGITS = np.log(np.array([3, 1 / 4, 2], np.float32))
LABELS = np.array([1, 0, 0], np.int32)


def batch_of(inputs: Any = LOGITS, targets: Any = LABELS, mask: Any = None) -> Batch:
    inputs = np.asarray(inputs, np.float32)
    return Batch(inputs, np.asarray(targets), np.asarray([1.0] * len(inputs) if mask is None else mask, np.float32))


def loss_of(task: Task, batch: Batch) -> dict[str, float]:
    """The training loss and the metrics beside it."""
    loss, (_, metrics) = task.loss(*task.init(KEY, batch), batch, KEY)
    return {name: float(value) for name, value in {"loss": loss, **metrics}.items()}


def sums_of(task: Task, batch: Batch) -> dict[str, float]:
    return {name: float(value) for name, value in task.evaluate(*task.init(KEY, batch), batch).items()}


def slope_of(task: Task, batch: Batch) -> float:
    params, state = task.init(KEY, batch)
    return float(jax.grad(lambda params: task.loss(params, state, batch, KEY)[0])(params)["scale"])


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_cross_entropy_and_accuracy_by_hand(shape: tuple[int, ...]) -> None:
    # Of 3/4, of 1 - 1/5 and of 1 - 2/3: ln 4/3, ln 5/4 and ln 3; the last is on the wrong side of 0.
    batch = batch_of(LOGITS.reshape(shape))
    total = math.log(4 / 3) + math.log(5 / 4) + math.log(3)
    task = tasks.binary_classification(SCALE)
    assert loss_of(task, batch) == pytest.approx({"loss": total / 3, "accuracy": 2 / 3}, rel=1e-6)
    assert sums_of(task, batch) == pytest.approx({"loss": total, "accuracy": 2.0, "count": 3.0}, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_it_is_classification_with_a_second_logit_of_zero(smoothing: float) -> None:
    two = np.stack([np.zeros_like(LOGITS), LOGITS], axis=1)
    one = tasks.binary_classification(SCALE, label_smoothing=smoothing)
    other = tasks.classification(SCALE, label_smoothing=smoothing)
    assert loss_of(one, batch_of()) == pytest.approx(loss_of(other, batch_of(two)), rel=1e-6)
    assert slope_of(one, batch_of()) == pytest.approx(slope_of(other, batch_of(two)), rel=1e-5)
    assert sums_of(one, batch_of()) == pytest.approx(sums_of(other, batch_of(two)), rel=1e-6)


def test_label_smoothing_by_hand() -> None:
    # 0.1 of each label goes to the other: 0.9 ln 4/3 + 0.1 ln 4.
    task = tasks.binary_classification(SCALE, label_smoothing=0.2)
    loss = loss_of(task, batch_of(LOGITS[:1], LABELS[:1]))["loss"]
    assert loss == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4), rel=1e-6)


def test_a_traced_label_smoothing_equals_the_plain_one() -> None:
    def traced(smoothing: jax.Array) -> jax.Array:
        task = tasks.binary_classification(SCALE, label_smoothing=smoothing)
        return task.loss({"scale": jnp.ones(())}, {}, batch_of(), KEY)[0]

    plain = [
        loss_of(tasks.binary_classification(SCALE, label_smoothing=share), batch_of())["loss"] for share in (0, 0.3)
    ]
    np.testing.assert_allclose(jax.jit(jax.vmap(traced))(jnp.array([0.0, 0.3])), plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("logit", "label", "loss"), [(1e4, 0, 1e4), (-1e4, 1, 1e4), (1e4, 1, 0.0), (-40, 0, math.exp(-40))]
)
def test_far_logits_are_exact_and_have_a_gradient(logit: float, label: int, loss: float) -> None:
    # A sigmoid in float32 would be 0 or 1 here, its logarithm infinite or 0. The slope is (sigmoid - label) * logit.
    task, batch = tasks.binary_classification(SCALE), batch_of([logit], [label])
    assert loss_of(task, batch)["loss"] == pytest.approx(loss, rel=1e-5, abs=0)
    slope = (1 / (1 + math.exp(min(-logit, 700))) - label) * logit
    assert slope_of(task, batch) == pytest.approx(slope, rel=1e-5, abs=0)


def test_a_logit_of_zero_predicts_label_0() -> None:
    metrics = loss_of(tasks.binary_classification(SCALE), batch_of([0.0, 0.0, 0.0], [0, 0, 1]))
    assert metrics == pytest.approx({"loss": math.log(2), "accuracy": 2 / 3}, rel=1e-6)


@pytest.mark.parametrize("label", [2, -1])
def test_of_another_label_the_loss_is_nan(label: int) -> None:
    assert math.isnan(loss_of(tasks.binary_classification(SCALE), batch_of(targets=[1, 0, label]))["loss"])


def test_labels_may_be_narrow() -> None:
    wide, narrow = (batch_of(targets=LABELS.astype(dtype)) for dtype in ("int32", "uint8"))
    task = tasks.binary_classification(SCALE)
    assert loss_of(task, narrow) == loss_of(task, wide)


def test_padding_counts_for_nothing() -> None:
    task = tasks.binary_classification(SCALE)
    padded = batch_of([*LOGITS, np.nan], [*LABELS, 7], mask=[1, 1, 1, 0])
    assert loss_of(task, padded) == loss_of(task, batch_of())
    assert slope_of(task, padded) == slope_of(task, batch_of())


def test_the_loss_is_computed_in_float32() -> None:
    task, rounded = tasks.binary_classification(SCALE), jnp.asarray(LOGITS, jnp.bfloat16)
    narrow = task.loss({"scale": jnp.ones((), jnp.bfloat16)}, {}, batch_of()._replace(inputs=rounded), KEY)[0]
    assert narrow.dtype == jnp.float32
    assert float(narrow) == pytest.approx(loss_of(task, batch_of(rounded))["loss"], rel=1e-6)


def test_it_learns_to_tell_two_classes_apart() -> None:
    inputs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    splits = jn.data.arrays((inputs, (inputs[:, 0] > 0).astype(np.int32)))
    experiment = tiny.experiment(
        data=splits,
        task=lambda config: jn.tasks.binary_classification(MLP((8, 1))),
        optimizer=lambda config: optax.adam(0.02),
        batch_size=50,
        num_steps=100,
    )
    run = jn.fit(experiment, record=False, progress="none", steps_per_call=50)
    assert run.evaluate("train")["accuracy"] > 0.97


@pytest.mark.parametrize(
    ("inputs", "targets", "sentence"),
    [
        (LOGITS, [0.0, 1.0, 1.0], r"binary_classification needs targets of integers \[batch\], not float\d+ \[3\]"),
        (LOGITS, LABELS[:, None], r"needs targets of integers \[batch\], not int32 \[3, 1\]"),
        (
            np.ones((3, 2)),
            LABELS,
            r"one logit, \[batch, 1\] or \[batch\], not \[3, 2\]: .*tasks.classification",
        ),
        (np.ones((3, 1, 1)), LABELS, r"one logit, .* not \[3, 1, 1\]: change its last layer"),
    ],
)
def test_what_cannot_be_classified_is_named(inputs: Any, targets: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loss_of(tasks.binary_classification(SCALE), batch_of(inputs, targets))


@pytest.mark.parametrize(
    ("apply", "sentence"),
    [
        (lambda params, inputs: (inputs, inputs), "one logit, .* not a tuple: change its last layer"),
        # One for all would be broadcast.
        (lambda params, inputs: inputs[:1], r"a logit for each label, not \[1\] for 3 labels"),
        (lambda params, inputs: inputs[0], r"one logit, .* not \[\]: change its last layer"),
    ],
)
def test_other_outputs_are_named(apply: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loss_of(tasks.binary_classification((lambda key, inputs: {}, apply)), batch_of())


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_what_is_predicted_is_a_number_an_example(shape: tuple[int, ...]) -> None:
    task = tasks.binary_classification(SCALE)
    predicted = task.predict({"scale": 1.0}, {}, jnp.asarray(LOGITS.reshape(shape)))
    np.testing.assert_array_equal(predicted, LOGITS)
    with pytest.raises(ConfigError, match=r"one logit, .* not \[1, 3\]"):
        task.predict({"scale": 1.0}, {}, jnp.asarray(LOGITS[None]))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_a_label_smoothing_out_of_range_is_named(smoothing: float) -> None:
    with pytest.raises(ConfigError, match=f"label_smoothing is {smoothing}, and must be at least 0 and below 1"):
        tasks.binary_classification(SCALE, label_smoothing=smoothing)
