"""Weights of PyTorch by name: logits by PyTorch's definitions of its layers."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.models import GPT, Bottleneck, ResNet, ViT, from_torch
from tests import draws

type Layer = Callable[[str, jax.Array], jax.Array]  # of a name and its input
type Weights = dict[str, Any]  # by the names of a PyTorch state dict
type Shapes = Iterable[tuple[str, tuple[int, ...]]]


def layer_norm(x: jax.Array, scale: Any, bias: Any, epsilon: float = 1e-6) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    unit = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return unit * scale[None, None] + bias[None, None]


def transformer_block(
    x: jax.Array, names: Any, norm: Layer, dense: Layer, heads: int, *, causal: bool = False, approximate: bool = False
) -> jax.Array:
    """A pre-norm block of ``[batch, time, features]`` with layers of six ``names``; GELU may be ``approximate``."""
    norm_1, projection, output, norm_2, first, last = names
    parts = jnp.split(dense(projection, norm(norm_1, x)), 3, axis=-1)
    query, key, value = (part.reshape(*x.shape[:2], heads, -1) for part in parts)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
    x = x + dense(output, attended.reshape(x.shape))
    return x + dense(last, jax.nn.gelu(dense(first, norm(norm_2, x)), approximate=approximate))


def with_bias(shapes: Shapes) -> Shapes:
    """Adds the bias of each weight, as long as its first axis."""
    for name, shape in shapes:
        yield f"{name}weight", shape
        yield f"{name}bias", shape[:1]


def resnet_shapes(model: ResNet) -> Shapes:
    """Shapes by torchvision's names."""
    deep, size = model.block is Bottleneck, 7 if model.stem == "imagenet" else 3
    layers = [("conv1", "bn1", (model.features, 3, size, size))]
    inputs = model.features
    for stage, count in enumerate(model.num_blocks):
        width = model.features * 2**stage
        outputs = 4 * width if deep else width
        for index in range(count):
            block = f"layer{stage + 1}.{index}."
            basic = [(width, inputs, 3, 3), (width, width, 3, 3)]
            bottleneck = [(width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1)]
            for number, shape in enumerate(bottleneck if deep else basic, 1):
                layers.append((f"{block}conv{number}", f"{block}bn{number}", shape))
            if inputs != outputs and model.project:
                layers.append((f"{block}downsample.0", f"{block}downsample.1", (outputs, inputs, 1, 1)))
            inputs = outputs
    yield from with_bias([("fc.", (model.num_classes, inputs))])
    for conv, norm, shape in layers:
        yield f"{conv}.weight", shape
        yield f"{norm}.num_batches_tracked", ()
        for name in ("weight", "bias", "running_mean", "running_var"):
            yield f"{norm}.{name}", shape[:1]


def resnet(w: Weights, model: ResNet, images: jax.Array) -> jax.Array:
    def conv(name: str, norm: str, x: jax.Array, stride: int = 1) -> jax.Array:
        kernel = w[f"{name}.weight"]
        x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), [(kernel.shape[-1] // 2,) * 2] * 2)
        weight, bias, mean, variance = (
            w[f"{norm}.{part}"][None, :, None, None] for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / jnp.sqrt(variance + 1e-5) * weight + bias

    x = images.transpose(0, 3, 1, 2)
    x = jax.nn.relu(conv("conv1", "bn1", x, 2 if model.stem == "imagenet" else 1))
    if model.stem == "imagenet":
        padding = [(0, 0), (0, 0), (1, 1), (1, 1)]
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), padding)
    last, strided = (3, 2) if model.block is Bottleneck else (2, 1)
    for stage, count in enumerate(model.num_blocks, 1):
        for index in range(count):
            block, stride, y = f"layer{stage}.{index}.", 2 if stage > 1 and index == 0 else 1, x
            for number in range(1, last + 1):
                y = conv(f"{block}conv{number}", f"{block}bn{number}", y, stride if number == strided else 1)
                y = y if number == last else jax.nn.relu(y)
            if f"{block}downsample.0.weight" in w:
                x = conv(f"{block}downsample.0", f"{block}downsample.1", x, stride)
            else:
                channels = y.shape[1] - x.shape[1]
                x = jnp.pad(x[:, :, ::stride, ::stride], [(0, 0), (0, channels), (0, 0), (0, 0)])
            x = jax.nn.relu(x + y)
    return x.mean((2, 3)) @ w["fc.weight"].T + w["fc.bias"][None]


# Names of a ViT's arrays outside of blocks, of a block, and in a block: in torchvision, its older files, and timm.
OUTER = ("class_token", "encoder.pos_embedding", "conv_proj.", "encoder.ln.", "heads.head.")
BLOCK = ("ln_1.", "self_attention.in_proj_", "self_attention.out_proj.", "ln_2.")
TORCHVISION = (OUTER, "encoder.layers.encoder_layer_{}.", (*BLOCK, "mlp.0.", "mlp.3."))
OLDER = (*TORCHVISION[:2], (*BLOCK, "mlp.linear_1.", "mlp.linear_2."))
TIMM = (
    ("cls_token", "pos_embed", "patch_embed.proj.", "norm.", "head."),
    "blocks.{}.",
    ("norm1.", "attn.qkv.", "attn.proj.", "norm2.", "mlp.fc1.", "mlp.fc2."),
)


def vit_shapes(model: ViT, names: Any = TORCHVISION) -> Shapes:
    """Shapes by ``names``, for six patches."""
    (token, positions, *layers), stem, block = names
    n, has_token = model.features, model.pooling == "class_token"
    yield positions, (1, 6 + has_token, n)
    if has_token:
        yield token, (1, 1, n)
    yield from with_bias(zip(layers, [(n, 3, model.patch_size, model.patch_size), (n,), (5, n)], strict=True))
    shapes = [(n,), (3 * n, n), (n, n), (n,), (4 * n, n), (n, 4 * n)]
    for number in range(model.num_layers):
        yield from with_bias((stem.format(number) + name, shape) for name, shape in zip(block, shapes, strict=True))


def vit(w: Weights, model: ViT, images: jax.Array) -> jax.Array:
    def norm(name: str, x: jax.Array) -> jax.Array:
        return layer_norm(x, w[f"{name}weight"], w[f"{name}bias"])

    def dense(name: str, x: jax.Array) -> jax.Array:
        return jnp.inner(x, w[f"{name}weight"]) + jnp.expand_dims(w[f"{name}bias"], range(x.ndim - 1))

    token, positions, patches, last, head = OUTER
    size = (model.patch_size, model.patch_size)
    x = jax.lax.conv_general_dilated(images.transpose(0, 3, 1, 2), w[f"{patches}weight"], size, "VALID")
    x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2) + w[f"{patches}bias"][None, None]
    if token in w:
        x = jnp.concatenate([jnp.broadcast_to(w[token], (len(x), 1, model.features)), x], axis=1)
    x = x + w[positions]
    for number in range(model.num_layers):
        names = [TORCHVISION[1].format(number) + name for name in TORCHVISION[2]]
        x = transformer_block(x, names, norm, dense, model.num_heads)
    x = norm(last, x)
    return dense(head, x[:, 0] if token in w else x.mean(1))


GPT_LAYERS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


def gpt2_shapes(model: GPT) -> Shapes:
    """Shapes by Hugging Face's names; masks and a copy of the embeddings are no weights."""
    n = model.features
    yield from {"wte.weight": (model.vocabulary_size, n), "wpe.weight": (model.max_length, n)}.items()
    yield from {"ln_f.weight": (n,), "ln_f.bias": (n,), "h.0.attn.bias": (1,), "lm_head.weight": (1,)}.items()
    shapes = [(n,), (n, 3 * n), (n, n), (n,), (n, 4 * n), (4 * n, n)]
    for index in range(model.num_layers):
        for name, shape in zip(GPT_LAYERS, shapes, strict=True):
            yield from {f"h.{index}.{name}.weight": shape, f"h.{index}.{name}.bias": shape[-1:]}.items()


def gpt2(w: Weights, model: GPT, tokens: jax.Array) -> jax.Array:
    def norm(name: str, x: jax.Array) -> jax.Array:
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], epsilon=1e-5)

    def dense(name: str, x: jax.Array) -> jax.Array:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"][None, None]

    x = w["wte.weight"][tokens] + w["wpe.weight"][None, : tokens.shape[1]]
    for index in range(model.num_layers):
        names = [f"h.{index}.{name}" for name in GPT_LAYERS]
        x = transformer_block(x, names, norm, dense, model.num_heads, causal=True, approximate=True)
    return norm("ln_f", x) @ w["wte.weight"].T


def weights_of(shapes: Shapes) -> dict[str, np.ndarray]:
    """Random weights: vectors are positive, as variances must be."""
    numbers = np.random.default_rng(0)
    return {name: numbers.uniform(-1.0 if len(shape) > 1 else 0.2, 1, shape).astype("f4") for name, shape in shapes}


SIZES: dict[str, Any] = {"num_blocks": (1, 2), "features": 4}
SMALL: dict[str, Any] = {"num_layers": 2, "features": 12, "num_heads": 3}
RESNET, VIT = ResNet(5, **SIZES), ViT(5, **SMALL)
GPT2 = GPT(11, **SMALL, max_length=7, tied=True, epsilon=1e-5)
RESNETS, VITS, GPTS = (resnet_shapes, resnet), (vit_shapes, vit), (gpt2_shapes, gpt2)
IMAGES, TOKENS = draws.normal(1, 2, 17, 12, 3), draws.integers(1, 11, 2, 6)
PATCHES = draws.normal(1, 2, 12, 8, 3)
CASES: dict[str, tuple[Any, tuple[Any, Callable[..., jax.Array]], jax.Array]] = {
    "ResNet of basic blocks": (RESNET, RESNETS, IMAGES),
    "ResNet with shortcuts padded with zeros": (ResNet(5, **SIZES, project=False), RESNETS, IMAGES),
    "ResNet of bottlenecks": (ResNet(5, **SIZES, block=Bottleneck, stem="imagenet"), RESNETS, IMAGES),
    "ViT": (VIT, VITS, PATCHES),
    "ViT, the mean of patches, in a scan": (VIT.clone(pooling="mean", scan=True), VITS, PATCHES),
    "GPT-2": (GPT2, GPTS, TOKENS),
    "GPT-2 in a scan": (GPT2.clone(scan=True, remat=True), GPTS, TOKENS),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("scan" in name)) for name in CASES])
def test_logits_are_those_of_layers_as_pytorch_defines_them(name):
    model, (shapes, reference), inputs = CASES[name]
    weights = weights_of(shapes(model))
    params, model_state = from_torch(model, weights)
    both = jax.jit(lambda variables, w, x: (model.apply(variables, x), reference(w, model, x)))
    found, expected = jax.device_get(both({"params": params, **model_state}, weights, inputs))
    assert np.ptp(expected, axis=0).min() > 1e-4, "the outputs differ between examples"
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_may_have_other_names():
    vits, gpts = (weights_of(shapes) for shapes in (vit_shapes(VIT), gpt2_shapes(GPT2)))
    prefixed = {name if name == "lm_head.weight" else f"transformer.{name}": gpts[name] for name in gpts}
    others = [dict(zip(dict(vit_shapes(VIT, names)), vits.values(), strict=True)) for names in (OLDER, TIMM)]
    for model, weights, renamed in ((VIT, vits, others[0]), (VIT, vits, others[1]), (GPT2, gpts, prefixed)):
        jax.tree.map(np.testing.assert_array_equal, from_torch(model, renamed), from_torch(model, weights))
