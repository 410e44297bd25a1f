"""Weights of PyTorch by name: published shapes, names that do not fit, outputs equal to PyTorch's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import MLP, Bottleneck, ResNet, ViT, create, from_torch
from jaxnn.types import ConfigError, DataError

NETWORKS = Path(__file__).parent / "torch_networks.py"
PEERS = Path(__file__).parents[2] / ".venv-peers/bin/python"  # of `make benchmark`


def resnet_shapes(blocks: tuple[int, ...], convolutions: Any, expansion: int) -> dict[str, tuple[int, ...]]:
    """torchvision's names; ``convolutions(inputs, features)`` are the shapes of a block's kernels."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv_norm(conv: str, norm: str, shape: tuple[int, ...]) -> None:
        shapes[f"{conv}.weight"], shapes[f"{norm}.num_batches_tracked"] = shape, ()
        shapes.update({f"{norm}.{name}": shape[:1] for name in ("weight", "bias", "running_mean", "running_var")})

    conv_norm("conv1", "bn1", (64, 3, 7, 7))
    inputs = 64
    for stage, count in enumerate(blocks):
        outputs = 64 * 2**stage * expansion
        for index in range(count):
            block = f"layer{stage + 1}.{index}"
            for number, shape in enumerate(convolutions(inputs, 64 * 2**stage), 1):
                conv_norm(f"{block}.conv{number}", f"{block}.bn{number}", shape)
            if inputs != outputs:
                conv_norm(f"{block}.downsample.0", f"{block}.downsample.1", (outputs, inputs, 1, 1))
            inputs = outputs
    return shapes | {"fc.weight": (1000, inputs), "fc.bias": (1000,)}


def vit_shapes(names: dict[str, str], width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """``names`` are torchvision's or timm's."""
    shapes = {names["token"]: (1, 1, width), names["positions"]: (1, 197, width)}
    linear = {"conv": (width, 3, 16, 16), "head": (1000, width), "norm": (width,)}
    of_block = {"norm1": (width,), "qkv": (3 * width, width), "out": (width, width), "norm2": (width,)}
    of_block |= {"mlp1": (4 * width, width), "mlp2": (width, 4 * width)}
    linear |= {f"{n} {name}": shape for n in range(layers) for name, shape in of_block.items()}
    for name, shape in linear.items():
        number, _, layer = name.rpartition(" ")
        stem = names["block"].format(number) + names[layer] if number else names[layer]
        stem = stem if stem.endswith("_") else f"{stem}."
        shapes |= {f"{stem}weight": shape, f"{stem}bias": shape[:1]}
    return shapes


TORCHVISION = {"token": "class_token", "positions": "encoder.pos_embedding", "conv": "conv_proj", "norm": "encoder.ln"}
TORCHVISION |= {"head": "heads.head", "block": "encoder.layers.encoder_layer_{}.", "norm1": "ln_1", "norm2": "ln_2"}
TORCHVISION |= {"qkv": "self_attention.in_proj_", "out": "self_attention.out_proj", "mlp1": "mlp.0", "mlp2": "mlp.3"}
OLD = {"mlp1": "mlp.linear_1", "mlp2": "mlp.linear_2"}  # in the file of vit_b_16
TIMM = {"token": "cls_token", "positions": "pos_embed", "conv": "patch_embed.proj", "norm": "norm", "head": "head"}
TIMM |= {"block": "blocks.{}.", "norm1": "norm1", "norm2": "norm2", "qkv": "attn.qkv", "out": "attn.proj"}
TIMM |= {"mlp1": "mlp.fc1", "mlp2": "mlp.fc2"}
BASIC = (lambda inputs, n: [(n, inputs, 3, 3), (n, n, 3, 3)], 1)
DEEP = (lambda inputs, n: [(n, inputs, 1, 1), (n, n, 3, 3), (4 * n, n, 1, 1)], 4)
SHAPES = {
    "resnet18": (resnet_shapes((2, 2, 2, 2), *BASIC), 11_689_512),
    "resnet50": (resnet_shapes((3, 4, 6, 3), *DEEP), 25_557_032),
    "vit_b_16": (vit_shapes(TORCHVISION | OLD, 768, 12), 86_567_656),
    "vit_ti_16": (vit_shapes(TIMM, 192, 12), 5_717_416),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_array_of_the_published_shapes_has_a_place(name: str) -> None:
    shapes, count = SHAPES[name]
    # Each array has a number of its own.
    arrays = {key: np.full(shape, index, np.float32) for index, (key, shape) in enumerate(shapes.items())}
    params, model_state = from_torch(name, arrays)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    variables = linen.unbox(jax.eval_shape(create(name).init, jax.random.key(0), jnp.ones((1, 224, 224, 3))))
    assert jax.tree.map(jnp.shape, {"params": params, **model_state}) == jax.tree.map(jnp.shape, variables)
    used = {float(leaf.ravel()[0]) for leaf in jax.tree.leaves((params, model_state))}
    assert used == {float(array.ravel()[0]) for key, array in arrays.items() if "num_batches" not in key}


def test_names_and_shapes_that_do_not_fit() -> None:
    shapes, _ = SHAPES["resnet18"]
    arrays = {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("resnet18", {"layer5.0.conv1.weight": np.ones(3)}, r"layer5.0.conv1.weight \(3,\) for .* \(unknown\)\."),
        ("resnet18", {"fc.weight": np.ones((9, 512))}, r"fc.weight \(512, 9\) for Dense_0.kernel \(512, 1000\)\."),
        (create("resnet18", num_blocks=(2, 2, 2)), {}, r"layer4.0.conv1.weight .* \(unknown\); .* and \d+ more\."),
        ("resnet34", {}, r"nothing for ResNetBlock_\d+.BatchNorm_0.mean \(\d+,\); .* and 75 more\."),
    ]
    for model, changed, words in cases:
        with pytest.raises(DataError, match=f"^from_torch: weights do not fit ResNet: .*{words}$"):
            from_torch(model, arrays | changed)
    with pytest.raises(ConfigError, match="takes a ResNet or a ViT, not a MLP"):
        from_torch(MLP((3,)), arrays)


SMALL = {"num_layers": 2, "features": 12, "num_heads": 3, "patch_size": 4}
CASES = {
    "resnet": ("4,1,2,1,1", ResNet(1000, num_blocks=(1, 2, 1, 1), features=4, block=Bottleneck, stem="imagenet")),
    "vit": ("8,4,2,12,3", ViT(1000, **SMALL)),
    "vit in a scan": ("8,4,2,12,3", ViT(1000, **SMALL, scan=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_those_of_pytorch(name: str, tmp_path: Path) -> None:
    python = Path(os.environ.get("JAXNN_TORCH_PYTHON", PEERS))
    if not python.exists():
        pytest.skip("no PyTorch: set JAXNN_TORCH_PYTHON to a Python that has it, or run `make benchmark` once")
    sizes, model = CASES[name]
    out = tmp_path / "arrays.npz"
    subprocess.run([python, NETWORKS, name.split()[0], sizes, out], check=True)
    arrays = dict(np.load(out))
    images, expected = arrays.pop("images"), arrays.pop("logits")
    params, model_state = from_torch(model, arrays)
    logits = jax.jit(model.apply)({"params": params, **model_state}, images)
    assert np.ptp(expected, axis=0).max() > 0.1, "the outputs differ between images"
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
