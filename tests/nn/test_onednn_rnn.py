"""The native loops of the LSTM: equal to XLA's loop in every form, to the bit in every run and for every row."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxnn.nn import GRU, LSTM, BatchSharding, Bidirectional, use_batch_sharding
from jaxnn.observe import product_flops
from jaxnn.parallel import Layout
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_near

pytestmark = native.needed
# Batch, time steps, inputs and features: one row and several parts of unequal size, fewer rows than threads, features
# that fill the vectors, are fewer, and more.
SIZES = [(1, 3, 2, 1), (2, 40, 3, 70), (3, 5, 4, 16), (7, 20, 5, 65), (9, 4, 3, 33), (8, 1, 3, 48)]
PADDED, KEPT = 2, {"reverse": True, "keep_order": True}


def arrays_of(batch: int, time: int, inputs: int, features: int) -> Any:
    """Parameters, inputs and state. The kernels' norms are near 1: rounding is not amplified from step to step."""
    x = draws.normal(0, batch, time, inputs)
    params = jax.tree.map(lambda leaf: leaf * features**-0.5, draws.variables(LSTM(features), x))
    return params, x, tuple(draws.normal(k, batch, features) for k in (1, 2))


def graded(by: str, params: Any, x: jax.Array, carry: Any, **call: Any) -> Any:
    """State and outputs, and the gradients of the sum of their cubes."""
    layer = LSTM(carry[0].shape[-1], implementation=by, return_carry=True)

    def loss(params: Any, x: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
        results = layer.apply(params, x, initial_carry=carry, **call)
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(results)), results

    return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, carry)


def by_both(run: Any) -> Any:
    return jax.jit(lambda: [run(by) for by in ("native", "fused_inputs")])()


def test_values_and_gradients_of_all_sizes_and_options_equal_xlas_loop() -> None:
    cases = [(arrays_of(*sizes), {}) for sizes in SIZES]
    padded = arrays_of(*SIZES[PADDED])
    cases += [(padded, {"seq_lengths": np.array([5, 0, 2]), **options}) for options in ({}, KEPT)]
    cases.append(((*padded[:1], padded[1].swapaxes(0, 1), padded[2]), {"time_major": True, "reverse": True}))
    assert_near(*by_both(lambda by: [graded(by, *arrays, **call) for arrays, call in cases]))
    x, pair = padded[1], {name: padded[0]["params"] for name in ("forward_rnn", "backward_rnn")}

    def both_directions(by: str) -> Any:
        return Bidirectional(*[LSTM(16, implementation=by) for _ in "ab"]).apply({"params": pair}, x)

    assert_near(*by_both(both_directions))


def test_tanh_is_exact_to_a_millionth() -> None:
    x = np.concatenate([np.logspace(-30, 1.3, 400), [0.0, 88.0, 1e30]])
    x = np.float32(np.concatenate([x, -x]))
    # The input gate is 1 and the cell's state 0: the new state is tanh of the input.
    params = jax.tree.map(jnp.zeros_like, arrays_of(1, 1, 1, 1)[0])
    cell = params["params"]["cell"]
    cell |= {"ig": {"kernel": jnp.ones((1, 1))}, "hi": cell["hi"] | {"bias": jnp.full(1, 40.0)}}
    ((c, _), _) = LSTM(1, implementation="native", return_carry=True).apply(params, x[:, None, None])
    np.testing.assert_allclose(c[:, 0], np.tanh(np.float64(x)), rtol=1e-6)


def test_saturated_gates_have_no_gradient() -> None:
    params, x, _ = arrays_of(1, 1, 2, 16)
    gradients = jax.grad(lambda p, x: LSTM(16, implementation="native").apply(p, x).sum())(params, x.at[:].set(1e30))
    assert all(np.isfinite(g).all() and np.abs(g).max() < 1 for g in jax.tree.leaves(gradients))


def test_second_derivatives_and_forward_mode_equal_xlas_loop() -> None:
    arrays = arrays_of(*SIZES[PADDED])
    tangents = jax.tree.map(lambda leaf: draws.normal(3, *leaf.shape), arrays)

    def derivatives(by: str) -> Any:
        def loss(*arrays: Any) -> jax.Array:
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(graded(by, *arrays)[1]))

        gradient = jax.grad(loss, (0, 1, 2))
        reverse = jax.grad(lambda *arrays: sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient(*arrays))), (0, 1, 2))
        forward = jax.grad(lambda *arrays: jax.jvp(loss, arrays, tangents)[1], (0, 1, 2))

        def layer(params: Any, x: jax.Array, carry: Any) -> jax.Array:
            return LSTM(16, implementation=by).apply(params, x, initial_carry=carry)

        pushed = [jax.jvp(function, arrays, tangents) for function in (layer, gradient)]
        return pushed, reverse(*arrays), forward(*arrays)

    assert_near(*by_both(derivatives))


def test_vmap_equals_separate_runs() -> None:
    params, x, carry = arrays_of(*SIZES[PADDED])
    members = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), params)

    def run(by: str) -> Any:
        one = jax.vmap(lambda p, x, c: graded(by, p, x, c), (0, None, None))
        nested = jax.vmap(one, (None, 1, None))
        return one(members, x, carry), nested(members, jnp.stack([x, -x], 1), carry)

    found, expected = by_both(run)
    assert_near(found, expected)
    one = jax.jit(lambda member: graded("native", jax.tree.map(lambda leaf: leaf[member], members), x, carry))
    assert_near(found[0], jax.tree.map(lambda *leaves: np.stack(leaves), *map(one, range(3))))


def test_rows_have_the_same_bits_alone_and_in_every_run() -> None:
    params, x, carry = arrays_of(*SIZES[3])
    run = jax.jit(lambda x, carry: (lambda g, out: (g[1], out))(*graded("native", params, x, carry)))
    together = run(x, carry)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(x, carry), together)
    layer = jax.jit(LSTM(65, implementation="native").apply)
    outputs = layer(params, x)
    for row in range(0, len(x), 3):
        np.testing.assert_array_equal(layer(params, x[row : row + 1])[0], outputs[row])
    scanned = jax.jit(lambda: lax.scan(lambda carry, _: (carry, run(x, carry)), carry, length=2)[1])()
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[1], one), scanned, together)


def test_nan_stays_in_its_row_and_empty_batches_run() -> None:
    params, x, carry = arrays_of(*SIZES[PADDED])
    outputs = LSTM(16, implementation="native").apply(params, x.at[1, 2].set(jnp.nan))
    assert (np.isnan(outputs).any(-1) == [[False] * 5, [False] * 2 + [True] * 3, [False] * 5]).all()
    (_, to_x, _), (state, outputs) = graded("native", params, x[:0], jax.tree.map(lambda leaf: leaf[:0], carry))
    assert (to_x.shape, state[0].shape, outputs.shape) == ((0, 5, 4), (0, 16), (0, 5, 16))


def test_each_device_runs_its_rows() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params, x, _ = arrays_of(8, 20, 5, 32)
    layer = LSTM(32, implementation="native", time_major=True)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layer.apply(params, x.swapaxes(0, 1)) ** 2)

    def shard(params: Any, x: jax.Array) -> jax.Array:
        return lax.psum(loss(params, x), "data")

    sharded = jax.shard_map(
        shard, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec()
    )
    expected = jax.jit(jax.grad(loss, (0, 1)))(params, x)
    assert_near(jax.jit(jax.grad(sharded, (0, 1)))(params, x), expected)
    with use_batch_sharding(
        BatchSharding(len(x), lambda rows: rows, Layout(mesh=mesh).map_rows)
    ):  # in a program that XLA partitions
        program = jax.jit(jax.grad(loss, (0, 1))).lower(params, x)
    calls = re.findall(r"@jaxnn_lstm.*?: \(tensor<20x(\d+)x128", program.as_text())
    assert len(calls) == 2 and set(calls) == {"2"}
    assert_near(program.compile()(params, x), expected)


def test_obstacles_have_a_reason_and_programs_for_other_platforms_have_xlas_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, x, carry = arrays_of(8, 8, 3, 4)

    def chosen(layer: Any, x: Any) -> str:
        text = jax.jit(layer.init_with_output).lower(jax.random.key(0), x).as_text(debug_info=True)
        return next(name for name in ("native", "fused_inputs") if f"jaxnn.recurrence.{name}" in text)

    assert chosen(LSTM(4), x) == "native"
    assert chosen(LSTM(4), x[1:]) == "fused_inputs"
    assert chosen(LSTM(4, implementation="native"), x[1:]) == "native"
    for reason, kind, options, inputs in (
        ("only for an LSTM", GRU, {}, x),
        ("float32, not in bfloat16, float32", LSTM, {"dtype": jnp.bfloat16}, x),
        ("no time steps", LSTM, {}, x[:, :0]),
    ):
        assert chosen(kind(4, **options), inputs) == "fused_inputs"
        with pytest.raises(ConfigError, match=f"'native' here: .*{reason}.*; leave implementation out"):
            kind(4, implementation="native", **options).init(jax.random.key(0), inputs)
    flops = [
        product_flops(jax.grad(lambda p, by=by: LSTM(4, implementation=by).apply(p, x).sum()), params)
        for by in ("native", "fused_inputs")
    ]
    assert flops[0] == flops[1] != {}
    (batch,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(LSTM(4).apply))(params, jax.ShapeDtypeStruct((batch, 8, 3), x.dtype))
    assert_near(exported.call(params, x), LSTM(4).apply(params, x))
    run = jax.jit(jax.vmap(lambda x: graded("native", params, x, carry)))
    text = jax.export.export(run, platforms=["cuda"])(x[None]).mlir_module()
    assert "stablehlo.while" in text and "jaxnn_lstm" not in text
    monkeypatch.setenv("JAXNN_NATIVE", "off")
    assert chosen(LSTM(4), x) == "fused_inputs"


NARROW = """
from tests.nn.test_onednn_rnn import *
cases = [arrays_of(*sizes) for sizes in SIZES]
assert_near(*by_both(lambda by: [graded(by, *arrays) for arrays in cases]))
test_tanh_is_exact_to_a_millionth()
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["AVX2", "SSE41"])
def test_narrower_instructions(isa: str) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa}
    done = subprocess.run([sys.executable, "-c", NARROW], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
