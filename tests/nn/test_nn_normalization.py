"""Normalisation: equal to Flax's in value, gradient and statistics, better where means are large."""

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

OURS = {"implementation": "analytic"}


def inputs(shape: tuple[int, ...] = (6, 5, 4, 3), dtype: Any = jnp.float32) -> Any:
    """Channels of different means and deviations."""
    x = draws.normal(0, *shape, dtype=dtype)
    steps = jnp.arange(shape[-1], dtype=dtype).reshape((1,) * (len(shape) - 1) + (-1,))
    return x * (1 + steps) + 2 * steps


def start(layer: Any, x: Any) -> Any:
    """Its variables, none of them at its plain first value."""
    variables = layer.init(jax.random.key(1), x)
    leaves, tree = jax.tree.flatten(variables)
    return tree.unflatten([a + draws.uniform(seed, *a.shape, dtype=a.dtype) for seed, a in enumerate(leaves)])


def made(flax: bool = False, **options: Any) -> Any:
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


def assert_same(found: Any, expected: Any, rtol: float, atol: float) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(np.float64(ours), np.float64(theirs), rtol=rtol, atol=atol)


@pytest.mark.parametrize("options", [{}, {"use_scale": False, "epsilon": 0.1}, {"use_bias": False}])
def test_value_gradient_and_statistics_are_those_of_flax(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        x = inputs(dtype=jnp.float64)
        own, flax = (made(flax, param_dtype=jnp.float64, **options) for flax in (False, True))
        variables = start(flax, x)
        assert jax.tree.structure(own.init(jax.random.key(1), x)) == jax.tree.structure(variables)
        assert_same(*(jax.jit(graded(layer))(variables, x) for layer in (own, flax)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{}, {"use_scale": False}, {"use_bias": False, "dtype": "float32"}, {"reduction_axes": (1, 2)}]
)
def test_layer_norm_is_flaxs(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        x = inputs(dtype=jnp.float64)
        own, flax = LayerNorm(**options), linen.LayerNorm(**options)
        variables = start(flax, x)
        assert jax.tree.structure(own.init(jax.random.key(1), x)) == jax.tree.structure(variables)
        tolerance = 1e-3 if "dtype" in options else 1e-6
        assert_same(*(jax.jit(graded(layer))(variables, x) for layer in (own, flax)), rtol=tolerance, atol=tolerance)
    x = inputs((64, 8), jnp.bfloat16)
    if "reduction_axes" not in options:
        rows = (layer.init_with_output(jax.random.key(0), x)[0] for layer in (own, flax))
        assert_same(*rows, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(7, 3), (1, 3), (1, 1, 5), (130, 9)])
def test_odd_shapes_and_one_example(shape: tuple[int, ...]) -> None:
    own, flax = (made(flax) for flax in (False, True))
    x = inputs(shape)
    variables = start(flax, x)
    assert_same(*(jax.jit(graded(layer))(variables, x) for layer in (own, flax)), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_half_precision_sums_in_float32(dtype: Any) -> None:
    x = inputs((64, 8), jnp.bfloat16)
    own, flax = (made(flax, dtype=dtype) for flax in (False, True))
    variables = start(flax, x)
    (own_out, own_grads), (flax_out, flax_grads) = (graded(layer)(variables, x) for layer in (own, flax))
    # Without a dtype the result is float32, as the parameters: exact sums show. bfloat16 itself has 8 bits.
    (rtol, atol) = (1e-4, 1e-4) if dtype is None else (0.02, 0.02)
    assert_same(own_out[1], flax_out[1], rtol, atol)
    assert_same(own_grads, flax_grads, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("layer", [LayerNorm(), made()])
def test_a_mean_large_beside_the_deviation_is_taken_off_exactly(layer: Any) -> None:
    # Whole numbers, exact in float32: 4096 + 0, 1, …, 63. E[x²] - E[x]² would be 1.7e7 - 1.7e7, with steps of 2.
    x = 4096 + jnp.arange(64.0)
    x = x[None] if isinstance(layer, LayerNorm) else x[:, None]
    y, _ = layer.apply(layer.init(jax.random.key(0), x), x, mutable=["batch_stats"])
    # 0…63 has mean 31.5 and variance (64² - 1) / 12 = 341.25.
    np.testing.assert_allclose(np.ravel(y), (np.arange(64.0) - 31.5) / 341.25**0.5, rtol=1e-5)


def test_running_statistics_are_what_evaluation_uses_and_keeps() -> None:
    x = inputs()
    layer = BatchNorm(momentum=0.75, **OURS)
    variables = layer.init(jax.random.key(0), x, use_running_average=False)
    _, updates = layer.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    rows = np.asarray(x, np.float64).reshape(-1, 3)
    # From 0 and 1: a quarter of the batch's, and of 1 three quarters.
    np.testing.assert_allclose(updates["batch_stats"]["mean"], rows.mean(0) / 4, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(updates["batch_stats"]["var"], 0.75 + rows.var(0) / 4, rtol=1e-5)
    variables = {**variables, **updates}
    y, kept = layer.apply(variables, x, use_running_average=True, mutable=["batch_stats"])
    mean, var = (np.float64(updates["batch_stats"][name]) for name in ("mean", "var"))
    np.testing.assert_allclose(y, (np.float64(x) - mean) / np.sqrt(var + 1e-5), rtol=1e-4, atol=1e-5)
    assert_same(kept, updates, rtol=0, atol=0)


def test_a_batch_on_two_devices_has_the_statistics_of_the_whole() -> None:
    x, layer = inputs((8, 5, 3)), made()
    variables = start(layer, x)
    step = jax.jit(graded(layer))
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    halves = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
    assert len(halves.sharding.device_set) == 2
    shared = jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))
    assert_same(step(shared, halves), step(variables, x), rtol=1e-4, atol=1e-5)
    # The halves' own statistics are others: what is compared can be told apart.
    assert not np.allclose(x[:4].mean((0, 1)), x.mean((0, 1)), atol=1e-2)


def scopes(layer: Any, *args: Any, **call: Any) -> set[str]:
    run = jax.jit(lambda *args: layer.init_with_output(jax.random.key(0), *args, **call)[0])
    text = str(run.lower(*args).as_text(debug_info=True))
    return {name for name in ("analytic", "xla") if f"jaxnn.normalization.{name}" in text}


def test_a_mask_counts_in_the_statistics_as_flax_does_it() -> None:
    x = inputs()
    mask = jnp.arange(6).reshape(6, 1, 1, 1) < 5
    own, flax = made(implementation=None), made(flax=True)
    variables = start(flax, x)
    assert_same(*(graded(layer, mask=mask)(variables, x) for layer in (own, flax)), rtol=1e-6, atol=1e-6)
    assert scopes(own, x, mask=mask) == {"xla"}
    assert scopes(own, x) == {"analytic"}


def test_statistics_over_a_named_axis_are_those_of_the_whole() -> None:
    x, whole = inputs((8, 5, 3)), made()
    variables = start(whole, x)
    halves = x.reshape(2, 4, 5, 3)
    named = made(axis_name="halves", implementation=None)

    def loss(layer: Any, x: Any) -> Any:
        y, updates = layer.apply(variables, x, mutable=["batch_stats"])
        return jnp.sum(jnp.sin(y)), (y, updates)

    (_, (y, updates)), grads = jax.value_and_grad(partial(loss, whole), has_aux=True)(x)

    def loss_of_halves(halves: Any) -> Any:
        # One number of both halves, so that its gradient goes through the collective.
        losses, rest = jax.vmap(partial(loss, named), axis_name="halves")(halves)
        return losses.sum(), rest

    to_halves, (parts, per_half) = jax.grad(loss_of_halves, has_aux=True)(halves)
    np.testing.assert_allclose(parts.reshape(x.shape), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(to_halves.reshape(x.shape), grads, rtol=1e-3, atol=1e-4)
    assert_same(jax.tree.map(lambda a: a[1], per_half), updates, rtol=1e-5, atol=1e-5)


def test_under_vmap_scan_and_checkpoint() -> None:
    x, layer = inputs((9, 4)), made()
    variables = start(layer, x)
    members = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), variables)
    step = graded(layer)
    alone = [step(jax.tree.map(lambda a, i=i: a[i], members), x) for i in range(2)]
    expected = jax.tree.map(lambda *a: jnp.stack(a), *alone)
    same = partial(assert_same, rtol=1e-4, atol=1e-4)
    same(jax.jit(jax.vmap(step, (0, None)))(members, x), expected)
    same(jax.lax.scan(lambda carry, member: (carry, step(member, x)), 0, members)[1], expected)
    nested = jax.vmap(jax.vmap(step, (None, 0)), (0, None))(members, jnp.stack([x, x + 1]))
    same(jax.tree.map(lambda a: a[:, 0], nested), expected)
    again = jax.grad(jax.checkpoint(lambda *a: step(*a)[0][0]), (0, 1))(variables, x)
    same(again, alone[0][1])


def test_epsilon_has_a_gradient() -> None:
    x = inputs((9, 4))

    def loss(epsilon: Any, flax: bool) -> Any:
        return jnp.sum(jnp.sin(made(flax, epsilon=epsilon).init_with_output(jax.random.key(0), x)[0]))

    np.testing.assert_allclose(jax.grad(loss)(0.1, False), jax.grad(loss)(0.1, True), rtol=1e-4)


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (made(axis_name="devices"), jnp.zeros((2, 3)), "does not average over a named axis"),
        (made(force_float32_reductions=False), jnp.zeros((2, 3)), "float32 or wider"),
        (made(), jnp.zeros((2, 3), jnp.int32), "takes floats, not int32"),
        (made(axis=1), jnp.zeros((2, 3, 4)), "channels last"),
    ],
)
def test_what_the_kernels_do_not_do_is_left_to_flax_or_named(layer: Any, x: Any, message: str) -> None:
    with pytest.raises(
        ConfigError, match=f"normalization cannot use 'analytic' here: .*{message}.*leave implementation"
    ):
        layer.clone(implementation="analytic").init(jax.random.key(0), x)
    if layer.axis_name is None:
        assert scopes(layer.clone(implementation=None), x) == {"xla"}
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        layer.clone(implementation="fast").init(jax.random.key(0), x)
