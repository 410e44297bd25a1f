"""ResNet, WideResNet and MobileNetV2: the same layers of Flax, how often an image is halved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import Bottleneck, MobileNetV2, ResNet, WideResNet
from tests import draws

IMAGES = draws.normal(1, 2, 17, 12, 3)
SIZES = {"num_blocks": (1, 2), "features": 4}
# Without the first convolution; halved, added in its second block; another number of channels.
STAGES = ((1, 4, 1, 1), (2, 4, 2, 2), (2, 3, 1, 1))
MOBILENET = MobileNetV2(5, stages=STAGES, features=4, last_features=6)


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


def resnet(variables: Any, x: jax.Array, model: ResNet) -> jax.Array:
    """Of one block, then two of twice the channels, of which the first halves the image."""
    network, is_bottleneck = Reference(variables), model.block is Bottleneck
    if model.stem == "imagenet":
        x = linen.max_pool(linen.relu(network(x, 4, 7, 2)), (3, 3), (2, 2), ((1, 1), (1, 1)))
    else:
        x = linen.relu(network(x, 4, 3))
    for number, (features, strides) in enumerate([(4, 1), (8, 2), (8, 1)]):
        block = Reference(variables, f"{model.block.__name__}_{number}")
        if is_bottleneck:
            y = linen.relu(block(x, features, 1))
            y = linen.relu(block(y, features, 3, strides))
            y = block(y, 4 * features, 1)
        else:
            y = block(linen.relu(block(x, features, 3, strides)), features, 3)
        changes = number == 1 or is_bottleneck and number == 0
        if changes and model.project:
            x = block(x, y.shape[-1], 1, strides)
        elif changes:
            skipped = x[:, ::strides, ::strides]
            x = jnp.concatenate([skipped, jnp.zeros((*skipped.shape[:3], y.shape[-1] - x.shape[-1]))], axis=-1)
        x = linen.relu(x + y)
    return network.logits(x)


def mobilenet(variables: Any, x: jax.Array, _: MobileNetV2) -> jax.Array:
    network = Reference(variables)
    x = linen.relu6(network(x, 4, 3, 2))
    for number, (hidden, features, strides, added) in enumerate(
        [(4, 4, 1, True), (8, 4, 2, False), (8, 4, 1, True), (8, 3, 1, False)]
    ):
        block = Reference(variables, f"InvertedResidual_{number}")
        y = x if hidden == 4 else linen.relu6(block(x, hidden, 1))
        y = linen.relu6(block(y, hidden, 3, strides, groups=hidden))
        y = block(y, features, 1)
        x = x + y if added else y
    return network.logits(linen.relu6(network(x, 6, 1)))


def wide(variables: Any, x: jax.Array, _: WideResNet) -> jax.Array:
    """One block of 16, 32 and 64 channels."""

    def conv(kernel: jax.Array, x: jax.Array, strides: int = 1) -> jax.Array:
        pad = len(kernel) // 2
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        return jax.lax.conv_general_dilated(x, kernel, (strides, strides), [(pad, pad)] * 2, **options)

    def active(trees: Any, number: int, x: jax.Array) -> jax.Array:
        own = {kind: tree[f"BatchNorm_{number}"] for kind, tree in trees.items()}
        return linen.relu(linen.BatchNorm(use_running_average=True, epsilon=1e-5).apply(own, x))

    x = conv(variables["params"]["Conv_0"]["kernel"], x)
    for number, strides in enumerate((1, 2, 2)):
        block = {kind: tree[f"WideBlock_{number}"] for kind, tree in variables.items()}
        kernels = [block["params"][f"Conv_{n}"]["kernel"] for n in range(2 + (number > 0))]
        start = active(block, 0, x)
        y = conv(kernels[1], active(block, 1, conv(kernels[0], start, strides)))
        x = y + (conv(kernels[2], start, strides) if number else x)
    return Reference(variables).logits(active(variables, 0, x))


CASES: dict[str, tuple[Any, Callable[..., jax.Array]]] = {
    "basic blocks": (ResNet(5, **SIZES), resnet),
    "shortcuts padded with zeros": (ResNet(5, **SIZES, project=False), resnet),
    "bottlenecks": (ResNet(5, **SIZES, block=Bottleneck, stem="imagenet"), resnet),
    "wide": (WideResNet(5, depth=10, width=1), wide),
    "mobilenet": (MOBILENET, mobilenet),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_flax_layers(name: str) -> None:
    model, reference = CASES[name]
    variables = draws.variables(model, IMAGES)
    got, expected = jax.jit(lambda x: (model.apply(variables, x), reference(variables, x, model)))(IMAGES)
    assert got.shape == (2, 5)
    assert np.ptp(expected, axis=0).min() > 1e-4, "the outputs differ between images"
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_mobilenet_halves_an_image_five_times() -> None:
    # 224 -> 7: the mean of one channel over 7x7 positions.
    init = partial(MobileNetV2().init_with_output, jax.random.key(0), capture_intermediates=True)
    logits, state = jax.eval_shape(init, jnp.ones((1, 224, 224, 3)))
    heights = {leaf.shape[1] for leaf in jax.tree.leaves(state["intermediates"]) if leaf.ndim == 4}
    assert heights == {7, 14, 28, 56, 112} and logits.shape == (1, 1000)


def test_a_block_is_any_module_with_the_same_call() -> None:
    class Plain(linen.Module):
        features: int
        strides: int
        project: bool

        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return linen.Conv(self.features, (1, 1), (self.strides, self.strides))(x)

    params = jax.eval_shape(ResNet(3, **SIZES, block=Plain).init, jax.random.key(0), IMAGES)["params"]
    assert params["Plain_2"]["Conv_0"]["kernel"].shape == (1, 1, 8, 8)
