"""The text generator: its formula, the auxiliary logits, names, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import TextGenerator
from jaxnn.types import ConfigError, DataError
from tests import draws

KEY = jax.random.key(0)
MODEL = TextGenerator(6, embedding_features=4, features=3, hidden=(5, 2))
TOKENS = jnp.array([[4, 2, 4, 1], [1, 0, 5, 0], [3, 3, 0, 2]])
train = partial(MODEL.apply, train=True, mutable=["batch_stats"])


def state_and_logits(variables: Any) -> tuple[jax.Array, jax.Array]:
    """The last state, and the logits in evaluation, by Flax's layers."""
    params, stats = variables["params"], variables["batch_stats"]
    embedded = params["Embed_0"]["embedding"][TOKENS]
    rnn = linen.RNN(linen.OptimizedLSTMCell(3))
    x = state = rnn.apply({"params": params["LSTM_0"]}, embedded)[:, -1]
    for index in range(2):
        norm = linen.BatchNorm(use_running_average=True)
        x = x @ params[f"Dense_{index}"]["kernel"]
        x = norm.apply({"params": params[f"BatchNorm_{index}"], "batch_stats": stats[f"BatchNorm_{index}"]}, x)
        x = linen.relu(x)
    return state, x @ params["Dense_2"]["kernel"] + params["Dense_2"]["bias"][None]


def test_it_equals_flaxs_layers() -> None:
    variables = draws.variables(MODEL, TOKENS)
    _, expected = state_and_logits(variables)
    np.testing.assert_allclose(MODEL.apply(variables, TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_in_training_the_auxiliary_logits_come_straight_from_the_state() -> None:
    variables = draws.variables(MODEL, TOKENS)
    (logits, auxiliary), _ = train(variables, TOKENS)
    state, _ = state_and_logits(variables)
    layer = variables["params"]["auxiliary"]
    np.testing.assert_allclose(auxiliary, state @ layer["kernel"] + layer["bias"][None], rtol=1e-4, atol=1e-5)
    assert logits.shape == auxiliary.shape == (3, 6)


def test_parameters_have_the_names_that_are_documented() -> None:
    shapes = jax.eval_shape(MODEL.init, KEY, TOKENS)
    layers = {"Embed_0", "LSTM_0", "Dense_0", "BatchNorm_0", "Dense_1", "BatchNorm_1", "Dense_2", "auxiliary"}
    assert set(shapes["params"]) == layers
    assert set(shapes["params"]["Dense_0"]) == {"kernel"}
    assert set(shapes["params"]["Dense_2"]) == {"kernel", "bias"}


def test_batch_statistics_move_in_training_only() -> None:
    variables = draws.variables(MODEL, TOKENS)
    _, trained = train(variables, TOKENS)
    _, evaluated = MODEL.apply(variables, TOKENS, mutable=["batch_stats"])
    before = variables["batch_stats"]
    moved = jax.tree.map(lambda old, new: bool(np.any(old != new)), before, trained["batch_stats"])
    assert all(jax.tree.leaves(moved))
    jax.tree.map(np.testing.assert_array_equal, evaluated["batch_stats"], before)


def test_without_dense_layers_the_logits_are_of_the_state() -> None:
    params = jax.eval_shape(MODEL.clone(hidden=()).init, KEY, TOKENS)["params"]
    assert set(params) == {"Embed_0", "LSTM_0", "Dense_0", "auxiliary"}
    assert params["Dense_0"]["kernel"].shape == params["auxiliary"]["kernel"].shape == (3, 6)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TextGenerator(0), "TextGenerator: vocabulary_size must be an integer >= 1, not 0"),
        (lambda: TextGenerator(6, embedding_features=None), "embedding_features must be an integer >= 1, not None"),
        (lambda: TextGenerator(6, features=2.5), "features must be an integer >= 1, not 2.5"),
        (lambda: TextGenerator(6, hidden=512), r"hidden must be a tuple of integers >= 1, as \(512, 256\), not 512"),
        (lambda: TextGenerator(6, layer="gru"), "layer must be nn.LSTM or nn.GRU, not 'gru'"),
    ],
)
def test_a_bad_choice_is_named_where_the_model_is_made(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_what_is_no_token_is_named() -> None:
    with pytest.raises(DataError, match=r"TextGenerator needs token ids \[batch, time\] of integers, not float32"):
        MODEL.init(KEY, TOKENS / 255)
