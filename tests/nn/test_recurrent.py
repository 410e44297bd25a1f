"""Recurrent layers: Flax's values and gradients, one product in each step of a loop, and native loops of the LSTM."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.experimental import rnn
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxnn._equations import equations
from jaxnn.nn import GRU, LSTM, Bidirectional
from jaxnn.observe import Traced
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_close, assert_near

BATCH, TIME, INPUTS, FEATURES = 3, 6, 5, 4
LENGTHS = np.array([6, 1, 4])
VALID = (np.arange(TIME)[None] < LENGTHS[:, None])[..., None]
KEY = jax.random.key(0)
CELLS = {LSTM: linen.OptimizedLSTMCell, GRU: linen.GRUCell}
KINDS = pytest.mark.parametrize("kind", [LSTM, pytest.param(GRU, marks=pytest.mark.slow)])
X = draws.normal(0, BATCH, TIME, INPUTS)
BACKWARD = {"reverse": True, "keep_order": True}


def flax_layer(kind: type, features: int = FEATURES, **options: Any) -> linen.Module:
    return linen.RNN(CELLS[kind](features, **options))


def both(kind: type, **options: Any) -> linen.Module:
    return Bidirectional(kind(FEATURES, **options), kind(FEATURES, **options))


@functools.cache
def params_of(kind: type) -> Any:
    """Parameters of which no bias is 0."""
    return draws.variables(flax_layer(kind), X)


def params_of_both(kind: type) -> Any:
    forward = params_of(kind)["params"]
    return {
        "params": {"forward_rnn": forward, "backward_rnn": jax.tree.map(lambda leaf: -np.asarray(leaf)[::-1], forward)}
    }


def carry_of(kind: type) -> Any:
    states = tuple(draws.normal(seed, BATCH, FEATURES) for seed in (7, 8))
    return states if kind is LSTM else states[0]


def with_gradients(layer: linen.Module, params: Any, x: jax.Array, carry: Any = None, **call: Any) -> Any:
    """State and valid outputs, and the gradients of `draws.graded`."""

    def run(params: Any, x: jax.Array, carry: Any) -> Any:
        state, outputs = layer.apply(params, x, initial_carry=carry, return_carry=True, **call)
        return state, jnp.where(VALID, outputs, 0.0) if "seq_lengths" in call else outputs

    return draws.graded(run)(params, x, carry)


@KINDS
def test_values_and_gradients_equal_flax(kind):
    lengths, reverse = {"seq_lengths": LENGTHS}, {"reverse": True}
    # What comes before and after the loops is the same for both kinds: each takes half of it.
    graded, valued = (lengths | BACKWARD, [reverse]) if kind is LSTM else (lengths, [BACKWARD, lengths | reverse])
    with jax.enable_x64(True):
        layers = kind(FEATURES, param_dtype=float), flax_layer(kind, param_dtype=float)
        given = params_of(kind), carry_of(kind), X
        params, carry, x = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), given)
        other = x[0] if kind is LSTM else x[None, :, :1]  # no batch axis; two, and a single step

        def run(params: Any, carry: Any, x: jax.Array, other: jax.Array) -> Any:
            def values(layer: linen.Module) -> Any:
                apply = functools.partial(layer.apply, params, return_carry=True)
                return apply(other), [apply(x, initial_carry=carry, **call) for call in valued]

            return [(with_gradients(layer, params, x, carry, **graded), values(layer)) for layer in layers]

        assert_close(*jax.jit(run)(params, carry, x, other), 1e-12)
    inits = jax.jit(lambda: [layer.init(KEY, X[:1, :1]) for layer in (kind(FEATURES), flax_layer(kind))])
    assert jax.tree.all(jax.tree.map(np.array_equal, *inits()))


def test_attributes_lengths_of_several_axes_and_empty_sequences():
    options = {"time_major": True, "return_carry": True, **BACKWARD}
    lengths, turned = np.array([[6, 1, 4], [2, 0, 5]]), LSTM(FEATURES, **options)
    pair, given_carries = (jax.tree.map(lambda leaf: np.stack([leaf, -leaf]), tree) for tree in (X, carry_of(LSTM)))

    def run(params: Any, pair: jax.Array, carries: Any) -> Any:
        x = pair[0]
        call = functools.partial(LSTM(FEATURES).apply, params, return_carry=True)
        state, outputs = call(x, **BACKWARD)
        by_attribute = turned.apply(params, x.swapaxes(0, 1)), (state, outputs.swapaxes(0, 1))
        overridden = turned.apply(params, x, **dict.fromkeys(options, False)), call(x)[1]
        nested = call(pair, seq_lengths=lengths, initial_carry=carries)
        flat_carries = jax.tree.map(lambda leaf: leaf.reshape(-1, FEATURES), carries)
        flat = call(pair.reshape(-1, TIME, INPUTS), seq_lengths=lengths.reshape(-1), initial_carry=flat_carries)
        flat = jax.tree.map(lambda leaf: leaf.reshape(2, BATCH, *leaf.shape[1:]), flat)
        kept = jax.tree.map(lambda leaf: leaf[1, 1], (nested[0], carries))
        return by_attribute, overridden, (nested, flat), kept

    for found, expected in jax.jit(run)(params_of(LSTM), pair, given_carries):
        assert_close(found, expected)


@pytest.mark.slow
def test_bidirectional_equals_flax():
    differ = LSTM(FEATURES), GRU(3, implementation="fused_inputs")
    pairs = [(Bidirectional(*differ, return_carry=True, time_major=True), flax_layer(LSTM), flax_layer(GRU, 3))]
    pairs.append((both(GRU).clone(return_carry=True, time_major=True), flax_layer(GRU), flax_layer(GRU)))
    call = {"seq_lengths": LENGTHS, "return_carry": True}

    given = [draws.variables(linen.Bidirectional(*directions), X) for _, *directions in pairs]

    def run(given: Any, x: jax.Array) -> Any:
        results = []
        for params, (ours, *directions) in zip(given, pairs, strict=True):
            flaxs = linen.Bidirectional(*directions)
            carry, outputs = ours.apply(params, x.swapaxes(0, 1), seq_lengths=LENGTHS)
            expected = flaxs.apply(params, x, **call)
            again = ours.apply(params, x, initial_carry=carry, return_carry=False, time_major=False)
            resumed = flaxs.apply(params, x, initial_carry=expected[0])
            results.append((((carry, outputs.swapaxes(0, 1)), again), (expected, resumed)))
        maxima = both(GRU).clone(merge_fn=jnp.maximum).apply(params, x, initial_carry=carry)
        return results, (maxima, jnp.maximum(*jnp.split(resumed, 2, axis=-1)))

    results, merged = jax.jit(run)(given, X)
    for ours, flaxs in [*results, merged]:
        assert_close(ours, flaxs)


@KINDS
def test_bfloat16_has_the_dtypes_of_flax(kind):
    params = params_of(kind)
    narrow = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), {"params": params, "x": X, "carry": carry_of(kind)}
    )
    cases = [({"dtype": jnp.bfloat16}, params, X), ({}, narrow["params"], narrow["x"]), ({}, params, narrow["x"])]
    for options, *given in cases:
        pair = kind(FEATURES, **options), flax_layer(kind, **options)
        ours, flaxs = (jax.eval_shape(functools.partial(with_gradients, layer), *given) for layer in pair)
        assert jax.tree.map(lambda leaf: leaf.dtype, ours) == jax.tree.map(lambda leaf: leaf.dtype, flaxs)
    call = {"initial_carry": narrow["carry"], "return_carry": True}
    state = jax.eval_shape(lambda: kind(FEATURES).apply(narrow["params"], narrow["x"], **call))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(("layer", "loops"), [(LSTM(4), 1), (GRU(4), 1), (both(LSTM), 2)], ids=["lstm", "gru", "both"])
def test_one_product_in_each_step_and_the_others_outside(layer, loops):
    def products(jaxpr: Any) -> int:
        return str(jaxpr).count("dot_general[")

    params = jax.eval_shape(layer.init, KEY, X)
    traced = jax.make_jaxpr(jax.grad(lambda p, x: layer.apply(p, x).sum(), argnums=(0, 1)))(params, X)
    bodies = [each.params["jaxpr"] for each, _ in equations(traced) if each.primitive.name == "scan"]
    assert [products(body) for body in bodies] == [1] * 2 * loops
    # Per direction outside: the inputs' product, its two gradients, and the recurrent kernel's gradient.
    assert products(traced) - sum(map(products, bodies)) == 4 * loops


def test_the_state_alone_needs_no_gradient_of_outputs():
    def carried(pick: Callable[..., jax.Array]) -> int:
        """The arrays of one float per step, sequence and feature in the loops' states."""

        def loss(params: Any, weights: jax.Array) -> jax.Array:
            return (pick(*LSTM(FEATURES).apply(params, X, return_carry=True)) * weights).sum()

        text = jax.jit(jax.grad(loss)).lower(params_of(LSTM), draws.normal(1, BATCH, FEATURES)).compile().as_text()
        loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
        return sum(line.count(f"f32[{TIME},{BATCH},{FEATURES}]") for line in loops)

    assert carried(lambda carry, outputs: carry[1]) < carried(lambda carry, outputs: outputs[:, -1])


def test_time_major_needs_no_transpose_and_programs_name_the_implementation():
    ids, table = draws.integers(0, 9, BATCH, TIME), draws.normal(1, 9, INPUTS)

    def last(table: jax.Array, ids: jax.Array) -> jax.Array:
        (_, h), _ = LSTM(FEATURES, time_major=True).apply(params_of(LSTM), table[ids.T], return_carry=True)
        return h.sum()

    traced = jax.jit(last).trace(table, ids)
    assert str(traced.jaxpr).count("transpose[") == 1  # that of the ids
    assert "jaxnn.recurrence.fused_inputs" in traced.lower().as_text(debug_info=True)


def test_flax_transformations_of_layers():
    members = linen.vmap(LSTM, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
    params = jax.tree.map(lambda leaf: np.stack([leaf, -leaf]), params_of(LSTM))
    shapes = jax.eval_shape(members(FEATURES).init, KEY, X)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)

    @jax.jit
    def run(params: Any, of_both: Any, x: jax.Array) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], params)
        remat = linen.remat(LSTM)(FEATURES).apply(first, x)
        mixed = linen.Bidirectional(LSTM(FEATURES), LSTM(FEATURES)).apply(of_both, x)
        plain, pair = LSTM(FEATURES).apply(first, x), both(LSTM).apply(of_both, x)
        return (members(FEATURES).apply(params, x)[0], remat, mixed), (plain, plain, pair)

    assert_close(*run(params, params_of_both(LSTM), X))


# Batch, time steps, inputs and features: one row and several parts of unequal size, fewer rows than threads, features
# that fill the vectors, are fewer, and more.
PADDED = (3, 5, 4, 16)
SIZES = [(1, 3, 2, 1), (2, 40, 3, 70), PADDED, (7, 20, 5, 65), (9, 4, 3, 33), (8, 1, 3, 48)]


def sized(batch: int, time: int, inputs: int, features: int) -> Any:
    """Parameters, inputs and state. The kernels' norms are near 1: rounding is not amplified from step to step."""
    x = draws.normal(0, batch, time, inputs)
    variables = draws.variables(LSTM(features), x)
    params = jax.tree.map(lambda leaf: np.float32(features**-0.5) * np.asarray(leaf), variables)
    return params, x, tuple(draws.normal(k, batch, features) for k in (1, 2))


@native.needed
@pytest.mark.slow
def test_native_loops_equal_xlas_in_every_size_length_and_direction():
    lengths = {"seq_lengths": np.array([5, 0, 2])}
    cases = [*[(sized(*sizes), {}) for sizes in SIZES], *[(sized(*PADDED), lengths | how) for how in ({}, BACKWARD)]]

    def graded(by: str, call: Any, params: Any, x: jax.Array, carry: Any) -> Any:
        layer = LSTM(carry[0].shape[-1], implementation=by, return_carry=True)
        return draws.graded(lambda p, x, c: layer.apply(p, x, initial_carry=c, **call))(params, x, carry)

    def run(by: str, given: Any) -> Any:
        params, x, _ = given[-1]
        pair = {name: params["params"] for name in ("forward_rnn", "backward_rnn")}
        both_directions = Bidirectional(*[LSTM(16, implementation=by) for _ in "ab"]).apply({"params": pair}, x)
        time_major = LSTM(16, implementation=by, time_major=True).apply(params, x.swapaxes(0, 1), reverse=True)
        return (
            [graded(by, *how, *arrays) for arrays, (_, *how) in zip(given, cases, strict=True)],
            both_directions,
            time_major,
        )

    both = jax.jit(lambda given: [run(by, given) for by in ("native", "fused_inputs")])
    assert_near(*both([arrays for arrays, _ in cases]))


@native.needed
def test_native_tanh_is_exact_to_a_millionth():
    x = np.concatenate([np.logspace(-30, 1.3, 400), [0.0, 88.0, 1e30]])
    x = np.float32(np.concatenate([x, -x]))
    # The input gate is 1 and the cell's state 0: the new state is tanh of the input.
    params = jax.tree.map(np.zeros_like, sized(1, 1, 1, 1)[0])
    cell = params["params"]["cell"]
    cell |= {"ig": {"kernel": np.ones((1, 1), np.float32)}, "hi": cell["hi"] | {"bias": np.full(1, 40.0, np.float32)}}
    ((c, _), _) = jax.jit(LSTM(1, implementation="native", return_carry=True).apply)(params, x[:, None, None])
    np.testing.assert_allclose(c[:, 0], np.tanh(np.float64(x)), rtol=1e-6)


@native.needed
def test_native_saturated_gates_have_no_gradient_and_nan_stays_in_its_row():
    params, x, _ = sized(*PADDED)
    apply = jax.jit(LSTM(16, implementation="native").apply)
    saturated = jax.jit(jax.grad(lambda p, x: apply(p, x).sum()))(params, np.full_like(x, 1e30))
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() < 1 for leaf in jax.tree.leaves(saturated))
    inputs = np.array(x)
    inputs[1, 2] = np.nan
    seen = np.isnan(apply(params, inputs)).any(-1)
    assert (seen == [[False] * 5, [False] * 2 + [True] * 3, [False] * 5]).all()


@native.needed
def test_native_loops_are_taken_from_a_size_on_and_refused_with_a_reason():
    params, x, _ = jax.tree.map(np.asarray, sized(8, 8, 3, 4))

    def chosen(layer: Any, x: Any) -> list[str]:
        return Traced(layer.apply, jax.eval_shape(layer.init, jax.random.key(0), x), x).implementations["recurrence"]

    assert chosen(LSTM(4), x) == chosen(LSTM(4, implementation="native"), x[1:]) == ["native"]
    assert chosen(LSTM(4), x[1:]) == ["fused_inputs"]
    for reason, kind, options, inputs in (
        ("only for an LSTM", GRU, {}, x),
        ("float32, not in bfloat16", LSTM, {"dtype": jnp.bfloat16}, x),
        ("no time steps", LSTM, {}, x[:, :0]),
    ):
        assert chosen(kind(4, **options), inputs) == ["fused_inputs"]
        with pytest.raises(ConfigError, match=f"'native' here: .*{reason}.*; leave implementation out"):
            jax.eval_shape(kind(4, implementation="native", **options).init, jax.random.key(0), inputs)
    flops = [
        Traced(jax.grad(lambda p, by=by: LSTM(4, implementation=by).apply(p, x).sum()), params).product_flops()
        for by in ("native", "fused_inputs")
    ]
    assert flops[0] == flops[1] != {}


# cuDNN's call itself needs a GPU; all around it is run here with JAX's reference in its place.


def reference(x: Any, h: Any, c: Any, weights: Any, lengths: Any, sizes: tuple[int, int, bool]) -> Any:
    num_inputs, features, bidirectional = sizes
    unpacked = rnn.unpack_lstm_weights(weights, num_inputs, features, 1, bidirectional)
    return rnn.lstm_ref(x, h, c, *unpacked, lengths, num_inputs, features, 1, 0.0, bidirectional)


once = Primitive("once")  # the identity, which as cuDNN's call cannot be batched
once.def_impl(lambda x: x)
once.def_abstract_eval(lambda x: x)
mlir.register_lowering(once, lambda context, x: [x])


@pytest.fixture
def cudnn_calls(monkeypatch: pytest.MonkeyPatch, pretend_gpu: Callable[..., None]) -> list[tuple[bool, Any]]:
    """A GPU whose cuDNN is JAX's reference: for each forward call whether it is bidirectional, and its precision."""
    calls = []

    def forward(x, h, c, w, lengths, inputs, features, layers, dropout, bidirectional, precision) -> Any:  # noqa: ANN001
        calls.append((bidirectional, precision))
        assert (layers, dropout, lengths.dtype) == (1, 0.0, jnp.int32)
        assert w.size == rnn.get_num_params_in_lstm(inputs, features, 1, bidirectional)
        operands = (once.bind(x), h, c, w, lengths)
        return reference(*operands, (inputs, features, bidirectional)), operands

    def backward(inputs, features, layers, dropout, bidirectional, precision, operands, cotangents) -> Any:  # noqa: ANN001
        *floats, lengths = operands
        sizes = (inputs, features, bidirectional)
        dx, dh, dc, dw = jax.vjp(lambda *floats: reference(*floats, lengths, sizes), *floats)[1](cotangents)
        return once.bind(dx), dh, dc, dw, jnp.zeros_like(lengths)

    pretend_gpu()
    monkeypatch.setattr(rnn, "lstm_fwd", forward)
    monkeypatch.setattr(rnn, "lstm_bwd", backward)
    return calls


@pytest.mark.slow
def test_cudnn_equals_the_loops_for_each_member_of_a_vmap(cudnn_calls):
    members = jax.tree.map(lambda leaf: np.stack([leaf, -leaf]), (params_of(LSTM), carry_of(LSTM)))

    def run(implementation: str, members: Any, of_both: Any, carry: Any) -> Any:
        layer, pair = LSTM(FEATURES, implementation=implementation), both(LSTM, implementation=implementation)
        call = {"seq_lengths": LENGTHS, **BACKWARD}
        of_members = jax.vmap(lambda p, c: with_gradients(layer, p, X, c, **call))(*members)
        return of_members, with_gradients(pair, of_both, X, (carry,) * 2)

    given = members, params_of_both(LSTM), carry_of(LSTM)
    assert_close(*jax.jit(lambda *given: [run(name, *given) for name in ("cudnn", "fused_inputs")])(*given), 2e-5)


def test_cudnn_is_the_default_in_the_precision_of_the_config(cudnn_calls):
    exact, fast = jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGH
    for name, precision in ((None, fast), ("highest", exact), ("float32", exact), ("bfloat16", fast)):
        with jax.default_matmul_precision(name):
            jax.eval_shape(LSTM(128).init, KEY, X)  # with fewer features it is slower
        assert cudnn_calls.pop() == (False, precision)
    # Directions of the same sizes run in one call.
    for second, expected in ((LSTM(128), [True]), (LSTM(256), [False, False]), (GRU(128), [False])):
        cudnn_calls.clear()
        jax.eval_shape(Bidirectional(LSTM(128), second).init, KEY, X)
        assert [bidirectional for bidirectional, _ in cudnn_calls] == expected


def test_cudnn_is_refused_with_the_reason(pretend_gpu):
    def assert_refused(kind: type, reason: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=f"cannot use 'cudnn' here: {reason}"):
            jax.eval_shape(kind(FEATURES, implementation="cudnn", **options).init, KEY, X)

    assert_refused(GRU, "JAX offers cuDNN's LSTM")
    assert_refused(LSTM, "cuDNN runs on NVIDIA GPUs")
    pretend_gpu("gfx942")
    assert_refused(LSTM, "cuDNN runs on NVIDIA GPUs")
    pretend_gpu()
    assert_refused(LSTM, "its LSTM computes in float32, not in bfloat16, float32", dtype=jnp.bfloat16)
