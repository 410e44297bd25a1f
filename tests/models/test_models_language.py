"""The recurrent language model: causal, Flax's layers, dropout, names, and bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import RecurrentLanguageModel
from jaxnn.nn import Dropout
from tests import draws

KEY = jax.random.key(0)
MODEL = RecurrentLanguageModel(6, features=3, embedding_features=4)
TOKENS = jnp.array([[4, 2, 4, 1, 0], [1, 0, 5, 0, 3]])


def test_it_equals_flaxs_layers_one_upon_another() -> None:
    variables = draws.variables(MODEL, TOKENS)
    params = variables["params"]
    x = params["Embed_0"]["embedding"][TOKENS]
    for layer in ("LSTM_0", "LSTM_1"):
        rnn = linen.RNN(linen.OptimizedLSTMCell(3))
        x = rnn.apply({"params": params[layer]}, x)
    expected = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"][None, None]
    got = MODEL.apply(variables, TOKENS)
    assert got.shape == (2, 5, 6)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", range(5))
def test_logits_depend_on_no_later_token(position: int) -> None:
    variables = draws.variables(MODEL, TOKENS)
    tokens = jnp.arange(5)[None]  # each once, so that the gradient of its row tells whether it was read

    def logit(table: jax.Array) -> jax.Array:
        params = {**variables["params"], "Embed_0": {"embedding": table}}
        return MODEL.apply({"params": params}, tokens)[0, position].sum()

    slope = jax.grad(logit)(variables["params"]["Embed_0"]["embedding"])
    assert np.any(slope != 0, axis=1).tolist() == [row <= position for row in range(6)]


def test_an_embedding_is_as_wide_as_a_state_unless_told() -> None:
    params = jax.eval_shape(RecurrentLanguageModel(6, features=3).init, KEY, TOKENS)["params"]
    assert params["Embed_0"]["embedding"].shape == (6, 3)


def test_dropout_is_before_each_layer_and_the_logits() -> None:
    model, variables, dropped = MODEL.clone(dropout=0.5), draws.variables(MODEL, TOKENS), []

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Dropout) and context.method_name == "__call__":
            dropped.append((context.module.rate, context.module.batch_axis, *args[0].shape))
        return call(*args, **kwargs)

    with linen.intercept_methods(note):
        jax.eval_shape(lambda: model.apply(variables, TOKENS, train=True, rngs={"dropout": KEY}))
    # Two sequences of five: the second axis is the batch, of which every device draws its rows.
    assert dropped == [(0.5, 1, 5, 2, 4), (0.5, 1, 5, 2, 3), (0.5, 1, 5, 2, 3)]
