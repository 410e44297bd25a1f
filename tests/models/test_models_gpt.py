"""GPT: parameters by hand, the same layers of Flax, causality by gradient, initialisation, bad input."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jaxnn.models import GPT
from jaxnn.types import DataError
from tests import draws

KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (3, 6), 0, 11)
SMALL = GPT(11, num_layers=2, features=8, num_heads=2, max_length=7)


@pytest.fixture(scope="module")
def variables() -> Any:
    """Parameters of ``SMALL`` away from their first values, so that each one tells."""
    return draws.variables(SMALL, TOKENS)


def test_parameters_have_the_names_that_are_documented() -> None:
    params = jax.eval_shape(SMALL.init, KEY, TOKENS)["params"]
    assert set(params) == {"Embed_0", "Embed_1", "Block_0", "Block_1", "LayerNorm_0", "Dense_0"}
    assert set(params["Block_0"]) == {"LayerNorm_0", "LayerNorm_1", *(f"Dense_{index}" for index in range(4))}
    assert params["Embed_0"]["embedding"].shape == (11, 8)
    assert params["Embed_1"]["embedding"].shape == (7, 8)


def test_it_is_its_formula(variables: Any) -> None:
    params = jax.tree.map(np.asarray, variables["params"])

    def dense(p: Any, x: Any) -> Any:
        return x @ p["kernel"] + p["bias"]

    def norm(p: Any, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def softmax(x: Any) -> Any:
        e = np.exp(x - x.max())
        return e / e.sum()

    def attended(qkv: Any) -> Any:
        # One head and one position at a time: heads 0 and 1 have channels 0…3 and 4…7 of each of q, k, v.
        out = np.zeros((6, 8), np.float32)
        for head in (slice(0, 4), slice(4, 8)):
            q, k, v = qkv[:, :8][:, head], qkv[:, 8:16][:, head], qkv[:, 16:][:, head]
            for t in range(6):
                out[t, head] = softmax(k[: t + 1] @ q[t] / 2.0) @ v[: t + 1]
        return out

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = params["Embed_0"]["embedding"][np.asarray(TOKENS[1])] + params["Embed_1"]["embedding"][:6]
    for block in (params["Block_0"], params["Block_1"]):
        x = x + dense(block["Dense_1"], attended(dense(block["Dense_0"], norm(block["LayerNorm_0"], x))))
        x = x + dense(block["Dense_3"], gelu(dense(block["Dense_2"], norm(block["LayerNorm_1"], x))))
    expected = dense(params["Dense_0"], norm(params["LayerNorm_0"], x))
    np.testing.assert_allclose(SMALL.apply(variables, TOKENS)[1], expected, rtol=1e-3, atol=1e-4)


def test_no_logit_depends_on_a_later_token(variables: Any) -> None:
    params = variables["params"]

    def logits(added: jax.Array) -> jax.Array:
        # Each position's own embedding, [7, 8]: what is added there is what a token there would add.
        table = params["Embed_1"]["embedding"] + added
        return SMALL.apply({"params": {**params, "Embed_1": {"embedding": table}}}, TOKENS[:1])[0]

    slopes = jnp.abs(jax.jit(jax.jacobian(logits))(jnp.zeros((7, 8)))).sum(axis=(1, 3))[:, :6]  # [time of logits, time]
    later = np.triu(np.ones((6, 6), bool), k=1)
    assert np.all(slopes[later] == 0)
    assert np.all(slopes[~later] > 0)


def test_initialisation_is_gpt_2s() -> None:
    # Projections onto the residual stream are narrower by sqrt(2 * 4 layers); 0.02 / sqrt(8) = 0.00707.
    params = linen.unbox(jax.jit(GPT(65).init)(KEY, TOKENS))["params"]
    block = params["Block_3"]
    wide = [params["Embed_0"]["embedding"], params["Embed_1"]["embedding"], params["Dense_0"]["kernel"]]
    wide += [block["Dense_0"]["kernel"], block["Dense_2"]["kernel"]]
    assert [float(jnp.std(leaf)) for leaf in wide] == pytest.approx([0.02] * 5, rel=0.05)
    narrow = [float(jnp.std(block[name]["kernel"])) for name in ("Dense_1", "Dense_3")]
    assert narrow == pytest.approx([0.00707] * 2, rel=0.05)
    assert not np.any(block["Dense_1"]["bias"])


def test_dropout_is_active_in_training_only(variables: Any) -> None:
    model = SMALL.clone(dropout=0.5)
    assert np.array_equal(model.apply(variables, TOKENS), SMALL.apply(variables, TOKENS))
    first, second = (
        model.apply(variables, TOKENS, train=True, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 2)
    )
    assert not np.array_equal(first, second)


def test_dropout_at_rate_one_leaves_the_last_norm_and_dense(variables: Any) -> None:
    # Of nothing but zeros the last norm makes its bias.
    outputs = SMALL.clone(dropout=1.0).apply(variables, TOKENS, train=True, rngs={"dropout": KEY})
    params = variables["params"]
    expected = params["LayerNorm_0"]["bias"] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    np.testing.assert_allclose(outputs, np.broadcast_to(expected, (3, 6, 11)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        (np.zeros((2, 8), np.int32), "GPT: sequences of 8 tokens are longer than max_length, 7"),
        (
            np.zeros((2, 4), np.float32),
            r"GPT needs token ids \[batch, time\] of integers, not float32 \[2, 4\]: .*int32",
        ),
        (np.zeros(4, np.int32), r"GPT needs token ids \[batch, time\] of integers, not int32 \[4\]\."),
    ],
)
def test_what_cannot_be_read_is_named(tokens: np.ndarray, named: str) -> None:
    with pytest.raises(DataError, match=named):
        SMALL.init(KEY, jnp.asarray(tokens))
