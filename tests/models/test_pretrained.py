"""Weights of PyTorch by name: published shapes, names that do not fit, outputs equal to PyTorch's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
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


def resnet(blocks: tuple[int, ...], convolutions: Callable[..., Any], expansion: int) -> dict[str, tuple[int, ...]]:
    """Shapes by torchvision's names; ``convolutions(inputs, features)`` are those of a block's kernels."""
    layers: dict[tuple[str, str], tuple[int, ...]] = {("conv1", "bn1"): (64, 3, 7, 7)}
    inputs = 64
    for stage, count in enumerate(blocks):
        outputs = 64 * 2**stage * expansion
        for index in range(count):
            block = f"layer{stage + 1}.{index}."
            for number, shape in enumerate(convolutions(inputs, 64 * 2**stage), 1):
                layers[f"{block}conv{number}", f"{block}bn{number}"] = shape
            if inputs != outputs:
                layers[f"{block}downsample.0", f"{block}downsample.1"] = (outputs, inputs, 1, 1)
            inputs = outputs
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (1000, inputs), "fc.bias": (1000,)}
    for (conv, norm), shape in layers.items():
        shapes |= {f"{conv}.weight": shape, f"{norm}.num_batches_tracked": ()}
        shapes |= {f"{norm}.{name}": shape[:1] for name in ("weight", "bias", "running_mean", "running_var")}
    return shapes


def vit(names: str, width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of twelve layers by ``names``, in the order of those below."""
    outer = [(width, 3, 16, 16), (width,), (1000, width)]
    block = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)]
    token, positions, *layers = names.split()
    stems = layers[:3] + [layers[3].format(number) + name for number in range(12) for name in layers[4:]]
    shapes: dict[str, tuple[int, ...]] = {token: (1, 1, width), positions: (1, 197, width)}
    for stem, shape in zip(stems, outer + 12 * block, strict=True):
        shapes |= {f"{stem}weight": shape, f"{stem}bias": shape[:1]}
    return shapes


# In the file of vit_b_16; a newer version names the last two mlp.0 and mlp.3.
TORCHVISION = "class_token encoder.pos_embedding conv_proj. encoder.ln. heads.head. encoder.layers.encoder_layer_{}. "
TORCHVISION += "ln_1. self_attention.in_proj_ self_attention.out_proj. ln_2. mlp.linear_1. mlp.linear_2."
TIMM = (
    "cls_token pos_embed patch_embed.proj. norm. head. blocks.{}. norm1. attn.qkv. attn.proj. norm2. mlp.fc1. mlp.fc2."
)
BASIC = (lambda inputs, n: [(n, inputs, 3, 3), (n, n, 3, 3)], 1)
DEEP = (lambda inputs, n: [(n, inputs, 1, 1), (n, n, 3, 3), (4 * n, n, 1, 1)], 4)
SHAPES = {
    "resnet18": (resnet((2, 2, 2, 2), *BASIC), 11_689_512),
    "resnet50": (resnet((3, 4, 6, 3), *DEEP), 25_557_032),
    "vit_b_16": (vit(TORCHVISION, 768), 86_567_656),
    "vit_ti_16": (vit(TIMM, 192), 5_717_416),
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
    with pytest.raises(ConfigError, match="takes a ResNet, a ViT or a GPT, not a MLP"):
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
    with np.load(out) as file:
        arrays = dict(file)
    images, expected = arrays.pop("images"), arrays.pop("logits")
    params, model_state = from_torch(model, arrays)
    logits = jax.jit(model.apply)({"params": params, **model_state}, images)
    assert np.ptp(expected, axis=0).max() > 0.1, "the outputs differ between images"
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
