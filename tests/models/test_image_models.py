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
from tests.models.test_text_models import dense

near = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
GRAY, IMAGES, TINY = draws.normal(1, 4, 16, 10, 1), draws.normal(1, 2, 17, 12, 3), draws.normal(0, 2, 5, 4, 3)
TIMES = np.array([0, 30])
EVALUATED_NORM = linen.BatchNorm(use_running_average=True, epsilon=1e-5)


def conv(p: Any, x: jax.Array, strides: int = 1, **options: Any) -> jax.Array:
    """A convolution of odd size that pads both sides alike, with or without a bias."""
    *window, _, features = p["kernel"].shape
    padding = [(size // 2, size // 2) for size in window]
    layer = linen.Conv(features, window, (strides, strides), padding=padding, use_bias="bias" in p, **options)
    return layer.apply({"params": p}, x)


def numbered(variables: Any, name: str) -> Any:
    """The variables of one layer, of each collection."""
    return {kind: tree[name] for kind, tree in variables.items() if name in tree}


def norm(variables: Any, number: int, x: jax.Array) -> jax.Array:
    return EVALUATED_NORM.apply(numbered(variables, f"BatchNorm_{number}"), x)


def conv_norm(variables: Any, number: int, x: jax.Array, strides: int = 1, **options: Any) -> jax.Array:
    return norm(variables, number, conv(variables["params"][f"Conv_{number}"], x, strides, **options))


def flatten(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), -1)


def pooled(pool: Callable[..., jax.Array], *window: tuple[int, int]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: pool(x, *window)


def in_order(*layers: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """Layers of Flax one after another, with the parameters of the model's ``Conv_0``, …, ``Dense_0``, …."""

    def reference(variables: Any, x: jax.Array) -> jax.Array:
        counts = {"Conv": 0, "Dense": 0}
        for layer in layers:
            kind = type(layer).__name__
            if kind in counts:
                x = layer.apply({"params": variables["params"][f"{kind}_{counts[kind]}"]}, x)
                counts[kind] += 1
            else:
                x = layer(x)
        return x

    return reference


def conv3(features: int, padding: str = "SAME") -> linen.Module:
    return linen.Conv(features, (3, 3), padding=padding)


def mobilenet(variables: Any, x: jax.Array) -> jax.Array:
    x = linen.relu6(conv_norm(variables, 0, x, 2))
    for number, (hidden, strides, added) in enumerate([(4, 1, True), (8, 2, False), (8, 1, True), (8, 1, False)]):
        block, y, first = numbered(variables, f"InvertedResidual_{number}"), x, 0
        if hidden > 4:
            y, first = linen.relu6(conv_norm(block, 0, x)), 1
        y = linen.relu6(conv_norm(block, first, y, strides, feature_group_count=hidden))
        y = conv_norm(block, first + 1, y)
        x = x + y if added else y
    return dense(variables["params"]["Dense_0"], linen.relu6(conv_norm(variables, 1, x)).mean(axis=(1, 2)))


def wide(variables: Any, x: jax.Array) -> jax.Array:
    """One block of 16, 32 and 64 channels, normalized before each convolution."""
    params = variables["params"]
    x = conv(params["Conv_0"], x)
    for number, strides in enumerate((1, 2, 2)):
        block = numbered(variables, f"WideBlock_{number}")
        kernels = block["params"]
        start = linen.relu(norm(block, 0, x))
        y = linen.relu(norm(block, 1, conv(kernels["Conv_0"], start, strides)))
        x = conv(kernels["Conv_1"], y) + (conv(kernels["Conv_2"], start, strides) if number else x)
    return dense(params["Dense_0"], linen.relu(norm(variables, 0, x)).mean(axis=(1, 2)))


def unet(normalize: linen.Module, variables: Any, x: jax.Array) -> jax.Array:
    """A U-Net of two levels of 4 and 8 channels, by layers in the order of their numbers."""
    params = variables["params"]["model"]

    def normed(p: Any, x: jax.Array) -> jax.Array:
        return linen.silu(normalize.apply({"params": p}, x))

    def block(number: int, x: jax.Array) -> jax.Array:
        p = params[f"UNetBlock_{number}"]
        first, second = (name for name in sorted(p) if "Norm" in name)
        y = conv(p["Conv_0"], normed(p[first], x)) + dense(p["Dense_0"], linen.silu(embedded))[:, None, None]
        y = conv(p["Conv_1"], normed(p[second], y))
        return y + (conv(p["Conv_2"], x) if "Conv_2" in p else x)

    angles = TIMES[:, None] * jnp.array([[1.0, 0.01]])  # 10,000 ** -(0, 1/2)
    embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    embedded = dense(params["Dense_1"], linen.silu(dense(params["Dense_0"], embedded)))
    stem = conv(params["Conv_0"], x)
    top = block(0, stem)
    halved = linen.Conv(8, (3, 3), 2)  # padded at the end alone where a side is even
    down = halved.apply({"params": params["Conv_1"]}, top)
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


TABLE = {
    "numbers": draws.normal(2, 6, 3),
    "categories": np.int32([[0, 1], [3, 0], [1, 1], [2, 0], [0, 0], [3, 1]]),
}


def table(variables: Any, inputs: Any) -> jax.Array:
    params, parts = variables["params"], []
    for column in range(3):  # each number's own periodic features and layer
        angles = 2 * np.pi * inputs["numbers"][:, column, None] * params["frequencies"][column][None]
        own = {name: leaf[column] for name, leaf in params["Einsum_0"].items()}
        parts.append(linen.relu(dense(own, jnp.hstack([jnp.sin(angles), jnp.cos(angles)]))))
    parts += [params["Embed_0"]["embedding"][first + inputs["categories"][:, i]] for i, first in enumerate((0, 4))]
    return dense(params["MLP_0"]["Dense_0"], jnp.hstack(parts))


RELU, HALVED = linen.relu, pooled(linen.max_pool, (2, 2), (2, 2))
OVERLAPPING = {"pool": (3, 2), "pool_strides": (2, 1), "pooling": (max_pool, avg_pool), "padding": ("VALID", "SAME")}
# Without the first convolution; halved, added in its second block; another number of channels.
STAGES = ((1, 4, 1, 1), (2, 4, 2, 2), (2, 3, 1, 1))
TINY_UNET = UNet(2, features=4, multipliers=(1, 2), num_groups=2)
PERIODIC: dict[str, Any] = {"embedding_features": 5, "frequencies": 2, "frequency_scale": 1.0}
# A model, its inputs, and its outputs by layers of Flax.
CASES: dict[str, tuple[linen.Module, Any, Callable[[Any, Any], jax.Array]]] = {
    "MLP": (MLP((3, 9)), GRAY, in_order(flatten, linen.Dense(3), RELU, linen.Dense(9))),
    "CNN": (
        CNN(5, blocks=((4,), (6, 6)), dense=(8,)),
        GRAY,
        in_order(
            *(conv3(4), RELU, HALVED, conv3(6), RELU, conv3(6), RELU, HALVED),
            *(flatten, linen.Dense(8), RELU, linen.Dense(5)),
        ),
    ),
    # 14x8 pooled by 3x2 in steps of 2 and 1 is 6x7, then of 4x5 it is 1x4.
    "CNN, one kind of pooling per block, one padding per convolution": (
        CNN(5, blocks=((4, 6), (6, 6)), dense=(), **OVERLAPPING),
        GRAY,
        in_order(
            *(conv3(4, "VALID"), RELU, conv3(6), RELU, pooled(linen.max_pool, (3, 2), (2, 1))),
            *(conv3(6, "VALID"), RELU, conv3(6), RELU, pooled(linen.avg_pool, (3, 2), (2, 1))),
            *(flatten, linen.Dense(5)),
        ),
    ),
    "MobileNetV2": (MobileNetV2(5, stages=STAGES, features=4, last_features=6), IMAGES, mobilenet),
    "WideResNet": (WideResNet(5, depth=10, width=1), IMAGES, wide),
    "UNet": (WithTime(TINY_UNET), TINY, partial(unet, linen.GroupNorm(2))),
    "UNet of layer norms": (WithTime(TINY_UNET.clone(num_groups=None)), TINY, partial(unet, linen.LayerNorm())),
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
