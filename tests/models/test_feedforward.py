"""MLP and CNN: Flax's layers, dropout, lists for tuples, images that are too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import CNN, MLP
from jaxnn.nn import avg_pool, max_pool
from jaxnn.types import ConfigError
from tests import draws

IMAGES = draws.normal(1, 4, 8, 8, 1)
SMALL_CNN = {"blocks": ((4,), (6, 6)), "dense": (8,)}
MODELS: dict[str, Callable[..., linen.Module]] = {
    "mlp": lambda **fields: MLP((16, 12, 5), **fields),
    "cnn": lambda **fields: CNN(5, **SMALL_CNN, **fields),
    "cnn with batch norm": lambda **fields: CNN(5, batch_norm=True, **SMALL_CNN, **fields),
}


def flatten(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1)


def pooled(pool: Callable[..., jax.Array], *window: tuple[int, int]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: pool(x, *window)


CONV, HALVED = linen.Conv(6, (3, 3)), pooled(linen.max_pool, (2, 2), (2, 2))
OVERLAPPING = {"pool": (3, 2), "pool_strides": (2, 1), "pooling": (max_pool, avg_pool)}
# A model and its layers in Flax; 8x8 pooled by 3x2 in steps of 2 and 1 is 3x7, then 1x6.
EQUAL: dict[str, tuple[linen.Module, list[Any]]] = {
    "mlp": (MLP((3, 9)), [flatten, linen.Dense(3), linen.relu, linen.Dense(9)]),
    "cnn": (
        CNN(5, **SMALL_CNN),
        [linen.Conv(4, (3, 3)), linen.relu, HALVED, CONV, linen.relu, linen.Conv(6, (3, 3)), linen.relu, HALVED]
        + [flatten, linen.Dense(8), linen.relu, linen.Dense(5)],
    ),
    "overlapping pooling, one kind per block": (
        CNN(5, blocks=((4,), (6,)), **OVERLAPPING, dense=()),
        [linen.Conv(4, (3, 3)), linen.relu, pooled(linen.max_pool, (3, 2), (2, 1))]
        + [CONV, linen.relu, pooled(linen.avg_pool, (3, 2), (2, 1)), flatten, linen.Dense(5)],
    ),
    "one padding per convolution": (
        CNN(5, blocks=((4, 6),), padding=("VALID", "SAME"), dense=()),
        [linen.Conv(4, (3, 3), padding="VALID"), linen.relu, CONV, linen.relu, HALVED, flatten, linen.Dense(5)],
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


@pytest.mark.parametrize("name", MODELS)
def test_dropout_in_training_only_and_gradients_of_every_layer(name: str) -> None:
    make = MODELS[name]
    variables = draws.variables(make(), IMAGES)

    def train(rate: Any, key: jax.Array, params: Any = variables["params"]) -> jax.Array:
        options = {"train": True, "rngs": {"dropout": key}, "mutable": ["batch_stats"]}
        return make(dropout=rate).apply({**variables, "params": params}, IMAGES, **options)[0]

    @jax.jit
    def run(keys: jax.Array) -> dict[str, Any]:
        return {
            "evaluated": [make(dropout=rate).apply(variables, IMAGES) for rate in (0.0, 0.5)],
            "constant rates": [train(rate, keys[0]) for rate in (0.0, 0.3, 1.0)],
            "traced rates": jax.vmap(train, (0, None))(jnp.array([0.0, 0.3, 1.0]), keys[0]),
            "other key": train(0.3, keys[1]),
            "gradients": jax.grad(lambda params: jnp.sum(train(0.2, keys[0], params) ** 2))(variables["params"]),
        }

    found = run(jax.random.split(jax.random.key(0)))
    np.testing.assert_array_equal(*found["evaluated"])
    np.testing.assert_allclose(found["traced rates"], found["constant rates"], rtol=1e-3, atol=1e-5)
    assert not np.array_equal(found["constant rates"][1], found["other key"])
    # At rate 1 everything before the logits is dropped: only their bias remains.
    bias = variables["params"]["Dense_2" if name == "mlp" else "Dense_1"]["bias"]
    np.testing.assert_array_equal(found["constant rates"][2], np.tile(bias, (4, 1)))
    for gradient in jax.tree.leaves(found["gradients"]):
        assert np.isfinite(gradient).all() and np.any(gradient != 0.0)


def test_dropout_of_pooled_and_dense_layers() -> None:
    variables = draws.variables(MODELS["cnn"](), IMAGES)
    params, no_dense = variables["params"], CNN(5, blocks=((4,),), dense=(), dropout=1.0)
    alone = draws.variables(no_dense, IMAGES)

    def train(model: linen.Module, variables: Any) -> jax.Array:
        return model.apply(variables, IMAGES, train=True, rngs={"dropout": jax.random.key(0)})

    dense, pooled, last = jax.jit(
        lambda: (
            train(CNN(5, **SMALL_CNN, dense_dropout=1.0), variables),
            train(CNN(5, **SMALL_CNN, dropout=1.0, dense_dropout=0.0), variables),
            train(no_dense, alone),
        )
    )()
    np.testing.assert_array_equal(dense, np.tile(params["Dense_1"]["bias"], (4, 1)))
    # What is pooled is dropped, and the dense layer before the logits has its bias, which is positive.
    expected = params["Dense_0"]["bias"] @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    np.testing.assert_allclose(pooled, np.tile(expected, (4, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(last, np.tile(alone["params"]["Dense_0"]["bias"], (4, 1)))


def test_lists_become_tuples() -> None:
    assert MLP([4, np.int64(2)]).features == (4, 2)
    assert hash(MLP([4, 2])) == hash(MLP((4, 2))) and MLP((4, 2)).activation is linen.relu
    assert CNN(2, blocks=[[4], [8]], dense=[3]) == CNN(2, blocks=((4,), (8,)), dense=(3,))
    lists = {"pool_strides": [1, 2], "pooling": [max_pool, avg_pool], "padding": ["SAME"]}
    tuples = {name: tuple(value) for name, value in lists.items()}
    assert CNN(2, **lists) == CNN(2, **tuples) and hash(CNN(2, **lists)) == hash(CNN(2, **tuples))


TOO_SMALL: list[tuple[dict[str, Any], tuple[int, int], str]] = [
    # 8 -> 4 -> 2 -> 1 -> 0; two valid convolutions of 3: 5 -> 1, pooled by 2: 0.
    ({"blocks": ((2,),) * 4}, (8, 9), "images of 8x9 .* after block 4 of 4"),
    ({"blocks": ((2, 2),), "padding": "VALID"}, (9, 5), "9x5 .* after block 1 of 1"),
    ({"blocks": ((2, 2),), "padding": "VALID"}, (5, 9), "5x9 .* after block 1 of 1"),
    # One valid convolution of two: 4 -> 2, too small for a window of 3.
    ({"blocks": ((2, 2),), "padding": ("SAME", "VALID"), "pool": (3, 3), "pool_strides": (1, 1)}, (4, 9), "4x9"),
]


def test_images_too_small_for_the_blocks() -> None:
    for options, size, words in TOO_SMALL:
        with pytest.raises(ConfigError, match=words):
            jax.eval_shape(CNN(2, **options).init, jax.random.key(0), jnp.ones((1, *size, 1)))
