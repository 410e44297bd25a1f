"""Classification, with one logit, auxiliary outputs and of next tokens: numbers by hand, stability, errors."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from losses import KEY, SCALE, batch_of, gradient_of, loss_of, sums_of

import jaxnn as jn
from jaxnn.nn import Policy
from jaxnn.tasks import binary_classification, classification, next_token
from jaxnn.types import Batch, ConfigError, DataError
from tests import tiny

# Probabilities 1/8, 2/8, 5/8, twice: label 2 is predicted in both, with ln 1.6 and ln 8 nats for labels 2 and 0.
LOGITS = np.log(np.array([[1, 2, 5], [1, 2, 5]], np.float32))
LABELS = np.array([2, 0], np.int32)
MAIN = (math.log(1.6) + math.log(8)) / 2
CLASSES = batch_of(LOGITS, LABELS)
# Odds of label 1 of 3 to 1, 1 to 4 and 2 to 1: ln 4/3, ln 5/4 and ln 3 nats; the last is on the wrong side of 0.
ODDS = np.log(np.array([3, 1 / 4, 2], np.float32))
BINARY = batch_of(ODDS, [1, 0, 0])
BINARY_NATS = math.log(4 / 3) + math.log(5 / 4) + math.log(3)
# Two sequences of two tokens; of the targets the first and the last are the likeliest.
TOKENS = np.log(np.array([[[1, 2, 5], [4, 2, 2]], [[2, 4, 2], [1, 6, 1]]], np.float32) / 8) + 0.5
TARGETS = np.array([[2, 1], [2, 1]], np.int32)
BITS = [math.log2(1.6), 2, 2, math.log2(8 / 6)]


def with_auxiliary(count: int = 1, always: bool = False) -> Any:
    """Returns its inputs and, in training, ``count`` auxiliary logits: the inputs rolled, times a parameter."""

    def apply(params: Any, x: jax.Array, train: bool) -> Any:
        auxiliary = (jnp.roll(x, -1, axis=1) * params["auxiliary"],) * count
        return (x * params["main"], *auxiliary) if train or always else x * params["main"]

    return (lambda key, x: {"main": jnp.ones(()), "auxiliary": jnp.ones(())}), apply


# Rolled, the probabilities are 2/8, 5/8, 1/8: ln 8 and ln 4 for the labels.
AUXILIARY = (math.log(8) + math.log(4)) / 2
# Of the share 0.3 each of 3 classes gets 0.1.
SMOOTHED, SMOOTHED_AUXILIARY = (0.7 * nats + 0.1 * math.log(8 * 4 * 1.6) for nats in (MAIN, AUXILIARY))
EVALUATED = {"loss": 2 * MAIN, "accuracy": 1.0, "count": 2.0}


def means(loss: float, accuracy: float) -> dict[str, float]:
    return {"loss": loss, "accuracy": accuracy}


def by_token(bits: list[float], right: int) -> tuple[dict[str, float], dict[str, float]]:
    """Means and sums over tokens, from the bits of each one and the number of right ones."""
    sums = {"loss": sum(bits) * math.log(2), "bits_per_token": sum(bits), "accuracy": right}
    return {name: value / max(len(bits), 1) for name, value in sums.items()}, {**sums, "count": len(bits)}


SOME_IGNORED = batch_of(TOKENS, [[2, -1], [2, 1]])
BY_HAND: dict[str, tuple[Any, Batch, tuple[dict[str, float], dict[str, float]]]] = {
    "classes": (classification(SCALE), CLASSES, (means(MAIN, 0.5), EVALUATED)),
    "two auxiliary, always": (
        classification(with_auxiliary(2, always=True), auxiliary_weight=0.2),
        CLASSES,
        (means(MAIN + 0.4 * AUXILIARY, 0.5), EVALUATED),
    ),
    "auxiliary, smoothed": (
        classification(with_auxiliary(), auxiliary_weight=0.2, label_smoothing=0.3),
        CLASSES,
        (means(SMOOTHED + 0.2 * SMOOTHED_AUXILIARY, 0.5), EVALUATED),
    ),
    "one logit": (
        binary_classification(SCALE),
        BINARY,
        (means(BINARY_NATS / 3, 2 / 3), {"loss": BINARY_NATS, "accuracy": 2.0, "count": 3.0}),
    ),
    "tokens, one ignored": (next_token(SCALE), SOME_IGNORED, by_token([BITS[0], *BITS[2:]], 2)),
    # The ignored one weighs nothing: not the mean of the two examples' means.
    "tokens, both": (next_token(SCALE), SOME_IGNORED._replace(mask=np.float32([1, 0])), by_token(BITS[:1], 1)),
    # 2 is the first target of both sequences.
    "tokens, another ignored": (next_token(SCALE, ignore=2), batch_of(TOKENS, TARGETS), by_token(BITS[1::2], 1)),
    "all ignored": (next_token(SCALE), batch_of(TOKENS, -np.ones((2, 2), np.int32)), by_token([], 0)),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_losses_and_metrics_by_hand(case: str) -> None:
    task, batch, (trained, evaluated) = BY_HAND[case]
    assert loss_of(task, batch) == pytest.approx(trained, rel=1e-5)
    assert sums_of(task, batch) == pytest.approx(evaluated, rel=1e-5)
    if not evaluated["count"]:
        assert float(gradient_of(task, batch)["scale"]) == 0.0


def test_traced_smoothing_and_weight_by_hand() -> None:
    def traced(value: jax.Array) -> tuple[jax.Array, ...]:
        params = {"scale": jnp.ones(()), "main": jnp.ones(()), "auxiliary": jnp.ones(())}
        tasks = (
            (classification(SCALE, label_smoothing=value), CLASSES),
            (binary_classification(SCALE, label_smoothing=value), BINARY),
            (classification(with_auxiliary(), auxiliary_weight=value), CLASSES),
        )
        return tuple(task.loss(params, {}, batch, KEY)[0] for task, batch in tasks)

    # The other labels have ln 4, ln 5 and ln 3/2 nats, and half of the share.
    smoothed = (0.85 * BINARY_NATS + 0.15 * math.log(4 * 5 * 3 / 2)) / 3
    expected = [MAIN, SMOOTHED], [BINARY_NATS / 3, smoothed], [MAIN, MAIN + 0.3 * AUXILIARY]
    np.testing.assert_allclose(jax.jit(jax.vmap(traced))(np.float32([0.0, 0.3])), expected, rtol=1e-6)


def test_far_logits_are_exact_and_have_a_gradient() -> None:
    task = binary_classification(SCALE)
    for logit, label, loss in ((1e4, 0, 1e4), (-1e4, 1, 1e4), (-40, 0, math.exp(-40))):
        # A sigmoid in float32 would be 0 or 1 here, its logarithm infinite or 0.
        batch, slope = batch_of([logit], [label]), (1 / (1 + math.exp(min(-logit, 700))) - label) * logit
        assert loss_of(task, batch)["loss"] == pytest.approx(loss, rel=1e-5, abs=0)
        assert gradient_of(task, batch)["scale"] == pytest.approx(slope, rel=1e-5, abs=0)


def test_labels_of_one_logit() -> None:
    task = binary_classification(SCALE)
    # A logit of zero predicts label 0.
    metrics = loss_of(task, batch_of([0.0, 0.0, 0.0], [0, 0, 1]))
    assert metrics == pytest.approx({"loss": math.log(2), "accuracy": 2 / 3}, rel=1e-6)
    assert loss_of(task, batch_of(ODDS, np.uint8([1, 0, 0]))) == loss_of(task, BINARY)
    for label in (2, -1):
        assert math.isnan(loss_of(task, batch_of(ODDS, [1, 0, label]))["loss"])
    first_logit = tiny.init, lambda params, inputs: tiny.apply(params, inputs)[:, 0]
    with pytest.raises(DataError, match=r"label 2 .*renumber the labels"):
        tiny.fit(tiny.experiment(task=lambda config: binary_classification(first_logit)))


def test_losses_are_computed_in_float32() -> None:
    task, rounded = binary_classification(SCALE), jnp.asarray(ODDS, jnp.bfloat16)
    narrow = task.loss({"scale": jnp.ones((), jnp.bfloat16)}, {}, BINARY._replace(inputs=rounded), KEY)[0]
    assert narrow.dtype == jnp.float32
    assert float(narrow) == pytest.approx(loss_of(task, batch_of(rounded, [1, 0, 0]))["loss"], rel=1e-6)
    auxiliary = classification(with_auxiliary(), auxiliary_weight=0.2, policy=Policy(compute="bfloat16"))
    assert loss_of(auxiliary, CLASSES)["loss"] == pytest.approx(MAIN + 0.2 * AUXILIARY, rel=1e-2)


def test_predictions() -> None:
    task = binary_classification(SCALE)
    for logits in (ODDS, ODDS[:, None]):
        np.testing.assert_array_equal(task.predict({"scale": 1.0}, {}, logits), ODDS)
    assert loss_of(task, batch_of(ODDS[:, None], [1, 0, 0])) == loss_of(task, BINARY)
    with pytest.raises(ConfigError, match=r"one logit, .* not \[1, 3\]"):
        task.predict({"scale": 1.0}, {}, jnp.asarray(ODDS[None]))
    task = classification(with_auxiliary(), auxiliary_weight=0.2)
    np.testing.assert_allclose(task.predict(*task.init(KEY, CLASSES), LOGITS), LOGITS)


def test_ignored_targets_change_neither_value_nor_gradient() -> None:
    padded = batch_of(np.concatenate([TOKENS, 9 * TOKENS[:, :1]], axis=1), [[2, 1, -1], [2, 1, -1]])
    flat = Batch(TOKENS.reshape(4, 3), TARGETS.reshape(4), np.ones(4, np.float32))
    expected, slope = loss_of(classification(SCALE), flat), gradient_of(classification(SCALE), flat)["scale"]
    expected["bits_per_token"] = expected["loss"] / math.log(2)
    assert loss_of(next_token(SCALE), padded) == pytest.approx(expected, rel=1e-6)
    assert gradient_of(next_token(SCALE), padded)["scale"] == pytest.approx(float(slope), rel=1e-5)


def test_evaluation_of_a_split_is_the_mean_over_its_tokens_and_perplexity_is_monitored() -> None:
    # Ten sequences in batches of eight: the last is partly padding.
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(10, 6, 5)).astype(np.float32), rng.integers(0, 5, (10, 6)).astype(np.int32)
    splits = jn.data.arrays((logits, tokens), test=(logits, tokens), num_classes=5)
    experiment = tiny.experiment(
        data=splits, task=lambda config: next_token(SCALE, ignore=0), batch_size=4, num_steps=4
    )
    run = tiny.fit(experiment, monitor="perplexity", eval_every=2)
    chosen = jax.nn.log_softmax(run.predict(logits))[np.arange(10)[:, None], np.arange(6), tokens]
    loss = -float(np.mean(np.asarray(chosen)[tokens != 0]))
    # The perplexity is that of the mean loss, not the mean over batches.
    expected = {"loss": loss, "bits_per_token": loss / math.log(2), "perplexity": math.exp(loss)}
    found = run.evaluate("train")
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert run.summary.metrics["test_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def model_of(function: Any) -> Any:
    return (lambda key, inputs: {}), lambda params, inputs: function(inputs)


BINARY_TASK, TOKEN_TASK = binary_classification(SCALE), next_token(SCALE)
REFUSED = [
    (classification(SCALE), LOGITS, [0.0, 1.0], r"integers \[batch\], not float\d+ \[2\]: .*tasks.regression"),
    (classification(SCALE), LOGITS, [[0], [1]], r"integers \[batch\], not int\d+ \[2, 1\]"),
    (classification(SCALE), LOGITS[:, 0], LABELS, r"logits \[batch, classes\], not \[2\] for 2 labels"),
    (classification(model_of(lambda x: x[:1])), LOGITS, LABELS, r"\[batch, classes\], not \[1, 3\] for 2 labels"),
    # The cross-entropy of a single class would be 0 for any logit.
    (classification(SCALE), LOGITS[:, :1], LABELS, r"has one, \[2, 1\]: .*tasks.binary_classification"),
    (classification(with_auxiliary()), LOGITS, LABELS, "tuple of 2: give auxiliary_weight"),
    (classification(with_auxiliary(0), auxiliary_weight=0.2), LOGITS, LABELS, "training returns a tuple"),
    (classification(SCALE, auxiliary_weight=0.2), LOGITS, LABELS, "training returns a tuple"),
    (BINARY_TASK, ODDS, [0.0, 1.0, 1.0], r"binary_classification .* integers \[batch\], not float\d+ \[3\]"),
    (BINARY_TASK, np.ones((3, 2)), [1, 0, 0], r"one logit, \[batch, 1\] .* not \[3, 2\]: .*tasks.classification"),
    (BINARY_TASK, np.ones((3, 1, 1)), [1, 0, 0], r"one logit, .* not \[3, 1, 1\]: change its last layer"),
    (binary_classification(model_of(lambda x: (x, x))), ODDS, [1, 0, 0], "one logit, .* not a tuple"),
    # One logit for all would be broadcast.
    (binary_classification(model_of(lambda x: x[:1])), ODDS, [1, 0, 0], r"each label, not \[1\] for 3 labels"),
    (binary_classification(model_of(lambda x: x[0])), ODDS, [1, 0, 0], r"one logit, .* not \[\]"),
    (TOKEN_TASK, TOKENS, [2, 1], r"integers \[batch, time\], not int\d+ \[2\]: .*tasks.classification"),
    (TOKEN_TASK, TOKENS[:, 0], TARGETS, r"\[batch, time, vocabulary\], not \[2, 3\] for targets \[2, 2\]"),
    (TOKEN_TASK, TOKENS[:, :1], TARGETS, r"\[batch, time, vocabulary\], not \[2, 1, 3\] for targets \[2, 2\]"),
]


@pytest.mark.parametrize(("task", "inputs", "targets", "words"), REFUSED)
def test_wrong_outputs_and_targets_are_named(task: Any, inputs: Any, targets: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loss_of(task, batch_of(inputs, targets))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: classification(SCALE, label_smoothing=-0.1), "label_smoothing is -0.1, .* below 1"),
        (lambda: classification(SCALE, label_smoothing=float("nan")), "label_smoothing is nan"),
        (lambda: binary_classification(SCALE, label_smoothing=1.0), "label_smoothing is 1.0"),
        (lambda: classification(SCALE, auxiliary_weight=-0.1), "auxiliary_weight is -0.1, .* at least 0"),
        (lambda: classification(SCALE, auxiliary_weight=float("nan")), "auxiliary_weight is nan"),
    ],
)
def test_wrong_arguments_are_named(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_tables_of_one_row_take_any_token() -> None:
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    splits = jn.data.arrays((ids, np.arange(4) % 3))
    batch = jn.Batch(ids, np.arange(4) % 3, np.ones(4, np.float32))
    for rows, error in ((1, contextlib.nullcontext()), (2, pytest.raises(jn.DataError, match="2 rows"))):
        task = classification(linen.Sequential([linen.Embed(rows, 3), lambda x: x.mean(1)]))
        params, model_state = jax.eval_shape(task.init, jax.random.key(0), batch)
        with error:
            task.check(params, model_state, batch, splits)
