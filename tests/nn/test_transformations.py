"""What holds for every layer, by tables: JAX's transformations; wrong arguments are named; policies of dtypes."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen
from jax.sharding import AxisType, PartitionSpec

from jaxnn import nn, testing
from jaxnn.nn import Policy
from jaxnn.types import ConfigError, DataError
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
    of_module("LSTM", nn.LSTM(2)),
    of_module("GRU", nn.GRU(2)),
    ragged(both(nn.GRU, implementation="fused_inputs")),
]
# Numbers are compared for these rows; the others have the same rules, or JAX's own, and are traced only. Members of
# other layers are compared in the files of these.
CHECKED = {
    "gradient": {
        *("Dense", "Conv", "max_pool of tiles", "max_pool", "avg_pool", "LayerNorm", "BatchNorm", "cross_entropy"),
        *("memory_efficient attention", "LSTM", "both directions of several lengths"),
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


def test_every_layer_has_a_row():
    # Functions that are called by layers, or beside them.
    others = {nn.Policy, nn.partitioned, nn.RMSNorm, nn.dot_general, nn.conv_general_dilated, nn.batch_mask}
    others |= {nn.add_broadcast}
    assert {getattr(nn, name) for name in nn.__all__} - others <= {row.layer for row in TABLE}


@rows(lambda row: row.name in set.union(*CHECKED.values()))
@pytest.mark.several_devices
def test_layers_conform(row):
    checks = [check for check, names in CHECKED.items() if row.name in names]
    passed = testing.check_layer(row.function, row.inputs, row.params, checks=checks)
    assert passed == dict.fromkeys(checks, "passed")


@rows(takes_floats)
def test_second_derivatives_of_either_order_agree(row):
    function, tangents = functools.partial(total, row), draws.weights((row.params, row.inputs))

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
@pytest.mark.several_devices
def test_gradients_under_shard_map_have_the_shapes_of_the_full_batch(row):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"))
    outputs = specs if takes_floats(row) else specs[:1]
    parts = jax.jit(jax.shard_map(gradient(row.name), mesh=mesh, in_specs=specs, out_specs=outputs))
    arrays = row.params, row.inputs
    assert parts.lower(*arrays).out_info == gradient(row.name).lower(*arrays).out_info


KEY = jax.random.key(0)
X = np.ones((3, 6, 5), np.float32)
ROWS, MATRIX, LABELS = np.ones((2, 3), np.float32), np.ones((3, 5), np.float32), np.ones(2, np.int32)
STATE = np.ones((3, 4), np.float32)
PAIR = nn.Bidirectional(nn.GRU(4), nn.GRU(4))


def attend(**change: Any) -> Any:
    query, keys = np.ones((3, 9, 4, 5), np.float32), np.ones((3, 9, 2, 5), np.float32)
    return nn.attention(**({"query": query, "key": keys, "value": keys} | change))


def run(layer: linen.Module, inputs: Any = X, **call: Any) -> Any:
    return layer.init(KEY, inputs, **call)


def drop(x: Any, **rngs: Any) -> Any:
    return nn.Dropout(1.0, rng_collection="noise").apply({}, x, train=True, rngs=rngs)


lstm = functools.partial(run, nn.LSTM(4))
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: attend(key=np.zeros((3, 9, 4, 6))), "not query .* key .*6.* and value"),
    (lambda: attend(query=np.zeros((3, 9, 3, 5))), "a multiple of key_heads"),
    (lambda: attend(value=np.zeros((3, 9, 2, 5), np.float16)), "one floating dtype"),
    (lambda: attend(mask=np.ones((9, 9))), "mask must be bool"),
    (lambda: attend(mask=np.ones((4, 1, 9, 9), bool)), r"mask of shape \(4, 1, 9, 9\) does not broadcast"),
    (lambda: attend(bias=np.zeros((1, 3, 1, 1, 9), np.float32)), "bias of shape .* does not broadcast"),
    (lambda: attend(lengths=np.array([1, 2])), r"lengths must be integers of shape \(3,\)"),
    (lambda: attend(query_lengths=np.array([1.0, 2.0, 3.0])), "query_lengths must be integers"),
    (lambda: attend(scale=np.ones(4)), r"scale must be one number, not of shape \[4\]"),
    (lambda: attend(implementation="flash"), "no implementation 'flash'"),
    (lambda: attend(implementation="memory_efficient", bias=np.zeros((9,), np.float32)), "it takes no bias"),
    (lambda: nn.cross_entropy(ROWS, np.ones(2, np.float32)), r"integers, not \[2, 3\] and float32"),
    (lambda: nn.cross_entropy(jnp.float32(1), jnp.int32(0)), r"logits \[..., classes\]"),
    (lambda: nn.cross_entropy(ROWS[0], jnp.int32(0), 1.5), "label_smoothing .*0…1, not 1.5"),
    (lambda: nn.Policy(compute="bfloat61"), "compute='bfloat61' .*did you mean 'bfloat16'"),
    (lambda: nn.Policy(compute=jnp.int32), "compute=.*int32"),
    (lambda: nn.avg_pool(np.ones((4, 4), np.float32), (2, 2), (2, 2)), r"2 spatial axes, features\], not"),
    (lambda: nn.avg_pool(np.ones((1, 4, 4, 1), bool), (2, 2), (2, 2)), r"2 spatial axes, features\], not"),
    (lambda: nn.Dropout(-0.1), "dropout rate .* 0…1"),
    (lambda: nn.Dropout(float("nan")), "dropout rate .* 0…1"),
    (lambda: drop(ROWS), "rngs={'noise': key}"),
    (lambda: drop(LABELS, noise=KEY), "floats.* int32"),
    (lambda: run(nn.Embed(7, 3), ROWS), "integer ids, not float32: cast"),
    (lambda: nn.Bidirectional(linen.RNN(linen.GRUCell(4)), nn.GRU(4)), "not RNN: use flax.linen.Bidirectional"),
    (lambda: nn.GRU(0), "GRU: features must be an integer >= 1, not 0"),
    (lambda: run(nn.GRU(4, implementation="hoist")), "recurrence has no implementation 'hoist'"),
]
# Window, strides and padding, of either kind of pooling.
POOLS: list[tuple[tuple[Any, Any, Any], str]] = [
    ((2, None, "VALID"), r"the window must be a tuple of integers >= 1, as \(2, 2\), not 2"),
    (((0, 2), (0, 2), "VALID"), r"the window must be a tuple of integers >= 1"),
    (((2, 2), (2,), "VALID"), r"window \(2, 2\) and strides \(2,\)"),
    (((2, 2), None, "FULL"), "no padding 'FULL'.* 'SAME', 'SAME_LOWER', 'VALID'"),
    (((2, 2), None, 1), r"padding must be .*\(low, high\).*, not 1"),
    (((2, 2), None, ((1, 1),)), r"padding must be .*\(low, high\)"),
]
WRONG += [
    (functools.partial(pool, np.ones((1, 4, 4, 1)), *how), words)
    for how, words in POOLS
    for pool in (nn.max_pool, nn.avg_pool)
]
BAD_DATA: list[tuple[Callable[[], Any], str]] = [
    (lambda: lstm(np.ones((2, 3), np.int32)), r"floats \[\*batch, time, features\], not int32 \[2, 3\]: embed"),
    (lambda: lstm(np.ones(3, np.float32), time_major=True), r"floats \[time, \*batch, features\], not"),
    (lambda: lstm(seq_lengths=np.ones((3, 1), int)), r"seq_lengths .* \[3\], not int32 \[3, 1\]"),
    (lambda: lstm(seq_lengths=np.ones(3, np.float32)), r"\[3\], not float32 \[3\]"),
    (lambda: lstm(initial_carry=STATE), r"initial_carry \(c, h\) of \[3, 4\] each, not \(3, 4\)"),
    (lambda: run(nn.GRU(4), initial_carry=(X, X)), r"initial_carry \[3, 4\], not"),
    (lambda: run(PAIR, initial_carry=X), "initial_carry of 2 states"),
]


@pytest.mark.parametrize(
    ("error", "call", "words"), [*((ConfigError, *row) for row in WRONG), *((DataError, *row) for row in BAD_DATA)]
)
def test_wrong_arguments_are_named(error, call, words):
    def traced() -> None:
        call()

    with pytest.raises(error, match=words):
        jax.eval_shape(traced)


MIXED = Policy(compute="bfloat16", outputs="float16")


def test_casts_change_floating_arrays_only():
    tree = {"w": jnp.ones((2, 3)), "b": [np.ones(3, np.float64), jnp.ones((), jnp.bfloat16)]}
    casts = (MIXED.cast_to_params, MIXED.cast_to_compute, MIXED.cast_to_outputs)
    for cast, dtype in zip(casts, ("float32", "bfloat16", "float16"), strict=True):
        got = cast(tree)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {dtype}
    others = [np.arange(3), np.arange(3, dtype=np.uint8), np.array([True]), jax.random.key(0)]
    others += [np.ones(2, np.complex64), 2.5, 3, None]
    for got, leaf in zip(MIXED.cast_to_compute(others), others, strict=True):
        assert got is leaf
    # 1 + 2^-9 lies between two bfloat16, 2^-7 apart there: it becomes 1. The gradient keeps the parameter's dtype.
    value, gradient = jax.value_and_grad(lambda w: MIXED.cast_to_compute(w) * 3)(jnp.float32(1 + 2**-9))
    assert float(value) == 3.0 and gradient.dtype == jnp.float32


def test_policies_are_values_that_can_be_recorded():
    for dtype in (jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16")):
        policy = Policy(compute=dtype)
        assert policy == Policy(compute="bfloat16") and hash(policy) == hash(Policy(compute="bfloat16"))
    fields = json.loads(json.dumps(dataclasses.asdict(Policy(compute=jnp.bfloat16))))
    assert Policy(**fields) == Policy(compute="bfloat16")
