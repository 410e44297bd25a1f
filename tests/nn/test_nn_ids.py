"""Ids and labels of any integer dtype mean what they mean in int32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn import models, nn, tasks
from jaxnn.types import Batch

CLASSES = 300  # more than uint8 tells apart
IDS = jnp.array([[0, 5, 255], [44, 7, 0]])
WEIGHTS = jax.random.normal(jax.random.key(0), (3, CLASSES))


def by_logits(smoothing: float) -> Callable[[jax.Array], jax.Array]:
    def gradient(ids: jax.Array) -> jax.Array:
        logits = jnp.broadcast_to(WEIGHTS, (2, 3, CLASSES))
        return jax.grad(lambda logits: nn.cross_entropy(logits, ids, smoothing).sum())(logits)

    return gradient


def by_kernel(ids: jax.Array) -> jax.Array:
    hidden = jnp.ones((2, 3, 3))
    return jax.grad(lambda kernel: nn.linear_cross_entropy(hidden, kernel, ids, chunk=64).sum())(WEIGHTS)


def by_table(num_rows: int) -> Callable[[jax.Array], jax.Array]:
    def gradient(ids: jax.Array) -> jax.Array:
        layer = nn.Embed(num_rows, 2)
        params = {"params": {"embedding": jnp.ones((num_rows, 2))}}
        return jax.tree.leaves(jax.grad(lambda params: layer.apply(params, ids).sum())(params))[0]

    return gradient


def of_model(model: object) -> Callable[[jax.Array], jax.Array]:
    return lambda ids: model.apply(model.init(jax.random.key(0), IDS), ids)  # type: ignore[attr-defined]


def of_tokens(ids: jax.Array) -> jax.Array:
    task = tasks.next_token((lambda key, x: {}, lambda params, x: jnp.broadcast_to(WEIGHTS, (2, 3, CLASSES))))
    batch = Batch(jnp.zeros((2, 3)), ids, jnp.ones(2))
    return jnp.stack(list(task.evaluate({}, {}, batch).values()))


CASES = {
    "cross_entropy": by_logits(0.0),
    "smoothed cross_entropy": by_logits(0.1),
    "linear_cross_entropy": by_kernel,
    "a table": by_table(300),
    "a table of 256": by_table(256),
    "padding of a bag": of_model(models.BagOfTokens(2, vocabulary_size=CLASSES, pad_id=256)),
    "padding of sequences": of_model(models.RecurrentClassifier(2, vocabulary_size=CLASSES, features=4, pad_id=256)),
    "tokens that do not count": of_tokens,
}


@pytest.mark.parametrize("name", CASES)
def test_narrow_ids_are_wide_ones(name: str) -> None:
    found, expected = (CASES[name](IDS.astype(dtype)) for dtype in ("uint8", "int32"))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(found, expected)
