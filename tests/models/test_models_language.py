"""The recurrent language model: causal, Flax's layers, dropout, names, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import RecurrentLanguageModel
from jaxnn.nn import GRU, Dropout
from jaxnn.types import ConfigError, DataError
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


def test_parameter_counts_by_hand() -> None:
    shapes = jax.eval_shape(RecurrentLanguageModel(6, features=3, num_layers=3, layer=GRU).init, KEY, TOKENS)
    # 6 * 3; three times three gates of 3 * 3 + 3 * 3 + 3, and a second bias of 3; 3 * 6 + 6
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 18 + 3 * (3 * 21 + 3) + 24


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (MODEL, {"LSTM_0", "LSTM_1"}),
        (RecurrentLanguageModel(6, features=3, num_layers=1, layer=GRU), {"GRU_0"}),
    ],
)
def test_parameters_have_the_names_that_are_documented(model: linen.Module, layers: set[str]) -> None:
    params = jax.eval_shape(model.init, KEY, TOKENS)["params"]
    assert set(params) == {"Embed_0", "Dense_0"} | layers


def test_dropout_is_active_in_training_only_and_before_the_logits() -> None:
    model, variables = MODEL.clone(dropout=1.0), draws.variables(MODEL, TOKENS)
    np.testing.assert_array_equal(model.apply(variables, TOKENS), MODEL.apply(variables, TOKENS))
    dropped = model.apply(variables, TOKENS, train=True, rngs={"dropout": KEY})
    np.testing.assert_array_equal(dropped, np.tile(variables["params"]["Dense_0"]["bias"], (2, 5, 1)))


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


def test_bfloat16_in_bfloat16_out() -> None:
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), draws.variables(MODEL, TOKENS))
    assert MODEL.apply(variables, TOKENS).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: RecurrentLanguageModel(0), "RecurrentLanguageModel: vocabulary_size must be an integer >= 1, not 0"),
        (lambda: RecurrentLanguageModel(6, features=None), "features must be an integer >= 1, not None"),
        (lambda: RecurrentLanguageModel(6, num_layers=0), "num_layers must be an integer >= 1, not 0"),
        (lambda: RecurrentLanguageModel(6, embedding_features=0), "embedding_features must be an integer >= 1, not 0"),
        (lambda: RecurrentLanguageModel(6, layer=linen.LSTMCell), "layer must be nn.LSTM or nn.GRU"),
        (lambda: RecurrentLanguageModel(6, dropout=1.5), "a dropout rate is a probability"),
    ],
)
def test_a_bad_choice_is_named_where_the_model_is_made(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_what_is_no_token_is_named() -> None:
    with pytest.raises(DataError, match=r"RecurrentLanguageModel needs token ids \[batch, time\] of integers"):
        MODEL.init(KEY, TOKENS[0])
