"""Normalization: equal to Flax's in value, gradient and statistics, more exact for large means."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxnn.nn import BatchNorm, LayerNorm, use_batch_axis, use_batch_mask
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_close

KEY = jax.random.key(0)
OURS = {"implementation": "custom_vjp"}


def inputs(shape: tuple[int, ...] = (6, 5, 4, 3), dtype: Any = jnp.float32) -> Any:
    """Channels of different means and deviations."""
    steps = np.arange(shape[-1]).reshape((1,) * (len(shape) - 1) + (-1,))
    numbers = np.random.default_rng(0).standard_normal(shape) * (1 + steps) + 2 * steps
    return jax.device_put(numbers.astype(dtype))


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


def compare(cases: list[tuple[Any, Any, Any]], *tolerances: float, **call: Any) -> None:
    """Asserts equal results of ``(own, flax, x)``, by one program, from the same variables, whose shapes must agree."""
    variables = [draws.variables(flax, x) for _, flax, x in cases]
    for own, flax, x in cases:
        assert jax.eval_shape(own.init, KEY, x) == jax.eval_shape(flax.init, KEY, x)

    def run(variables: Any, xs: Any) -> Any:
        triples = zip(cases, variables, xs, strict=True)
        return [[graded(layer, **call)(v, x) for layer in (own, flax)] for (own, flax, _), v, x in triples]

    results = jax.jit(run)(variables, [x for *_, x in cases])
    for (ours, flaxs), tolerance in zip(results, tolerances * (len(results) // len(tolerances)), strict=True):
        assert_close(ours, flaxs, tolerance)


def test_batch_norm_equals_flax_in_float64():
    cases = [({}, (6, 5, 4, 3)), ({"use_scale": False, "epsilon": 0.1}, (1, 3)), ({"use_bias": False}, (1, 1, 5))]
    with jax.enable_x64(True):
        layers = [({"param_dtype": jnp.float64, **options}, inputs(shape, jnp.float64)) for options, shape in cases]
        compare([(norm(**options), norm(True, **options), x) for options, x in layers], 1e-10)


def test_layer_norm_equals_flax():
    cases = [{}, {"use_scale": False}, {"reduction_axes": (1, 2)}, {"use_bias": False, "dtype": "float32"}]
    with jax.enable_x64(True):
        x = inputs(dtype=jnp.float64)
        compare([(LayerNorm(**options), linen.LayerNorm(**options), x) for options in cases], 1e-6, 1e-6, 1e-6, 1e-3)


def test_half_precision_equals_flax():
    x = inputs((64, 8), jnp.bfloat16)

    @jax.jit
    def run(variables: Any, x: jax.Array) -> Any:
        kinds = LayerNorm, linen.LayerNorm
        rows = [layer(use_scale=False, use_bias=False).apply({"params": {}}, x) for layer in kinds]
        dtypes = None, x.dtype
        return rows, [[graded(norm(flax, dtype=dtype))(variables, x) for flax in (False, True)] for dtype in dtypes]

    rows, pairs = run(draws.variables(norm(True), x), x)
    assert_close(*rows, 0.02)
    # Without a dtype the result is float32, as the parameters: exact sums show. bfloat16 itself has 8 bits.
    for pair, tolerance in zip(pairs, (1e-4, 0.02), strict=True):
        (ours, our_gradients), (flaxs, flax_gradients) = pair
        assert_close(ours[1], flaxs[1], tolerance)
        for own, theirs in zip(jax.tree.leaves(our_gradients), jax.tree.leaves(flax_gradients), strict=True):
            np.testing.assert_allclose(np.float64(own), np.float64(theirs), rtol=0.02, atol=0.1)


def test_a_mean_large_beside_the_deviation_is_subtracted_exactly():
    # Whole numbers, exact in float32: 4096 + 0, 1, …, 63. E[x²] - E[x]² would be 1.7e7 - 1.7e7, with steps of 2.
    x = np.float32(4096 + np.arange(64.0))
    layers = LayerNorm(), norm()
    run = jax.jit(lambda *xs: [layer.init_with_output(KEY, x) for layer, x in zip(layers, xs, strict=True)])
    for y, _ in run(x[None], x[:, None]):
        # 0…63 has mean 31.5 and variance (64² - 1) / 12 = 341.25.
        np.testing.assert_allclose(np.ravel(y), (np.arange(64.0) - 31.5) / 341.25**0.5, rtol=1e-5)


def test_running_statistics_are_updated_in_training_and_used_in_evaluation():
    x, layer = inputs(), BatchNorm(momentum=0.75, **OURS)

    @jax.jit
    def run(x: jax.Array) -> Any:
        variables = layer.init(KEY, x, use_running_average=False)
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
    assert_close(kept, updates, 0.0)


def test_statistics_are_those_of_the_full_batch_sharded_or_mapped():
    x, layer, mask = inputs((8, 5, 3)), norm(), np.float32(np.arange(8) < 5)
    variables = draws.variables(layer, x)
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    halves = jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
    replicated = jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))
    run = jax.jit(graded(layer))
    assert_close(run(replicated, halves), run(variables, x), 2e-5)
    # The halves' own statistics are others: the comparison can fail.
    assert not np.allclose(np.mean(x[:4], (0, 1)), np.mean(x, (0, 1)), atol=1e-2)

    def apply(x: Any, mask: Any, axis: str | None) -> Any:
        with use_batch_axis(axis), use_batch_mask(mask):
            return layer.apply(variables, x, mutable=["batch_stats"])

    def loss(x: Any, mask: Any) -> Any:
        y, updates = apply(x, mask, None)
        return jnp.sum(jnp.sin(y)), (y, updates)

    def loss_of_halves(x: Any, mask: Any) -> Any:
        # One number of both halves, so that its gradient goes through the collective.
        halves = x.reshape(2, 4, 5, 3), mask.reshape(2, 4)
        y, updates = jax.vmap(lambda x, mask: apply(x, mask, "halves"), axis_name="halves")(*halves)
        return jnp.sum(jnp.sin(y)), (y.reshape(x.shape), jax.tree.map(lambda leaf: leaf[1], updates))

    # Padding is in the second half alone.
    both = jax.jit(lambda *given: [jax.grad(f, has_aux=True)(*given) for f in (loss_of_halves, loss)])
    found, expected = both(x, mask)
    assert_close(found, expected, 2e-5)
    layer = norm(implementation="xla")
    by_flax = jax.jit(lambda mask: apply(x, mask, None))
    assert_close(by_flax(mask), expected[1], 2e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(by_flax(0 * mask)))


def scopes(layer: Any, *args: Any, **call: Any) -> set[str]:
    run = jax.jit(lambda *args: layer.init_with_output(KEY, *args, **call)[0])
    text = str(run.lower(*args).as_text(debug_info=True))
    return {name for name in ("native", "custom_vjp", "xla") if f"jaxnn.normalization.{name}" in text}


def test_a_mask_is_left_to_flax():
    x, mask = inputs(), np.arange(6).reshape(6, 1, 1, 1) < 5
    own = norm(implementation=None)
    compare([(own, norm(flax=True), x)], 1e-6, mask=mask)
    assert scopes(own, x, mask=mask) == {"xla"}
    assert scopes(own, x) == {"native" if native.USED else "custom_vjp"}


OBSTACLES = [
    (norm(axis_name="devices"), (2, 3), "float32", "does not average over a named axis"),
    (norm(force_float32_reductions=False), (2, 3), "float32", "float32 or wider"),
    (norm(), (2, 3), "int32", "takes floats, not int32"),
    (norm(axis=1), (2, 3, 4), "float32", "channels last"),
]


def test_what_the_custom_gradient_does_not_support_is_left_to_flax_or_refused():
    for layer, shape, dtype, words in OBSTACLES:
        x = np.zeros(shape, dtype)
        with pytest.raises(ConfigError, match=f"cannot use 'custom_vjp' here: .*{words}.*leave implementation"):
            jax.eval_shape(layer.init, KEY, x)
        if layer.axis_name is None:
            assert scopes(layer.clone(implementation=None), x) == {"xla"}
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        jax.eval_shape(norm(implementation="fast").init, KEY, np.zeros((2, 3)))
