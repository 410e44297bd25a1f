"""Losses, metrics and gradients of all tasks: by hand, padded, ignored, stable, precise; what does not fit is named."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxnn as jn
from jaxnn.nn import Policy
from jaxnn.tasks import as_model, binary_classification, classification, next_token, regression
from jaxnn.types import Batch, ConfigError, DataError, Task
from tests import elsewhere, tiny

KEY = jax.random.key(0)
# Its outputs are the inputs of the test.
SCALE = (lambda key, inputs: {"scale": jnp.ones(())}, lambda params, inputs: inputs * params["scale"])


def batch_of(inputs: Any, targets: Any, mask: Any = None) -> Batch:
    inputs = np.asarray(inputs, np.float32)
    return Batch(inputs, np.asarray(targets), np.asarray([1.0] * len(inputs) if mask is None else mask, np.float32))


# Probabilities 1/8, 2/8, 5/8, twice: label 2 is predicted in both, with ln 1.6 and ln 8 nats for labels 2 and 0.
LOGITS = np.log(np.array([[1, 2, 5], [1, 2, 5]], np.float32))
LABELS = np.array([2, 0], np.int32)
MAIN = (math.log(1.6) + math.log(8)) / 2
CLASSES, SOFT = batch_of(LOGITS, LABELS), batch_of(LOGITS, np.eye(3, dtype=np.float32)[LABELS])
# Odds of label 1 of 3 to 1, 1 to 4 and 2 to 1: ln 4/3, ln 5/4 and ln 3 nats; the last is on the wrong side of 0.
ODDS = np.log(np.array([3, 1 / 4, 2], np.float32))
BINARY = batch_of(ODDS, [1, 0, 0])
BINARY_NATS = math.log(4 / 3) + math.log(5 / 4) + math.log(3)
# Two sequences of two tokens; of the targets the first and the last are the likeliest.
TOKENS = np.log(np.array([[[1, 2, 5], [4, 2, 2]], [[2, 4, 2], [1, 6, 1]]], np.float32) / 8) + 0.5
TARGETS = np.array([[2, 1], [2, 1]], np.int32)
BITS = [math.log2(1.6), 2, 2, math.log2(8 / 6)]
SOME_IGNORED = batch_of(TOKENS, [[2, -1], [2, 1]])


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
type Numbers = tuple[dict[str, float], dict[str, float]]  # the means of training, and the sums of an evaluation


def errors(squared: float, absolute: float, count: float) -> Numbers:
    means = {"loss": squared, "mean_absolute_error": absolute}
    return means, {name: value * count for name, value in means.items()} | {"count": count}


def of_classes(loss: float) -> Numbers:
    return {"loss": loss, "accuracy": 0.5}, {"loss": 2 * MAIN, "accuracy": 1.0, "count": 2.0}


def by_token(bits: list[float], right: int) -> Numbers:
    """From the bits of each token and the number of right ones."""
    sums = {"loss": sum(bits) * math.log(2), "bits_per_token": sum(bits), "accuracy": right}
    return {name: value / max(len(bits), 1) for name, value in sums.items()}, {**sums, "count": len(bits)}


def of_one_logit(loss: float) -> Numbers:
    """Of three labels, two of them predicted."""
    return {"loss": loss / 3, "accuracy": 2 / 3}, {"loss": loss, "accuracy": 2.0, "count": 3.0}


ERRORS, ONE_LOGIT, NEXT = regression(SCALE), binary_classification(SCALE), next_token(SCALE)
ONE_OF_MANY = classification(SCALE)
TWO = classification(with_auxiliary(2, always=True), auxiliary_weight=0.2)
SMOOTH = classification(with_auxiliary(), auxiliary_weight=0.2, label_smoothing=0.3)
# One example with errors 1, 2, 3, 6: squares (1 + 4 + 9 + 36) / 4, absolute 12 / 4.
MATRIX = batch_of([[[1.0, 2.0], [3.0, 6.0]]], np.zeros((1, 2, 2), np.float32))
BY_HAND: dict[str, tuple[Task, Batch, Numbers]] = {
    # Errors 1 and -3, also for outputs with a last axis of one: broadcast to [2, 2] the mean would be 3.
    "errors": (ERRORS, batch_of([3.0, 1.0], [2.0, 4.0]), errors(5, 2, 2)),
    "errors, a last axis of one": (ERRORS, batch_of([[3.0], [1.0]], [2.0, 4.0]), errors(5, 2, 2)),
    "errors of a matrix": (ERRORS, MATRIX, errors(12.5, 3, 1)),
    # Errors 1 and 3 count, 100 does not: (1 + 9) / 2 and (1 + 3) / 2.
    "errors, padded": (ERRORS, batch_of([1, 100, 3], np.zeros(3, "f4"), mask=[1, 0, 1]), errors(5, 2, 2)),
    "padding alone": (ERRORS, batch_of([5.0, 7.0], [0.0, 0.0], mask=[0, 0]), errors(0, 0, 0)),
    "classes": (ONE_OF_MANY, CLASSES, of_classes(MAIN)),
    "probabilities": (ONE_OF_MANY, SOFT, of_classes(MAIN)),
    "probabilities, smoothed": (SMOOTH, SOFT, of_classes(SMOOTHED + 0.2 * SMOOTHED_AUXILIARY)),
    "two auxiliary, always": (TWO, CLASSES, of_classes(MAIN + 0.4 * AUXILIARY)),
    "auxiliary, smoothed": (SMOOTH, CLASSES, of_classes(SMOOTHED + 0.2 * SMOOTHED_AUXILIARY)),
    "one logit": (ONE_LOGIT, BINARY, of_one_logit(BINARY_NATS)),
    "one logit, a last axis of one": (ONE_LOGIT, batch_of(ODDS[:, None], [1, 0, 0]), of_one_logit(BINARY_NATS)),
    "one logit, labels of bytes": (ONE_LOGIT, batch_of(ODDS, np.uint8([1, 0, 0])), of_one_logit(BINARY_NATS)),
    # A logit of zero predicts label 0.
    "logits of zero": (ONE_LOGIT, batch_of([0.0, 0.0, 0.0], [0, 0, 1]), of_one_logit(3 * math.log(2))),
    "tokens, one ignored": (NEXT, SOME_IGNORED, by_token([BITS[0], *BITS[2:]], 2)),
    # The ignored one weighs nothing: not the mean of the two examples' means.
    "tokens, both": (NEXT, SOME_IGNORED._replace(mask=np.float32([1, 0])), by_token(BITS[:1], 1)),
    # 2 is the first target of both sequences.
    "tokens, another ignored": (next_token(SCALE, ignore=2), batch_of(TOKENS, TARGETS), by_token(BITS[1::2], 1)),
    "all ignored": (NEXT, batch_of(TOKENS, -np.ones((2, 2), np.int32)), by_token([], 0)),
}
# The logit, its label and the loss; a sigmoid in float32 would be 0 or 1 here, its logarithm infinite or 0.
FAR = {"far": (1e4, 0, 1e4), "far below": (-1e4, 1, 1e4), "right": (-40, 0, math.exp(-40))}
CASES: dict[str, tuple[Task, Batch]] = {
    **{name: (task, batch) for name, (task, batch, _) in BY_HAND.items()},
    **{name: (ONE_LOGIT, batch_of([logit], [label])) for name, (logit, label, _) in FAR.items()},
    **{f"label {label}": (ONE_LOGIT, batch_of(ODDS, [1, 0, label])) for label in (2, -1)},
    "rounded": (ONE_LOGIT, batch_of(ODDS.astype(jnp.bfloat16), [1, 0, 0])),
    "in bfloat16": (classification(with_auxiliary(), auxiliary_weight=0.2, policy=Policy(compute="bfloat16")), CLASSES),
    "each token": (ONE_OF_MANY, Batch(TOKENS.reshape(4, 3), TARGETS.reshape(4), np.ones(4, np.float32))),
    "padded tokens": (NEXT, batch_of(np.hstack([TOKENS, 9 * TOKENS[:, :1]]), [[2, 1, -1], [2, 1, -1]])),
}


@functools.cache
def computed() -> dict[str, Any]:
    """Loss and metrics of training, sums of an evaluation and the gradient of each case, by one program."""

    def numbers(task: Task, batch: Batch) -> Any:
        params, model_state = task.init(KEY, batch)
        (loss, (_, metrics)), slope = jax.value_and_grad(task.loss, has_aux=True)(params, model_state, batch, KEY)
        return {"loss": loss, **metrics}, task.evaluate(params, model_state, batch, KEY), slope

    compute = jax.jit(lambda batches: {name: numbers(CASES[name][0], batch) for name, batch in batches.items()})
    found: dict[str, Any] = jax.tree.map(float, compute({name: batch for name, (_, batch) in CASES.items()}))
    return found


@pytest.mark.parametrize("case", BY_HAND)
def test_losses_and_metrics_by_hand(case):
    *_, (means, sums) = BY_HAND[case]
    found, evaluated, slope = computed()[case]
    assert found == pytest.approx(means, rel=1e-5) and evaluated == pytest.approx(sums, rel=1e-5)
    if not sums["count"]:
        assert slope["scale"] == 0.0


@pytest.mark.parametrize("case", FAR)
def test_far_logits_are_exact_and_have_a_gradient(case):
    logit, label, loss = FAR[case]
    found, _, slope = computed()[case]
    assert found["loss"] == pytest.approx(loss, rel=1e-5, abs=0)
    expected = (1 / (1 + math.exp(min(-logit, 700))) - label) * logit
    assert slope["scale"] == pytest.approx(expected, rel=1e-5, abs=0)


def test_labels_other_than_0_and_1_of_one_logit_are_nan():
    for label in (2, -1):
        assert math.isnan(computed()[f"label {label}"][0]["loss"])


def test_traced_smoothing_and_weight_by_hand():
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


def test_losses_are_computed_in_float32():
    params, batch = {"scale": np.ones((), jnp.bfloat16)}, BINARY._replace(inputs=ODDS.astype(jnp.bfloat16))
    narrow = jax.jit(lambda batch: ONE_LOGIT.loss(params, {}, batch, KEY)[0])(batch)
    assert narrow.dtype == np.float32
    assert float(narrow) == pytest.approx(computed()["rounded"][0]["loss"], rel=1e-6)
    assert computed()["in bfloat16"][0]["loss"] == pytest.approx(MAIN + 0.2 * AUXILIARY, rel=1e-2)


def test_predictions():
    for logits in (ODDS, ODDS[:, None]):
        np.testing.assert_array_equal(ONE_LOGIT.predict({"scale": 1.0}, {}, logits), ODDS)
    task = classification(with_auxiliary(), auxiliary_weight=0.2)
    params = {"main": np.ones((), np.float32), "auxiliary": np.ones((), np.float32)}
    np.testing.assert_allclose(task.predict(params, {}, LOGITS), LOGITS)


def test_ignored_targets_change_neither_value_nor_gradient():
    (found, _, slope), (expected, _, expected_slope) = (computed()[name] for name in ("padded tokens", "each token"))
    expected = {**expected, "bits_per_token": expected["loss"] / math.log(2)}
    assert found == pytest.approx(expected, rel=1e-6)
    assert slope["scale"] == pytest.approx(expected_slope["scale"], rel=1e-5)


def test_evaluation_of_a_split_is_the_mean_over_its_tokens_and_perplexity_is_monitored():
    # Ten sequences in batches of eight: the last is partly padding.
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(10, 6, 5)).astype(np.float32), rng.integers(0, 5, (10, 6)).astype(np.int32)
    splits = jn.data.arrays((logits, tokens), test=(logits, tokens), num_classes=5)
    parts = {"data": splits, "task": lambda config: next_token(SCALE, ignore=0)}
    run = tiny.fit(tiny.experiment(**parts, batch_size=4, num_steps=4), monitor="perplexity", eval_every=2)
    outputs = np.asarray(run.predict(logits))
    chosen = np.take_along_axis(outputs, tokens[..., None], axis=-1)[..., 0] - np.log(np.exp(outputs).sum(-1))
    loss = -float(np.mean(chosen[tokens != 0]))
    # The perplexity is that of the mean loss, not the mean over batches.
    expected = {"loss": loss, "bits_per_token": loss / math.log(2), "perplexity": math.exp(loss)}
    found = run.evaluate("train")
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert run.summary.metrics["test_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def model_of(function: Any) -> Any:
    return (lambda key, inputs: {}), lambda params, inputs: function(inputs)


# A task, the outputs of its model, and targets.
REFUSED = [
    (ERRORS, np.zeros((2, 3)), np.zeros(2), r"outputs \[2, 3\] for targets \[2\]"),
    (ERRORS, np.zeros(2), np.zeros((2, 1)), r"outputs \[2\] for targets \[2, 1\]"),
    (ERRORS, np.zeros((2, 1, 1)), np.zeros(2), r"outputs \[2, 1, 1\] for targets \[2\]"),
    (ONE_OF_MANY, LOGITS, [0.0, 1.0], r"integers \[batch\], not float\d+ \[2\]: .*tasks.regression"),
    (ONE_OF_MANY, LOGITS, [[0], [1]], r"integers \[batch\], not int\d+ \[2, 1\]"),
    (ONE_OF_MANY, LOGITS, np.ones((2, 4), np.float32), r"probabilities of 4 classes, .* for outputs \[2, 3\]"),
    (ONE_OF_MANY, LOGITS[:, 0], LABELS, r"logits \[batch, classes\], not \[2\] for 2 labels"),
    (classification(model_of(lambda x: x[:1])), LOGITS, LABELS, r"\[batch, classes\], not \[1, 3\] for 2 labels"),
    # The cross-entropy of a single class would be 0 for any logit.
    (ONE_OF_MANY, LOGITS[:, :1], LABELS, r"has one, \[2, 1\]: .*tasks.binary_classification"),
    (classification(with_auxiliary()), LOGITS, LABELS, "tuple of 2: give auxiliary_weight"),
    (classification(with_auxiliary(0), auxiliary_weight=0.2), LOGITS, LABELS, "training returns a tuple"),
    (classification(SCALE, auxiliary_weight=0.2), LOGITS, LABELS, "training returns a tuple"),
    (ONE_LOGIT, ODDS, [0.0, 1.0, 1.0], r"binary_classification .* integers \[batch\], not float\d+ \[3\]"),
    (ONE_LOGIT, np.ones((3, 2)), [1, 0, 0], r"one logit, \[batch, 1\] .* not \[3, 2\]: .*tasks.classification"),
    (ONE_LOGIT, np.ones((3, 1, 1)), [1, 0, 0], r"one logit, .* not \[3, 1, 1\]: change its last layer"),
    (binary_classification(model_of(lambda x: (x, x))), ODDS, [1, 0, 0], "one logit, .* not a tuple"),
    # One logit for all would be broadcast.
    (binary_classification(model_of(lambda x: x[:1])), ODDS, [1, 0, 0], r"each label, not \[1\] for 3 labels"),
    (binary_classification(model_of(lambda x: x[0])), ODDS, [1, 0, 0], r"one logit, .* not \[\]"),
    (NEXT, TOKENS, [2, 1], r"integers \[batch, time\], not int\d+ \[2\]: .*tasks.classification"),
    (NEXT, TOKENS[:, 0], TARGETS, r"\[batch, time, vocabulary\], not \[2, 3\] for targets \[2, 2\]"),
    (NEXT, TOKENS[:, :1], TARGETS, r"\[batch, time, vocabulary\], not \[2, 1, 3\] for targets \[2, 2\]"),
]
NO_MODEL = r"a model must be .*Linen module, .* Equinox .* \(init, apply\)"
INPUTS = tiny.points(8)[0]


def loss(task: Any, inputs: Any, targets: Any) -> None:
    batch = batch_of(inputs, targets)
    jax.eval_shape(lambda: task.loss(*task.init(KEY, batch), batch, KEY))


class Noisy(linen.Module):
    """Of noise in an evaluation too."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return linen.Dense(3)(x + jax.random.normal(self.make_rng("noise"), x.shape))


UNFIT = [
    (elsewhere.NNXNet, r"needs num_inputs besides rngs: pass lambda rngs: NNXNet\(num_inputs=..., "),
    (lambda rngs: 1, "factory of rngs must return a module of Flax NNX, not 1"),
    ((lambda key: {}, len), r"init of a model .* function of \(key, inputs\), not <lambda>\(key\)"),
    (lambda key: 1, "factory of key must return an Equinox module.* not 1"),
]
CALLS: list[tuple[Callable[[], Any], str]] = [
    *((lambda row=row: loss(*row), words) for *row, words in REFUSED),
    (lambda: ONE_LOGIT.predict({"scale": 1.0}, {}, ODDS[None]), r"one logit, .* not \[1, 3\]"),
    (lambda: classification(SCALE, label_smoothing=-0.1), "label_smoothing is -0.1, .* below 1"),
    (lambda: binary_classification(SCALE, label_smoothing=1.0), "label_smoothing is 1.0"),
    (lambda: classification(SCALE, auxiliary_weight=-0.1), "auxiliary_weight is -0.1, .* at least 0"),
    (lambda: classification(SCALE, auxiliary_weight=float("nan")), "auxiliary_weight is nan"),
    *(
        (lambda model=model: classification(model), NO_MODEL)
        for model in ("mlp", linen.Dense, None, (len,), (len, "apply"), lambda inputs: inputs)
    ),
    *((lambda model=model: as_model(model)[0](KEY, INPUTS), words) for model, words in UNFIT),
    (lambda: tiny.fit(tiny.experiment(model=Noisy())), 'stream "noise" in evaluation.* train'),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_state_of_another_class_is_refused():
    params, state = as_model(lambda rngs: nnx.Linear(3, 3, rngs=rngs))[0](KEY, INPUTS)
    wider, other = (lambda rngs: nnx.Linear(3, 4, rngs=rngs)), (lambda rngs: nnx.LayerNorm(3, rngs=rngs))
    for model, words in ((wider, r"bias of shape \[4\], which is of shape \[3\]"), (other, "scale of .* is absent")):
        with pytest.raises(ConfigError, match=words):
            as_model(model)[1](params, state, INPUTS, None)


def test_tables_of_one_row_take_any_token():
    ids = np.arange(8, dtype=np.int32).reshape(4, 2)
    splits = jn.data.arrays((ids, np.arange(4) % 3))
    batch = jn.Batch(ids, np.arange(4) % 3, np.ones(4, np.float32))
    for rows, error in ((1, contextlib.nullcontext()), (2, pytest.raises(DataError, match="2 rows"))):
        task = classification(linen.Sequential([linen.Embed(rows, 3), lambda x: x.mean(1)]))
        params, model_state = jax.eval_shape(task.init, KEY, batch)
        with error:
            task.check(params, model_state, batch, splits)
