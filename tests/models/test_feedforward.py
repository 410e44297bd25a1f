"""MLP and CNN: Flax's layers, lists for tuples, images that are too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import CNN, MLP, TableMLP
from jaxnn.nn import avg_pool, max_pool
from jaxnn.types import ConfigError, DataError
from tests import draws

IMAGES = draws.normal(1, 4, 16, 10, 1)


def flatten(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1)


def pooled(pool: Callable[..., jax.Array], *window: tuple[int, int]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: pool(x, *window)


def conv(features: int, padding: str = "SAME") -> linen.Module:
    return linen.Conv(features, (3, 3), padding=padding)


RELU, HALVED = linen.relu, pooled(linen.max_pool, (2, 2), (2, 2))
OVERLAPPING = {"pool": (3, 2), "pool_strides": (2, 1), "pooling": (max_pool, avg_pool), "padding": ("VALID", "SAME")}
# A model and its layers in Flax; 14x8 pooled by 3x2 in steps of 2 and 1 is 6x7, then of 4x5 it is 1x4.
EQUAL: dict[str, tuple[linen.Module, list[Any]]] = {
    "mlp": (MLP((3, 9)), [flatten, linen.Dense(3), RELU, linen.Dense(9)]),
    "cnn": (
        CNN(5, blocks=((4,), (6, 6)), dense=(8,)),
        [conv(4), RELU, HALVED, conv(6), RELU, conv(6), RELU, HALVED, flatten, linen.Dense(8), RELU, linen.Dense(5)],
    ),
    "one kind of pooling per block, one padding per convolution": (
        CNN(5, blocks=((4, 6), (6, 6)), dense=(), **OVERLAPPING),
        [conv(4, "VALID"), RELU, conv(6), RELU, pooled(linen.max_pool, (3, 2), (2, 1))]
        + [conv(6, "VALID"), RELU, conv(6), RELU, pooled(linen.avg_pool, (3, 2), (2, 1)), flatten, linen.Dense(5)],
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equals_flax_layers(name: str) -> None:
    model, layers = EQUAL[name]
    variables = draws.variables(model, IMAGES)
    kinds = {linen.Conv: "Conv", linen.Dense: "Dense"}
    counts, renamed = dict.fromkeys(kinds.values(), 0), {}
    for index, layer in enumerate(layers):
        if kind := kinds.get(type(layer)):
            renamed[f"layers_{index}"] = variables["params"][f"{kind}_{counts[kind]}"]
            counts[kind] += 1
    reference = linen.Sequential(layers)
    run = jax.jit(lambda: (model.apply(variables, IMAGES), reference.apply({"params": renamed}, IMAGES)))
    found, expected = run()
    assert np.any(expected < 0.0)  # no activation at the end
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_lists_become_tuples() -> None:
    assert MLP([4, np.int64(2)]).features == (4, 2)
    lists = CNN(2, blocks=[[4], [8]], pool_strides=[1, 2], pooling=[max_pool, avg_pool], padding=["SAME"])
    tuples = CNN(2, blocks=((4,), (8,)), pool_strides=(1, 2), pooling=(max_pool, avg_pool), padding=("SAME",))
    assert lists == tuples and hash(lists) == hash(tuples)


def test_images_too_small_for_the_blocks() -> None:
    for options, size, words in (
        # 8 -> 4 -> 2 -> 1 -> 0; two valid convolutions of 3: 5 -> 1, pooled by 2: 0.
        ({"blocks": ((2,),) * 4}, (8, 9), "images of 8x9 .* after block 4 of 4"),
        ({"blocks": ((2, 2),), "padding": "VALID"}, (9, 5), "9x5 .* after block 1 of 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            jax.eval_shape(CNN(2, **options).init, jax.random.key(0), jnp.ones((1, *size, 1)))


def test_a_table_is_embedded_by_column() -> None:
    model = TableMLP((3,), num_categories=(4, 2), embedding_features=5, frequencies=2, frequency_scale=1.0)
    inputs = {
        "numbers": draws.normal(2, 6, 3),
        "categories": np.int32([[0, 1], [3, 0], [1, 1], [2, 0], [0, 0], [3, 1]]),
    }
    variables = draws.variables(model, inputs)
    params = linen.unbox(variables["params"])
    parts = []
    for column in range(3):  # each number's own periodic features and layer
        angles = 2 * np.pi * inputs["numbers"][:, column, None] * params["frequencies"][column][None]
        waves = np.hstack([np.sin(angles), np.cos(angles)])
        parts.append(
            np.maximum(waves @ params["Einsum_0"]["kernel"][column] + params["Einsum_0"]["bias"][None, column], 0)
        )
    parts += [params["Embed_0"]["embedding"][first + inputs["categories"][:, i]] for i, first in enumerate((0, 4))]
    dense = params["MLP_0"]["Dense_0"]
    expected = np.hstack(parts) @ dense["kernel"] + dense["bias"][None]
    np.testing.assert_allclose(model.apply(variables, inputs), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(DataError, match="have 2 columns of categories, and TableMLP's num_categories are of 0"):
        jax.eval_shape(TableMLP((3,)).init, jax.random.key(0), inputs)
