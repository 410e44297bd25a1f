"""Weights of PyTorch by name: logits by layers of Flax, whose parameters have the names and axes of PyTorch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import GPT, Bottleneck, ResNet, ViT, from_torch
from tests import draws


class TorchResNet(linen.Module):
    """torchvision's."""

    model: ResNet

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(names: tuple[str, str], x: jax.Array, features: int, size: int, strides: int = 1) -> jax.Array:
            layer = linen.Conv(features, (size, size), strides, padding=size // 2, use_bias=False, name=f"{names[0]}.")
            return linen.BatchNorm(use_running_average=True, name=f"{names[1]}.")(layer(x))

        deep, imagenet = self.model.block is Bottleneck, self.model.stem == "imagenet"
        x = linen.relu(conv(("conv1", "bn1"), x, self.model.features, 7 if imagenet else 3, 2 if imagenet else 1))
        if imagenet:
            x = linen.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, count in enumerate(self.model.num_blocks):
            width = self.model.features * 2**stage
            for index in range(count):
                block, strides, y = f"layer{stage + 1}.{index}.", 2 if stage and not index else 1, x
                sizes = [(width, 1, 1), (width, 3, strides), (4 * width, 1, 1)]
                for number, size in enumerate(sizes if deep else [(width, 3, strides), (width, 3, 1)], 1):
                    y = conv((f"{block}conv{number}", f"{block}bn{number}"), linen.relu(y), *size)
                if x.shape != y.shape and self.model.project:
                    x = conv((f"{block}downsample.0", f"{block}downsample.1"), x, y.shape[-1], 1, strides)
                else:
                    x = jnp.pad(x[:, ::strides, ::strides], [(0, 0)] * 3 + [(0, y.shape[-1] - x.shape[-1])])
                x = linen.relu(x + y)
        return linen.Dense(self.model.num_classes, name="fc.")(x.mean((1, 2)))


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


def pre_norm_block(x: jax.Array, names: Any, heads: int, epsilon: float, **options: Any) -> jax.Array:
    """A transformer's, of six layers; attention is causal and GELU approximate where ``options`` say so."""
    norm_1, projection, output, norm_2, first, last = names
    normed = linen.LayerNorm(epsilon, name=norm_1)(x)
    parts = jnp.split(linen.Dense(3 * x.shape[-1], name=projection)(normed), 3, axis=-1)
    query, key, value = (part.reshape(*x.shape[:2], heads, -1) for part in parts)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=options.get("causal", False))
    x = x + linen.Dense(x.shape[-1], name=output)(attended.reshape(x.shape))
    hidden = linen.Dense(4 * x.shape[-1], name=first)(linen.LayerNorm(epsilon, name=norm_2)(x))
    return x + linen.Dense(x.shape[-1], name=last)(jax.nn.gelu(hidden, options.get("approximate", False)))


class TorchViT(linen.Module):
    """torchvision's."""

    model: ViT

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        token, positions, patches, last, head = OUTER
        n, size, has_token = self.model.features, (self.model.patch_size,) * 2, self.model.pooling == "class_token"
        x = linen.Conv(n, size, size, name=patches)(images).reshape(len(images), -1, n)
        if has_token:
            given = self.param(token, linen.initializers.zeros, (1, 1, n))
            x = jnp.concatenate([jnp.broadcast_to(given, (len(x), 1, n)), x], axis=1)
        x = x + self.param(positions, linen.initializers.zeros, (1, *x.shape[1:]))
        for number in range(self.model.num_layers):
            names = [TORCHVISION[1].format(number) + name for name in TORCHVISION[2]]
            x = pre_norm_block(x, names, self.model.num_heads, 1e-6)
        x = linen.LayerNorm(1e-6, name=last)(x)
        return linen.Dense(self.model.num_classes, name=head)(x[:, 0] if has_token else x.mean(1))


class TorchGPT(linen.Module):
    """GPT-2 of Hugging Face."""

    model: GPT

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        table = linen.Embed(self.model.vocabulary_size, self.model.features, name="wte.")
        places = linen.Embed(self.model.max_length, self.model.features, name="wpe.")
        x = table(tokens) + places(jnp.arange(tokens.shape[1])[None])
        for number in range(self.model.num_layers):
            layers = [f"h.{number}.{name}." for name in names]
            x = pre_norm_block(x, layers, self.model.num_heads, 1e-5, causal=True, approximate=True)
        return table.attend(linen.LayerNorm(1e-5, name="ln_f.")(x))


def weights_of(reference: linen.Module, variables: Any) -> dict[str, np.ndarray]:
    """As a PyTorch state dict has them: of kernels the outputs come first, but not of GPT-2's."""
    names = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}
    found = {}
    for path, leaf in jax.tree.leaves_with_path(variables):
        *_, layer, name = (key.key for key in path)
        if name == "kernel" and not isinstance(reference, TorchGPT):
            leaf = leaf.transpose(3, 2, 0, 1) if leaf.ndim == 4 else leaf.T
        found[name if layer == "params" else layer + names.get(name, name)] = np.asarray(leaf)
    # Masks and a copy of the embeddings are no weights, nor are counts of batches.
    others = {"h.0.attn.bias", "lm_head.weight"} if isinstance(reference, TorchGPT) else set()
    others |= {name.replace("running_mean", "num_batches_tracked") for name in found if "running_mean" in name}
    return found | dict.fromkeys(others, np.ones(1))


SIZES: dict[str, Any] = {"num_blocks": (1, 2), "features": 4}
SMALL: dict[str, Any] = {"num_layers": 2, "features": 12, "num_heads": 3}
RESNET, VIT = ResNet(5, **SIZES), ViT(5, **SMALL)
GPT2 = GPT(11, **SMALL, max_length=7, tied=True, epsilon=1e-5)
IMAGES, TOKENS = draws.normal(1, 2, 17, 12, 3), draws.integers(1, 11, 2, 6)
PATCHES = draws.normal(1, 2, 12, 8, 3)
CASES: dict[str, tuple[linen.Module, Callable[..., linen.Module], jax.Array]] = {
    "ResNet of basic blocks": (RESNET, TorchResNet, IMAGES),
    "ResNet with shortcuts padded with zeros": (ResNet(5, **SIZES, project=False), TorchResNet, IMAGES),
    "ResNet of bottlenecks": (ResNet(5, **SIZES, block=Bottleneck, stem="imagenet"), TorchResNet, IMAGES),
    "ViT": (VIT, TorchViT, PATCHES),
    "ViT, the mean of patches, in a scan": (VIT.clone(pooling="mean", scan=True), TorchViT, PATCHES),
    "GPT-2": (GPT2, TorchGPT, TOKENS),
    "GPT-2 in a scan": (GPT2.clone(scan=True, remat=True), TorchGPT, TOKENS),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("scan" in name)) for name in CASES])
def test_logits_are_those_of_layers_as_pytorch_defines_them(name):
    model, kind, inputs = CASES[name]
    variables = draws.variables(kind(model), inputs)
    params, model_state = from_torch(model, weights_of(kind(model), variables))
    both = jax.jit(lambda ours, theirs, x: (model.apply(ours, x), kind(model).apply(theirs, x)))
    found, expected = jax.device_get(both({"params": params, **model_state}, variables, inputs))
    assert np.ptp(expected, axis=0).min() > 1e-4, "the outputs differ between examples"
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def some_weights(name: str) -> dict[str, np.ndarray]:
    model, kind, inputs = CASES[name]
    return weights_of(kind(model), draws.variables(kind(model), inputs))


def prefixes(names: Any) -> list[str]:
    outer, stem, block = names
    return [*outer, *(stem.format(number) + name for number in range(VIT.num_layers) for name in block)]


def test_weights_may_have_other_names():
    vits, gpts = some_weights("ViT"), some_weights("GPT-2")
    given = [(GPT2, gpts, {name if name == "lm_head.weight" else f"transformer.{name}": gpts[name] for name in gpts})]
    for names in (OLDER, TIMM):
        pairs = [*zip(prefixes(TORCHVISION), prefixes(names), strict=True)]
        renamed = {name.replace(old, new): vits[name] for name in vits for old, new in pairs if name.startswith(old)}
        given.append((VIT, vits, renamed))
    for model, weights, renamed in given:
        assert len(renamed) == len(weights)
        jax.tree.map(np.testing.assert_array_equal, from_torch(model, renamed), from_torch(model, weights))
