"""The bag of tokens: its formula, padding, order, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.models import BagOfTokens
from jaxnn.types import ConfigError, DataError

KEY = jax.random.key(0)
TOKENS = jnp.array([[4, 2, 4, 0], [1, 0, 0, 0], [0, 3, 0, 5], [0, 0, 0, 0]])
PLAIN = BagOfTokens(3, vocabulary_size=6, features=2)
PADDED = BagOfTokens(3, vocabulary_size=6, features=2, pad_id=0)
VARIABLES = {
    "params": {
        "Embed_0": {"embedding": np.array([[9, 9], [1, 2], [3, 0], [5, 5], [0, 6], [1, 1]], np.float32)},
        "Dense_0": {"kernel": np.array([[1, 0, 1], [0, 1, -1]], np.float32), "bias": np.array([0, 10, 0], np.float32)},
    }
}


@pytest.mark.parametrize(
    ("model", "means"),
    [
        # (0+3+0+9)/4, (6+0+6+9)/4; (1+9+9+9)/4, (2+9+9+9)/4; (9+5+9+1)/4 twice; 9
        (PLAIN, [[3, 5.25], [7, 7.25], [6, 6], [9, 9]]),
        # Without zeros, wherever they stand: (0+3+0)/3, (6+0+6)/3; 1, 2; (5+1)/2; nothing
        (PADDED, [[1, 4], [1, 2], [3, 3], [0, 0]]),
    ],
)
def test_logits_by_hand(model: BagOfTokens, means: list[list[float]]) -> None:
    # Of a mean (a, b) the logits are a, b + 10 and a - b.
    expected = [[a, b + 10, a - b] for a, b in means]
    np.testing.assert_allclose(model.apply(VARIABLES, TOKENS), expected, rtol=1e-6, atol=1e-6)


def test_the_order_does_not_count() -> None:
    got = PLAIN.apply(VARIABLES, TOKENS[:, ::-1])
    np.testing.assert_allclose(got, PLAIN.apply(VARIABLES, TOKENS), rtol=1e-6)


def test_padding_gets_no_gradient() -> None:
    slope = jax.grad(lambda params: jnp.sum(PADDED.apply({"params": params}, TOKENS)))(VARIABLES["params"])
    used = np.any(slope["Embed_0"]["embedding"] != 0, axis=1)
    # The logits of a row add up to 2 a + 0 b + 10, and every token but 0 is used.
    assert used.tolist() == [False, True, True, True, True, True]


def test_parameter_counts_by_hand() -> None:
    shapes = jax.eval_shape(BagOfTokens(2, vocabulary_size=20_000).init, KEY, TOKENS)
    # 20000 * 50 and 50 * 2 + 2
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 1_000_000 + 102


def test_parameters_have_the_names_that_are_documented() -> None:
    shapes = jax.eval_shape(PLAIN.init, KEY, TOKENS)
    assert jax.tree.structure(shapes) == jax.tree.structure(VARIABLES)
    assert jax.tree.map(jnp.shape, VARIABLES) == jax.tree.map(lambda leaf: leaf.shape, shapes)


def test_embeddings_begin_small_on_both_sides_of_0() -> None:
    table = BagOfTokens(2, vocabulary_size=1_000, features=50).init(KEY, TOKENS)["params"]["Embed_0"]["embedding"]
    assert np.abs(table).max() == pytest.approx(1 / 50, rel=1e-3) and abs(float(np.mean(table))) < 1e-3


def test_bfloat16_in_bfloat16_out() -> None:
    variables = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), VARIABLES)
    assert PADDED.apply(variables, TOKENS).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: BagOfTokens(0, vocabulary_size=6), "BagOfTokens: num_classes must be an integer >= 1, not 0"),
        (lambda: BagOfTokens(2, vocabulary_size=-6), "BagOfTokens: vocabulary_size must be an integer >= 1, not -6"),
        (lambda: BagOfTokens(2, vocabulary_size=6, features="a"), "BagOfTokens: features must be an integer >= 1"),
    ],
)
def test_a_bad_size_is_named_where_the_model_is_made(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


def test_what_is_no_token_is_named() -> None:
    with pytest.raises(
        DataError, match=r"BagOfTokens needs token ids \[batch, time\] of integers, not float32 \[4, 4\]"
    ):
        PLAIN.init(KEY, TOKENS / 255)
