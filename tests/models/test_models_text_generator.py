"""The text generator: its formula, the auxiliary logits, names, and bad input."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from jaxnn.models import TextGenerator
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
