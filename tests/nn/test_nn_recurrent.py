"""Recurrent layers: Flax's values and gradients, with one product to each step of a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
CELLS = {LSTM: linen.OptimizedLSTMCell, GRU: linen.GRUCell}
KINDS = pytest.mark.parametrize("kind", [LSTM, GRU])


def flax_layer(kind: type, **options: Any) -> linen.Module:
    return linen.RNN(CELLS[kind](FEATURES), **options)


def flax_both(kind: type) -> linen.Module:
    return linen.Bidirectional(flax_layer(kind), flax_layer(kind))


def both(kind: type, **options: Any) -> linen.Module:
    return Bidirectional(kind(FEATURES, **options), kind(FEATURES, **options))


@functools.cache
def params_of(kind: type, num_inputs: int = INPUTS) -> Any:
    """Parameters as initialised, and noise on each, so that no bias is 0."""
    leaves, structure = jax.tree.flatten(kind(FEATURES).init(jax.random.key(1), draws.normal(0, 1, 1, num_inputs)))
    return structure.unflatten([leaf + 0.3 * draws.normal(3 + k, *leaf.shape) for k, leaf in enumerate(leaves)])


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
        if lengths is not None:
            valid = jnp.arange(x.shape[-2])[None] < jnp.asarray(lengths)[:, None]
            results = (results[0], jnp.where(valid[..., None], results[1], 0.0))
        weights = [draws.normal(k, *leaf.shape, dtype=leaf.dtype) for k, leaf in enumerate(jax.tree.leaves(results))]
        return sum(jnp.sum(w * leaf) for w, leaf in zip(weights, jax.tree.leaves(results), strict=True)), results

    wanted = (0, 1) if carry is None else (0, 1, 2)
    return jax.grad(loss, wanted, has_aux=True)(params, x, carry)


def assert_equal_layers(cases: Sequence[tuple[str, Callable[..., Any]]], *operands: Any, **options: Any) -> None:
    """Compares what each case's pair of results is; all are compiled as one program, for the sake of time."""
    results = jax.jit(lambda *operands: [pair(*operands) for _, pair in cases])(*operands)
    for (name, _), (ours, flaxs) in zip(cases, results, strict=True):
        assert_close(ours, flaxs, name=name, **options)


def assert_close(ours: Any, flaxs: Any, tolerance: float = 2e-5, name: str = "") -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(flaxs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(flaxs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=name)


@KINDS
def test_initial_parameters_are_flaxs(kind: type) -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    for pair in ((kind(FEATURES), flax_layer(kind)), (both(kind), flax_both(kind))):
        ours, flaxs = (layer.init(jax.random.key(1), x) for layer in pair)
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, flaxs))


CALLS = [
    {**lengths, **order}
    for lengths in ({}, {"seq_lengths": np.array(LENGTHS)})
    for order in ({}, {"reverse": True}, {"reverse": True, "keep_order": True})
]


@KINDS
def test_values_and_gradients_are_flaxs(kind: type) -> None:
    def pair(call: dict, params: Any, x: jax.Array, carry: Any) -> list[Any]:
        return [value_and_gradients(layer, params, x, carry, **call) for layer in (kind(FEATURES), flax_layer(kind))]

    def without_carry(params: Any, x: jax.Array, carry: Any) -> list[Any]:
        return pair({}, params, x, None)

    cases = [(str(call), functools.partial(pair, call)) for call in CALLS] + [("no carry", without_carry)]
    assert_equal_layers(cases, params_of(kind), draws.normal(0, BATCH, TIME, INPUTS), carry_of(kind, BATCH))


@KINDS
def test_float64_is_flaxs_to_its_last_digits(kind: type) -> None:
    def pair(x: jax.Array, params: Any) -> list[Any]:
        layers = kind(FEATURES, param_dtype=jnp.float64), linen.RNN(CELLS[kind](FEATURES, param_dtype=jnp.float64))
        return [value_and_gradients(layer, params, x, None) for layer in layers]

    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params_of(kind))
        shapes = [(1, 1), (TIME,), (2, BATCH, 2)]
        cases = [
            (str(shape), functools.partial(pair, draws.normal(0, *shape, INPUTS, dtype=float))) for shape in shapes
        ]
        assert_equal_layers(cases, params, tolerance=1e-12)


@KINDS
def test_attributes_are_the_defaults_of_the_call(kind: type) -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    options = {"time_major": True, "return_carry": True, "reverse": True, "keep_order": True}
    params = params_of(kind)
    ours = kind(FEATURES, **options).apply(params, x.swapaxes(0, 1))
    assert_close(ours, flax_layer(kind, **options).apply(params, x.swapaxes(0, 1)))
    plain = kind(FEATURES, **options).apply(params, x, **dict.fromkeys(options, False))
    assert_close(plain, kind(FEATURES).apply(params, x))


@KINDS
def test_outputs_behind_the_end_go_on_as_in_flax(kind: type) -> None:
    x, lengths = draws.normal(0, BATCH, TIME, INPUTS), np.array(LENGTHS)
    params = params_of(kind)
    for options in ({}, {"reverse": True}, {"reverse": True, "keep_order": True}):
        ours, flaxs = (
            layer.apply(params, x, seq_lengths=lengths, **options) for layer in (kind(FEATURES), flax_layer(kind))
        )
        assert_close(ours, flaxs)


@KINDS
def test_an_empty_sequence_keeps_the_state_it_was_given(kind: type) -> None:
    x, carry = draws.normal(0, BATCH, TIME, INPUTS), carry_of(kind, BATCH)
    params = params_of(kind)
    options = {"initial_carry": carry, "return_carry": True}
    last, _ = kind(FEATURES).apply(params, x, seq_lengths=np.array([0, 6, 0]), **options)
    full, _ = kind(FEATURES).apply(params, x, **options)
    for got, first, end in zip(*map(jax.tree.leaves, (last, carry, full)), strict=True):
        np.testing.assert_allclose(got, np.stack([first[0], end[1], first[2]]), rtol=1e-6)


def test_lengths_may_have_several_axes() -> None:
    x, lengths = draws.normal(0, 2, BATCH, TIME, INPUTS), np.array([[6, 1, 4], [2, 3, 5]])
    params = params_of(LSTM)
    options = {"return_carry": True, "reverse": True, "keep_order": True}
    nested = LSTM(FEATURES).apply(params, x, seq_lengths=lengths, **options)
    flat = LSTM(FEATURES).apply(params, x.reshape(6, TIME, INPUTS), seq_lengths=lengths.reshape(-1), **options)
    assert_close(nested, jax.tree.map(lambda leaf: leaf.reshape(2, BATCH, *leaf.shape[1:]), flat))


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


@KINDS
def test_both_directions_are_flaxs(kind: type) -> None:
    def pair(call: dict, params: Any, x: jax.Array, carry: Any) -> list[Any]:
        layers = (both(kind), flax_both(kind))
        return [value_and_gradients(layer, params, x, carry, **call) for layer in layers]

    cases = [(str(call), functools.partial(pair, call)) for call in (CALLS[0], CALLS[3])]
    carry = (carry_of(kind, BATCH), jax.tree.map(lambda leaf: -leaf, carry_of(kind, BATCH)))
    assert_equal_layers(cases, params_of_both(kind), draws.normal(0, BATCH, TIME, INPUTS), carry)


def test_directions_that_differ() -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    for pair in ((LSTM(4), GRU(4)), (LSTM(4), LSTM(3)), (GRU(4), GRU(4, implementation="fused_inputs"))):
        flaxs = linen.Bidirectional(*(linen.RNN(CELLS[type(layer)](layer.features)) for layer in pair))
        params = flaxs.init(jax.random.key(1), x)
        layer = Bidirectional(*pair, return_carry=True, time_major=True)
        carry, outputs = layer.apply(params, x.swapaxes(0, 1))
        assert_close((carry, outputs.swapaxes(0, 1)), flaxs.apply(params, x, return_carry=True))


def test_directions_are_merged_as_told() -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    layer = Bidirectional(GRU(4), GRU(4), merge_fn=jnp.maximum)
    outputs, params = layer.init_with_output(jax.random.key(1), x)
    assert_close(outputs, linen.Bidirectional(flax_layer(GRU), flax_layer(GRU), jnp.maximum).apply(params, x))


@pytest.mark.parametrize("time_major", [True, False])
def test_stacked_is_one_layer_upon_another(time_major: bool) -> None:
    lengths = np.array(LENGTHS)
    x = draws.normal(0, TIME, BATCH, INPUTS) if time_major else draws.normal(0, BATCH, TIME, INPUTS)
    layers = (both(LSTM), GRU(3), LSTM(2))
    stacked = Stacked(layers, dropout=0.5)
    options = {"seq_lengths": lengths, "time_major": time_major, "return_carry": True}
    (carries, outputs), variables = stacked.init_with_output(jax.random.key(1), x, **options)
    expected = []
    for k, layer in enumerate(layers):
        carry, x = layer.apply({"params": variables["params"][f"layers_{k}"]}, x, **options)
        expected.append(carry)
    assert_close((carries, outputs), (tuple(expected), x))


def test_stacked_goes_on_from_its_states() -> None:
    x, lengths = draws.normal(0, BATCH, TIME, INPUTS), None
    stacked = Stacked([LSTM(4), GRU(3)], return_carry=True)
    (_, outputs), params = stacked.init_with_output(jax.random.key(1), x, seq_lengths=lengths)
    carry, start = stacked.apply(params, x[:, :2])
    _, end = stacked.apply(params, x[:, 2:], initial_carry=carry)
    assert_close(jnp.concatenate([start, end], axis=1), outputs, 1e-6)


def test_dropout_is_between_layers_and_only_there() -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    params = Stacked([GRU(4), GRU(3)]).init(jax.random.key(1), x)
    run = jax.jit(
        lambda rate: Stacked([GRU(4), GRU(3)], rate).apply(params, x, train=True, rngs={"dropout": jax.random.key(2)})
    )
    first = GRU(3).apply({"params": params["params"]["layers_1"]}, jnp.zeros((BATCH, TIME, 4)))
    assert_close(run(1.0), first, 1e-6)  # all that passes between them is dropped
    assert_close(run(0.0), Stacked([GRU(4), GRU(3)]).apply(params, x), 1e-6)
    assert not np.allclose(run(0.5), run(0.0))
    single = Stacked([GRU(4)], 1.0)
    alone = {"params": {"layers_0": params["params"]["layers_0"]}}
    assert_close(single.apply(alone, x, train=True), single.apply(alone, x))


@KINDS
def test_a_population_is_its_members(kind: type) -> None:
    x = draws.normal(0, 2, BATCH, TIME, INPUTS)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), params_of(kind))

    @jax.jit
    def run(params: Any, x: jax.Array) -> Any:
        return value_and_gradients(kind(FEATURES), params, x, None, seq_lengths=np.array(LENGTHS))

    population = jax.jit(jax.vmap(jax.vmap(run, (None, 0)), (0, None)))(params, x)
    for member in range(3):
        for which in range(2):
            alone = run(jax.tree.map(lambda leaf, k=member: leaf[k], params), x[which])
            assert_close(jax.tree.map(lambda leaf, k=member, j=which: leaf[k, j], population), alone)


@KINDS
def test_training_under_scan_and_remat_is_training_without(kind: type) -> None:
    x = draws.normal(0, 3, BATCH, TIME, INPUTS)
    params = params_of(kind)

    def step(wrap: Callable, params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(wrap(lambda p: jnp.mean(kind(FEATURES).apply(p, x) ** 2)))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    plain = jax.jit(functools.partial(step, lambda loss: loss))
    scanned, losses = jax.lax.scan(functools.partial(step, jax.checkpoint), params, x)
    for k in range(3):
        params, loss = plain(params, x[k])
        np.testing.assert_allclose(loss, losses[k], rtol=1e-5)
    assert_close(scanned, params)


@KINDS
def test_bfloat16_has_flaxs_dtypes_and_is_near_float32(kind: type) -> None:
    def narrow(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)

    @jax.jit
    def run(params: Any, x: jax.Array) -> list[Any]:
        cases = [({"dtype": jnp.bfloat16}, params, x), ({}, narrow(params), narrow(x)), ({}, params, narrow(x))]
        return [value_and_gradients(kind(FEATURES), params, x, None)] + [
            [value_and_gradients(layer, params, x, None) for layer in layers]
            for options, params, x in cases
            for layers in [(kind(FEATURES, **options), linen.RNN(CELLS[kind](FEATURES, **options)))]
        ]

    carry = narrow(carry_of(kind, BATCH))
    x = draws.normal(0, BATCH, TIME, INPUTS)
    state = kind(FEATURES).apply(narrow(params_of(kind)), narrow(x), initial_carry=carry, return_carry=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}
    exact, *pairs = run(params_of(kind), draws.normal(0, BATCH, TIME, INPUTS))
    for ours, flaxs in pairs:
        assert jax.tree.map(lambda leaf: leaf.dtype, ours) == jax.tree.map(lambda leaf: leaf.dtype, flaxs)
        for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
            np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0.1, atol=0.1)


def scans(jaxpr: Any) -> list[Any]:
    """The bodies of all loops in a traced program, from the first to the last."""
    found = []
    for equation in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        inner = [value for value in inner if hasattr(value, "eqns")]
        found += inner if equation.primitive.name == "scan" else [body for value in inner for body in scans(value)]
    return found


def products(jaxpr: Any) -> int:
    return str(jaxpr).count("dot_general[")


@pytest.mark.parametrize(("layer", "loops"), [(LSTM(4), 1), (GRU(4), 1), (both(LSTM), 2)], ids=["lstm", "gru", "both"])
def test_one_product_to_each_step_and_the_others_outside(layer: linen.Module, loops: int) -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    params = jax.eval_shape(layer.init, jax.random.key(1), x)
    traced = jax.make_jaxpr(jax.grad(lambda p, x: layer.apply(p, x).sum(), argnums=(0, 1)))(params, x)
    bodies = scans(traced.jaxpr)
    assert [products(body) for body in bodies] == [1] * 2 * loops
    # Per direction outside: the inputs' product, its two gradients, and the recurrent kernel's gradient.
    assert products(traced) - sum(map(products, bodies)) == 4 * loops


def test_the_state_alone_needs_no_gradient_of_outputs() -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    params = params_of(LSTM)

    def compiled(pick: Callable) -> str:
        def loss(params: Any, weights: jax.Array) -> jax.Array:
            return (pick(*LSTM(FEATURES).apply(params, x, return_carry=True)) * weights).sum()

        return jax.jit(jax.grad(loss)).lower(params, draws.normal(1, BATCH, FEATURES)).compile().as_text()

    def carried(text: str) -> int:
        """The arrays of one float a step, sequence and feature in the loops' states."""
        loops = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
        return sum(line.count(f"f32[{TIME},{BATCH},{FEATURES}]") for line in loops)

    assert carried(compiled(lambda carry, outputs: carry[1])) < carried(compiled(lambda carry, outputs: outputs[:, -1]))


def test_ids_embedded_time_first_are_never_transposed() -> None:
    ids = draws.integers(0, 9, BATCH, TIME)
    table = draws.normal(1, 9, INPUTS)
    params = params_of(LSTM)

    def last(table: jax.Array, ids: jax.Array) -> jax.Array:
        (_, h), _ = LSTM(FEATURES, time_major=True).apply(params, table[ids.T], return_carry=True)
        return h.sum()

    program = str(jax.make_jaxpr(last)(table, ids))
    assert program.count("transpose[") == 1  # that of the ids
    np.testing.assert_allclose(last(table, ids), LSTM(FEATURES).apply(params, table[ids])[:, -1].sum(), rtol=1e-5)


@KINDS
def test_layers_stand_where_flax_puts_them_under_its_transformations(kind: type) -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    members = linen.vmap(kind, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
    outputs, params = members(FEATURES).init_with_output(jax.random.key(1), x)
    second = kind(FEATURES).apply(jax.tree.map(lambda leaf: leaf[1], params), x)
    assert_close(outputs[1], second)
    assert_close(linen.remat(kind)(FEATURES).apply(jax.tree.map(lambda leaf: leaf[1], params), x), second)
    mixed = linen.Bidirectional(kind(FEATURES), kind(FEATURES))
    assert_close(mixed.init_with_output(jax.random.key(1), x)[0], both(kind).init_with_output(jax.random.key(1), x)[0])


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
def test_what_cudnn_is_given_and_gives(on_gpu: None, directions: int) -> None:
    def pair(call: dict, params: Any, x: jax.Array, carry: Any) -> list[Any]:
        own = LSTM(FEATURES, implementation="cudnn") if directions == 1 else both(LSTM, implementation="cudnn")
        layers = (own, flax_layer(LSTM) if directions == 1 else flax_both(LSTM))
        return [value_and_gradients(layer, params, x, carry, **call) for layer in layers]

    calls = (CALLS[0], CALLS[2], CALLS[4]) if directions == 1 else (CALLS[0], CALLS[3])
    cases = [(str(call), functools.partial(pair, call)) for call in calls]
    params, carry = params_of(LSTM), carry_of(LSTM, BATCH)
    if directions == 2:
        params, carry = params_of_both(LSTM), (carry, carry)
    assert_equal_layers(cases, params, draws.normal(0, BATCH, TIME, INPUTS), carry)


def test_cudnn_runs_the_members_of_a_population(on_gpu: None) -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf, 2 * leaf]), params_of(LSTM))

    def run(layer: linen.Module) -> Any:
        return jax.jit(jax.vmap(lambda params: value_and_gradients(layer, params, x, None)))(params)

    assert_close(*(run(LSTM(FEATURES, implementation=name)) for name in ("cudnn", "fused_inputs")))


def test_cudnn_where_it_cannot_be_used_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    for layer, reason in ((GRU, "JAX offers cuDNN's LSTM alone"), (LSTM, "cuDNN runs on NVIDIA GPUs")):
        with pytest.raises(ConfigError, match=f"cannot use 'cudnn' here: {reason}"):
            layer(FEATURES, implementation="cudnn").init(jax.random.key(1), x)
    assert "float32, not in bfloat16, float32" in _obstacle_on("cuda 13000", monkeypatch)
    assert _rnn_kernels.cudnn_obstacle([jnp.dtype("float32")]) is None
    assert _obstacle_on("rocm 70000", monkeypatch) == "cuDNN runs on NVIDIA GPUs"


def _obstacle_on(version: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    client = type("Client", (), {"platform_version": version})
    monkeypatch.setattr(_rnn_kernels, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [type("Device", (), {"client": client})])
    return _rnn_kernels.cudnn_obstacle([jnp.dtype("float32"), jnp.dtype("bfloat16")])


def test_the_precision_asked_for_is_cudnns(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, allowed = rnn.lstm_fwd, []

    def recorded(*arguments: Any) -> Any:
        allowed.append(rnn._lstm_cudnn_allow_tf32(arguments[-1]))
        return forward(*arguments)

    monkeypatch.setattr(rnn, "lstm_fwd", recorded)
    layer, x = LSTM(FEATURES, implementation="cudnn"), draws.normal(0, BATCH, TIME, INPUTS)
    for name, exact in ((None, False), ("highest", True), ("float32", True), ("bfloat16", False)):
        with jax.default_matmul_precision(name):
            jax.eval_shape(lambda x: layer.apply(params_of(LSTM), x), x)
        assert allowed.pop() is not exact


def test_the_traced_program_names_the_implementation() -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    lowered = jax.jit(LSTM(FEATURES).apply).lower(params_of(LSTM), x)
    assert "jaxnn.recurrence.fused_inputs" in lowered.as_text(debug_info=True)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"inputs": np.ones((2, 3), np.int32)},
            r"LSTM needs floats \[\*batch, time, features\], not int32 \[2, 3\]: embed",
        ),
        ({"inputs": np.ones(3, np.float32)}, r"not float32 \[3\]\."),
        ({"inputs": np.ones(3, np.float32), "time_major": True}, r"LSTM needs floats \[time, \*batch, features\], not"),
        ({"seq_lengths": np.ones(2, int)}, r"seq_lengths of one integer for each sequence, \[3\], not int32 \[2\]\."),
        ({"seq_lengths": np.ones((3, 1), int)}, r"\[3\], not int32 \[3, 1\]\."),
        ({"seq_lengths": np.ones(3, np.float32)}, r"\[3\], not float32 \[3\]\."),
        ({"initial_carry": np.ones((3, 4))}, r"LSTM needs an initial_carry \(c, h\) of \[3, 4\] each, not \(3, 4\)\."),
        ({"initial_carry": (np.ones((3, 4)),) * 3}, r"\(c, h\) of \[3, 4\] each, not"),
        ({"initial_carry": (np.ones((3, 4)), np.ones((3, 5)))}, r"not \(\(3, 4\), \(3, 5\)\)\."),
    ],
)
def test_bad_input_is_named(given: dict, sentence: str) -> None:
    call = {"inputs": np.ones((BATCH, TIME, INPUTS), np.float32), **given}
    with pytest.raises(DataError, match=sentence):
        LSTM(FEATURES).init(jax.random.key(0), call.pop("inputs"), **call)


def test_bad_layers_are_named() -> None:
    x = draws.normal(0, BATCH, TIME, INPUTS)
    with pytest.raises(DataError, match=r"GRU needs an initial_carry \[3, 4\], not"):
        GRU(FEATURES).init(jax.random.key(0), x, initial_carry=(x, x))
    for layers in (GRU(4), [64, 64], [linen.GRUCell(4)]):
        with pytest.raises(ConfigError, match=r"Stacked needs layers, as Stacked\(\[LSTM\(64\), LSTM\(64\)\]\)"):
            Stacked(layers)
    with pytest.raises(DataError, match="Stacked needs an initial_carry of 2 states, one for each layer"):
        Stacked([GRU(4), GRU(4)]).init(jax.random.key(0), x, initial_carry=(x,))
    with pytest.raises(DataError, match=r"Stacked needs floats \[\*batch, time, features\], not int32 \[3, 6\]"):
        Stacked([GRU(4)]).init(jax.random.key(0), np.ones((BATCH, TIME), np.int32))
    with pytest.raises(DataError, match="Bidirectional needs an initial_carry of 2 states"):
        both(GRU).init(jax.random.key(0), x, initial_carry=x)
    with pytest.raises(ConfigError, match=r"Stacked needs layers, as Stacked\(\[LSTM"):
        Stacked([])
    with pytest.raises(ConfigError, match="a dropout rate is a probability"):
        Stacked([GRU(4)], dropout=2.0)
    with pytest.raises(ConfigError, match="takes jaxnn's LSTM or GRU, not RNN: use flax.linen.Bidirectional"):
        Bidirectional(flax_layer(GRU), GRU(4))
    with pytest.raises(ConfigError, match="GRU: features must be an integer >= 1, not 0"):
        GRU(0)
    with pytest.raises(ConfigError, match="recurrence has no implementation 'hoist'"):
        GRU(4, implementation="hoist").init(jax.random.key(0), x)
