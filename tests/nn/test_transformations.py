"""Every layer under JAX's transformations, by one table: a new layer adds a row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import AxisType, PartitionSpec

from jaxnn import nn
from tests import draws

BATCH, TIME, FEATURES = 2, 3, 4
SEQUENCES = draws.normal(0, BATCH, TIME, FEATURES)
IDS = draws.integers(1, 5, BATCH, TIME)
KERNEL = draws.normal(2, FEATURES, 5)


class Row(NamedTuple):
    """One layer, as a function of its parameters and of a batch."""

    name: str
    layer: Any
    params: Any
    function: Callable[[Any, jax.Array], jax.Array]  # (params, inputs) -> outputs, both with the batch in front
    inputs: jax.Array = SEQUENCES  # derivatives are taken by floats
    mixes_rows: bool = False  # whether an output depends on other examples


def of_module(name: str, module: linen.Module, inputs: jax.Array = SEQUENCES, **options: Any) -> Row:
    return Row(name, type(module), draws.variables(module, inputs), lambda p, x: module.apply(p, x, **options), inputs)


def both(kind: Any, **options: Any) -> nn.Bidirectional:
    return nn.Bidirectional(*(kind(2, **options) for _ in range(2)))


def ragged(module: linen.Module) -> Row:
    def read(params: Any, x: jax.Array) -> jax.Array:
        outputs: jax.Array = module.apply(params, x, seq_lengths=2 + first_labels(x[:, 0]))
        return outputs

    return Row("both directions of several lengths", type(module), draws.variables(module, SEQUENCES), read)


def attends(implementation: str) -> Row:
    def attend(kernel: jax.Array, x: jax.Array) -> jax.Array:
        heads = [(x @ kernel)[..., None, k : k + 2] for k in range(3)]
        return nn.attention(*heads, causal=True, implementation=implementation)

    return Row(f"{implementation} attention", nn.attention, KERNEL, attend)


def pools(name: str, pool: Callable[..., jax.Array], **options: Any) -> Row:
    return Row(name, pool, {}, lambda _, x: pool(x, (2,), padding="SAME", **options))


def batch_normed(params: Any, x: jax.Array) -> jax.Array:
    module = nn.BatchNorm(use_running_average=False, implementation="custom_vjp")
    outputs: jax.Array = module.apply({"params": params}, x, mutable=["batch_stats"])[0]
    return outputs


def dropped(_: Any, x: jax.Array) -> jax.Array:
    outputs: jax.Array = nn.Dropout(0.5).apply({}, x, train=True, rngs={"dropout": jax.random.key(0)})
    return outputs


def first_labels(x: jax.Array) -> jax.Array:
    return jnp.int32(x[..., 0] > 0)


def linear_losses(params: Any, x: jax.Array) -> jax.Array:
    return nn.linear_cross_entropy(x, params["kernel"], first_labels(x), params["bias"], chunk=2)


SCALES = {"scale": draws.uniform(3, FEATURES), "bias": draws.uniform(4, FEATURES)}
TABLE = [
    of_module("Dense", nn.Dense(2)),
    of_module("Conv", nn.Conv(2, (2,))),
    of_module("Conv of thin inputs", nn.Conv(2, (2,)), SEQUENCES[..., :1]),
    pools("max_pool of tiles", nn.max_pool, strides=(2,)),
    pools("max_pool", nn.max_pool),
    pools("avg_pool of tiles", nn.avg_pool, strides=(2,), count_include_pad=False),
    pools("avg_pool", nn.avg_pool),
    of_module("LayerNorm", nn.LayerNorm()),
    Row("BatchNorm", nn.BatchNorm, SCALES, batch_normed, mixes_rows=True),
    Row("Dropout", nn.Dropout, {}, dropped, mixes_rows=True),
    of_module("Embed", nn.Embed(5, 2), IDS),
    attends("math"),
    attends("memory_efficient"),
    Row("cross_entropy", nn.cross_entropy, KERNEL, lambda k, x: nn.cross_entropy(x @ k, first_labels(x), 0.1)),
    Row("linear_cross_entropy", nn.linear_cross_entropy, {"kernel": KERNEL, "bias": jnp.ones(5)}, linear_losses),
    of_module("LSTM", nn.LSTM(2)),
    of_module("GRU", nn.GRU(2)),
    ragged(both(nn.GRU, implementation="fused_inputs")),
    of_module("Stacked", nn.Stacked([nn.GRU(2), nn.GRU(1)])),
]
# Their rules are in faster rows too, or are JAX's own.
SLOW = {
    *("both directions of several lengths", "Stacked", "Conv of thin inputs"),
    *("Embed", "math attention", "Dropout", "avg_pool of tiles"),
}
rows = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE])


def compiled_rows(rows: list[Row]) -> pytest.MarkDecorator:
    """Each row, some of them slow."""
    marked = [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (row.name in SLOW)) for row in rows]
    return pytest.mark.parametrize("row", marked)


def total(row: Row, params: Any, inputs: jax.Array) -> jax.Array:
    """A sum that is not linear in the outputs."""
    return jnp.sum(jnp.sin(row.function(params, inputs)))


def gradient(row: Row) -> Callable[..., Any]:
    """By the parameters, and by inputs that are floats."""
    by = (0, 1) if jnp.issubdtype(row.inputs.dtype, jnp.floating) else (0,)
    return jax.grad(lambda params, inputs: total(row, params, inputs), argnums=by)


@functools.cache
def expected_gradient(name: str) -> Any:
    row = next(row for row in TABLE if row.name == name)
    return jax.jit(gradient(row))(row.params, row.inputs)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def test_every_layer_has_a_row() -> None:
    # Functions that are called by layers, or beside them.
    others = {nn.Policy, nn.partitioned, nn.RMSNorm, nn.dot_general, nn.conv_general_dilated, nn.batch_mask}
    assert {getattr(nn, name) for name in nn.__all__} - others <= {row.layer for row in TABLE}


@compiled_rows(TABLE)
def test_derivatives_in_either_mode_equal_differences(row: Row) -> None:
    fixed = () if jnp.issubdtype(row.inputs.dtype, jnp.floating) else (row.inputs,)
    arrays = (row.params,) if fixed else (row.params, row.inputs)

    def function(arrays: Any) -> jax.Array:
        return total(row, *arrays, *fixed)

    def derivatives(arrays: Any, tangents: Any) -> Any:
        def forward(arrays: Any) -> jax.Array:
            return jax.jvp(function, (arrays,), (tangents,))[1]

        by_reverse = jax.jvp(jax.value_and_grad(function), (arrays,), (tangents,))
        return by_reverse, jax.value_and_grad(forward)(arrays)

    def moved(step: float) -> Any:
        return jax.tree.map(lambda leaf, tangent: leaf + step * tangent, arrays, tangents)

    with jax.enable_x64(True):
        arrays = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), arrays)
        tangents = jax.tree.map(lambda leaf: draws.normal(leaf.size, *leaf.shape, dtype=np.float64), arrays)
        compiled = jax.jit(derivatives).lower(arrays, tangents).compile()
        (_, forward_over_reverse), reverse_over_forward = compiled(arrays, tangents)
        (above, _), (below, _) = (compiled(moved(step), tangents)[0] for step in (1e-5, -1e-5))
        differences = jax.tree.map(lambda a, b: (a - b) / 2e-5, above, below)
        # Of the value and of its gradient, each along the tangents.
        assert_close(forward_over_reverse, differences, 1e-6)
        assert_close(reverse_over_forward, differences, 1e-6)


@compiled_rows(TABLE)
def test_gradients_export_with_a_symbolic_batch(row: Row, request: pytest.FixtureRequest) -> None:
    batch = jax.export.symbolic_shape("batch")
    inputs = jax.ShapeDtypeStruct((*batch, *row.inputs.shape[1:]), row.inputs.dtype)
    exported = jax.export.export(jax.jit(gradient(row)))(row.params, inputs)
    if row.mixes_rows or request.config.getoption("slow"):
        assert_close(exported.call(row.params, row.inputs), expected_gradient(row.name), 1e-5)


@rows
def test_gradients_of_an_empty_batch(row: Row) -> None:
    params, *rest = jax.eval_shape(gradient(row), row.params, row.inputs[:0])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, row.params)
    assert all(inputs.size == 0 for inputs in rest)


@rows
def test_saved_products_are_not_recomputed(row: Row) -> None:
    def products(policy: Any) -> int:
        checkpointed = jax.checkpoint(lambda params: total(row, params, row.inputs), policy=policy)
        program = str(jax.make_jaxpr(jax.grad(checkpointed))(row.params))
        return program.count("= dot_general[")

    policies = jax.checkpoint_policies
    assert products(policies.dots_saveable) == products(policies.everything_saveable)


@compiled_rows([row for row in TABLE if jax.tree.leaves(row.params) and not row.mixes_rows])
def test_gradients_under_shard_map_equal_the_full_batch(row: Row) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    shared, split = PartitionSpec(), PartitionSpec("data")
    expected = expected_gradient(row.name)
    specs = (shared, split)
    parts = jax.shard_map(gradient(row), mesh=mesh, in_specs=specs, out_specs=specs[: len(expected)])
    assert_close(jax.jit(parts)(row.params, row.inputs), expected, 1e-4)
