"""Inside `jax.shard_map` layers give each device's part, and gradients of shared parameters are summed over devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxnn import nn

BATCH, TIME, FEATURES = 4, 3, 8
SEQUENCES = jax.random.normal(jax.random.key(0), (BATCH, TIME, FEATURES))
KERNEL = jax.random.normal(jax.random.key(1), (FEATURES, 5))
LABELS = jnp.arange(BATCH * TIME).reshape(BATCH, TIME) % 5


def of_module(module: Any, inputs: jax.Array = SEQUENCES) -> tuple[Any, Callable, jax.Array]:
    return module.init(jax.random.key(2), inputs), module.apply, inputs


def both(kind: Any, implementation: str) -> Any:
    return nn.Bidirectional(*(kind(4, implementation=implementation) for _ in range(2)))


# Parameters, a function of them and of a batch, and the batch.
CASES = {
    "LSTM": of_module(nn.LSTM(4)),
    "GRU": of_module(nn.GRU(4)),
    "both directions paired": of_module(both(nn.LSTM, "paired")),
    "LayerNorm": of_module(nn.LayerNorm(implementation="analytic")),
    "RMSNorm": of_module(nn.RMSNorm(implementation="analytic")),
    "Conv": of_module(nn.Conv(4, (2,))),
    "Embed": of_module(nn.Embed(5, 4, implementation="one_hot"), LABELS),
    "attention": (
        KERNEL,
        lambda kernel, x: nn.attention(*((x @ kernel)[..., None],) * 3, causal=True, implementation="chunked"),
        SEQUENCES,
    ),
    "cross_entropy": (KERNEL, lambda kernel, x: nn.cross_entropy(x @ kernel, jnp.int32(x[..., 0] > 0), 0.1), SEQUENCES),
    "linear_cross_entropy": (
        {"kernel": KERNEL, "bias": jnp.ones(5)},
        lambda p, x: nn.linear_cross_entropy(x, p["kernel"], jnp.int32(x[..., 0] > 0), p["bias"], chunk=2),
        SEQUENCES,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_on_devices_make_the_whole(name: str) -> None:
    params, function, inputs = CASES[name]

    def gradient(params: Any, inputs: jax.Array) -> Any:
        return jax.grad(lambda params: jnp.sum(jnp.square(function(params, inputs))))(params)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    shared, split = PartitionSpec(), PartitionSpec("data")
    found = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(shared, split), out_specs=shared))(params, inputs)
    expected = jax.jit(gradient)(params, inputs)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
