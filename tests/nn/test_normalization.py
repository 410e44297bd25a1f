"""Normalization: equal to Flax's in value, gradient and statistics, more exact for large means."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnn.nn import BatchNorm, LayerNorm
from jaxnn.types import ConfigError
from tests import draws

OURS = {"implementation": "custom_vjp"}


def inputs(shape: tuple[int, ...] = (6, 5, 4, 3), dtype: Any = jnp.float32) -> Any:
    """Channels of different means and deviations."""
    steps = np.arange(shape[-1]).reshape((1,) * (len(shape) - 1) + (-1,))
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape) * (1 + steps) + 2 * steps, dtype)


def norm(flax: bool = False, **options: Any) -> Any:
    options = {"use_running_average": False} | options
    return linen.BatchNorm(**options) if flax else BatchNorm(**(OURS | options))


def graded(layer: Any, **call: Any) -> Callable[[Any, Any], Any]:
    """``(variables, x) -> ((loss, (y, updates)), gradients)``, of a loss that also depends on the new statistics."""

    def loss(variables: Any, x: Any) -> Any:
        y, updates = layer.apply(variables, x, mutable=["batch_stats"], **call)
        ways = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        total = jnp.sum(y * ways) + sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(updates))
        return total, (y, updates)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)


def assert_same(found: Any, expected: Any, rtol: float, atol: float | None = None) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(np.float64(ours), np.float64(theirs), rtol=rtol, atol=rtol if atol is None else atol)


def both_graded(own: Any, flax: Any, x: Any, **call: Any) -> Any:
    """The results of both layers, by one program, from the same variables, whose shapes must agree."""
    variables = draws.variables(flax, x)
    assert jax.eval_shape(own.init, jax.random.key(1), x) == jax.eval_shape(flax.init, jax.random.key(1), x)
    return jax.jit(lambda v, x: [graded(layer, **call)(v, x) for layer in (own, flax)])(variables, x)


@pytest.mark.parametrize("options", [{}, {"use_scale": False, "epsilon": 0.1}, {"use_bias": False}])
def test_batch_norm_equals_flax_in_float64(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        own, flax = (norm(flax, param_dtype=jnp.float64, **options) for flax in (False, True))
        assert_same(*both_graded(own, flax, inputs(dtype=jnp.float64)), rtol=1e-10)


LAYER_OPTIONS = [{}, {"use_scale": False}, {"use_bias": False, "dtype": "float32"}, {"reduction_axes": (1, 2)}]


@pytest.mark.parametrize("options", LAYER_OPTIONS)
def test_layer_norm_equals_flax(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        results = both_graded(LayerNorm(**options), linen.LayerNorm(**options), inputs(dtype=jnp.float64))
        assert_same(*results, rtol=1e-3 if "dtype" in options else 1e-6)


def test_odd_shapes_and_half_precision() -> None:
    for shape in [(1, 3), (1, 1, 5), (130, 9)]:
        assert_same(*both_graded(norm(), norm(True), inputs(shape)), rtol=1e-3, atol=2e-3)
    x = inputs((64, 8), jnp.bfloat16)
    for dtype in (None, jnp.bfloat16):
        (own_out, own_grads), (flax_out, flax_grads) = both_graded(norm(dtype=dtype), norm(True, dtype=dtype), x)
        # Without a dtype the result is float32, as the parameters: exact sums show. bfloat16 itself has 8 bits.
        assert_same(own_out[1], flax_out[1], 1e-4 if dtype is None else 0.02)
        assert_same(own_grads, flax_grads, rtol=0.02, atol=0.1)
    rows = [layer.apply({"params": {}}, x) for layer in (cls(use_scale=False, use_bias=False) for cls in NORMS)]
    assert_same(*rows, rtol=0.02)


NORMS = (LayerNorm, linen.LayerNorm)


@pytest.mark.parametrize("layer", [LayerNorm(), norm()])
def test_a_mean_large_beside_the_deviation_is_subtracted_exactly(layer: Any) -> None:
    # Whole numbers, exact in float32: 4096 + 0, 1, …, 63. E[x²] - E[x]² would be 1.7e7 - 1.7e7, with steps of 2.
    x = np.float32(4096 + np.arange(64.0))
    x = x[None] if isinstance(layer, LayerNorm) else x[:, None]
    y, _ = jax.jit(lambda: layer.init_with_output(jax.random.key(0), x))()
    # 0…63 has mean 31.5 and variance (64² - 1) / 12 = 341.25.
    np.testing.assert_allclose(np.ravel(y), (np.arange(64.0) - 31.5) / 341.25**0.5, rtol=1e-5)


def test_running_statistics_are_updated_in_training_and_used_in_evaluation() -> None:
    x, layer = inputs(), BatchNorm(momentum=0.75, **OURS)

    @jax.jit
    def run(x: jax.Array) -> Any:
        variables = layer.init(jax.random.key(0), x, use_running_average=False)
        _, updates = layer.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
        again = layer.apply({**variables, **updates}, x, use_running_average=True, mutable=["batch_stats"])
        return updates, again

    updates, (y, kept) = run(x)
    rows = np.asarray(x, np.float64).reshape(-1, 3)
    # From 0 and 1: a quarter of the batch's, and of 1 three quarters.
    mean, var = (np.float64(updates["batch_stats"][name]) for name in ("mean", "var"))
    np.testing.assert_allclose(mean, rows.mean(0) / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(var, 0.75 + rows.var(0) / 4, rtol=1e-5)
    np.testing.assert_allclose(y, (np.float64(x) - mean) / np.sqrt(var + 1e-5), rtol=1e-4, atol=1e-5)
    assert_same(kept, updates, rtol=0)


def test_statistics_are_those_of_the_full_batch_sharded_or_mapped() -> None:
    x, layer = inputs((8, 5, 3)), norm()
    variables = draws.variables(layer, x)
    expected = jax.jit(graded(layer))(variables, x)
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    halves = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
    replicated = jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))
    assert_same(jax.jit(graded(layer))(replicated, halves), expected, rtol=1e-4, atol=1e-5)
    # The halves' own statistics are others: the comparison can fail.
    assert not np.allclose(np.mean(x[:4], (0, 1)), np.mean(x, (0, 1)), atol=1e-2)

    def loss(layer: Any, x: Any) -> Any:
        y, updates = layer.apply(variables, x, mutable=["batch_stats"])
        return jnp.sum(jnp.sin(y)), (y, updates)

    def loss_of_halves(halves: Any) -> Any:
        # One number of both halves, so that its gradient goes through the collective.
        named = norm(axis_name="halves", implementation=None)
        losses, rest = jax.vmap(partial(loss, named), axis_name="halves")(halves)
        return losses.sum(), rest

    grad, (y, updates) = jax.jit(jax.grad(partial(loss, layer), has_aux=True))(x)
    to_halves, (parts, per_half) = jax.jit(jax.grad(loss_of_halves, has_aux=True))(x.reshape(2, 4, 5, 3))
    np.testing.assert_allclose(parts.reshape(x.shape), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_halves.reshape(x.shape), grad, rtol=1e-3, atol=1e-4)
    assert_same(jax.tree.map(lambda a: a[1], per_half), updates, rtol=1e-5)


def scopes(layer: Any, *args: Any, **call: Any) -> set[str]:
    run = jax.jit(lambda *args: layer.init_with_output(jax.random.key(0), *args, **call)[0])
    text = str(run.lower(*args).as_text(debug_info=True))
    return {name for name in ("custom_vjp", "xla") if f"jaxnn.normalization.{name}" in text}


def test_a_mask_is_left_to_flax() -> None:
    x, mask = inputs(), np.arange(6).reshape(6, 1, 1, 1) < 5
    own = norm(implementation=None)
    assert_same(*both_graded(own, norm(flax=True), x, mask=mask), rtol=1e-6)
    assert scopes(own, x, mask=mask) == {"xla"}
    assert scopes(own, x) == {"custom_vjp"}


def test_under_vmap_scan_and_checkpoint() -> None:
    x, layer = inputs((9, 4)), norm()
    members = jax.tree.map(lambda a: np.stack([a, 2 * a]), draws.variables(layer, x))
    step = graded(layer)

    @jax.jit
    def run(members: Any, x: jax.Array) -> Any:
        nested = jax.vmap(jax.vmap(step, (None, 0)), (0, None))(members, jnp.stack([x, x + 1]))
        first = jax.tree.map(lambda a: a[0], members)
        return (
            jax.lax.scan(lambda carry, member: (carry, step(member, x)), 0, members)[1],
            jax.vmap(step, (0, None))(members, x),
            jax.tree.map(lambda a: a[:, 0], nested),
            jax.grad(jax.checkpoint(lambda *a: step(*a)[0][0]), (0, 1))(first, x),
        )

    *same, checkpointed = run(members, x)
    alone = [jax.jit(step)(jax.tree.map(lambda a, i=i: a[i], members), x) for i in range(2)]
    for found in same:
        assert_same(found, jax.tree.map(lambda *a: np.stack(a), *alone), rtol=1e-4)
    assert_same(checkpointed, alone[0][1], rtol=1e-4)


def test_epsilon_has_a_gradient() -> None:
    x = inputs((9, 4))

    def loss(epsilon: Any, flax: bool) -> Any:
        return jnp.sum(jnp.sin(norm(flax, epsilon=epsilon).init_with_output(jax.random.key(0), x)[0]))

    np.testing.assert_allclose(*jax.jit(lambda e: [jax.grad(loss)(e, flax) for flax in (False, True)])(0.1), rtol=1e-4)


OBSTACLES = [
    (norm(axis_name="devices"), (2, 3), "float32", "does not average over a named axis"),
    (norm(force_float32_reductions=False), (2, 3), "float32", "float32 or wider"),
    (norm(), (2, 3), "int32", "takes floats, not int32"),
    (norm(axis=1), (2, 3, 4), "float32", "channels last"),
]


def test_what_the_custom_gradient_does_not_support_is_left_to_flax_or_refused() -> None:
    for layer, shape, dtype, words in OBSTACLES:
        x = np.zeros(shape, dtype)
        with pytest.raises(ConfigError, match=f"cannot use 'custom_vjp' here: .*{words}.*leave implementation"):
            layer.init(jax.random.key(0), x)
        if layer.axis_name is None:
            assert scopes(layer.clone(implementation=None), x) == {"xla"}
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        norm(implementation="fast").init(jax.random.key(0), np.zeros((2, 3)))
