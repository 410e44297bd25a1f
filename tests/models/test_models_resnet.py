"""ResNet: parameters by hand, the same layers of Flax, statistics, sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import ResNet
from tests import draws

KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(1), (3, 7, 6, 2))
SMALL = ResNet(5, num_blocks=(1, 2), features=4)
PADDED = ResNet(5, num_blocks=(1, 2), features=4, project=False)


def test_parameters_have_the_names_that_are_documented() -> None:
    variables = jax.eval_shape(SMALL.init, KEY, IMAGES)
    names = {"Conv_0", "BatchNorm_0", "Dense_0", *(f"ResNetBlock_{index}" for index in range(3))}
    assert set(variables["params"]) == names
    plain = {f"{layer}_{index}" for layer in ("Conv", "BatchNorm") for index in range(2)}
    assert set(variables["params"]["ResNetBlock_0"]) == set(variables["params"]["ResNetBlock_2"]) == plain
    assert set(variables["params"]["ResNetBlock_1"]) == plain | {"Conv_2", "BatchNorm_2"}
    assert set(variables["batch_stats"]) == names - {"Conv_0", "Dense_0"}
    padded = jax.eval_shape(PADDED.init, KEY, IMAGES)["params"]
    assert all(set(padded[f"ResNetBlock_{index}"]) == plain for index in range(3))


def flax_layer(layer: linen.Module, variables: Any, *names: str) -> Callable[[jax.Array], jax.Array]:
    """``layer`` with the parameters and statistics found under ``names``."""
    own = {}
    for collection, tree in variables.items():
        for name in names:
            tree = tree.get(name, {})
        own[collection] = tree
    return lambda x: layer.apply(own, x)


def reference(variables: Any, x: jax.Array, project: bool) -> jax.Array:
    """``SMALL`` or ``PADDED`` in evaluation, written with Flax's layers."""

    def conv_norm(x: jax.Array, index: int, strides: int, *block: str, size: int = 3, features: int = 4) -> jax.Array:
        padding = [(size // 2, size // 2)] * 2
        conv = linen.Conv(features, (size, size), (strides, strides), padding=padding, use_bias=False)
        norm = linen.BatchNorm(use_running_average=True, epsilon=1e-5)
        x = flax_layer(conv, variables, *block, f"Conv_{index}")(x)
        return flax_layer(norm, variables, *block, f"BatchNorm_{index}")(x)

    x = linen.relu(conv_norm(x, 0, 1))
    for number, (features, strides) in enumerate([(4, 1), (8, 2), (8, 1)]):
        block = f"ResNetBlock_{number}"
        y = linen.relu(conv_norm(x, 0, strides, block, features=features))
        y = conv_norm(y, 1, 1, block, features=features)
        if strides == 2 and project:
            x = conv_norm(x, 2, strides, block, size=1, features=features)
        elif strides == 2:
            # Every second position of four channels, and four of zeros.
            x = jnp.concatenate([x[:, ::2, ::2], jnp.zeros_like(x[:, ::2, ::2])], axis=-1)
        x = linen.relu(x + y)
    return flax_layer(linen.Dense(5), variables, "Dense_0")(x.mean(axis=(1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("model", [SMALL, PADDED])
def test_it_equals_the_same_layers_of_flax(model: ResNet) -> None:
    variables = draws.variables(model, IMAGES)
    expected = jax.jit(reference, static_argnums=2)(variables, IMAGES, model.project)
    got = jax.jit(model.apply)(variables, IMAGES)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (2, 5, 4, 1)])
def test_any_size_of_image_passes(shape: tuple[int, ...], project: bool) -> None:
    model = ResNet(4, features=2, project=project)
    outputs, _ = jax.eval_shape(lambda x: model.init_with_output(KEY, x), jnp.ones(shape))
    assert outputs.shape == (shape[0], 4)
