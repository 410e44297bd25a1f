"""Models: shapes, parameter counts by hand, dropout only in training, and bad sizes named."""

from __future__ import annotations

import functools
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

KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
SMALL_CNN = {"blocks": ((4,), (6, 6)), "dense": (8,)}
MODELS: dict[str, Callable[..., linen.Module]] = {
    "mlp": lambda **fields: MLP((16, 12, 5), **fields),
    "cnn": lambda **fields: CNN(5, **SMALL_CNN, **fields),
    "cnn with batch norm": lambda **fields: CNN(5, batch_norm=True, **SMALL_CNN, **fields),
}


def num_params(model: linen.Module, shape: tuple[int, ...]) -> int:
    variables = jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct(shape, jnp.float32))
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


@functools.cache
def init(model: linen.Module) -> Any:
    return model.init(KEY, IMAGES)


def apply(model: linen.Module, variables: Any, x: jax.Array, key: jax.Array | None = None) -> Any:
    """Outputs in training with a key for dropout, or in evaluation without."""
    if key is None:
        return model.apply(variables, x)
    rngs = {"dropout": key}
    return model.apply(variables, x, train=True, rngs=rngs, mutable=["batch_stats"])[0]


def test_mlp_is_dense_relu_dense() -> None:
    model = MLP((3, 9))
    params = init(model)["params"]
    flat = np.asarray(IMAGES).reshape(4, 64)
    hidden = np.maximum(flat @ params["Dense_0"]["kernel"], 0.0)
    expected = hidden @ params["Dense_1"]["kernel"]
    assert np.any(expected < 0.0)  # no activation at the end
    np.testing.assert_allclose(model.apply({"params": params}, IMAGES), expected, rtol=1e-4, atol=1e-6)


def test_cnn_equals_the_same_layers_of_flax() -> None:
    reference = linen.Sequential(
        [
            linen.Conv(4, (3, 3)),
            linen.relu,
            lambda x: linen.max_pool(x, (2, 2), (2, 2)),
            linen.Conv(6, (3, 3)),
            linen.relu,
            linen.Conv(6, (3, 3)),
            linen.relu,
            lambda x: linen.max_pool(x, (2, 2), (2, 2)),
            lambda x: x.reshape(len(x), -1),
            linen.Dense(8),
            linen.relu,
            linen.Dense(5),
        ]
    )
    model = CNN(5, **SMALL_CNN)
    params = init(model)["params"]
    names = {"Conv_0": 0, "Conv_1": 3, "Conv_2": 5, "Dense_0": 9, "Dense_1": 11}
    renamed = {f"layers_{index}": params[name] for name, index in names.items()}
    expected = reference.apply({"params": renamed}, IMAGES)
    np.testing.assert_allclose(model.apply({"params": params}, IMAGES), expected, rtol=1e-4)


def test_pooling_may_overlap_and_differ_from_block_to_block() -> None:
    model = CNN(5, blocks=((4,), (6,)), pool=(3, 2), pool_strides=(2, 1), pooling=(max_pool, avg_pool), dense=())
    reference = linen.Sequential(
        [
            linen.Conv(4, (3, 3)),
            linen.relu,
            lambda x: linen.max_pool(x, (3, 2), (2, 1)),  # 8x8 to 3x7
            linen.Conv(6, (3, 3)),
            linen.relu,
            lambda x: linen.avg_pool(x, (3, 2), (2, 1)),  # to 1x6
            lambda x: x.reshape(len(x), -1),
            linen.Dense(5),
        ]
    )
    assert_equal_to_flax(model, reference, {"Conv_0": 0, "Conv_1": 3, "Dense_0": 7})


def test_each_convolution_of_a_block_may_have_its_padding() -> None:
    model = CNN(5, blocks=((4, 6),), padding=("VALID", "SAME"), dense=())
    reference = linen.Sequential(
        [
            linen.Conv(4, (3, 3), padding="VALID"),
            linen.relu,
            linen.Conv(6, (3, 3), padding="SAME"),
            linen.relu,
            lambda x: linen.max_pool(x, (2, 2), (2, 2)),
            lambda x: x.reshape(len(x), -1),
            linen.Dense(5),
        ]
    )
    assert_equal_to_flax(model, reference, {"Conv_0": 0, "Conv_1": 2, "Dense_0": 6})


def assert_equal_to_flax(model: CNN, reference: linen.Module, names: dict[str, int]) -> None:
    params = init(model)["params"]
    expected = reference.apply({"params": {f"layers_{n}": params[name] for name, n in names.items()}}, IMAGES)
    np.testing.assert_allclose(model.apply({"params": params}, IMAGES), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_finite_and_every_layer_learns(name: str) -> None:
    model, variables = MODELS[name](dropout=0.2), init(MODELS[name]())

    def loss(params: Any) -> jax.Array:
        outputs = apply(model, {**variables, "params": params}, IMAGES, KEY)
        assert outputs.shape == (4, 5)
        return jnp.sum(outputs**2)

    for gradient in jax.tree.leaves(jax.jit(jax.grad(loss))(variables["params"])):
        assert np.isfinite(gradient).all()
        assert np.any(gradient != 0.0)


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_active_in_training_only(name: str) -> None:
    model, without = MODELS[name](dropout=0.5), MODELS[name]()
    variables = init(without)
    evaluated = apply(model, variables, IMAGES)
    assert np.array_equal(evaluated, apply(without, variables, IMAGES))
    first, second = (apply(model, variables, IMAGES, jax.random.key(n)) for n in (1, 2))
    assert not np.array_equal(first, second)
    assert np.array_equal(*(apply(without, variables, IMAGES, jax.random.key(n)) for n in (1, 2)))


@pytest.mark.parametrize("name", MODELS)
def test_a_dropout_rate_may_be_traced_and_vmapped(name: str) -> None:
    variables = init(MODELS[name]())

    def outputs(rate: float | jax.Array) -> jax.Array:
        return apply(MODELS[name](dropout=rate), variables, IMAGES, KEY)

    rates = (0.0, 0.3, 1.0)
    got = jax.jit(jax.vmap(outputs))(jnp.array(rates))
    np.testing.assert_allclose(got, [outputs(rate) for rate in rates], rtol=1e-3, atol=1e-5)


def test_dropout_at_rate_one_leaves_the_last_bias() -> None:
    # Everything before the logits is dropped, so that only their bias remains; they are not.
    for make in MODELS.values():
        model = make(dropout=1.0)
        variables = jax.tree.map(lambda leaf: leaf + 1.0, init(make()))
        assert np.array_equal(apply(model, variables, IMAGES, KEY), np.ones((4, 5)))


def test_dropout_follows_each_pooling() -> None:
    # Without dense layers, dropout of the pooled block alone reaches the logits.
    model = CNN(5, blocks=((4,),), dense=(), dropout=1.0)
    assert not np.any(apply(model, init(model), IMAGES, KEY))


def test_dense_layers_may_have_a_dropout_of_their_own() -> None:
    variables = jax.tree.map(lambda leaf: leaf + 1.0, init(MODELS["cnn"]()))
    last_bias = np.ones((4, 5))
    dense_alone = CNN(5, **SMALL_CNN, dense_dropout=1.0)
    assert np.array_equal(apply(dense_alone, variables, IMAGES, KEY), last_bias)
    # What is pooled is dropped, and the biases of the dense layer before the logits remain: 8 of 1, times kernels.
    pooled_alone = apply(CNN(5, **SMALL_CNN, dropout=1.0, dense_dropout=0.0), variables, IMAGES, KEY)
    np.testing.assert_allclose(pooled_alone[0], 1 + variables["params"]["Dense_1"]["kernel"].sum(0), rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_in_bfloat16_out(name: str) -> None:
    model = MODELS[name](dropout=0.5)
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init(MODELS[name]()))
    assert apply(model, variables, IMAGES.astype(jnp.bfloat16), KEY).dtype == jnp.bfloat16


@pytest.mark.parametrize("make", [lambda: MLP([4, 2]), lambda: CNN(2, blocks=[[4], [4]])])
def test_models_are_values(make: Callable) -> None:
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make().activation is linen.relu


def test_sizes_given_as_lists_become_tuples() -> None:
    assert MLP([4, np.int64(2)]).features == (4, 2)
    assert CNN(2, blocks=[[4], [8]], dense=[3]) == CNN(2, blocks=((4,), (8,)), dense=(3,))
    lists = {"pool_strides": [1, 2], "pooling": [max_pool, avg_pool], "padding": ["SAME"]}
    assert CNN(2, **lists) == CNN(2, **{name: tuple(value) for name, value in lists.items()})


@pytest.mark.parametrize(
    ("model", "shape", "named"),
    [
        # 8 -> 4 -> 2 -> 1 -> 0
        (CNN(2, blocks=((2,),) * 4), (1, 8, 9, 1), "images of 8x9 .* after block 4 of 4"),
        # Two valid convolutions of 3: 5 -> 1, pooled by 2: 0
        (CNN(2, blocks=((2, 2),), padding="VALID"), (1, 9, 5, 1), "9x5 .* after block 1 of 1"),
        (CNN(2, blocks=((2, 2),), padding="VALID"), (1, 5, 9, 1), "5x9 .* after block 1 of 1"),
        # One valid convolution of two: 4 -> 2, of which no 3 can be pooled, whatever the steps
        (CNN(2, blocks=((2, 2),), padding=("SAME", "VALID"), pool=(3, 3), pool_strides=(1, 1)), (1, 4, 9, 1), "4x9"),
    ],
)
def test_images_too_small_are_named(model: CNN, shape: tuple[int, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct(shape, jnp.float32))
