"""Every layer under JAX's transformations, by one table: a new layer adds a row."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jax.sharding import AxisType, PartitionSpec

from jaxnn import nn, testing
from tests import draws
from tests.draws import assert_close

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
    return Row(name, pool, None, lambda _, x: pool(x, (2,), padding="SAME", **options))


def batch_normed(params: Any, x: jax.Array) -> jax.Array:
    module = nn.BatchNorm(use_running_average=False)  # by the package, if it is installed, as in users' programs
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
    of_module("Conv of thin inputs", nn.Conv(2, (2,)), draws.normal(5, 18, TIME, 1)),  # chunks of 8 of each half
    pools("max_pool of tiles", nn.max_pool, strides=(2,)),
    pools("max_pool", nn.max_pool),
    pools("avg_pool of tiles", nn.avg_pool, strides=(2,), count_include_pad=False),
    pools("avg_pool", nn.avg_pool),
    of_module("LayerNorm", nn.LayerNorm()),
    Row("BatchNorm", nn.BatchNorm, SCALES, batch_normed, mixes_rows=True),
    Row("Dropout", nn.Dropout, None, dropped, mixes_rows=True),
    of_module("Embed", nn.Embed(5, 2), IDS),
    attends("math"),
    attends("memory_efficient"),
    Row("cross_entropy", nn.cross_entropy, KERNEL, lambda k, x: nn.cross_entropy(x @ k, first_labels(x), 0.1)),
    Row("linear_cross_entropy", nn.linear_cross_entropy, {"kernel": KERNEL, "bias": jnp.ones(5)}, linear_losses),
    of_module("LSTM", nn.LSTM(2)),
    of_module("GRU", nn.GRU(2)),
    ragged(both(nn.GRU, implementation="fused_inputs")),
]
# Numbers are compared for these rows; the others have the same rules, or JAX's own, and are traced only. Members of
# other layers are compared in the files of these.
CHECKED = {
    "gradient": {
        *("Dense", "Conv", "max_pool of tiles", "max_pool", "avg_pool", "LayerNorm", "BatchNorm", "cross_entropy"),
        *("memory_efficient attention", "linear_cross_entropy", "LSTM", "both directions of several lengths"),
    },
    "vmap": {"LayerNorm", "BatchNorm", "memory_efficient attention", "LSTM"},
    "devices": {"Dense", "Conv", "LayerNorm"},
}
SECOND_ORDER = {"Dense", "memory_efficient attention"}


def rows(choose: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE if choose(row)])


def takes_floats(row: Row) -> bool:
    return bool(jnp.issubdtype(row.inputs.dtype, jnp.floating))


def total(row: Row, params: Any, inputs: jax.Array) -> jax.Array:
    """A sum that is not linear in the outputs."""
    return jnp.sum(jnp.sin(row.function(params, inputs)))


@functools.cache
def gradient(name: str) -> Any:
    """By the parameters, and by inputs that are floats."""
    row = next(row for row in TABLE if row.name == name)
    return jax.jit(jax.grad(functools.partial(total, row), (0, 1) if takes_floats(row) else (0,)))


def tangents_of(arrays: Any) -> Any:
    return jax.tree.map(lambda leaf: draws.normal(leaf.size, *leaf.shape, dtype=leaf.dtype), arrays)


def test_every_layer_has_a_row():
    # Functions that are called by layers, or beside them.
    others = {nn.Policy, nn.partitioned, nn.RMSNorm, nn.dot_general, nn.conv_general_dilated, nn.batch_mask}
    assert {getattr(nn, name) for name in nn.__all__} - others <= {row.layer for row in TABLE}


@rows(lambda row: row.name in set.union(*CHECKED.values()))
def test_layers_conform(row):
    checks = [check for check, names in CHECKED.items() if row.name in names]
    passed = testing.check_layer(row.function, row.inputs, row.params, checks=checks)
    assert passed == dict.fromkeys(checks, "passed")


@rows(takes_floats)
def test_second_derivatives_of_either_order_agree(row):
    function, tangents = functools.partial(total, row), tangents_of((row.params, row.inputs))

    def forward(*arrays: Any) -> jax.Array:
        return jax.jvp(function, arrays, tangents)[1]

    @jax.jit
    def run(*arrays: Any) -> Any:
        return jax.jvp(jax.grad(function, (0, 1)), arrays, tangents)[1], jax.grad(forward, (0, 1))(*arrays)

    if row.name in SECOND_ORDER:
        assert_close(*run(row.params, row.inputs), 1e-4)
    else:
        by_reverse, by_forward = jax.eval_shape(run, row.params, row.inputs)
        assert by_reverse == by_forward


@rows()
def test_gradients_export_with_a_symbolic_batch(row):
    batch = jax.export.symbolic_shape("batch")
    inputs = jax.ShapeDtypeStruct((*batch, *row.inputs.shape[1:]), row.inputs.dtype)
    exported = jax.export.export(gradient(row.name))(row.params, inputs)
    if row.mixes_rows or row.name == "Conv of thin inputs":
        assert_close(exported.call(row.params, row.inputs), gradient(row.name)(row.params, row.inputs), 1e-5)


@rows()
def test_gradients_of_an_empty_batch(row):
    params, *rest = jax.eval_shape(gradient(row.name), row.params, row.inputs[:0])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, row.params)
    assert all(inputs.size == 0 for inputs in rest)


@rows()
def test_saved_products_are_not_recomputed(row):
    def products(policy: Any) -> int:
        checkpointed = jax.checkpoint(lambda params: total(row, params, row.inputs), policy=policy)
        program = str(jax.make_jaxpr(jax.grad(checkpointed))(row.params))
        return program.count("= dot_general[")

    policies = jax.checkpoint_policies
    assert products(policies.dots_saveable) == products(policies.everything_saveable)


@rows(lambda row: row.params is not None and not row.mixes_rows)
def test_gradients_under_shard_map_have_the_shapes_of_the_full_batch(row):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"))
    outputs = specs if takes_floats(row) else specs[:1]
    parts = jax.jit(jax.shard_map(gradient(row.name), mesh=mesh, in_specs=specs, out_specs=outputs))
    arrays = row.params, row.inputs
    assert parts.lower(*arrays).out_info == gradient(row.name).lower(*arrays).out_info
