"""The native loops of the LSTM: equal to XLA's loop in every size and direction, to the bit for every row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.nn import GRU, LSTM, Bidirectional
from jaxnn.observe import implementations, product_flops
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
    variables = draws.variables(LSTM(features), x)
    params = jax.tree.map(lambda leaf: np.float32(features**-0.5) * np.asarray(leaf), variables)
    return params, x, tuple(draws.normal(k, batch, features) for k in (1, 2))


def graded(by: str, params: Any, x: jax.Array, carry: Any, **call: Any) -> Any:
    """State and outputs, and the gradients of the sum of their cubes."""
    layer = LSTM(carry[0].shape[-1], implementation=by, return_carry=True)

    def loss(params: Any, x: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
        results = layer.apply(params, x, initial_carry=carry, **call)
        return sum(jnp.sum(leaf**3) for leaf in jax.tree.leaves(results)), results

    return jax.grad(loss, (0, 1, 2), has_aux=True)(params, x, carry)


def exact(params: Any, x: Any, carry: Any) -> Any:
    """The results of `graded` by NumPy in float64: backpropagation through time."""
    params, x, (c, h) = jax.tree.map(np.float64, (params, x, carry))
    cell = params["params"]["cell"]
    of_inputs, of_state = (np.concatenate([cell[f"{k}{gate}"]["kernel"] for gate in "ifgo"], 1) for k in "ih")
    bias = np.concatenate([cell[f"h{gate}"]["bias"] for gate in "ifgo"])
    steps, outputs = [], []
    for t in range(x.shape[1]):
        sums = np.split(x[:, t] @ of_inputs + h @ of_state + bias, 4, axis=1)
        i, f, o = (1 / (1 + np.exp(-sums[gate])) for gate in (0, 1, 3))
        g, before = np.tanh(sums[2]), (c, h)
        c = f * c + i * g
        h = o * np.tanh(c)
        steps.append((before, i, f, g, o, np.tanh(c)))
        outputs.append(h)
    to_c, to_h, to_x = 3 * c**2, 3 * h**2, np.zeros_like(x)
    to_inputs, to_state, to_bias = (np.zeros_like(array) for array in (of_inputs, of_state, bias))
    for t, ((c_before, h_before), i, f, g, o, tanh) in reversed([*enumerate(steps)]):
        to_h = to_h + 3 * outputs[t] ** 2
        to_c = to_c + to_h * o * (1 - tanh**2)
        slopes = to_c * g * i * (1 - i), to_c * c_before * f * (1 - f), to_c * i * (1 - g**2), to_h * tanh * o * (1 - o)
        to_sums = np.concatenate(slopes, 1)
        to_inputs += x[:, t].T @ to_sums
        to_state += h_before.T @ to_sums
        to_bias += to_sums.sum(0)
        to_x[:, t], to_h, to_c = to_sums @ of_inputs.T, to_sums @ of_state.T, to_c * f
    halves = [np.split(array, 4, axis=-1) for array in (to_inputs, to_state, to_bias)]
    to_cell = {f"i{gate}": {"kernel": kernel} for gate, kernel in zip("ifgo", halves[0], strict=True)}
    to_cell |= {f"h{gate}": {"kernel": k, "bias": b} for gate, k, b in zip("ifgo", *halves[1:], strict=True)}
    gradients = {"params": {"cell": to_cell}}, to_x, (to_c, to_h)
    return jax.tree.map(np.float32, (gradients, ((c, h), np.stack(outputs, 1))))


def test_values_and_gradients_of_all_sizes_are_exact():
    cases = [arrays_of(*sizes) for sizes in SIZES]
    found = jax.jit(lambda cases: [graded("native", *arrays) for arrays in cases])(cases)
    for one, arrays in zip(found, cases, strict=True):
        assert_near(one, exact(*arrays))


def test_lengths_directions_and_time_major_equal_xlas_loop():
    params, x, carry = arrays_of(*SIZES[PADDED])
    lengths = np.array([5, 0, 2])

    def run(by: str, params: Any, x: jax.Array, carry: Any) -> Any:
        padded = [graded(by, params, x, carry, seq_lengths=lengths, **options) for options in ({}, KEPT)]
        pair = {name: params["params"] for name in ("forward_rnn", "backward_rnn")}
        both_directions = Bidirectional(*[LSTM(16, implementation=by) for _ in "ab"]).apply({"params": pair}, x)
        layer = LSTM(16, implementation=by, time_major=True)
        return padded, both_directions, layer.apply(params, x.swapaxes(0, 1), reverse=True)

    both = jax.jit(lambda *arrays: [run(by, *arrays) for by in ("native", "fused_inputs")])
    assert_near(*both(params, x, carry))


def test_tanh_is_exact_to_a_millionth():
    x = np.concatenate([np.logspace(-30, 1.3, 400), [0.0, 88.0, 1e30]])
    x = np.float32(np.concatenate([x, -x]))
    # The input gate is 1 and the cell's state 0: the new state is tanh of the input.
    params = jax.tree.map(np.zeros_like, arrays_of(1, 1, 1, 1)[0])
    cell = params["params"]["cell"]
    cell |= {"ig": {"kernel": np.ones((1, 1), np.float32)}, "hi": cell["hi"] | {"bias": np.full(1, 40.0, np.float32)}}
    ((c, _), _) = jax.jit(LSTM(1, implementation="native", return_carry=True).apply)(params, x[:, None, None])
    np.testing.assert_allclose(c[:, 0], np.tanh(np.float64(x)), rtol=1e-6)


def test_saturated_gates_have_no_gradient_and_nan_stays_in_its_row():
    params, x, _ = arrays_of(*SIZES[PADDED])
    apply = jax.jit(LSTM(16, implementation="native").apply)
    saturated = jax.jit(jax.grad(lambda p, x: apply(p, x).sum()))(params, np.full_like(x, 1e30))
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() < 1 for leaf in jax.tree.leaves(saturated))
    inputs = np.array(x)
    inputs[1, 2] = np.nan
    seen = np.isnan(apply(params, inputs)).any(-1)
    assert (seen == [[False] * 5, [False] * 2 + [True] * 3, [False] * 5]).all()


def test_rows_have_the_same_bits_alone():
    params, x, _ = arrays_of(*SIZES[3])
    layer = jax.jit(LSTM(65, implementation="native").apply)
    outputs = layer(params, x)
    for row in range(0, len(x), 3):
        np.testing.assert_array_equal(layer(params, np.asarray(x)[row : row + 1])[0], outputs[row])


def test_sizes_and_dtypes_choose_and_obstacles_have_a_reason():
    params, x, _ = jax.tree.map(np.asarray, arrays_of(8, 8, 3, 4))

    def chosen(layer: Any, x: Any) -> list[str]:
        return implementations(layer.apply, jax.eval_shape(layer.init, jax.random.key(0), x), x)["recurrence"]

    assert chosen(LSTM(4), x) == chosen(LSTM(4, implementation="native"), x[1:]) == ["native"]
    assert chosen(LSTM(4), x[1:]) == ["fused_inputs"]
    for reason, kind, options, inputs in (
        ("only for an LSTM", GRU, {}, x),
        ("float32, not in bfloat16, float32", LSTM, {"dtype": jnp.bfloat16}, x),
        ("no time steps", LSTM, {}, x[:, :0]),
    ):
        assert chosen(kind(4, **options), inputs) == ["fused_inputs"]
        with pytest.raises(ConfigError, match=f"'native' here: .*{reason}.*; leave implementation out"):
            jax.eval_shape(kind(4, implementation="native", **options).init, jax.random.key(0), inputs)
    flops = [
        product_flops(jax.grad(lambda p, by=by: LSTM(4, implementation=by).apply(p, x).sum()), params)
        for by in ("native", "fused_inputs")
    ]
    assert flops[0] == flops[1] != {}
