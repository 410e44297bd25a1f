"""GPT's options by their formulas, remat and scan, GPT-2's size and published weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen

from jaxnn.models import GPT, create, from_torch, num_parameters
from jaxnn.nn import RMSNorm
from jaxnn.types import ConfigError, DataError
from tests import draws

TOKENS = draws.integers(1, 11, 2, 6)
KEY = jax.random.key(0)
near = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
SMALL: dict[str, Any] = {"num_layers": 2, "features": 8, "num_heads": 2, "max_length": 7}
MODERN = GPT(11, **SMALL | {"num_heads": 4}, num_key_heads=2, rotary=True, norm=RMSNorm, tied=True)


def test_rotary_grouped_queries_rms_norm_and_tied_embeddings_by_formulas() -> None:
    model = MODERN.clone(num_layers=1)
    variables = draws.variables(model, TOKENS)
    params = variables["params"]
    assert set(params) == {"Embed_0", "Block_0", "RMSNorm_0"}

    def norm(p: Any, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]

    def rotated(x: np.ndarray) -> np.ndarray:  # heads of two numbers are one complex number, at angles 0, 1, 2, …
        numbers = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * np.arange(6))[:, None]
        return np.stack([numbers.real, numbers.imag], -1)

    def dense(p: Any, x: np.ndarray) -> np.ndarray:
        return x @ p["kernel"] + p["bias"]

    table, block = (jax.tree.map(np.float64, params[name]) for name in ("Embed_0", "Block_0"))
    x = table["embedding"][TOKENS]
    parts = np.split(dense(block["Dense_0"], norm(block["RMSNorm_0"], x)), [8, 12], axis=-1)
    query, key, value = (part.reshape(2, 6, -1, 2) for part in parts)
    query, key, value = rotated(query), rotated(key).repeat(2, 2), value.repeat(2, 2)
    scores = np.einsum("bthd,bshd->bhts", query, key) / 2**0.5
    weights = np.exp(np.where(np.tri(6, dtype=bool), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    x = x + dense(block["Dense_1"], np.einsum("bhts,bshd->bthd", weights, value).reshape(2, 6, 8))
    x = x + dense(block["Dense_3"], np.asarray(jax.nn.gelu(dense(block["Dense_2"], norm(block["RMSNorm_1"], x)))))
    expected = norm(jax.tree.map(np.float64, params["RMSNorm_0"]), x) @ table["embedding"].T
    near(jax.jit(model.apply)(variables, TOKENS), expected, rtol=1e-3)


def test_remat_and_scan_give_the_same_logits_and_gradients() -> None:
    params = draws.variables(MODERN, TOKENS)["params"]
    stacked = {name: params[name] for name in ("Embed_0", "RMSNorm_0")}
    stacked["Block_0"] = jax.tree.map(lambda *layers: np.stack(layers), params["Block_0"], params["Block_1"])
    scanned = MODERN.clone(scan=True, remat=True, dropout=0.5)

    @jax.jit
    def compute(params: Any, stacked: Any) -> Any:
        def graded(model: GPT, params: Any) -> Any:
            return jax.value_and_grad(lambda p: model.apply({"params": p}, TOKENS).std())(params)

        return graded(MODERN, params), graded(scanned, stacked), scanned.init(KEY, TOKENS)

    (loss, gradients), (found, slope), drawn = jax.device_get(compute(params, stacked))
    near(found, loss)
    jax.tree.map(near, slope["Embed_0"], gradients["Embed_0"])
    jax.tree.map(lambda one, both: near(both[1], one), gradients["Block_1"], slope["Block_0"])
    # Layers have initial values and dropout masks of their own, and their first axis no name of a mesh axis.
    specs = linen.get_partition_spec(jax.eval_shape(scanned.init, KEY, TOKENS))["params"]
    assert tuple(specs["Block_0"]["Dense_0"]["kernel"]) == (None, None, "model")
    kernel = linen.unbox(drawn)["params"]["Block_0"]["Dense_0"]["kernel"]
    assert np.any(kernel[0] != kernel[1])


def gpt2_weights(model: GPT) -> dict[str, np.ndarray]:
    """Random weights by the names and shapes of a PyTorch state dict."""
    width, numbers = model.features, np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (model.vocabulary_size, width), "ln_f.weight": (width,)}
    shapes |= {"wpe.weight": (model.max_length, width), "ln_f.bias": (width,)}
    layers = {"ln_1": (width,), "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
    layers |= {"ln_2": (width,), "mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
    for index in range(model.num_layers):
        for name, shape in layers.items():
            shapes |= {f"h.{index}.{name}.weight": shape, f"h.{index}.{name}.bias": shape[-1:]}
    weights = {f"transformer.{name}": numbers.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    return weights | {"transformer.h.0.attn.bias": np.ones(1), "lm_head.weight": np.ones(1)}  # ignored


def gpt2_reference(weights: dict[str, np.ndarray], tokens: np.ndarray, num_heads: int) -> np.ndarray:
    """GPT-2's logits in NumPy, float64."""
    w = {name.removeprefix("transformer."): array.astype(float) for name, array in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    batch, time = tokens.shape
    x = w["wte.weight"][tokens] + w["wpe.weight"][:time]
    for index in range(sum(name.endswith("ln_1.bias") for name in w)):
        h = f"h.{index}"
        heads = conv(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").reshape(batch, time, 3, num_heads, -1)
        query, key, value = heads.transpose(2, 0, 3, 1, 4)
        scores = np.where(np.tri(time, dtype=bool), query @ key.swapaxes(-1, -2) / key.shape[-1] ** 0.5, -np.inf)
        weights_ = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (weights_ / weights_.sum(-1, keepdims=True) @ value).swapaxes(1, 2)
        x = x + conv(attended.reshape(x.shape), f"{h}.attn.c_proj")
        hidden = conv(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        hidden = 0.5 * hidden * (1 + np.tanh((2 / np.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        x = x + conv(hidden, f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


GPT2 = GPT(11, **SMALL, tied=True, epsilon=1e-5)


def test_weights_of_a_torch_state_dict_give_the_logits_of_gpt_2() -> None:
    weights = gpt2_weights(GPT2)
    expected = gpt2_reference(weights, np.asarray(TOKENS), GPT2.num_heads)
    models = GPT2, GPT2.clone(scan=True, remat=True), GPT2.clone(tied=False)
    tied, scanned = (from_torch(model, weights)[0] for model in models[:2])
    untied = tied | {"Dense_0": {"kernel": tied["Embed_0"]["embedding"].T, "bias": np.arange(11.0, dtype=np.float32)}}
    given = [{"params": params} for params in (tied, scanned, untied)]
    *found, shifted = jax.jit(lambda given: [m.apply(v, TOKENS) for m, v in zip(models, given, strict=True)])(given)
    for logits in (*found, shifted - np.arange(11.0)[None, None]):
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_fit_are_named() -> None:
    weights = gpt2_weights(GPT2)
    with pytest.raises(ConfigError, match="tied=True"):
        from_torch(GPT2.clone(tied=False), weights)
    with pytest.raises(DataError, match=r"do not fit GPT: nothing for Block_2\.Dense_0\.bias \(24,\).* and 7 more"):
        from_torch(GPT2.clone(num_layers=3), weights)
    with pytest.raises(DataError, match=r"transformer\.wte\.weight \(11, 8\) for Embed_0\.embedding \(12, 8\)"):
        from_torch(GPT2.clone(vocabulary_size=12), weights)


def test_gpt_2_has_124_million_parameters() -> None:
    tokens = jax.ShapeDtypeStruct((1, 1024), "int32")
    gpt2 = create("gpt2")
    assert num_parameters(gpt2, tokens) == num_parameters(gpt2.clone(scan=True), tokens) == 124_439_808
