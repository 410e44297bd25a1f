"""The bag of tokens: its formula, padding, order, and bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.models import BagOfTokens

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


def test_embeddings_begin_small_on_both_sides_of_0() -> None:
    table = BagOfTokens(2, vocabulary_size=1_000, features=50).init(KEY, TOKENS)["params"]["Embed_0"]["embedding"]
    assert np.abs(table).max() == pytest.approx(1 / 50, rel=1e-3) and abs(float(np.mean(table))) < 1e-3
