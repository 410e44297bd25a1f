"""oneDNN's convolutions and dense gradients: XLA's in every form, to the bit in every run, on any number of threads."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxnn.nn import BatchSharding, Conv, Embed, conv_general_dilated, dot_general, portable, use_batch_sharding
from jaxnn.observe import implementations, product_flops
from jaxnn.parallel import Layout
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_near
from tests.nn.test_convolution import CASES, DENSE, DEPTHWISE, FORMS, GROUPS, Case, assert_exact, graded, with_gradients

pytestmark = native.needed
# Strides and input dilation at once are refused.
SUPPORTED = {name: case for name, case in CASES.items() if not (case.lhs_dilation and max(case.strides) > 1)}
TRANSPOSED = {
    "transposed": Case((4, 5), (3, 4), (1, 1), ((2, 1), (1, 3)), lhs_dilation=(2, 3)),
    "transposed groups, dilated": Case(
        (4, 5), (2, 3), (1, 1), ((0, 2), (3, 0)), groups=2, lhs_dilation=(3, 2), rhs_dilation=(2, 1)
    ),
    "transposed, padded beyond the kernel": Case((3,), (2,), (1,), ((4, 3),), lhs_dilation=(3,)),
    "transposed, cropped": Case((4, 5), (3, 3), (1, 1), ((-2, 0), (-1, -3)), lhs_dilation=(2, 2)),
    "3-D, transposed": Case((2, 3, 2), (2, 2, 1), (1, 1, 1), ((1, 1),) * 3, (2, 3), lhs_dilation=(2, 2, 2)),
}
# Enough work to be cut into parts, of unequal sizes too; the last more than one thread's share of features.
LARGE = {
    "even": Case((16, 16), (3, 3), (1, 1), features=(16, 24), batch=8),
    "uneven": Case((16, 16), (3, 3), (2, 2), features=(16, 24), batch=7),
    "few": Case((32, 32), (3, 3), (1, 1), features=(16, 24), batch=1),
    "4x4 tiles": Case((15, 12), (3, 3), (1, 1), ((1, 1), (2, 0)), features=(32, 48), batch=5),
    "2x2 tiles": Case((12, 9), (3, 3), (1, 1), ((0, 0), (0, 2)), features=(48, 16), batch=2),
    "depthwise": Case((32, 32), (3, 3), (1, 1), features=(32, 32), groups=32, batch=5),
}


def test_every_form_equals_the_definition_and_other_implementations() -> None:
    cases = SUPPORTED | TRANSPOSED | LARGE
    assert len(SUPPORTED) == len(CASES) - 2
    ours, theirs = graded(cases, jnp.float32, "onednn"), graded(cases, jnp.float32, "channels_last")
    for name, case in cases.items():
        assert_exact(case, *case.arrays(), ours[name], 1e-5, name)
        for left, right in zip(ours[name], theirs[name], strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * np.abs(right).max(), err_msg=name)


def test_bfloat16_is_summed_in_float32() -> None:
    import jaxnn_onednn

    if not jaxnn_onednn.has_bfloat16():
        pytest.skip("this CPU has no instructions for bfloat16")
    cases = FORMS | LARGE
    for wide in (None, jnp.float32):
        for name, results in graded(cases, jnp.bfloat16, "onednn", preferred_element_type=wide).items():
            assert [str(each.dtype) for each in results] == [wide and "float32" or "bfloat16", *["bfloat16"] * 2]
            assert_exact(cases[name], *cases[name].arrays(jnp.bfloat16), results, 3e-2, name)


def test_second_derivatives_and_forward_mode_equal_xla() -> None:
    def derivatives(case: Case, implementation: str) -> Any:
        def loss(arrays: Any) -> jax.Array:
            return (case.function(implementation)(*arrays) ** 3).sum()

        arrays, tangents = case.arrays(), case.arrays(seed=5)
        return jax.jvp(jax.grad(loss), (arrays,), (tangents,)), jax.grad(lambda a: jax.jvp(loss, (a,), (tangents,))[1])(
            arrays
        )

    cases = [DENSE, DEPTHWISE, GROUPS, LARGE["4x4 tiles"], LARGE["2x2 tiles"], *TRANSPOSED.values()]
    both = jax.jit(lambda: [[derivatives(case, name) for case in cases] for name in ("onednn", "xla")])()
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("axes", [(1, None), (None, -1), (0, 2)], ids=["inputs", "kernels", "both"])
def test_vmap_equals_separate_runs(axes: tuple[int | None, int | None]) -> None:
    cases = FORMS | {"transposed": TRANSPOSED["transposed"]} | {name: LARGE[name] for name in ("even", "4x4 tiles")}

    def members(case: Case) -> list[Any]:
        pairs = zip(case.arrays(), axes, strict=True)
        scaled = [a if axis is None else jnp.stack([k * a for k in (1, -2, 3)], axis) for a, axis in pairs]
        return scaled

    def run(implementation: str, case: Case, arrays: Any) -> Any:
        # Members of members, of which the outer share the first array.
        function = jax.vmap(jax.vmap(with_gradients(case.function(implementation)), axes), (None, 0))
        return function(arrays[0], jnp.stack([arrays[1], 2 * arrays[1]]))

    both = jax.jit(
        lambda: [{name: run(by, case, members(case)) for name, case in cases.items()} for by in ("onednn", "xla")]
    )()
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


def test_bits_are_equal_in_every_run_and_in_a_scan() -> None:
    cases = LARGE | FORMS
    runs = {name: with_gradients(case.function("onednn")) for name, case in cases.items()}
    arrays = {name: case.arrays() for name, case in cases.items()}
    once = jax.jit(lambda arrays: {name: run(*arrays[name]) for name, run in runs.items()})
    scanned = jax.jit(lambda arrays: lax.scan(lambda carry, _: (carry, once(arrays)), 0, length=3)[1])
    first, in_scan = once(arrays), scanned(arrays)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, once(arrays), first)
    for step in range(3):
        jax.tree.map(lambda a, b, step=step: np.testing.assert_array_equal(a[step], b), in_scan, first)
    # Outside of jit, operation by operation.
    jax.tree.map(np.testing.assert_array_equal, runs["uneven"](*arrays["uneven"]), first["uneven"])


def test_each_device_convolves_its_rows() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, kernel = LARGE["even"].arrays()
    function = LARGE["even"].function("onednn")

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(function(x, kernel) ** 2)

    def shard(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return lax.psum(loss(kernel, x), "data")

    specs = PartitionSpec(), PartitionSpec("data")
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    expected = jax.jit(jax.grad(loss, (0, 1)))(kernel, x)
    gradients = [jax.jit(jax.grad(sharded, (0, 1)))(kernel, x)]
    with use_batch_sharding(
        BatchSharding(len(x), lambda rows: rows, Layout(mesh=mesh).map_rows)
    ):  # in a program that XLA partitions
        program = jax.jit(jax.grad(loss, (0, 1))).lower(kernel, x)
    calls = re.findall(r"@jaxnn_convolution.*?: \(tensor<(\d+)x16x16x16", program.as_text())
    assert len(calls) >= 2 and set(calls) == {"2"}
    for found in (*gradients, program.compile()(kernel, x)):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_obstacles_have_a_reason_and_the_next_implementation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = DENSE.arrays()

    def chosen(function: Any, *arrays: Any) -> str:
        text = jax.jit(function).lower(*arrays).as_text(debug_info=True)
        return next(name for name in ("onednn", "channels_last", "xla") if f"jaxnn.convolution.{name}" in text)

    assert chosen(DENSE.function(), x, kernel) == "onednn"
    both_dilated, cropped = CASES["input dilated"], Case((2, 9), (2, 2), (1, 1), ((-2, 3), (0, 0)))
    for text, function, arrays in (
        ("both strides and input dilation", both_dilated.function, both_dilated.arrays()),
        ("float32 and bfloat16, not float16", DENSE.function, DENSE.arrays(jnp.float16)),
        ("crops all", cropped.function, cropped.arrays()),
    ):
        assert chosen(function(), *arrays) == "channels_last"
        with pytest.raises(ConfigError, match=f"'onednn' here: .*{text}.*; leave implementation out"):
            function("onednn")(*arrays)
    (batch,) = jax.export.symbolic_shape("b")
    symbolic = jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    exported = jax.export.export(jax.jit(DENSE.function()))(symbolic, kernel)
    np.testing.assert_allclose(exported.call(x, kernel), DENSE.function()(x, kernel), rtol=0, atol=1e-5)
    with portable():
        assert chosen(DENSE.function(), x, kernel) == "xla"
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", lambda name: ctypes.CDLL("libabsent.so"))
        with pytest.raises(ConfigError, match="the package jaxnn-onednn cannot be loaded: libabsent.so: cannot open"):
            DENSE.function("onednn")(x, kernel)
        patched.setattr(importlib, "import_module", lambda name: __import__("absent"))
        with pytest.raises(ConfigError, match="the package jaxnn-onednn cannot be loaded: No module named 'absent'"):
            DENSE.function("onednn")(x, kernel)
        patched.setattr(importlib, "import_module", types.ModuleType)
        with pytest.raises(ConfigError, match="the package jaxnn-onednn is older than jaxnn: make onednn"):
            DENSE.function("onednn")(x, kernel)
    monkeypatch.setenv("JAXNN_NATIVE", "off")
    assert chosen(DENSE.function(), x, kernel) == "channels_last"
    with pytest.raises(ConfigError, match="the package jaxnn-onednn is not installed: make onednn"):
        DENSE.function("onednn")(x, kernel)


def test_empty_batches_convolve() -> None:
    layer = Conv(3, (3, 3))
    params = draws.variables(layer, jnp.ones((1, 5, 4, 2)))
    assert layer.apply(params, jnp.ones((0, 5, 4, 2))).shape == (0, 5, 4, 3)
    stacked = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape)), params)
    assert jax.vmap(layer.apply, (0, None))(stacked, jnp.ones((2, 5, 4, 2))).shape == (0, 2, 5, 4, 3)


def test_programs_for_other_platforms_have_xlas_convolution() -> None:
    def run(x: jax.Array, kernel: jax.Array) -> Any:
        return jax.vmap(with_gradients(GROUPS.function("onednn")))(x, kernel)

    stacked = [jnp.stack([array] * 2) for array in GROUPS.arrays()]
    text = jax.export.export(jax.jit(run), platforms=["cuda"])(*stacked).mlir_module()
    assert "stablehlo.convolution" in text and "jaxnn_convolution" not in text


# Sizes of [batch, in_features] and [in_features, out_features]: cut into blocks of rows or of columns, equal or not.
DENSE_SIZES = {
    "rows": (70, 160, 128),
    "columns": (90, 65, 300),
    "odd": (129, 300, 97),
    "narrow": (400, 2, 1),
    "one": (1, 5, 3),
    "empty": (0, 5, 3),
}


def dense(implementation: str | None, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), implementation=implementation)


def dense_arrays(name: str, dtype: Any = jnp.float32) -> list[jax.Array]:
    batch, in_features, out_features = DENSE_SIZES[name]
    return [draws.normal(0, batch, in_features, dtype=dtype), draws.normal(1, in_features, out_features, dtype=dtype)]


def dense_gradients(implementation: str | None) -> Any:
    return jax.value_and_grad(lambda *arrays: jnp.sum(dense(implementation, *arrays) ** 3), (0, 1))


def test_dense_gradients_equal_xla_to_any_order_and_in_a_scan() -> None:
    arrays = {name: dense_arrays(name) for name in DENSE_SIZES}
    tangents = {name: [array[::-1] for array in pair] for name, pair in arrays.items()}

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str) -> Any:
        first = dense_gradients(implementation)
        results = [first(*pair) for pair in arrays.values()]
        results += [jax.jvp(lambda *a: first(*a)[1], arrays[name], tangents[name]) for name in arrays]
        x, kernel = arrays["rows"]
        results.append(first(x.reshape(7, 5, 2, -1), kernel))
        results.append(jax.grad(lambda *a: sum(jnp.sum(jnp.sin(1e-4 * g)) for g in first(*a)[1]), (0, 1))(x, kernel))
        return results, lax.scan(lambda carry, _: (carry, results[:2]), 0, length=2)[1]

    both = [run("onednn"), run("xla")]
    assert_near(*both)
    results, scanned = both[0]
    jax.tree.map(np.testing.assert_array_equal, run("onednn"), both[0])
    for step in range(2):
        jax.tree.map(lambda a, b, step=step: np.testing.assert_array_equal(a[step], b), scanned, results[:2])


def test_dense_gradients_of_bfloat16_are_summed_in_float32() -> None:
    import jaxnn_onednn

    if not jaxnn_onednn.has_bfloat16():
        pytest.skip("this CPU has no instructions for bfloat16")
    x, kernel = dense_arrays("rows", jnp.bfloat16)
    gradient = lambda x, kernel: jax.vjp(functools.partial(dense, "onednn"), x, kernel)[1](x[:, :128])[1]  # noqa: E731
    found, expected = jax.jit(gradient)(x, kernel), np.float32(x).T @ np.float32(x[:, :128])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(found), expected, rtol=2**-8, atol=1e-5)


def test_dense_gradients_run_where_jit_is_disabled() -> None:
    arrays = dense_arrays("one")
    with jax.disable_jit():
        both = [dense_gradients(by)(*arrays) for by in ("onednn", "xla")]
    assert_near(*both)


@pytest.mark.parametrize("axes", [(0, None), (None, -1), (1, 0)], ids=["inputs", "kernels", "both"])
def test_dense_members_equal_separate_runs(axes: tuple[int | None, int | None]) -> None:
    pairs = [list(zip(dense_arrays(name), axes, strict=True)) for name in ("rows", "columns")]
    members = [[a if axis is None else jnp.stack([a, -2 * a, 3 * a], axis) for a, axis in pair] for pair in pairs]

    def run(implementation: str, pair: Any) -> Any:
        # Members of members, of which the outer share the inputs.
        return jax.vmap(jax.vmap(dense_gradients(implementation), axes), (None, 0))(pair[0], jnp.stack([pair[1]] * 2))

    assert_near(*jax.jit(lambda: [[run(by, pair) for pair in members] for by in ("onednn", "xla")])())
    assert product_flops(functools.partial(run, "onednn"), members[0]) == {"float32": 2 * 3 * 6 * 70 * 160 * 128.0}


def test_each_device_multiplies_its_rows() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, kernel = draws.normal(0, 80, 160), dense_arrays("rows")[1]

    sharded = lambda *arrays: dense_gradients("onednn")(*arrays)  # noqa: E731
    with use_batch_sharding(
        BatchSharding(len(x), lambda rows: rows, Layout(mesh=mesh).map_rows)
    ):  # in a program that XLA partitions
        program = jax.jit(sharded).lower(x, kernel)
        assert product_flops(sharded, x, kernel) == {"float32": 2 * 3 * 80 * 160 * 128.0}, "of all devices"
        with pytest.raises(ConfigError, match="devices share the batch, whose axis is not the first"):
            dense("onednn", x[None], kernel)
    with pytest.raises(ConfigError, match="there is one row"):
        dense("onednn", x[0], kernel)
    calls = 1 + importlib.import_module("jaxnn_onednn").has_fast_products(20)  # the layer itself, if that is faster too
    assert re.findall(r"@jaxnn_product.*?: \(tensor<(\d+)x160x", program.as_text()) == ["20"] * calls
    rows = jax.shard_map(
        lambda x, kernel: lax.psum(dense_gradients("onednn")(x, kernel)[0], "data"),
        mesh=mesh,
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    expected = jax.jit(dense_gradients("xla"))(x, kernel)
    assert_near(program.compile()(x, kernel)[1], expected[1])
    assert_near(jax.jit(jax.grad(rows, (0, 1)))(x, kernel), expected[1])


def test_dense_gradients_fall_back_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    x, kernel = jnp.ones((128, 65)), jnp.ones((65, 64))

    def chosen(x: Any, kernel: Any) -> list[str]:
        return implementations(functools.partial(dense, None), x, kernel).get("dense", ["xla"])

    assert chosen(x, kernel) == ["onednn"] and chosen(x[:, 1:], kernel[1:]) == ["xla"], "of few products"
    assert chosen(x.astype(jnp.float16), kernel.astype(jnp.float16)) == ["xla"]
    (batch,) = jax.export.symbolic_shape("b")
    symbolic = jax.ShapeDtypeStruct((batch, 65), x.dtype)
    exported = jax.export.export(jax.jit(dense_gradients(None)))(symbolic, kernel)
    assert_near(exported.call(x, kernel), dense_gradients(None)(x, kernel))
    text = jax.export.export(jax.jit(dense_gradients("onednn")), platforms=["cuda"])(x, kernel).mlir_module()
    assert text.count("stablehlo.dot_general") == 3 and "jaxnn_product" not in text
    monkeypatch.setenv("JAXNN_NATIVE", "off")
    assert chosen(x, kernel) == ["xla"]
    with pytest.raises(ConfigError, match="dense cannot use 'onednn' here: the package jaxnn-onednn is not installed"):
        dense("onednn", x, kernel)


ON_ONE_THREAD = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, jaxnn_onednn
from tests.nn.test_onednn import LARGE, ConfigError, FORMS, graded, np
threads = jax.jit(lambda: jax.ffi.ffi_call("jaxnn_threads", jax.ShapeDtypeStruct((), jnp.int32))())()
assert threads == 1, threads
ours, theirs = (graded(LARGE | FORMS, jnp.float32, name) for name in ("onednn", "channels_last"))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), ours, theirs)
assert not jaxnn_onednn.has_bfloat16()
try:
    graded(FORMS, jnp.bfloat16, "onednn")
except ConfigError as error:
    print(error)
"""


def test_gradients_of_tables_have_the_bits_of_xla() -> None:
    # Enough for several threads; some ids are beyond the table, and some count from its end.
    ids, table, weights = draws.integers(0, 1100, 64, 30) - 50, draws.normal(1, 1000, 50), draws.normal(2, 64, 50)
    layer = Embed(1000, 50)

    def loss(method: str, table: jax.Array) -> jax.Array:
        rows = layer.apply({"params": {"embedding": table}}, ids, method=method)
        return jnp.nansum((rows if method == "mean" else rows.sum(axis=1)) * weights)

    for method in ("__call__", "mean"):
        gradient = jax.grad(functools.partial(loss, method))
        assert implementations(gradient, table)["lookup"] == ["native"]
        with portable():
            assert implementations(plain := lambda x, f=gradient: f(x), table)["lookup"] == ["xla"]
            expected = jax.jit(plain)(table)
        tolerance = 1e-5 if method == "mean" else 0.0  # of a mean, the addends are rounded too
        np.testing.assert_allclose(jax.jit(gradient)(table), expected, tolerance, tolerance)
    with use_batch_sharding(BatchSharding(64, lambda x: x, lambda f, *_: f)):
        assert implementations(jax.grad(lambda x: loss("mean", x)), table)["lookup"] == ["xla"]


@pytest.mark.slow
def test_one_thread_without_the_widest_instructions() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run([sys.executable, "-c", ON_ONE_THREAD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "this CPU has no instructions for bfloat16" in done.stdout


@pytest.mark.slow
def test_many_threads_and_more_shapes_than_the_cache_holds() -> None:
    import jaxnn_onednn

    sizes = range(3, 93)
    convolve = functools.partial(conv_general_dilated, window_strides=(1,), padding="SAME", implementation="onednn")

    @functools.partial(jax.jit, static_argnames="size")
    def run(x: jax.Array, kernel: jax.Array, size: int) -> Any:
        numbers = ("NWC", "WIO", "NWC")
        return with_gradients(functools.partial(convolve, dimension_numbers=numbers))(x[:, :size], kernel)

    x, kernel = draws.normal(0, 6, 92, 16), draws.normal(1, 3, 16, 24)
    alone = {size: jax.device_get(run(x, kernel, size)) for size in sizes}  # of each size three primitives
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for size, results in [(s, pool.submit(run, x, kernel, s)) for _ in range(4) for s in reversed(sizes)]:
            jax.tree.map(np.testing.assert_array_equal, results.result(), alone[size])
    # Of one shape, from all threads at once.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results in [pool.submit(run, x, kernel, 50) for _ in range(400)]:
            jax.tree.map(np.testing.assert_array_equal, results.result(), alone[50])
    assert 0 < jaxnn_onednn.num_plans() <= 256
