"""Networks for photographs: the same layers of Flax, statistics, names, sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import BottleneckResNet, MobileNetV2
from tests import draws

KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(1), (2, 17, 12, 3))
RESNET = BottleneckResNet(5, num_blocks=(1, 2), features=2)
# Without the first convolution; halved, added in its second block; another number of channels.
STAGES = ((1, 4, 1, 1), (2, 4, 2, 2), (2, 3, 1, 1))
MOBILENET = MobileNetV2(5, stages=STAGES, features=4, last_features=6)
MODELS = {"resnet": RESNET, "mobilenet": MOBILENET}


class Reference:
    """Layers of Flax, which take the variables of a model one after another, block by block."""

    def __init__(self, variables: Any, block: str | None = None) -> None:
        self.variables = {kind: tree[block] if block else tree for kind, tree in variables.items()}
        self.count = 0

    def __call__(self, x: jax.Array, features: int, size: int, strides: int = 1, groups: int = 1) -> jax.Array:
        name, self.count = f"_{self.count}", self.count + 1
        half = size // 2
        window = {"strides": (strides, strides), "padding": ((half, half), (half, half))}
        conv = linen.Conv(features, (size, size), **window, feature_group_count=groups, use_bias=False)
        norm = linen.BatchNorm(use_running_average=True, epsilon=1e-5)
        x = conv.apply({"params": self.variables["params"][f"Conv{name}"]}, x)
        return norm.apply({kind: tree[f"BatchNorm{name}"] for kind, tree in self.variables.items()}, x)

    def logits(self, x: jax.Array) -> jax.Array:
        return linen.Dense(5).apply({"params": self.variables["params"]["Dense_0"]}, x.mean(axis=(1, 2)))


def resnet_reference(variables: Any, x: jax.Array) -> jax.Array:
    whole = Reference(variables)
    x = linen.relu(whole(x, 2, 7, 2))
    x = linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
    for number, (features, strides, projected) in enumerate([(2, 1, True), (4, 2, True), (4, 1, False)]):
        block = Reference(variables, f"Bottleneck_{number}")
        y = linen.relu(block(x, features, 1))
        y = linen.relu(block(y, features, 3, strides))
        y = block(y, 4 * features, 1)
        x = linen.relu(y + (block(x, 4 * features, 1, strides) if projected else x))
    return whole.logits(x)


def mobilenet_reference(variables: Any, x: jax.Array) -> jax.Array:
    whole = Reference(variables)
    x = linen.relu6(whole(x, 4, 3, 2))
    for number, (hidden, features, strides, added) in enumerate(
        [(4, 4, 1, True), (8, 4, 2, False), (8, 4, 1, True), (8, 3, 1, False)]
    ):
        block = Reference(variables, f"InvertedResidual_{number}")
        y = x if hidden == 4 else linen.relu6(block(x, hidden, 1))
        y = linen.relu6(block(y, hidden, 3, strides, groups=hidden))
        y = block(y, features, 1)
        x = x + y if added else y
    return whole.logits(linen.relu6(whole(x, 6, 1)))


@pytest.mark.parametrize(("name", "reference"), [("resnet", resnet_reference), ("mobilenet", mobilenet_reference)])
def test_it_equals_the_same_layers_of_flax(name: str, reference: Callable[..., jax.Array]) -> None:
    variables = draws.variables(MODELS[name], IMAGES)
    got, expected = jax.jit(MODELS[name].apply)(variables, IMAGES), jax.jit(reference)(variables, IMAGES)
    assert got.shape == (2, 5)
    assert np.ptp(expected, axis=0).min() > 1e-4, "the images are told apart"
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [BottleneckResNet, MobileNetV2])
def test_an_image_is_halved_five_times(make: Callable[[], linen.Module]) -> None:
    # 224 -> 7: the mean of one channel over 7x7 positions.
    state = jax.eval_shape(
        lambda x: make().init_with_output(KEY, x, capture_intermediates=True), jnp.ones((1, 224, 224, 3))
    )
    shapes = [leaf.shape[1:3] for leaf in jax.tree.leaves(state[1]["intermediates"]) if leaf.ndim == 4]
    assert sorted({height for height, _ in shapes}) == [7, 14, 28, 56, 112]
    assert state[0].shape == (1, 1000)


def test_dropout_is_before_the_logits_in_training_only() -> None:
    variables, dropped = draws.variables(MOBILENET, IMAGES), MOBILENET.clone(dropout=1.0)
    train = partial(dropped.apply, train=True, rngs={"dropout": KEY}, mutable=["batch_stats"])
    got, _ = jax.jit(train)(variables, IMAGES)
    np.testing.assert_array_equal(got, np.tile(variables["params"]["Dense_0"]["bias"], (2, 1)))
    evaluated = (jax.jit(model.apply)(variables, IMAGES) for model in (dropped, MOBILENET))
    np.testing.assert_array_equal(*evaluated)
