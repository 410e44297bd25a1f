"""What does not fit a task is named: outputs, targets, settings, models, labels."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from losses import KEY, SCALE, batch_of

import jaxnn as jn
from jaxnn.tasks import as_model, binary_classification, classification, next_token, regression
from jaxnn.types import ConfigError, DataError
from tests import elsewhere, tiny
from tests.tasks.test_losses import LABELS, LOGITS, ODDS, TARGETS, TOKENS, with_auxiliary


def model_of(function: Any) -> Any:
    return (lambda key, inputs: {}), lambda params, inputs: function(inputs)


REGRESSION, CLASSES, BINARY, NEXT = (
    make(SCALE) for make in (regression, classification, binary_classification, next_token)
)
# A task, the outputs of its model, and targets.
REFUSED = [
    (REGRESSION, np.zeros((2, 3)), np.zeros(2), r"outputs \[2, 3\] for targets \[2\]"),
    (REGRESSION, np.zeros(2), np.zeros((2, 1)), r"outputs \[2\] for targets \[2, 1\]"),
    (REGRESSION, np.zeros((2, 1, 1)), np.zeros(2), r"outputs \[2, 1, 1\] for targets \[2\]"),
    (CLASSES, LOGITS, [0.0, 1.0], r"integers \[batch\], not float\d+ \[2\]: .*tasks.regression"),
    (CLASSES, LOGITS, [[0], [1]], r"integers \[batch\], not int\d+ \[2, 1\]"),
    (CLASSES, LOGITS, np.ones((2, 4), np.float32), r"probabilities of 4 classes, .* for outputs \[2, 3\]"),
    (CLASSES, LOGITS[:, 0], LABELS, r"logits \[batch, classes\], not \[2\] for 2 labels"),
    (classification(model_of(lambda x: x[:1])), LOGITS, LABELS, r"\[batch, classes\], not \[1, 3\] for 2 labels"),
    # The cross-entropy of a single class would be 0 for any logit.
    (CLASSES, LOGITS[:, :1], LABELS, r"has one, \[2, 1\]: .*tasks.binary_classification"),
    (classification(with_auxiliary()), LOGITS, LABELS, "tuple of 2: give auxiliary_weight"),
    (classification(with_auxiliary(0), auxiliary_weight=0.2), LOGITS, LABELS, "training returns a tuple"),
    (classification(SCALE, auxiliary_weight=0.2), LOGITS, LABELS, "training returns a tuple"),
    (BINARY, ODDS, [0.0, 1.0, 1.0], r"binary_classification .* integers \[batch\], not float\d+ \[3\]"),
    (BINARY, np.ones((3, 2)), [1, 0, 0], r"one logit, \[batch, 1\] .* not \[3, 2\]: .*tasks.classification"),
    (BINARY, np.ones((3, 1, 1)), [1, 0, 0], r"one logit, .* not \[3, 1, 1\]: change its last layer"),
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
    (lambda: BINARY.predict({"scale": 1.0}, {}, ODDS[None]), r"one logit, .* not \[1, 3\]"),
    (lambda: classification(SCALE, label_smoothing=-0.1), "label_smoothing is -0.1, .* below 1"),
    (lambda: classification(SCALE, label_smoothing=float("nan")), "label_smoothing is nan"),
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


def test_labels_that_are_no_class_are_named_before_training():
    first_logit = tiny.init, lambda params, inputs: tiny.apply(params, inputs)[:, 0]
    with pytest.raises(DataError, match=r"label 2 .*renumber the labels"):
        tiny.fit(tiny.experiment(task=lambda config: binary_classification(first_logit)))


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
