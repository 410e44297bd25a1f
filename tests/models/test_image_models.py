"""Models of images and tables: logits by layers of Flax, sizes, attention; VAE's mean and samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import CNN, MLP, VAE, MobileNetV2, ResNet, TableMLP, UNet, WideResNet
from jaxnn.nn import avg_pool, max_pool
from tests import draws
from tests.models.test_text_models import Layers

near = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
GRAY, IMAGES, TINY = draws.normal(1, 4, 16, 10, 1), draws.normal(1, 2, 17, 12, 3), draws.normal(0, 2, 5, 4, 3)
TIMES = np.array([0, 30])


def conv(x: jax.Array, features: int, size: int = 3, strides: int = 1, **options: Any) -> jax.Array:
    """A convolution of odd size that pads both sides alike."""
    return linen.Conv(features, (size, size), strides, padding=size // 2, **options)(x)


def norm(x: jax.Array) -> jax.Array:
    return linen.BatchNorm(use_running_average=True)(x)


def conv_norm(x: jax.Array, *sizes: int, **options: Any) -> jax.Array:
    return norm(conv(x, *sizes, use_bias=False, **options))


def feedforward(blocks: Any, units: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Blocks of a pooling and the features and padding of each convolution before it; then dense layers."""
    for pool, *convolutions in blocks:
        for features, padding in convolutions:
            x = linen.relu(linen.Conv(features, (3, 3), padding=padding)(x))
        x = pool(x)
    x = x.reshape(len(x), -1)
    for hidden in units[:-1]:
        x = linen.relu(linen.Dense(hidden)(x))
    return linen.Dense(units[-1])(x)


def mobilenet(x: jax.Array) -> jax.Array:
    def block(hidden: int, features: int, strides: int, x: jax.Array) -> jax.Array:
        y = linen.relu6(conv_norm(x, hidden, 1)) if hidden > 4 else x
        y = linen.relu6(conv_norm(y, hidden, 3, strides, feature_group_count=hidden))
        y = conv_norm(y, features, 1)
        return x + y if x.shape == y.shape else y

    x = linen.relu6(conv_norm(x, 4, 3, 2))
    for number, sizes in enumerate([(4, 4, 1), (8, 4, 2), (8, 4, 1), (8, 3, 1)]):
        x = Layers(partial(block, *sizes), name=f"InvertedResidual_{number}")(x)
    x = linen.relu6(conv_norm(x, 6, 1))
    return linen.Dense(5)(x.mean(axis=(1, 2)))


def wide(x: jax.Array) -> jax.Array:
    """One block of 16, 32 and 64 channels, normalized before each convolution."""
    plain = partial(conv, use_bias=False)

    def block(features: int, strides: int, x: jax.Array) -> jax.Array:
        start = linen.relu(norm(x))
        y = linen.relu(norm(plain(start, features, 3, strides)))
        y = plain(y, features)
        return y + (x if x.shape == y.shape else plain(start, features, 1, strides))

    x = plain(x, 16)
    for number, sizes in enumerate([(16, 1), (32, 2), (64, 2)]):
        x = Layers(partial(block, *sizes), name=f"WideBlock_{number}")(x)
    return linen.Dense(5)(linen.relu(norm(x)).mean(axis=(1, 2)))


def unet(normalize: Callable[[], linen.Module], x: jax.Array) -> jax.Array:
    """A U-Net of two levels of 4 and 8 channels."""

    def normed(x: jax.Array) -> jax.Array:
        return linen.silu(normalize()(x))

    def block(number: int, features: int, *parts: jax.Array) -> jax.Array:
        def layers(x: jax.Array) -> jax.Array:
            y = conv(normed(x), features) + linen.Dense(features)(linen.silu(embedded))[:, None, None]
            y = conv(normed(y), features)
            return y + (x if x.shape == y.shape else conv(x, features, 1))

        return Layers(layers, name=f"UNetBlock_{number}")(jnp.concatenate(parts, -1))

    angles = TIMES[:, None] * jnp.array([[1.0, 0.01]])  # 10,000 ** -(0, 1/2)
    embedded = linen.Dense(16)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1))
    embedded = linen.Dense(16)(linen.silu(embedded))
    stem = conv(x, 4)
    top = block(0, 4, stem)
    down = linen.Conv(8, (3, 3), 2)(top)  # padded at the end alone where a side is even
    low = block(1, 8, down)
    x = block(3, 8, block(2, 8, low))
    x = block(5, 8, block(4, 8, x, low), down)
    x = conv(jax.image.resize(x, (2, 6, 4, 8), "nearest")[:, :5], 8)  # 5 -> 3 -> 6, cut to 5
    return conv(normed(block(7, 4, block(6, 4, x, top), stem)), 2)


class WithTime(linen.Module):
    """So that its parameters include those of the time."""

    model: UNet

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.model(x, time=TIMES)


TABLE = {
    "numbers": draws.normal(2, 6, 3),
    "categories": np.int32([[0, 1], [3, 0], [1, 1], [2, 0], [0, 0], [3, 1]]),
}


def table(variables: Any, inputs: Any) -> jax.Array:
    params, parts = variables["params"], []
    for column in range(3):  # each number's own periodic features and layer
        angles = 2 * np.pi * inputs["numbers"][:, column, None] * params["frequencies"][column][None]
        own = {"params": {name: leaf[column] for name, leaf in params["Einsum_0"].items()}}
        parts.append(linen.relu(linen.Dense(5).apply(own, jnp.hstack([jnp.sin(angles), jnp.cos(angles)]))))
    parts += [params["Embed_0"]["embedding"][first + inputs["categories"][:, i]] for i, first in enumerate((0, 4))]
    return linen.Dense(3).apply({"params": params["MLP_0"]["Dense_0"]}, jnp.hstack(parts))


def unet_of(normalize: Callable[[], linen.Module]) -> Callable[..., Any]:
    return Layers(lambda x: Layers(partial(unet, normalize), name="model")(x)).apply


def pooled(pool: Callable[..., jax.Array], *window: tuple[int, int]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: pool(x, *window)


HALVED = pooled(linen.max_pool, (2, 2), (2, 2))
OVERLAPPING = {"pool": (3, 2), "pool_strides": (2, 1), "pooling": (max_pool, avg_pool), "padding": ("VALID", "SAME")}
# 14x8 pooled by 3x2 in steps of 2 and 1 is 6x7, then of 4x5 it is 1x4.
OVERLAPPED = [
    (pooled(pool, (3, 2), (2, 1)), (features, "VALID"), (6, "SAME"))
    for pool, features in ((linen.max_pool, 4), (linen.avg_pool, 6))
]
# Without the first convolution; halved, added in its second block; another number of channels.
STAGES = ((1, 4, 1, 1), (2, 4, 2, 2), (2, 3, 1, 1))
TINY_UNET = UNet(2, features=4, multipliers=(1, 2), num_groups=2)
PERIODIC: dict[str, Any] = {"embedding_features": 5, "frequencies": 2, "frequency_scale": 1.0}
# A model, its inputs, and its outputs by layers of Flax.
CASES: dict[str, tuple[linen.Module, Any, Callable[[Any, Any], jax.Array]]] = {
    "MLP": (MLP((3, 9)), GRAY, Layers(partial(feedforward, (), (3, 9))).apply),
    "CNN": (
        CNN(5, blocks=((4,), (6, 6)), dense=(8,)),
        GRAY,
        Layers(partial(feedforward, [(HALVED, (4, "SAME")), (HALVED, *[(6, "SAME")] * 2)], (8, 5))).apply,
    ),
    "CNN, one kind of pooling per block, one padding per convolution": (
        CNN(5, blocks=((4, 6), (6, 6)), dense=(), **OVERLAPPING),
        GRAY,
        Layers(partial(feedforward, OVERLAPPED, (5,))).apply,
    ),
    "MobileNetV2": (MobileNetV2(5, stages=STAGES, features=4, last_features=6), IMAGES, Layers(mobilenet).apply),
    "WideResNet": (WideResNet(5, depth=10, width=1), IMAGES, Layers(wide).apply),
    "UNet": (WithTime(TINY_UNET), TINY, unet_of(partial(linen.GroupNorm, 2))),
    "UNet of layer norms": (WithTime(TINY_UNET.clone(num_groups=None)), TINY, unet_of(linen.LayerNorm)),
    "TableMLP": (TableMLP((3,), num_categories=(4, 2), **PERIODIC), TABLE, table),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("norms" in name or name == "UNet")) for name in CASES]
)
def test_outputs_equal_those_of_flax_layers(name):
    model, inputs, reference = CASES[name]
    variables = draws.variables(model, inputs)
    both = jax.jit(lambda variables, x: (model.apply(variables, x), reference(variables, x)))
    found, expected = jax.device_get(both(variables, inputs))
    assert found.shape == expected.shape and np.ptp(expected, axis=0).min() > 1e-4, "examples differ"
    assert np.any(expected < 0.0)  # no activation at the end
    near(found, expected, rtol=1e-4, atol=1e-5)


def test_mobilenet_halves_an_image_five_times():
    # 224 -> 7: the mean of one channel over 7x7 positions.
    init = partial(MobileNetV2().init_with_output, jax.random.key(0), capture_intermediates=True)
    logits, state = jax.eval_shape(init, jnp.ones((1, 224, 224, 3)))
    heights = {leaf.shape[1] for leaf in jax.tree.leaves(state["intermediates"]) if leaf.ndim == 4}
    assert heights == {7, 14, 28, 56, 112} and logits.shape == (1, 1000)


def test_a_block_is_any_module_with_the_same_call():
    class Plain(linen.Module):
        features: int
        strides: int
        project: bool

        @linen.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return linen.Conv(self.features, (1, 1), (self.strides, self.strides))(x)

    model = ResNet(3, num_blocks=(1, 2), features=4, block=Plain)
    params = jax.eval_shape(model.init, jax.random.key(0), IMAGES)["params"]
    assert params["Plain_2"]["Conv_0"]["kernel"].shape == (1, 1, 8, 8)


def test_lists_become_tuples():
    assert MLP([4, np.int64(2)]).features == (4, 2)
    lists = CNN(2, blocks=[[4], [8]], pool_strides=[1, 2], pooling=[max_pool, avg_pool], padding=["SAME"])
    tuples = CNN(2, blocks=((4,), (8,)), pool_strides=(1, 2), pooling=(max_pool, avg_pool), padding=("SAME",))
    assert lists == tuples and hash(lists) == hash(tuples)


@pytest.mark.slow
def test_unet_attention_reaches_all_pixels():
    # Twelve convolutions alone reach twelve pixels; the layer norm is of each pixel.
    local = UNet(1, features=2, multipliers=(1,), num_groups=None)
    models, row = (local, local.clone(num_heads=1)), draws.normal(0, 1, 1, 32, 1)
    variables = [draws.variables(model, row) for model in models]

    @jax.jit
    def slopes_of_the_first_pixel(variables: Any) -> Any:
        firsts = [lambda x, m=m, v=v: m.apply(v, x)[0, 0, 0, 0] for m, v in zip(models, variables, strict=True)]
        return [jax.grad(first)(row)[0, 0, 24:, 0] for first in firsts]

    by_convolutions, by_attention = jax.device_get(slopes_of_the_first_pixel(variables))
    assert not by_convolutions.any() and by_attention.all()


def test_vae_samples_in_training_or_with_a_key_else_takes_the_mean():
    # One linear layer each: means, log variances, and their sample as it is.
    model = VAE(MLP((4,)), MLP((2,)), shape=(1, 2))
    kernel = np.float32([[1.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    params = {
        "encoder": {"Dense_0": {"kernel": kernel, "bias": np.float32([0.0, 0.0, 0.0, 2.0])}},
        "decoder": {"Dense_0": {"kernel": np.eye(2, dtype=np.float32), "bias": np.zeros(2, np.float32)}},
    }

    @jax.jit
    def compute(variables: Any, x: jax.Array) -> Any:
        rngs = {"latents": jax.random.key(0)}
        drawn = [model.apply(variables, x, train=train, rngs=rngs).reconstruction[:, 0] for train in (True, False)]
        mean, _ = model.apply(variables, x[:1], method="encode")
        return model.apply(variables, x), drawn, model.apply(variables, mean, method="decode")

    inputs = np.tile(np.float32([3.0, -1.0]), (10_000, 1))
    evaluated, (drawn, again), decoded = jax.device_get(compute({"params": params}, inputs))
    assert evaluated.reconstruction.shape == (10_000, 1, 2)
    near(evaluated.reconstruction[0, 0], [3, 5])
    near(evaluated.log_variance[0], [0, 2])
    near(again, drawn)
    assert np.mean(drawn, axis=0) == pytest.approx([3, 5], abs=0.1)
    assert np.std(drawn, axis=0) == pytest.approx([1, np.e], rel=0.03)
    near(decoded, evaluated.reconstruction[:1])
