"""Classification with auxiliary outputs: their terms by hand in training, the main logits alone in evaluation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import KEY, loss_of, sums_of

from jaxnn import tasks
from jaxnn.nn import Policy
from jaxnn.types import Batch, ConfigError, Task

LABELS = np.array([2, 0], np.int32)
# Probabilities 1/8, 2/8, 5/8, twice: of the labels ln 1.6 and ln 8, the first of them right.
LOGITS = np.log(np.array([[1, 2, 5], [1, 2, 5]], np.float32))
MAIN = (math.log(1.6) + math.log(8)) / 2
BATCH = Batch(LOGITS, LABELS, np.ones(2, np.float32))


def model(count: int = 1, always: bool = False) -> Any:
    """Gives its inputs and, in training, ``count`` auxiliary logits: the inputs rolled, times a parameter."""

    def apply(params: Any, x: jax.Array, train: bool) -> Any:
        auxiliary = (jnp.roll(x, -1, axis=1) * params["auxiliary"],) * count
        return (x * params["main"], *auxiliary) if train or always else x * params["main"]

    return (lambda key, x: {"main": jnp.ones(()), "auxiliary": jnp.ones(())}), apply


# Rolled, the probabilities are 2/8, 5/8, 1/8: of the labels ln 8 and ln 4, none of them right.
AUXILIARY = (math.log(8) + math.log(4)) / 2


@pytest.mark.parametrize("count", [1, 2])
def test_auxiliary_terms_are_added_in_training(count: int) -> None:
    task = tasks.classification(model(count), auxiliary_weight=0.2)
    expected = {"loss": MAIN + 0.2 * count * AUXILIARY, "accuracy": 0.5}
    assert loss_of(task, BATCH) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("always", [False, True])
def test_the_main_logits_alone_are_evaluated(always: bool) -> None:
    task = tasks.classification(model(always=always), auxiliary_weight=0.2)
    assert sums_of(task, BATCH) == pytest.approx({"loss": 2 * MAIN, "accuracy": 1.0, "count": 2.0}, rel=1e-6)


def test_what_is_predicted_are_the_main_logits() -> None:
    task = tasks.classification(model(), auxiliary_weight=0.2)
    np.testing.assert_allclose(task.predict(*task.init(KEY, BATCH), LOGITS), LOGITS)


def test_auxiliary_terms_are_smoothed_as_the_main_one() -> None:
    smoothed = tasks.classification(model(), label_smoothing=0.3, auxiliary_weight=0.2)
    # Of 0.3 each of 3 classes gets 0.1, whatever their order.
    main, auxiliary = (0.7 * term + 0.1 * math.log(8 * 4 * 1.6) for term in (MAIN, AUXILIARY))
    assert loss_of(smoothed, BATCH)["loss"] == pytest.approx(main + 0.2 * auxiliary, rel=1e-6)


def test_a_traced_weight_equals_the_plain_one() -> None:
    def traced(weight: jax.Array) -> jax.Array:
        task = tasks.classification(model(), auxiliary_weight=weight)
        return task.loss(*task.init(KEY, BATCH), BATCH, KEY)[0]

    expected = [MAIN + weight * AUXILIARY for weight in (0.0, 0.5)]
    np.testing.assert_allclose(jax.jit(jax.vmap(traced))(jnp.array([0.0, 0.5])), expected, rtol=1e-6)


def test_every_output_meets_the_loss_in_the_policys_precision() -> None:
    task = tasks.classification(model(), auxiliary_weight=0.2, policy=Policy(compute="bfloat16"))
    assert loss_of(task, BATCH)["loss"] == pytest.approx(MAIN + 0.2 * AUXILIARY, rel=1e-2)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (tasks.classification(model()), "not a tuple of 2: give auxiliary_weight if those after the first"),
        (tasks.classification(model(0), auxiliary_weight=0.2), "a model that in training returns a tuple"),
        (
            tasks.classification((lambda key, x: {}, lambda params, x: x), auxiliary_weight=0.2),
            "a model that in training returns a tuple, the logits and the auxiliary logits: let it return them",
        ),
    ],
)
def test_outputs_that_do_not_fit_are_named(task: Task, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loss_of(task, BATCH)


@pytest.mark.parametrize("weight", [-0.1, float("nan")])
def test_a_weight_out_of_range_is_named(weight: float) -> None:
    with pytest.raises(ConfigError, match=f"auxiliary_weight is {weight}, and must be at least 0, or None"):
        tasks.classification(model(), auxiliary_weight=weight)
