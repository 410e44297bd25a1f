"""GPT: its formula and initialization."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen

from jaxnn.models import GPT
from jaxnn.types import DataError
from tests import draws

KEY = jax.random.key(0)
TOKENS = draws.integers(1, 11, 3, 6)
SMALL = GPT(11, num_layers=2, features=8, num_heads=2, max_length=7)
VARIABLES = draws.variables(SMALL, TOKENS)
PARAMS = jax.tree.map(np.asarray, VARIABLES["params"])


def dense(p: Any, x: Any) -> Any:
    return x @ p["kernel"] + p["bias"]


def norm(p: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max())
    return e / e.sum()


def attended(qkv: Any) -> Any:
    """One head and one position at a time: heads 0 and 1 have channels 0…3 and 4…7 of each of q, k, v."""
    out = np.zeros((6, 8), np.float32)
    for head in (slice(0, 4), slice(4, 8)):
        q, k, v = qkv[:, :8][:, head], qkv[:, 8:16][:, head], qkv[:, 16:][:, head]
        for t in range(6):
            out[t, head] = softmax(k[: t + 1] @ q[t] / 2.0) @ v[: t + 1]
    return out


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_names_and_causal_formula() -> None:
    assert set(PARAMS) == {"Embed_0", "Embed_1", "Block_0", "Block_1", "LayerNorm_0", "Dense_0"}
    assert set(PARAMS["Block_0"]) == {"LayerNorm_0", "LayerNorm_1", *(f"Dense_{index}" for index in range(4))}
    assert PARAMS["Embed_0"]["embedding"].shape == (11, 8) and PARAMS["Embed_1"]["embedding"].shape == (7, 8)

    logits = jax.jit(lambda: SMALL.apply(VARIABLES, TOKENS[1:2]))()
    x = PARAMS["Embed_0"]["embedding"][np.asarray(TOKENS[1])] + PARAMS["Embed_1"]["embedding"][:6]
    for block in (PARAMS["Block_0"], PARAMS["Block_1"]):
        x = x + dense(block["Dense_1"], attended(dense(block["Dense_0"], norm(block["LayerNorm_0"], x))))
        x = x + dense(block["Dense_3"], gelu(dense(block["Dense_2"], norm(block["LayerNorm_1"], x))))
    expected = dense(PARAMS["Dense_0"], norm(PARAMS["LayerNorm_0"], x))
    np.testing.assert_allclose(logits[0], expected, rtol=1e-3, atol=1e-4)


def test_initialization_is_gpt_2s() -> None:
    # Projections onto the residual stream are narrower by sqrt(2 * 1 layer).
    params = linen.unbox(jax.jit(GPT(65, num_layers=1).init)(KEY, TOKENS))["params"]
    block = params["Block_0"]
    wide = [params["Embed_0"]["embedding"], params["Embed_1"]["embedding"], params["Dense_0"]["kernel"]]
    wide += [block["Dense_0"]["kernel"], block["Dense_2"]["kernel"]]
    assert [np.std(leaf) for leaf in wide] == pytest.approx([0.02] * 5, rel=0.05)
    narrow = [np.std(block[name]["kernel"]) for name in ("Dense_1", "Dense_3")]
    assert narrow == pytest.approx([0.02 / 2**0.5] * 2, rel=0.05)
    assert not np.any(block["Dense_1"]["bias"])


def test_sequences_longer_than_max_length() -> None:
    with pytest.raises(DataError, match="8 tokens are longer than max_length, 7"):
        jax.eval_shape(SMALL.init, KEY, np.zeros((2, 8), np.int32))
