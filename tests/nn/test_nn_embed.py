"""Embed: Flax's in every result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.nn import Embed
from jaxnn.types import ConfigError
from tests import draws

KEY = jax.random.key(0)


def graded(layer: linen.Module, params: Any, ids: jax.Array) -> Any:
    """The rows, and the gradient of a loss in which every element counts differently."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        rows = layer.apply(params, ids)
        return jnp.sum(jnp.sin(rows.astype(jnp.float32)) * jnp.cos(jnp.arange(rows.size).reshape(rows.shape))), rows

    return jax.jit(jax.grad(loss, has_aux=True))(params)


@pytest.mark.parametrize("dtypes", [{}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}])
@pytest.mark.parametrize("ids", [draws.integers(0, 7, 2, 3, 4), jnp.int32(3), jnp.array([-1, -8, 7, 2])], ids=jnp.shape)
def test_equals_flax(dtypes: dict[str, Any], ids: jax.Array) -> None:
    ours, theirs = Embed(7, 3, **dtypes), linen.Embed(7, 3, **dtypes)
    params = ours.init(KEY, ids)
    for found, expected in zip(*(jax.tree.leaves(graded(layer, params, ids)) for layer in (ours, theirs)), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.float64(found), np.float64(expected))


def test_attend_and_a_table_of_one_row_are_flaxs() -> None:
    query, layer, ids = jnp.ones((2, 3)), Embed(7, 3), jnp.zeros((2, 3), jnp.int32)
    params = layer.init(KEY, ids)
    expected = linen.Embed(7, 3).apply(params, query, method="attend")
    assert np.array_equal(layer.apply(params, query, method="attend"), expected)
    one = Embed(1, 3)
    assert one.apply(one.init(KEY, ids), ids).shape == (2, 3, 3)


def test_ids_that_are_floats_are_refused() -> None:
    with pytest.raises(ConfigError, match="Embed needs integer ids, not float32: cast them"):
        Embed(7, 3).init(KEY, jnp.ones(2))
