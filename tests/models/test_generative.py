"""U-Net: the same layers of Flax, sizes, time, attention. VAE: the mean in evaluation, a sample in training."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import MLP, VAE, UNet
from tests import draws

near = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
KEY = jax.random.key(0)
IMAGES, TIMES = draws.normal(0, 2, 5, 4, 3), jnp.array([0, 30])


def reference(params: Any, x: jax.Array, time: jax.Array, norm: linen.Module) -> jax.Array:
    """A U-Net of two levels of 4 and 8 channels, by layers of Flax in the order of their numbers."""

    def dense(p: Any, x: jax.Array) -> jax.Array:
        return x @ p["kernel"] + p["bias"][None]

    def conv(p: Any, x: jax.Array, strides: int = 1) -> jax.Array:
        *window, _, features = p["kernel"].shape
        return linen.Conv(features, window, strides).apply({"params": p}, x)

    def normed(p: Any, x: jax.Array) -> jax.Array:
        return linen.silu(norm.apply({"params": p}, x))

    def block(number: int, x: jax.Array) -> jax.Array:
        p = params[f"UNetBlock_{number}"]
        first, second = (name for name in sorted(p) if "Norm" in name)
        y = conv(p["Conv_0"], normed(p[first], x)) + dense(p["Dense_0"], linen.silu(embedded))[:, None, None]
        y = conv(p["Conv_1"], normed(p[second], y))
        return y + (conv(p["Conv_2"], x) if "Conv_2" in p else x)

    angles = time[:, None] * jnp.array([[1.0, 0.01]])  # 10,000 ** -(0, 1/2)
    embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    embedded = dense(params["Dense_1"], linen.silu(dense(params["Dense_0"], embedded)))
    stem = conv(params["Conv_0"], x)
    top = block(0, stem)
    down = conv(params["Conv_1"], top, 2)
    low = block(1, down)
    x = block(3, block(2, low))
    x = block(5, jnp.concatenate([block(4, jnp.concatenate([x, low], -1)), down], -1))
    x = conv(params["Conv_2"], jax.image.resize(x, (2, 6, 4, 8), "nearest")[:, :5])  # 5 -> 3 -> 6, cut to 5
    x = block(7, jnp.concatenate([block(6, jnp.concatenate([x, top], -1)), stem], -1))
    (last,) = (name for name in params if "Norm" in name)
    return conv(params["Conv_3"], normed(params[last], x))


class WithTime(linen.Module):
    """So that its parameters include those of the time."""

    model: UNet

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.model(x, time=TIMES)


@pytest.mark.parametrize("num_groups", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_unet_equals_flax_layers(num_groups: int | None) -> None:
    model = UNet(2, features=4, multipliers=(1, 2), num_groups=num_groups)
    variables = {"params": draws.variables(WithTime(model), IMAGES)["params"]["model"]}
    norm = linen.GroupNorm(2) if num_groups else linen.LayerNorm()
    got, expected, later = jax.jit(
        lambda variables: (
            model.apply(variables, IMAGES, time=TIMES),
            reference(variables["params"], IMAGES, TIMES, norm),
            model.apply(variables, IMAGES, time=TIMES + 1),
        )
    )(variables)
    assert got.shape == (2, 5, 4, 2)
    near(got, expected)
    assert np.abs(got - later).max() > 1e-2


def test_unet_attention_reaches_all_pixels() -> None:
    # Twelve convolutions alone reach twelve pixels; the layer norm is of each pixel.
    model = UNet(1, features=2, multipliers=(1,), num_groups=None)
    row = draws.normal(0, 1, 1, 32, 1)
    for num_heads, reaches in ((None, False), (1, True)):
        net = model.clone(num_heads=num_heads)
        variables = draws.variables(net, row)
        slope = jax.jit(jax.grad(lambda x, net=net, given=variables: net.apply(given, x)[0, 0, 0, 0]))(row)
        assert bool(np.any(slope[0, 0, 24:])) is reaches


def test_vae_samples_in_training_or_with_a_key_else_takes_the_mean() -> None:
    # One linear layer each: means, log variances, and their sample as it is.
    model = VAE(MLP((4,)), MLP((2,)), shape=(1, 2))
    kernel = jnp.array([[1.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    params = {
        "encoder": {"Dense_0": {"kernel": kernel, "bias": jnp.array([0.0, 0.0, 0.0, 2.0])}},
        "decoder": {"Dense_0": {"kernel": jnp.eye(2), "bias": jnp.zeros(2)}},
    }
    x = jnp.tile(jnp.array([3.0, -1.0]), (10_000, 1))
    evaluated = model.apply({"params": params}, x)
    assert evaluated.reconstruction.shape == (10_000, 1, 2)
    near(evaluated.reconstruction[0, 0], [3, 5])
    near(evaluated.log_variance[0], [0, 2])
    drawn = model.apply({"params": params}, x, train=True, rngs={"latents": KEY}).reconstruction[:, 0]
    near(model.apply({"params": params}, x, rngs={"latents": KEY}).reconstruction[:, 0], drawn)
    assert np.mean(drawn, axis=0) == pytest.approx([3, 5], abs=0.1)
    assert np.std(drawn, axis=0) == pytest.approx([1, np.e], rel=0.03)
    mean, _ = model.apply({"params": params}, x[:1], method="encode")
    near(model.apply({"params": params}, mean, method="decode"), evaluated.reconstruction[:1])
