"""Binary classification: one logit by hand, two logits' numbers, stability, and what cannot be told apart."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import KEY, SCALE, batch_of, gradient_of, loss_of, sums_of

from jaxnn import tasks
from jaxnn.types import ConfigError

# The odds of 1 are 3 to 1, 1 to 4 and 2 to 1: probabilities 3/4, 1/5 and 2/3.
LOGITS = np.log(np.array([3, 1 / 4, 2], np.float32))
LABELS = np.array([1, 0, 0], np.int32)
BATCH = batch_of(LOGITS, LABELS)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_cross_entropy_and_accuracy_by_hand(shape: tuple[int, ...]) -> None:
    # Of 3/4, of 1 - 1/5 and of 1 - 2/3: ln 4/3, ln 5/4 and ln 3; the last is on the wrong side of 0.
    batch = batch_of(LOGITS.reshape(shape), LABELS)
    total = math.log(4 / 3) + math.log(5 / 4) + math.log(3)
    task = tasks.binary_classification(SCALE)
    assert loss_of(task, batch) == pytest.approx({"loss": total / 3, "accuracy": 2 / 3}, rel=1e-6)
    assert sums_of(task, batch) == pytest.approx({"loss": total, "accuracy": 2.0, "count": 3.0}, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_it_is_classification_with_a_second_logit_of_zero(smoothing: float) -> None:
    two = np.stack([np.zeros_like(LOGITS), LOGITS], axis=1)
    one = tasks.binary_classification(SCALE, label_smoothing=smoothing)
    other = tasks.classification(SCALE, label_smoothing=smoothing)
    assert loss_of(one, BATCH) == pytest.approx(loss_of(other, batch_of(two, LABELS)), rel=1e-6)
    assert float(gradient_of(one, BATCH)["scale"]) == pytest.approx(
        float(gradient_of(other, batch_of(two, LABELS))["scale"]), rel=1e-5
    )
    assert sums_of(one, BATCH) == pytest.approx(sums_of(other, batch_of(two, LABELS)), rel=1e-6)


def test_a_traced_label_smoothing_equals_the_plain_one() -> None:
    def traced(smoothing: jax.Array) -> jax.Array:
        task = tasks.binary_classification(SCALE, label_smoothing=smoothing)
        return task.loss({"scale": jnp.ones(())}, {}, BATCH, KEY)[0]

    plain = [loss_of(tasks.binary_classification(SCALE, label_smoothing=share), BATCH)["loss"] for share in (0, 0.3)]
    np.testing.assert_allclose(jax.jit(jax.vmap(traced))(jnp.array([0.0, 0.3])), plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("logit", "label", "loss"), [(1e4, 0, 1e4), (-1e4, 1, 1e4), (1e4, 1, 0.0), (-40, 0, math.exp(-40))]
)
def test_far_logits_are_exact_and_have_a_gradient(logit: float, label: int, loss: float) -> None:
    # A sigmoid in float32 would be 0 or 1 here, its logarithm infinite or 0. The slope is (sigmoid - label) * logit.
    task, batch = tasks.binary_classification(SCALE), batch_of([logit], [label])
    assert loss_of(task, batch)["loss"] == pytest.approx(loss, rel=1e-5, abs=0)
    slope = (1 / (1 + math.exp(min(-logit, 700))) - label) * logit
    assert gradient_of(task, batch)["scale"] == pytest.approx(slope, rel=1e-5, abs=0)


def test_a_logit_of_zero_predicts_label_0() -> None:
    metrics = loss_of(tasks.binary_classification(SCALE), batch_of([0.0, 0.0, 0.0], [0, 0, 1]))
    assert metrics == pytest.approx({"loss": math.log(2), "accuracy": 2 / 3}, rel=1e-6)


@pytest.mark.parametrize("label", [2, -1])
def test_of_another_label_the_loss_is_nan(label: int) -> None:
    assert math.isnan(loss_of(tasks.binary_classification(SCALE), batch_of(LOGITS, [1, 0, label]))["loss"])


def test_labels_may_be_narrow() -> None:
    wide, narrow = (batch_of(LOGITS, LABELS.astype(dtype)) for dtype in ("int32", "uint8"))
    task = tasks.binary_classification(SCALE)
    assert loss_of(task, narrow) == loss_of(task, wide)


def test_the_loss_is_computed_in_float32() -> None:
    task, rounded = tasks.binary_classification(SCALE), jnp.asarray(LOGITS, jnp.bfloat16)
    narrow = task.loss({"scale": jnp.ones((), jnp.bfloat16)}, {}, BATCH._replace(inputs=rounded), KEY)[0]
    assert narrow.dtype == jnp.float32
    assert float(narrow) == pytest.approx(loss_of(task, batch_of(rounded, LABELS))["loss"], rel=1e-6)


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
        loss_of(tasks.binary_classification((lambda key, inputs: {}, apply)), BATCH)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_what_is_predicted_is_a_number_an_example(shape: tuple[int, ...]) -> None:
    task = tasks.binary_classification(SCALE)
    predicted = task.predict({"scale": 1.0}, {}, jnp.asarray(LOGITS.reshape(shape)))
    np.testing.assert_array_equal(predicted, LOGITS)
    with pytest.raises(ConfigError, match=r"one logit, .* not \[1, 3\]"):
        task.predict({"scale": 1.0}, {}, jnp.asarray(LOGITS[None]))
