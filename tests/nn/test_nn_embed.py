"""Embed: Flax's in every result, with either gradient."""

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
IDS = jnp.array([[0, 3, 3], [6, 1, 3]])
IMPLEMENTATIONS = ["gather", "one_hot"]


def graded(layer: linen.Module, params: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
    """The rows, and the gradient of a loss in which every element counts differently."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        rows = layer.apply(params, ids)
        return jnp.sum(jnp.sin(rows.astype(jnp.float32)) * jnp.cos(jnp.arange(rows.size).reshape(rows.shape))), rows

    gradient, rows = jax.jit(jax.grad(loss, has_aux=True))(params)
    return rows, gradient


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradient_by_hand(implementation: str) -> None:
    # Row 3 is looked up at positions 1, 2 and 5 with the weights 2, 3 and 6: 11; row 2 never.
    layer, weights = Embed(7, 2, implementation=implementation), jnp.array([[1.0, 2, 3], [4, 5, 6]])
    table = jnp.arange(14.0).reshape(7, 2)
    loss = lambda table: jnp.sum(layer.apply({"params": {"embedding": table}}, IDS).sum(-1) * weights)  # noqa: E731
    expected = np.repeat([[1.0], [5], [0], [11], [0], [0], [4]], 2, axis=1)
    assert np.array_equal(jax.grad(loss)(table), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtypes", [{}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}, {"dtype": jnp.float64}])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4)])
def test_equals_flax(implementation: str, dtypes: dict[str, Any], shape: tuple[int, ...]) -> None:
    with jax.enable_x64(jnp.float64 in dtypes.values()):
        ids = draws.integers(0, 7, *shape)
        ours, flaxs = Embed(7, 3, implementation=implementation, **dtypes), linen.Embed(7, 3, **dtypes)
        params = ours.init(KEY, ids)
        assert jax.tree.all(jax.tree.map(np.array_equal, params, flaxs.init(KEY, ids)))
        (rows, gradient), (expected_rows, expected) = (graded(layer, params, ids) for layer in (ours, flaxs))
        assert rows.dtype == expected_rows.dtype
        assert np.array_equal(rows, expected_rows)
        narrow = jnp.bfloat16 in dtypes.values()
        found, wanted = (np.asarray(tree["params"]["embedding"], np.float64) for tree in (gradient, expected))
        # bfloat16 keeps 8 bits, and Flax rounds after each addition.
        np.testing.assert_allclose(found, wanted, rtol=0.02 if narrow else 1e-5, atol=0.02 if narrow else 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_outside_are_as_in_flax(implementation: str) -> None:
    # From the end, below the start, and beyond the end.
    ids = jnp.array([-1, -8, 7, 2])
    layer = Embed(7, 3, implementation=implementation)
    params = layer.init(KEY, ids)
    rows, gradient = graded(layer, params, ids)
    expected_rows, expected = graded(linen.Embed(7, 3), params, ids)
    assert np.array_equal(rows, expected_rows, equal_nan=True)
    assert np.isnan(rows).any(axis=1).tolist() == [False, True, True, False]
    found = np.asarray(gradient["params"]["embedding"])
    np.testing.assert_allclose(found, expected["params"]["embedding"], rtol=1e-6)
    assert found.any(axis=1).tolist() == [False, False, True, False, False, False, True]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_transformations_agree(implementation: str) -> None:
    layer = Embed(7, 3, implementation=implementation)
    members = jax.vmap(lambda key: layer.init(key, IDS))(jax.random.split(KEY))
    ids = jnp.stack([IDS, IDS[::-1]])
    member = lambda tree, number: jax.tree.map(lambda leaf: leaf[number], tree)  # noqa: E731
    alone = [graded(layer, member(members, number), ids[number])[1] for number in range(2)]
    mapped = jax.vmap(lambda params, ids: graded(layer, params, ids)[1])(members, ids)
    scanned = jax.lax.scan(lambda _, x: (None, graded(layer, *x)[1]), None, (members, ids))[1]
    remat = jax.vmap(
        lambda params, ids: graded(linen.remat(Embed)(7, 3, implementation=implementation), params, ids)[1]
    )
    for found in (mapped, scanned, remat(members, ids)):
        for number in range(2):
            np.testing.assert_allclose(
                member(found, number)["params"]["embedding"], alone[number]["params"]["embedding"], rtol=1e-6
            )


def test_attend_and_a_table_of_one_row_are_flaxs() -> None:
    query, layer = jnp.ones((2, 3)), Embed(7, 3)
    params = layer.init(KEY, IDS)
    expected = linen.Embed(7, 3).apply(params, query, method="attend")
    assert np.array_equal(layer.apply(params, query, method="attend"), expected)
    one = Embed(1, 3)
    assert one.apply(one.init(KEY, IDS), IDS).shape == (2, 3, 3)


def test_the_backend_and_the_size_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(rows: int) -> str:
        traced = jax.jit(lambda ids: Embed(rows, 3).init_with_output(KEY, ids)[0]).lower(IDS)
        text = traced.as_text(debug_info=True)
        return next(name for name in IMPLEMENTATIONS if f"jaxnn.embedding.{name}" in text)

    assert [chosen(rows) for rows in (1, 7, 512, 513)] == ["gather"] * 4
    monkeypatch.setattr("jaxnn.nn._layer_arguments.platform", lambda: "gpu")
    assert [chosen(rows) for rows in (1, 7, 512, 513)] == ["gather", "one_hot", "one_hot", "gather"]


@pytest.mark.parametrize(
    ("layer", "ids", "sentence"),
    [
        (Embed(7, 3), jnp.ones(2), "Embed needs integer ids, not float32: cast them"),
        (Embed(7, 3, implementation="onehot"), IDS, "embedding has no implementation 'onehot': did you mean 'one_hot'"),
        (Embed(1, 3, implementation="one_hot"), IDS, "cannot use 'one_hot' here: the table has one row"),
    ],
)
def test_bad_input_is_named(layer: Embed, ids: jax.Array, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        layer.init(KEY, ids)
