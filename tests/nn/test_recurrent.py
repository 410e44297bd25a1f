"""Recurrent layers: Flax's values and gradients, with one product in each step of a loop."""

from __future__ import annotations

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

from jaxnn.nn import GRU, LSTM, Bidirectional, Stacked, _rnn_kernels
from jaxnn.types import ConfigError, DataError
from tests import draws

BATCH, TIME, INPUTS, FEATURES = 3, 6, 5, 4
LENGTHS = (6, 1, 4)
KEY = jax.random.key(0)
CELLS = {LSTM: linen.OptimizedLSTMCell, GRU: linen.GRUCell}
KINDS = pytest.mark.parametrize("kind", [LSTM, GRU])
SLOW_GRU = pytest.mark.parametrize("kind", [LSTM, pytest.param(GRU, marks=pytest.mark.slow)])


def flax_layer(kind: type, **options: Any) -> linen.Module:
    return linen.RNN(CELLS[kind](FEATURES), **options)


def flax_both(kind: type) -> linen.Module:
    return linen.Bidirectional(flax_layer(kind), flax_layer(kind))


def both(kind: type, **options: Any) -> linen.Module:
    return Bidirectional(kind(FEATURES, **options), kind(FEATURES, **options))


@functools.cache
def params_of(kind: type) -> Any:
    """Parameters of which no bias is 0."""
    return draws.variables(flax_layer(kind), draws.normal(0, 1, 1, INPUTS))


def params_of_both(kind: type) -> Any:
    forward = params_of(kind)["params"]
    return {"params": {"forward_rnn": forward, "backward_rnn": jax.tree.map(lambda leaf: -leaf[::-1], forward)}}


def carry_of(kind: type, *batch: int) -> Any:
    states = tuple(draws.normal(seed, *batch, FEATURES) for seed in (7, 8))
    return states if kind is LSTM else states[0]


def value_and_gradients(layer: linen.Module, params: Any, x: jax.Array, carry: Any, **call: Any) -> Any:
    """State and valid outputs, and the gradients of a sum that weighs each of their elements differently."""
    lengths = call.get("seq_lengths")

    def loss(params: Any, x: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
        results = layer.apply(params, x, initial_carry=carry, return_carry=True, **call)
        weighed = results
        if lengths is not None:
            valid = jnp.arange(x.shape[-2])[None] < jnp.asarray(lengths)[:, None]
            weighed = (results[0], jnp.where(valid[..., None], results[1], 0.0))
        weights = [draws.normal(k, *leaf.shape, dtype=leaf.dtype) for k, leaf in enumerate(jax.tree.leaves(weighed))]
        return sum(jnp.sum(w * leaf) for w, leaf in zip(weights, jax.tree.leaves(weighed), strict=True)), results

    wanted = (0, 1) if carry is None else (0, 1, 2)
    return jax.grad(loss, wanted, has_aux=True)(params, x, carry)


def assert_close(ours: Any, flaxs: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(flaxs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(flaxs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


X = draws.normal(0, BATCH, TIME, INPUTS)
ORDERS: list[dict[str, Any]] = [{}, {"reverse": True}, {"reverse": True, "keep_order": True}]
CALLS = [{**lengths, **order} for lengths in ({}, {"seq_lengths": np.array(LENGTHS)}) for order in ORDERS]


@KINDS
def test_values_and_gradients_equal_flax(kind: type) -> None:
    def run(params: Any, carry: Any) -> Any:
        layers, directions = (kind(FEATURES), flax_layer(kind)), (both(kind), flax_both(kind))
        pair = (carry, jax.tree.map(lambda leaf: -leaf, carry))
        calls = (CALLS[0], CALLS[4], CALLS[5]) if kind is LSTM else (CALLS[1], CALLS[2], CALLS[3])
        results = [[value_and_gradients(layer, params, X, carry, **call) for layer in layers] for call in calls]
        results.append([value_and_gradients(layer, params, X, None) for layer in layers])
        call = CALLS[3 if kind is LSTM else 0]
        results.append([value_and_gradients(layer, params_of_both(kind), X, pair, **call) for layer in directions])
        # Attributes are the defaults of the call; an empty sequence keeps the state it was given.
        options = {"time_major": True, "return_carry": True, "reverse": True, "keep_order": True}
        turned = kind(FEATURES, **options)
        results.append([layer.apply(params, X.swapaxes(0, 1)) for layer in (turned, flax_layer(kind, **options))])
        plain = turned.apply(params, X, **dict.fromkeys(options, False))
        results.append([plain, layers[0].apply(params, X)])
        given = {"initial_carry": carry, "return_carry": True}
        last, _ = layers[0].apply(params, X, seq_lengths=np.array([0, 6, 0]), **given)
        full, _ = layers[0].apply(params, X, **given)
        empty = jax.tree.map(lambda first, end: jnp.stack([first[0], end[1], first[2]]), carry, full)
        return [*results, [last, empty]]

    for ours, flaxs in jax.jit(run)(params_of(kind), carry_of(kind, BATCH)):
        assert_close(ours, flaxs)
    for pair in ((kind(FEATURES), flax_layer(kind)), (both(kind), flax_both(kind))):
        ours, flaxs = (jax.jit(layer.init)(jax.random.key(1), X[:1, :1]) for layer in pair)
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, flaxs))


@KINDS
def test_float64_shapes_and_lengths_of_several_axes(kind: type) -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params_of(kind))
        xs = [draws.normal(0, *shape, INPUTS, dtype=float) for shape in [(1, 1), (TIME,), (2, BATCH, 2)]]
        layers = kind(FEATURES, param_dtype=float), linen.RNN(CELLS[kind](FEATURES, param_dtype=float))
        lengths = np.array([[6, 1, 4], [2, 3, 5]])
        options = {"return_carry": True, "reverse": True, "keep_order": True}
        x = draws.normal(0, 2, BATCH, TIME, INPUTS, dtype=float)

        def run(params: Any) -> Any:
            nested = layers[0].apply(params, x, seq_lengths=lengths, **options)
            flat = layers[0].apply(params, x.reshape(6, TIME, INPUTS), seq_lengths=lengths.reshape(-1), **options)
            flat = jax.tree.map(lambda leaf: leaf.reshape(2, BATCH, *leaf.shape[1:]), flat)
            return [[value_and_gradients(layer, params, x, None) for layer in layers] for x in xs], (nested, flat)

        pairs, nested = jax.jit(run)(params)
        for ours, flaxs in [*pairs, nested]:
            assert_close(ours, flaxs, 1e-12)


def test_lstm_by_hand() -> None:
    # One feature, inputs 1 and 0, all input kernels 0 but g's, which is 1, all else 0: every sigmoid is 1/2.
    # c1 = tanh(1) / 2, h1 = tanh(c1) / 2; c2 = c1 / 2, for g2 = tanh(0) = 0; h2 = tanh(c2) / 2.
    x = jnp.array([[[1.0], [0.0]]])
    params = jax.tree.map(jnp.zeros_like, jax.eval_shape(LSTM(1).init, jax.random.key(0), x))
    params["params"]["cell"]["ig"]["kernel"] = jnp.ones((1, 1))
    (c, h), outputs = LSTM(1).apply(params, x, return_carry=True)
    first = np.tanh(1.0) / 2
    np.testing.assert_allclose(outputs[0, :, 0], [np.tanh(first) / 2, np.tanh(first / 2) / 2], rtol=1e-6)
    np.testing.assert_allclose([c.item(), h.item()], [first / 2, np.tanh(first / 2) / 2], rtol=1e-6)


def test_directions_that_differ_and_merge_fn() -> None:
    pairs = [(LSTM(4), GRU(4)), (LSTM(4), LSTM(3)), (GRU(4), GRU(4, implementation="fused_inputs"))]

    def compared(one: Any, other: Any) -> Any:
        flaxs = linen.Bidirectional(*(linen.RNN(CELLS[type(layer)](layer.features)) for layer in (one, other)))
        params = draws.variables(flaxs, X)
        layer = Bidirectional(one, other, return_carry=True, time_major=True)
        carry, outputs = layer.apply(params, X.swapaxes(0, 1))
        return (carry, outputs.swapaxes(0, 1)), flaxs.apply(params, X, return_carry=True)

    def merged() -> Any:
        layer, flaxs = Bidirectional(GRU(4), GRU(4), jnp.maximum), flax_both(GRU).clone(merge_fn=jnp.maximum)
        return layer.apply(params_of_both(GRU), X), flaxs.apply(params_of_both(GRU), X)

    for ours, flaxs in jax.jit(lambda: [*(compared(*pair) for pair in pairs), merged()])():
        assert_close(ours, flaxs)


def test_stacked_layers_states_and_dropout() -> None:
    layers = (both(LSTM), GRU(3), LSTM(2))
    stacked = Stacked(layers, dropout=0.5)
    params = draws.variables(stacked, X)["params"]
    pair, key = Stacked([GRU(4), GRU(3)]), {"dropout": jax.random.key(2)}
    of_pair = draws.variables(pair, X)
    single, alone = Stacked([GRU(4)], 1.0), {"params": {"layers_0": of_pair["params"]["layers_0"]}}

    def one_by_one(time_major: bool) -> Any:
        x = X.swapaxes(0, 1) if time_major else X
        options = {"seq_lengths": np.array(LENGTHS), "time_major": time_major, "return_carry": True}
        ours, carries = stacked.apply({"params": params}, x, **options), []
        for k, layer in enumerate(layers):
            carry, x = layer.apply({"params": params[f"layers_{k}"]}, x, **options)
            carries.append(carry)
        return ours, (tuple(carries), x)

    def resumed() -> Any:
        carry, start = pair.apply(of_pair, X[:, :2], return_carry=True)
        end = pair.apply(of_pair, X[:, 2:], initial_carry=carry)
        return jnp.concatenate([start, end], axis=1), pair.apply(of_pair, X)

    def run(rates: Any) -> Any:
        dropped = jax.vmap(lambda rate: pair.clone(dropout=rate).apply(of_pair, X, train=True, rngs=key))(rates)
        second = GRU(3).apply({"params": of_pair["params"]["layers_1"]}, jnp.zeros((BATCH, TIME, 4)))
        equal = [one_by_one(True), one_by_one(False), resumed(), (dropped[0], pair.apply(of_pair, X))]
        equal.append((dropped[2], second))  # everything between the layers is dropped
        return [*equal, (single.apply(alone, X, train=True), single.apply(alone, X))], dropped

    pairs, dropped = jax.jit(run)(jnp.array([0.0, 0.5, 1.0]))
    for ours, expected in pairs:
        assert_close(ours, expected)
    assert not np.allclose(dropped[0], dropped[1])


@SLOW_GRU
def test_vmap_scan_and_rematerialization(kind: type) -> None:
    xs = draws.normal(0, 2, BATCH, TIME, INPUTS)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params_of(kind))

    def run(params: Any, x: jax.Array) -> Any:
        return value_and_gradients(kind(FEATURES), params, x, None, seq_lengths=np.array(LENGTHS))

    def step(wrap: Callable[..., Any], params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(wrap(lambda p: jnp.mean(kind(FEATURES).apply(p, x) ** 2)))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def trained(params: Any) -> Any:
        losses = []
        for x in xs:
            params, loss = step(lambda loss: loss, params, x)
            losses.append(loss)
        return params, jnp.stack(losses)

    @jax.jit
    def everything(params: Any, xs: jax.Array) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], params)
        population = jax.vmap(jax.vmap(run, (None, 0)), (0, None))(params, xs)
        return population, jax.lax.scan(functools.partial(step, jax.checkpoint), first, xs), trained(first)

    population, scanned, expected = everything(params, xs)
    assert_close(scanned, expected)
    alone = jax.jit(run)
    for member, which in ((0, 1), (1, 0)):
        found = jax.tree.map(lambda leaf, k=member, j=which: leaf[k, j], population)
        assert_close(found, alone(jax.tree.map(lambda leaf, k=member: leaf[k], params), xs[which]))


@SLOW_GRU
def test_bfloat16_has_the_dtypes_of_flax_and_is_near_float32(kind: type) -> None:
    def narrow(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)

    params = params_of(kind)
    cases = [({"dtype": jnp.bfloat16}, params, X), ({}, narrow(params), narrow(X)), ({}, params, narrow(X))]
    exact, *results = jax.jit(
        lambda: [
            value_and_gradients(kind(FEATURES, **options), *of, None) for options, *of in [({}, params, X), *cases]
        ]
    )()
    for ours, (options, *of) in zip(results, cases, strict=True):
        layer = linen.RNN(CELLS[kind](FEATURES, **options))
        flaxs = jax.eval_shape(lambda layer=layer, of=of: value_and_gradients(layer, *of, None))
        assert jax.tree.map(lambda leaf: leaf.dtype, ours) == jax.tree.map(lambda leaf: leaf.dtype, flaxs)
        for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
            np.testing.assert_allclose(np.float32(got), expected, rtol=0.1, atol=0.1)
    call = {"initial_carry": narrow(carry_of(kind, BATCH)), "return_carry": True}
    state = jax.eval_shape(lambda: kind(FEATURES).apply(narrow(params), narrow(X), **call))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}


def scans(jaxpr: Any) -> list[Any]:
    """The bodies of all loops in a traced program, from the first to the last."""
    found = []
    for equation in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        inner = [value for value in inner if hasattr(value, "eqns")]
        found += inner if equation.primitive.name == "scan" else [body for value in inner for body in scans(value)]
    return found


@pytest.mark.parametrize(("layer", "loops"), [(LSTM(4), 1), (GRU(4), 1), (both(LSTM), 2)], ids=["lstm", "gru", "both"])
def test_one_product_in_each_step_and_the_others_outside(layer: linen.Module, loops: int) -> None:
    def products(jaxpr: Any) -> int:
        return str(jaxpr).count("dot_general[")

    params = jax.eval_shape(layer.init, jax.random.key(1), X)
    traced = jax.make_jaxpr(jax.grad(lambda p, x: layer.apply(p, x).sum(), argnums=(0, 1)))(params, X)
    bodies = scans(traced.jaxpr)
    assert [products(body) for body in bodies] == [1] * 2 * loops
    # Per direction outside: the inputs' product, its two gradients, and the recurrent kernel's gradient.
    assert products(traced) - sum(map(products, bodies)) == 4 * loops


def test_the_state_alone_needs_no_gradient_of_outputs() -> None:
    def carried(pick: Callable[..., jax.Array]) -> int:
        """The arrays of one float per step, sequence and feature in the loops' states."""

        def loss(params: Any, weights: jax.Array) -> jax.Array:
            return (pick(*LSTM(FEATURES).apply(params, X, return_carry=True)) * weights).sum()

        text = jax.jit(jax.grad(loss)).lower(params_of(LSTM), draws.normal(1, BATCH, FEATURES)).compile().as_text()
        loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
        return sum(line.count(f"f32[{TIME},{BATCH},{FEATURES}]") for line in loops)

    assert carried(lambda carry, outputs: carry[1]) < carried(lambda carry, outputs: outputs[:, -1])


def test_time_major_needs_no_transpose_and_programs_name_the_implementation() -> None:
    ids, table, params = draws.integers(0, 9, BATCH, TIME), draws.normal(1, 9, INPUTS), params_of(LSTM)

    def last(table: jax.Array, ids: jax.Array) -> jax.Array:
        (_, h), _ = LSTM(FEATURES, time_major=True).apply(params, table[ids.T], return_carry=True)
        return h.sum()

    assert str(jax.make_jaxpr(last)(table, ids)).count("transpose[") == 1  # that of the ids
    lowered = jax.jit(last).lower(table, ids)
    assert "jaxnn.recurrence.fused_inputs" in lowered.as_text(debug_info=True)
    expected = LSTM(FEATURES).apply(params, table[ids])[:, -1].sum()
    np.testing.assert_allclose(lowered.compile()(table, ids), expected, rtol=1e-5)


@SLOW_GRU
def test_flax_transformations_of_layers(kind: type) -> None:
    members = linen.vmap(kind, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params_of(kind))
    second = jax.tree.map(lambda leaf: leaf[1], params)
    assert jax.tree.map(jnp.shape, jax.eval_shape(members(4).init, jax.random.key(1), X)) == jax.tree.map(
        jnp.shape, params
    )
    mixed = linen.Bidirectional(kind(FEATURES), kind(FEATURES))
    outputs, remat, plain, *pair = jax.jit(
        lambda: (
            [members(FEATURES).apply(params, X)[1]]
            + [layer(FEATURES).apply(second, X) for layer in (linen.remat(kind), kind)]
            + [layer.apply(params_of_both(kind), X) for layer in (mixed, both(kind))]
        )
    )()
    for ours, expected in ((outputs, plain), (remat, plain), pair):
        assert_close(ours, expected)


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
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x, h, c, w, lengths, inputs, features, layers, dropout, bidirectional, precision) -> Any:  # noqa: ANN001
        assert (layers, dropout, lengths.dtype) == (1, 0.0, jnp.int32)
        assert w.size == rnn.get_num_params_in_lstm(inputs, features, 1, bidirectional)
        operands = (once.bind(x), h, c, w, lengths)
        return reference(*operands, (inputs, features, bidirectional)), operands

    def backward(inputs, features, layers, dropout, bidirectional, precision, operands, cotangents) -> Any:  # noqa: ANN001
        *floats, lengths = operands
        sizes = (inputs, features, bidirectional)
        dx, dh, dc, dw = jax.vjp(lambda *floats: reference(*floats, lengths, sizes), *floats)[1](cotangents)
        return once.bind(dx), dh, dc, dw, jnp.zeros_like(lengths)

    monkeypatch.setattr(rnn, "lstm_fwd", forward)
    monkeypatch.setattr(rnn, "lstm_bwd", backward)
    monkeypatch.setattr("jaxnn.nn._rnn.cudnn_obstacle", lambda dtypes: None)


@pytest.mark.parametrize("directions", [1, 2])
def test_cudnn_equals_flax(on_gpu: None, directions: int) -> None:
    params, carry = params_of(LSTM), carry_of(LSTM, BATCH)
    layers, calls = (LSTM(FEATURES, implementation="cudnn"), flax_layer(LSTM)), (CALLS[2], CALLS[4])
    if directions == 2:
        layers, calls = (both(LSTM, implementation="cudnn"), flax_both(LSTM)), (CALLS[0], CALLS[3])
        params, carry = params_of_both(LSTM), (carry, carry)
    values = lambda layer, call: value_and_gradients(layer, params, X, carry, **call)  # noqa: E731
    for call, pair in zip(
        calls, jax.jit(lambda: [[values(layer, c) for layer in layers] for c in calls])(), strict=True
    ):
        if "seq_lengths" in call:  # cuDNN's outputs past a sequence's end are 0
            valid = np.arange(TIME)[None] < np.array(LENGTHS)[:, None]
            pair = [(grads, (state, np.where(valid[..., None], out, 0.0))) for grads, (state, out) in pair]
        assert_close(*pair)


def test_cudnn_runs_the_members_of_a_vmap(on_gpu: None) -> None:
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), params_of(LSTM))
    layers = [LSTM(FEATURES, implementation=name) for name in ("cudnn", "fused_inputs")]
    run = jax.jit(lambda p: [jax.vmap(lambda p: value_and_gradients(layer, p, X, None))(p) for layer in layers])  # noqa: B023
    assert_close(*run(params))


def test_cudnn_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer, reason in ((GRU, "JAX offers cuDNN's LSTM"), (LSTM, "cuDNN runs on NVIDIA GPUs")):
        with pytest.raises(ConfigError, match=f"cannot use 'cudnn' here: {reason}"):
            layer(FEATURES, implementation="cudnn").init(jax.random.key(1), X)

    monkeypatch.setattr(_rnn_kernels, "compute_capability", lambda: 9.0)
    obstacle = _rnn_kernels.cudnn_obstacle([jnp.dtype("float32"), jnp.dtype("bfloat16")])
    assert "float32, not in bfloat16, float32" in str(obstacle)
    assert _rnn_kernels.cudnn_obstacle([jnp.dtype("float32")]) is None


def test_cudnn_has_the_precision_of_the_config(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, allowed = rnn.lstm_fwd, []

    def recorded(*arguments: Any) -> Any:
        allowed.append(rnn._lstm_cudnn_allow_tf32(arguments[-1]))
        return forward(*arguments)

    monkeypatch.setattr(rnn, "lstm_fwd", recorded)
    layer = LSTM(FEATURES, implementation="cudnn")
    for name, exact in ((None, False), ("highest", True), ("float32", True), ("bfloat16", False)):
        with jax.default_matmul_precision(name):
            jax.eval_shape(lambda x: layer.apply(params_of(LSTM), x), X)
        assert allowed.pop() is not exact


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"inputs": np.ones((2, 3), np.int32)}, r"floats \[\*batch, time, features\], not int32 \[2, 3\]: embed"),
    ({"inputs": np.ones(3, np.float32)}, r"not float32 \[3\]"),
    ({"inputs": np.ones(3, np.float32), "time_major": True}, r"floats \[time, \*batch, features\], not"),
    ({"seq_lengths": np.ones(2, int)}, r"seq_lengths .* \[3\], not int32 \[2\]"),
    ({"seq_lengths": np.ones((3, 1), int)}, r"\[3\], not int32 \[3, 1\]"),
    ({"seq_lengths": np.ones(3, np.float32)}, r"\[3\], not float32 \[3\]"),
    ({"initial_carry": np.ones((3, 4))}, r"initial_carry \(c, h\) of \[3, 4\] each, not \(3, 4\)"),
    ({"initial_carry": (np.ones((3, 4)),) * 3}, r"\(c, h\) of \[3, 4\] each, not"),
    ({"initial_carry": (np.ones((3, 4)), np.ones((3, 5)))}, r"not \(\(3, 4\), \(3, 5\)\)"),
]
BAD_LAYERS: list[tuple[type[Exception], Callable[[], Any], str]] = [
    *((ConfigError, lambda x=x: Stacked(x), r"Stacked\(\[LSTM\(64\)") for x in (GRU(4), [64], [linen.GRUCell(4)], [])),
    (ConfigError, lambda: Stacked([GRU(4)], dropout=2.0), "dropout rate"),
    (ConfigError, lambda: Bidirectional(flax_layer(GRU), GRU(4)), "not RNN: use flax.linen.Bidirectional"),
    (ConfigError, lambda: GRU(0), "GRU: features must be an integer >= 1, not 0"),
    (ConfigError, lambda: GRU(4, implementation="hoist").init(KEY, X), "recurrence has no implementation 'hoist'"),
    (DataError, lambda: GRU(FEATURES).init(KEY, X, initial_carry=(X, X)), r"initial_carry \[3, 4\], not"),
    (DataError, lambda: Stacked([GRU(4)] * 2).init(KEY, X, initial_carry=(X,)), "initial_carry of 2 states"),
    (DataError, lambda: both(GRU).init(KEY, X, initial_carry=X), "initial_carry of 2 states"),
    (DataError, lambda: Stacked([GRU(4)]).init(KEY, np.ones((3, 6), np.int32)), r"not int32 \[3, 6\]"),
]


def test_bad_arguments() -> None:
    for given, words in BAD_CALLS:
        call = {"inputs": X, **given}
        with pytest.raises(DataError, match=words):
            LSTM(FEATURES).init(KEY, call.pop("inputs"), **call)
    for kind, make, words in BAD_LAYERS:
        with pytest.raises(kind, match=words):
            make()
