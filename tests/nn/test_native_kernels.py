"""Layers with native kernels, by one table: XLA's derivatives, the same bits in every run, devices, other platforms."""

import concurrent.futures
import ctypes
import functools
import importlib
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxnn import kernels, nn
from jaxnn._batch_context import BatchSharding, use_batch_sharding
from jaxnn.observe import Traced
from jaxnn.parallel import Layout
from jaxnn.types import ConfigError
from tests import draws, native, shell
from tests.draws import assert_near
from tests.nn.test_convolution import DENSE, LARGE
from tests.nn.test_recurrent import sized

pytestmark = native.needed


class Row(NamedTuple):
    """One layer; arrays of its inputs and outputs have the batch in front."""

    operation: str  # as `implementations` names it
    layer: Callable[..., Any]  # (params, inputs, implementation=...) -> outputs
    params: Any
    inputs: Any
    native: str
    fallback: str  # what is chosen without the package
    product: str  # XLA's operation in programs for other platforms
    kernels: str  # forward and backward
    call: str | None = None  # the call of the kernel with a device's rows; None if an output depends on other rows


def dense(kernel: jax.Array, x: jax.Array, implementation: str | None = None) -> jax.Array:
    return nn.dot_general(x, kernel, (((1,), (0,)), ((), ())), implementation=implementation)


def convolve(kernel: jax.Array, x: jax.Array, implementation: str | None = None) -> jax.Array:
    return LARGE["even"].function(implementation)(x, kernel)


def attend(scales: jax.Array, arrays: Any, implementation: str | None = None) -> jax.Array:
    query, key, value = arrays
    lengths = jnp.where(value[:, 0, 0, 0] > 0, 64, 5)
    query = query * scales[None, None, None]
    return nn.attention(query, key, value, causal=True, lengths=lengths, implementation=implementation)


def recur(params: Any, inputs: Any, implementation: str | None = None) -> Any:
    x, carry = inputs
    layer = nn.LSTM(65, return_carry=True, implementation=implementation)
    return layer.apply(params, x, initial_carry=carry)


def normalize(params: Any, x: jax.Array, implementation: str | None = None) -> Any:
    layer = nn.BatchNorm(use_running_average=False, implementation=implementation)
    return layer.apply({**draws.variables(layer, x), "params": params}, x, mutable=["batch_stats"])


IMAGES = LARGE["even"].arrays()[::-1]
LSTM_PARAMS, *SEQUENCES = sized(8, 20, 5, 65)
OF_LSTM = LSTM_PARAMS, SEQUENCES
SCALES = {"scale": draws.uniform(3, 6), "bias": draws.uniform(4, 6)}
MATRICES = draws.normal(1, 160, 128), draws.normal(0, 400, 160)  # rows enough for products forward too
OF_HEADS = draws.uniform(3, 32), [draws.normal(seed, 4, 64, 2, 32) for seed in range(3)]
BATCHES = SCALES, draws.normal(0, 40, 5, 6)
TABLE = [
    Row("convolution", convolve, *IMAGES, "native", "channels_last", "convolution", "convolution", r"(\d+)x16x16"),
    Row("dense", dense, *MATRICES, "native", "xla", "dot_general", "product", r"(\d+)x160x"),
    Row("attention", attend, *OF_HEADS, "native", "math", "dot_general", "attention attention_backward", r"(\d+)x64x2"),
    Row("recurrence", recur, *OF_LSTM, "native", "fused_inputs", "while", "lstm lstm_backward", r"20x(\d+)x260"),
    Row("normalization", normalize, *BATCHES, "native", "custom_vjp", "reduce", "channel_sums moments"),
]


def rows(choose: Callable[[Row], bool] = lambda row: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.operation) for row in TABLE if choose(row)])


def loss(row: Row, by: str | None, params: Any, inputs: Any) -> Any:
    """The sum of the outputs' cubes, and the outputs."""
    outputs = row.layer(params, inputs, implementation=by)
    return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(outputs)), outputs


def gradient(row: Row, by: str | None) -> Callable[..., Any]:
    """By parameters and inputs, and the outputs."""
    return jax.grad(functools.partial(loss, row, by), (0, 1), has_aux=True)


@functools.cache
def program(operation: str) -> Any:
    row = next(row for row in TABLE if row.operation == operation)
    return jax.jit(gradient(row, row.native))


@rows(lambda row: row.operation != "convolution")  # whose derivatives are compared with exact numbers
@pytest.mark.slow
def test_derivatives_of_either_mode_and_order_equal_xla(row):
    arrays = row.params, row.inputs
    # Along the gradient itself, half of the derivative of its square is the same as the two mixed derivatives.
    tangents, _ = program(row.operation)(*arrays)

    def derivatives(by: str, arrays: Any, tangents: Any) -> Any:
        def slopes(*arrays: Any) -> Any:
            return gradient(row, by)(*arrays)[0]

        def square(*arrays: Any) -> jax.Array:
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(slopes(*arrays))) / 2

        def forward(*arrays: Any) -> jax.Array:
            return jax.jvp(lambda *arrays: loss(row, by, *arrays)[0], arrays, tangents)[1]

        first, second = jax.jvp(slopes, arrays, tangents)
        outputs, push = jax.linearize(functools.partial(row.layer, implementation=by), *arrays)
        others = [jax.grad(f, (0, 1))(*arrays) for f in (square, forward)] if by == row.native else [second, second]
        return outputs, push(*tangents), first, second, others

    run = jax.jit(lambda *given: [derivatives(by, *given) for by in (row.native, row.fallback)])
    assert_near(*run(arrays, tangents), 1e-4 if row.operation == "normalization" else 1e-5)


@rows()
def test_members_and_steps_of_a_scan_equal_separate_runs_which_have_the_same_bits(row):
    alone, run = program(row.operation), gradient(row, row.native)

    @jax.jit
    def together(params: Any, inputs: Any) -> Any:
        members = [
            jax.tree.map(lambda leaf, k=k: jnp.stack([leaf, -leaf], k), tree) for k, tree in enumerate((params, inputs))
        ]
        mapped = jax.vmap(jax.vmap(run, (None, 1)), (0, None))(*members)
        scanned = lax.scan(lambda carry, _: (carry, run(params, inputs)), 0, length=2)[1]
        if row.call is None:
            return mapped, scanned, None
        of_nothing = gradient(row, None if row.operation == "convolution" else row.native)
        return mapped, scanned, of_nothing(params, jax.tree.map(lambda leaf: leaf[:0], inputs))

    first = alone(row.params, row.inputs)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, alone(row.params, row.inputs), first)
    mapped, scanned, nothing = jax.device_get(together(row.params, row.inputs))
    jax.tree.map(lambda steps, one: np.testing.assert_array_equal(steps, [one, one]), scanned, first)
    for member in np.ndindex(2, 2):
        pairs = zip(member, (row.params, row.inputs), strict=True)
        arrays = [jax.tree.map(lambda leaf, k=k: np.float32(1 - 2 * k) * np.asarray(leaf), tree) for k, tree in pairs]
        assert_near(jax.tree.map(lambda leaf, member=member: leaf[member], mapped), alone(*arrays))
    if row.operation in ("attention", "recurrence"):  # whose loops have no parts that depend on the batch
        of_rows, one_by_one = (first[0][1], first[1]), jax.device_get(row.inputs)
        (_, to_inputs), outputs = jax.tree.map(lambda leaf: leaf[0, 0], mapped)
        jax.tree.map(np.testing.assert_array_equal, (to_inputs, outputs), of_rows)
        for k in range(0, len(jax.tree.leaves(row.inputs)[0]), 3):
            (_, to_inputs), outputs = alone(row.params, jax.tree.map(lambda leaf, k=k: leaf[k : k + 1], one_by_one))
            found = jax.tree.map(lambda leaf: leaf[0], (to_inputs, outputs))
            jax.tree.map(lambda one, all, k=k: np.testing.assert_array_equal(one, all[k]), found, of_rows)
    if nothing is not None:
        (to_params, to_inputs), outputs = nothing
        assert not any(leaf.any() for leaf in jax.tree.leaves(to_params))
        shapes = jax.tree.map(jnp.shape, (to_inputs, outputs))
        assert jax.tree.map(lambda leaf: leaf[:0].shape, (first[0][1], first[1])) == shapes


@rows(lambda row: row.call is not None)
@pytest.mark.several_devices
def test_each_device_computes_its_rows(row):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    expected = program(row.operation)(row.params, row.inputs)
    batch = len(jax.tree.leaves(row.inputs)[0])
    sharing = BatchSharding(batch, lambda rows: rows, Layout(mesh=mesh).map_rows)
    with use_batch_sharding(sharing):  # in a program that XLA partitions
        partitioned = jax.jit(gradient(row, row.native)).lower(row.params, row.inputs)
    calls = re.findall(r"@jaxnn_\w+\(.*?: \(tensor<" + row.call, partitioned.as_text())
    assert calls and set(calls) == {str(batch // 4)}
    assert_near(partitioned.compile()(row.params, row.inputs), expected)

    def shard(params: Any, inputs: Any) -> jax.Array:
        return lax.psum(loss(row, row.native, params, inputs)[0], "data")

    specs = PartitionSpec(), PartitionSpec("data")
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    assert_near(jax.jit(jax.grad(sharded, (0, 1)))(row.params, row.inputs), expected[0])


@rows()
def test_kernels_are_the_default_and_other_programs_have_xlas_operations(row, monkeypatch):
    def chosen() -> list[str]:
        found = Traced(lambda *arrays: gradient(row, None)(*arrays), row.params, row.inputs).implementations
        return found.get(row.operation, ["xla"])

    assert chosen() == [row.native]
    lowered = jax.jit(gradient(row, None)).lower(row.params, row.inputs).as_text()
    assert " ".join(sorted(set(re.findall(r"@jaxnn_(\w+)\(", lowered)))) == row.kernels
    with kernels.portable():
        assert chosen() == ["fused_inputs" if row.operation == "recurrence" else "xla"]
    members = jax.tree.map(lambda leaf: leaf[None], row.inputs)
    run = jax.jit(jax.vmap(gradient(row, row.native), (None, 0)))
    text = jax.export.export(run, platforms=["cuda"])(row.params, members).mlir_module()
    assert f"stablehlo.{row.product}" in text and "@jaxnn_" not in text
    monkeypatch.setenv("JAXNN_NATIVE", "off")
    assert chosen() == [row.fallback]
    with pytest.raises(ConfigError, match=f"{row.operation} cannot use '{row.native}' here: .*switched off"):
        jax.eval_shape(functools.partial(row.layer, implementation=row.native), row.params, row.inputs)


@rows(lambda row: row.call is not None)
def test_programs_with_a_symbolic_batch_have_the_same_results(row):
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype), row.inputs)
    exported = jax.export.export(jax.jit(row.layer))(row.params, shapes)
    assert_near(exported.call(row.params, row.inputs), program(row.operation)(row.params, row.inputs)[1])


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch):
    loads: list[tuple[Callable[[str], Any], str]] = [
        (lambda name: ctypes.CDLL("libabsent.so"), "cannot be loaded: libabsent.so: cannot open"),
        (lambda name: __import__("absent"), "cannot be loaded: No module named 'absent'"),
        (
            lambda name: types.SimpleNamespace(abi=lambda: 0),
            r"has kernels of version 0, and jaxnn calls version \d+: make",
        ),
    ]
    x, kernel = DENSE.arrays()
    for load, words in loads:
        with monkeypatch.context() as patched:
            patched.setattr(importlib, "import_module", load)
            with pytest.raises(ConfigError, match=f"the package jaxnn-native {words}"):
                DENSE.function("native")(x, kernel)


NARROW = """
import os
one_thread = os.environ["JAX_NUM_CPU_DEVICES"] == "1"
if one_thread:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, jaxnn_native, pytest
from tests.nn import test_attention, test_convolution, test_recurrent
if one_thread:
    threads = jax.jit(lambda: jax.ffi.ffi_call("jaxnn_threads", jax.ShapeDtypeStruct((), jnp.int32))())()
    assert threads == 1, threads
    test_convolution.test_values_and_gradients_are_exact("native")
    test_attention.test_native_values_and_gradients_of_all_sizes_and_options_are_exact()  # which needs AVX2
test_recurrent.test_native_loops_equal_xlas_in_every_size_length_and_direction()
test_recurrent.test_native_tanh_is_exact_to_a_millionth()
assert not jaxnn_native.has_bfloat16()
with pytest.raises(test_convolution.ConfigError, match="this CPU has no instructions for bfloat16"):
    test_convolution.all_graded(test_convolution.FORMS, jnp.bfloat16, "native")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("instructions", "devices"), [("avx2", 1), ("baseline", 4)], ids=["one thread", "threads"])
def test_fewer_instructions_give_the_same_results(instructions, devices):
    environment = {"JAXNN_MAX_ISA": instructions, "JAX_NUM_CPU_DEVICES": str(devices)}
    done = shell.python("-c", NARROW, timeout=900, **environment)
    assert done.returncode == 0, done.stderr


CORES = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
import jax, numpy as np
from tests.nn.test_native_kernels import TABLE, program
for row in TABLE:
    leaves = map(np.asarray, jax.tree.leaves(program(row.operation)(row.params, row.inputs)))
    print(row.operation, hashlib.sha256(b"".join(map(bytes, leaves))).hexdigest())
"""


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_cores():
    one, two = (shell.python("-c", CORES, cores, timeout=900).stdout for cores in "12")
    assert one == two and one.count("\n") == len(TABLE)


@pytest.mark.slow
def test_many_threads_and_more_shapes_than_the_cache_holds():
    import jaxnn_native

    sizes = range(3, 93)
    convolve = functools.partial(nn.conv_general_dilated, window_strides=(1,), padding="SAME", implementation="native")

    @functools.partial(jax.jit, static_argnames="size")
    def run(x: jax.Array, kernel: jax.Array, size: int) -> Any:
        numbers = ("NWC", "WIO", "NWC")
        return draws.graded(functools.partial(convolve, dimension_numbers=numbers))(x[:, :size], kernel)

    x, kernel = draws.normal(0, 6, 92, 16), draws.normal(1, 3, 16, 24)
    alone = {size: jax.device_get(run(x, kernel, size)) for size in sizes}  # of each size three primitives
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for size, results in [(s, pool.submit(run, x, kernel, s)) for _ in range(4) for s in reversed(sizes)]:
            jax.tree.map(np.testing.assert_array_equal, results.result(), alone[size])
    # Of one shape, from all threads at once.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results in [pool.submit(run, x, kernel, 50) for _ in range(400)]:
            jax.tree.map(np.testing.assert_array_equal, results.result(), alone[50])
    assert 0 < jaxnn_native.num_plans() <= 256
