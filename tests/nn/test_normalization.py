"""Normalization: equal to Flax's in value, gradient and statistics, also by native sums, and exact for large means."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.sharding import Mesh, PartitionSpec

from jaxnn._batch_context import use_batch_axis, use_batch_mask
from jaxnn.nn import BatchNorm, LayerNorm
from jaxnn.observe import Traced
from jaxnn.types import ConfigError
from tests import draws, native
from tests.draws import assert_close, assert_near

KEY = jax.random.key(0)
OURS, NATIVE = {"implementation": "custom_vjp"}, {"implementation": "native"}


def inputs(shape: tuple[int, ...] = (6, 5, 4, 3), dtype: Any = jnp.float32) -> Any:
    """Channels of different means and deviations."""
    steps = np.arange(shape[-1]).reshape((1,) * (len(shape) - 1) + (-1,))
    numbers = np.random.default_rng(0).standard_normal(shape) * (1 + steps) + 2 * steps
    return jax.device_put(numbers.astype(dtype))


def norm(flax: bool = False, **options: Any) -> Any:
    options = {"use_running_average": False} | options
    return linen.BatchNorm(**options) if flax else BatchNorm(**(OURS | options))


def graded(layer: Any, **call: Any) -> Callable[[Any, Any], Any]:
    """``(variables, x) -> ((y, updates), gradients)``."""
    return draws.graded(functools.partial(layer.apply, mutable=["batch_stats"], **call))


def pairs(cases: list[tuple[Any, Any, Any]], **call: Any) -> Any:
    """The results of ``(own, other, x)``, by one program, from the same variables, whose shapes must agree."""
    variables = [draws.variables(other, x) for _, other, x in cases]
    for own, other, x in cases:
        assert jax.eval_shape(own.init, KEY, x) == jax.eval_shape(other.init, KEY, x)

    def run(variables: Any, xs: Any) -> Any:
        triples = zip(cases, variables, xs, strict=True)
        return [[graded(layer, **call)(v, x) for layer in (own, other)] for (own, other, _), v, x in triples]

    return jax.jit(run)(variables, [x for *_, x in cases])


def test_batch_norm_equals_flax_in_float64():
    cases = [({}, (6, 5, 4, 3)), ({"use_scale": False, "epsilon": 0.1}, (1, 3)), ({"use_bias": False}, (1, 1, 5))]
    with jax.enable_x64(True):
        layers = [({"param_dtype": jnp.float64, **options}, inputs(shape, jnp.float64)) for options, shape in cases]
        for ours, flaxs in pairs([(norm(**options), norm(True, **options), x) for options, x in layers]):
            assert_close(ours, flaxs, 1e-10)


def test_layer_norm_equals_flax():
    cases = [{}, {"use_scale": False}, {"reduction_axes": (1, 2)}, {"use_bias": False, "dtype": "float32"}]
    with jax.enable_x64(True):
        x = inputs(dtype=jnp.float64)
        results = pairs([(LayerNorm(**options), linen.LayerNorm(**options), x) for options in cases])
        for options, (ours, flaxs) in zip(cases, results, strict=True):
            assert_close(ours, flaxs, 1e-3 if "dtype" in options else 1e-6)


# Few rows; one channel; parts of blocks and of lanes; several blocks, of which the last is small; many channels.
SHAPES = [(5, 3), (7, 1), (5, 3, 7), (2, 3, 20, 64), (40, 30, 33, 5), (70, 300)]


@native.needed
def test_native_sums_give_the_results_of_xlas():
    assert_near(*zip(*pairs([(norm(**NATIVE), norm(), inputs(shape)) for shape in SHAPES]), strict=True))


def test_half_precision_equals_flax():
    x, bare = inputs((64, 8), jnp.bfloat16), {"use_scale": False, "use_bias": False}
    cases = [(norm(dtype=dtype), norm(True, dtype=dtype), x) for dtype in (None, x.dtype)]
    results = pairs([*cases, (LayerNorm(**bare), linen.LayerNorm(**bare), x)])
    # Without a dtype the result is float32, as the parameters: exact sums show. bfloat16 itself has 8 bits.
    for ((ours, our_gradients), (flaxs, flax_gradients)), tolerance in zip(results, (1e-4, 0.02, 0.02), strict=True):
        assert_close(ours, flaxs, tolerance)
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


@native.needed
def test_native_moments_are_those_of_float64_and_have_the_same_bits_in_a_batch_of_members():
    x = np.float32(4096 + np.random.default_rng(0).normal(size=(5000, 6)))
    layer = norm(momentum=0.0, **NATIVE)

    def moments(x: Any) -> Any:
        return layer.apply(draws.variables(layer, x), x, mutable=["batch_stats"])[1]["batch_stats"]

    alone, members = jax.jit(lambda x: (moments(x), jax.vmap(moments)(jnp.stack([x + 1, x]))))(x)
    np.testing.assert_allclose(alone["mean"], np.float64(x).mean(0), rtol=1e-7)
    np.testing.assert_allclose(alone["var"], np.float64(x).var(0), rtol=1e-5)
    jax.tree.map(lambda one, both: np.testing.assert_array_equal(one, both[1]), alone, members)


def test_statistics_by_device_are_those_of_the_full_batch():
    x, mesh, rows = inputs((8, 5, 3)), Mesh(np.array(jax.devices()[:2]), ("batch",)), PartitionSpec("batch")
    variables = draws.variables(norm(), x)
    # The halves' own statistics are others: the comparison can fail.
    assert not np.allclose(np.mean(x[:4], (0, 1)), np.mean(x, (0, 1)), atol=1e-2)

    def apply(layer: Any, params: Any, x: Any, mask: Any) -> Any:
        with use_batch_mask(mask):
            return layer.apply({**variables, "params": params}, x, mutable=["batch_stats"])

    def apply_by_device(layer: Any, *given: Any) -> Any:
        def of_half(*given: Any) -> Any:
            with use_batch_axis("batch"):
                return apply(layer, *given)

        whole = PartitionSpec()
        return jax.shard_map(of_half, mesh=mesh, in_specs=(whole, rows, rows), out_specs=(rows, whole))(*given)

    def slopes(function: Any, layer: Any, params: Any, x: Any, mask: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, updates = function(layer, params, x, mask)
            return jnp.sum(jnp.sin(y)), (y, updates)

        return jax.grad(loss, (0, 1), has_aux=True)(params, x)

    # Padding is in the second half alone; the native sums take none.
    mask, cases = np.float32(np.arange(8) < 5), [(norm(), True), *[(norm(**NATIVE), False)] * native.USED]

    @jax.jit
    def run(params: Any, x: Any, mask: Any) -> Any:
        by_flax = [apply(norm(implementation="xla"), params, x, counts) for counts in (mask, 0 * mask)]
        found, expected = (
            [slopes(way, layer, params, x, mask if padded else None) for layer, padded in cases]
            for way in (apply_by_device, apply)
        )
        return found, expected, by_flax

    found, expected, (by_flax, of_padding) = run(variables["params"], x, mask)
    assert_close(found, expected, 2e-5)
    assert_close(by_flax, expected[0][1], 2e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of_padding))


def chosen(layer: Any, *args: Any, **call: Any) -> list[str]:
    run = functools.partial(layer.init_with_output, KEY, **call)
    return Traced(lambda *args: run(*args)[0], *args).implementations["normalization"]


@pytest.mark.needs_cpu
def test_a_mask_is_left_to_flax():
    x, mask = inputs(), np.arange(6).reshape(6, 1, 1, 1) < 5
    own = norm(implementation=None)
    assert_close(*zip(*pairs([(own, norm(flax=True), x)], mask=mask), strict=True), 1e-6)
    assert chosen(own, x, mask=mask) == ["xla"]
    assert chosen(own, x) == ["native" if native.USED else "custom_vjp"]


OBSTACLES = [
    (norm(axis_name="devices"), (2, 3), "float32", "does not average over a named axis"),
    (norm(force_float32_reductions=False), (2, 3), "float32", "float32 or wider"),
    (norm(), (2, 3), "int32", "takes floats, not int32"),
    (norm(axis=1), (2, 3, 4), "float32", "channels last"),
    (norm(**NATIVE), (6, 4, 3), "bfloat16", "float32"),
    (norm(**NATIVE, dtype=jnp.bfloat16), (6, 4, 3), "float32", "float32"),
    (norm(**NATIVE), (6, 4, 3), "float32", "padding"),
]


@pytest.mark.needs_cpu
def test_what_an_implementation_does_not_support_is_left_to_another_or_refused():
    for layer, shape, dtype, words in OBSTACLES:
        name, x = layer.implementation, np.zeros(shape, dtype)
        if name == "native" and not native.USED:
            continue
        with use_batch_mask(np.arange(len(x)) < 5 if words == "padding" else None):
            with pytest.raises(ConfigError, match=f"cannot use '{name}' here: .*{words}.*leave implementation"):
                jax.eval_shape(layer.init, KEY, x)
            if layer.axis_name is None:
                assert chosen(layer.clone(implementation=None), x) == ["custom_vjp" if name == "native" else "xla"]
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        jax.eval_shape(norm(implementation="fast").init, KEY, np.zeros((2, 3)))
    assert chosen(norm(**NATIVE, use_running_average=True), inputs()) == ["xla"]  # which needs no sums
