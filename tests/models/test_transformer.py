"""ViT and TransformerClassifier: the same layers of Flax, padding, remat and scan over layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import TransformerClassifier, ViT
from jaxnn.types import DataError
from tests import draws

near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
KEY = jax.random.key(0)
SIZES: dict[str, Any] = {"num_layers": 2, "features": 8, "num_heads": 2}
IMAGES = draws.normal(0, 2, 8, 4, 3)
VIT = ViT(5, **SIZES)
# 0 is padding, at any position; the last row has nothing else.
TOKENS = np.array([[4, 2, 4, 1], [0, 1, 5, 0], [3, 0, 0, 0], [0, 0, 0, 0]])
ENCODER = TransformerClassifier(3, **SIZES, vocabulary_size=6, pad_id=0, max_length=7)


def dense(p: Any, x: jax.Array) -> jax.Array:
    return linen.Dense(p["bias"].size).apply({"params": p}, x)


def norm(p: Any, x: jax.Array) -> jax.Array:
    return linen.LayerNorm().apply({"params": p}, x)


def blocks(params: Any, x: jax.Array) -> jax.Array:
    """The blocks and the last norm, by layers of Flax and JAX."""
    for p in (params["TransformerBlock_0"], params["TransformerBlock_1"]):
        qkv = jnp.split(dense(p["Dense_0"], norm(p["LayerNorm_0"], x)), 3, axis=-1)
        attended = jax.nn.dot_product_attention(*(part.reshape(*x.shape[:2], 2, 4) for part in qkv))
        x = x + dense(p["Dense_1"], attended.reshape(x.shape))
        x = x + dense(p["Dense_3"], jax.nn.gelu(dense(p["Dense_2"], norm(p["LayerNorm_1"], x)), approximate=False))
    return norm(params["LayerNorm_0"], x)


@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_vit_equals_flax_layers(pooling: str) -> None:
    model = VIT.clone(pooling=pooling)
    variables = draws.variables(model, IMAGES)
    params = variables["params"]

    def reference() -> jax.Array:
        # Patches in row-major order, flattened as the kernel of a convolution is.
        patches = IMAGES.reshape(2, 2, 4, 1, 4, 3).swapaxes(2, 3).reshape(2, 2, 48)
        x = patches @ params["Conv_0"]["kernel"].reshape(48, 8) + params["Conv_0"]["bias"][None, None]
        if pooling == "class_token":
            x = jnp.concatenate([jnp.broadcast_to(params["class_token"], (2, 1, 8)), x], axis=1)
        x = blocks(params, x + params["positions"])
        return dense(params["Dense_0"], x[:, 0] if pooling == "class_token" else x.mean(axis=1))

    near(*jax.jit(lambda: (model.apply(variables, IMAGES), reference()))())


def test_classifier_equals_flax_layers_on_each_sequence_without_padding() -> None:
    variables = draws.variables(ENCODER, TOKENS)
    params = variables["params"]
    vectors = TransformerClassifier(3, **SIZES, max_length=7)
    # Vectors are projected by a layer that takes the name of the last one: here by the identity.
    given = {name: params[name] for name in params if name != "Embed_0"} | {"Dense_1": params["Dense_0"]}
    given["Dense_0"] = {"kernel": jnp.eye(8), "bias": jnp.zeros(8)}
    table = params["Embed_0"]["embedding"]

    def reference() -> list[jax.Array]:
        logits = []
        for row in TOKENS[:3]:
            (places,) = np.nonzero(row)
            x = blocks(params, table[row[places]][None] + params["positions"][:, places])
            logits.append(dense(params["Dense_0"], x.mean(axis=1))[0])
        return logits

    got, longer, of_vectors, expected = jax.jit(
        lambda: (
            ENCODER.apply(variables, TOKENS),
            ENCODER.apply(variables, np.pad(TOKENS, [(0, 0), (0, 3)])),
            vectors.apply({"params": given}, table[TOKENS], mask=TOKENS != 0),
            reference(),
        )
    )()
    near(got[:3], expected)
    near(got[3], params["Dense_0"]["bias"])  # the mean of nothing is 0
    near(longer, got)
    near(of_vectors, got)


def stacked(params: Any) -> Any:
    """As a scan over layers has them."""
    layers = [params[f"TransformerBlock_{number}"] for number in range(3)]
    rest = {name: params[name] for name in params if not name.startswith("TransformerBlock")}
    return rest | {"TransformerBlock_0": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def test_remat_and_scan_give_equal_gradients_in_less_memory_and_fewer_products() -> None:
    deep, images = VIT.clone(num_layers=3), draws.normal(0, 16, 16, 16, 3)
    params = draws.variables(deep, images)["params"]

    def lowered(remat: Any, scan: bool) -> Any:
        model = deep.clone(remat=remat, scan=scan)
        loss = lambda params: jnp.square(model.apply({"params": params}, images)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(stacked(params) if scan else params)

    plain, both = lowered(False, False).compile(), lowered(True, True).compile()
    draws.assert_close(both(stacked(params)), stacked(plain(params)), 1e-3)
    assert both.memory_analysis().temp_size_in_bytes < 0.6 * plain.memory_analysis().temp_size_in_bytes

    def products(remat: Any, scan: bool) -> int:
        return lowered(remat, scan).as_text().count("stablehlo.dot_general")

    stored, again, once = products(False, False), products(True, False), products(True, True)
    assert products(jax.checkpoint_policies.dots_saveable, False) == stored
    assert again > stored and once < again / 2


def test_layers_of_a_scan_draw_numbers_of_their_own() -> None:
    model = VIT.clone(scan=True, remat=True)
    boxed = jax.eval_shape(model.init, KEY, IMAGES)["params"]
    specs = linen.get_partition_spec(boxed)["TransformerBlock_0"]
    assert specs["Dense_0"]["kernel"] == jax.sharding.PartitionSpec(None, None, "model")
    variables = linen.unbox(jax.tree.map(lambda leaf: jnp.ones(leaf.shape), {"params": boxed}))

    @jax.jit
    def drawn(rate: Any) -> tuple[jax.Array, ...]:
        kernel = linen.unbox(model.init(KEY, IMAGES))["params"]["TransformerBlock_0"]["Dense_0"]["kernel"]
        options = {"train": True, "rngs": {"dropout": KEY}, "capture_intermediates": True, "mutable": ["intermediates"]}
        state = model.clone(dropout=rate).apply(variables, IMAGES, **options)[1]["intermediates"]
        return kernel, state["TransformerBlock_0"]["Dropout_0"]["__call__"][0]

    kernels, dropped = drawn(0.5)
    assert kernels.shape == (2, 8, 24) and not np.allclose(kernels[0], kernels[1])
    assert dropped.shape == (2, 2, 3, 8) and np.any((dropped[0] == 0) != (dropped[1] == 0))


def test_wrong_inputs() -> None:
    cases = [
        (VIT, np.ones((2, 8, 6, 3)), "ViT: images of 8x6 are no multiple of patch_size 4"),
        (ENCODER, np.ones((2, 8), np.int32), "TransformerClassifier: 8 positions are more than max_length, 7"),
        (ENCODER.clone(vocabulary_size=None), TOKENS, r"vectors .* or a vocabulary_size .* not int.. \[4, 4\]"),
    ]
    for model, inputs, words in cases:
        with pytest.raises(DataError, match=words):
            jax.eval_shape(model.init, KEY, inputs)
