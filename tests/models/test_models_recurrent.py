"""The recurrent classifier: Flax's layers on each sequence alone, padding, both directions, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import RecurrentClassifier
from jaxnn.nn import GRU, LSTM
from tests import draws

KEY = jax.random.key(0)
SIZES = {"vocabulary_size": 6, "embedding_features": 4, "features": 3}
# 0 pads at the end; before that it is a token like the others.
TOKENS = jnp.array([[4, 2, 4, 1], [1, 0, 5, 0], [3, 0, 0, 0], [0, 3, 0, 0]])
LENGTHS = [4, 3, 1, 2]


def last_state(step: Callable[..., Any], carry: Any, embedded: jax.Array) -> jax.Array:
    """What Flax's cell puts out at the last step of ``embedded [time, features]``."""
    for x in embedded:
        carry, out = step(carry, x)
    return out


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layer", [LSTM, GRU])
def test_it_equals_flaxs_layers_on_each_sequence_alone(layer: type, bidirectional: bool) -> None:
    model = RecurrentClassifier(5, **SIZES, layer=layer, bidirectional=bidirectional, pad_id=0)
    variables = draws.variables(model, TOKENS)
    params, name = variables["params"], layer.__name__
    cell = {"LSTM": linen.OptimizedLSTMCell, "GRU": linen.GRUCell}[name](3)
    carry = jax.tree.map(jnp.zeros_like, cell.initialize_carry(KEY, (4,)))
    steps = [
        jax.jit(lambda carry, x, params=params[f"{name}_{index}"]["cell"]: cell.apply({"params": params}, carry, x))
        for index in range(1 + bidirectional)
    ]
    got = model.apply(variables, TOKENS)
    for row, length in enumerate(LENGTHS):
        embedded = params["Embed_0"]["embedding"][TOKENS[row, :length]]
        states = [last_state(*pair) for pair in zip(steps, [carry] * 2, [embedded, embedded[::-1]], strict=False)]
        expected = jnp.concatenate(states) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
        np.testing.assert_allclose(got[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_without_an_embedding_a_token_is_its_row_of_the_kernels(bidirectional: bool) -> None:
    # What an embedding by the identity gives.
    sizes = {"vocabulary_size": 6, "features": 3, "bidirectional": bidirectional, "pad_id": 0}
    model, embedding = (RecurrentClassifier(5, **sizes, embedding_features=features) for features in (None, 6))
    params = draws.variables(model, TOKENS)["params"]
    expected = embedding.apply({"params": {**params, "Embed_0": {"embedding": jnp.eye(6)}}}, TOKENS)
    np.testing.assert_allclose(model.apply({"params": params}, TOKENS), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("token", [6, -1])
def test_without_an_embedding_a_token_outside_the_vocabulary_is_nan(token: int) -> None:
    model = RecurrentClassifier(5, vocabulary_size=6, embedding_features=None, features=3)
    logits = model.apply(draws.variables(model, TOKENS), TOKENS.at[1, 2].set(token))
    assert np.isnan(logits).any(axis=1).tolist() == [False, True, False, False]


def test_without_padding_all_tokens_are_read() -> None:
    variables = draws.variables(RecurrentClassifier(5, **SIZES), TOKENS)
    plain, padded = (RecurrentClassifier(5, **SIZES, pad_id=pad_id).apply(variables, TOKENS) for pad_id in (None, 0))
    np.testing.assert_allclose(plain[0], padded[0], rtol=1e-5, atol=1e-6)
    assert np.all(np.abs(plain[1:] - padded[1:]).max(axis=1) > 1e-3)


def test_more_padding_changes_nothing() -> None:
    model = RecurrentClassifier(5, **SIZES, bidirectional=True, pad_id=0)
    variables = draws.variables(model, TOKENS)
    longer = jnp.pad(TOKENS, [(0, 0), (0, 3)])
    np.testing.assert_allclose(model.apply(variables, longer), model.apply(variables, TOKENS), rtol=1e-5, atol=1e-6)


def test_of_nothing_but_padding_the_bias_is_left() -> None:
    model = RecurrentClassifier(5, **SIZES, pad_id=0)
    variables = draws.variables(model, TOKENS)
    got = model.apply(variables, jnp.zeros((1, 4), jnp.int32))
    np.testing.assert_array_equal(got[0], variables["params"]["Dense_0"]["bias"])


def test_dropout_is_active_in_training_only() -> None:
    model, without = (RecurrentClassifier(5, **SIZES, dropout=rate) for rate in (1.0, 0.0))
    variables = draws.variables(without, TOKENS)
    assert np.array_equal(model.apply(variables, TOKENS), without.apply(variables, TOKENS))
    # Before the logits everything is dropped.
    dropped = model.apply(variables, TOKENS, train=True, rngs={"dropout": KEY})
    np.testing.assert_array_equal(dropped, np.tile(variables["params"]["Dense_0"]["bias"], (4, 1)))
