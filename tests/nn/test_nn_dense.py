"""Dense layers: Flax's values and derivatives, with a kernel's gradient that no transpose touches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxnn import nn

DENSE = (((1,), (0,)), ((), ()))
GENERATOR = np.random.default_rng(0)
X, KERNEL = (jnp.asarray(GENERATOR.normal(size=size), jnp.float32) for size in ((6, 5), (5, 3)))


def loss(dot: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A sum that is not linear in the product."""
    return jnp.sum(jnp.sin(dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))))


def gradients(dot: Any) -> Any:
    return jax.grad(lambda *arrays: loss(dot, *arrays), argnums=(0, 1))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        np.testing.assert_allclose(*(np.asarray(each, np.float64) for each in (left, right)), atol=10 * tolerance)


@pytest.mark.parametrize("leading", [(6,), (), (2, 3), (4, 1, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_product_and_gradients_are_those_of_lax(leading: tuple[int, ...], dtype: str, tolerance: float) -> None:
    x, kernel = jnp.asarray(np.random.default_rng(1).normal(size=(*leading, 5)), dtype), KERNEL.astype(dtype)
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    assert_close(nn.dot_general(x, kernel, numbers), lax.dot_general(x, kernel, numbers), tolerance)
    assert_close(gradients(nn.dot_general)(x, kernel), gradients(lax.dot_general)(x, kernel), tolerance)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, -1)])
def test_members_of_vmap_are_those_of_lax(axes: tuple[int | None, int | None]) -> None:
    arrays = [a if axis is None else jnp.stack([a, -2 * a], axis) for a, axis in zip((X, KERNEL), axes, strict=True)]
    for function in (gradients, lambda dot: lambda *arrays: loss(dot, *arrays)):
        ours, theirs = (jax.vmap(function(dot), axes)(*arrays) for dot in (nn.dot_general, lax.dot_general))
        assert_close(ours, theirs)


def test_no_gradient_is_transposed() -> None:
    def transposes(dot: Any) -> int:
        return jax.jit(gradients(dot)).lower(X, KERNEL).as_text().count("stablehlo.transpose")

    assert transposes(nn.dot_general) == 0
    assert transposes(lax.dot_general) > 0, "JAX no longer transposes: this layer has no reason to be"


def test_devices_sum_a_gradient_as_it_lies() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    step = jax.jit(gradients(nn.dot_general), in_shardings=(rows, whole), out_shardings=(rows, whole))
    text = step.lower(X, KERNEL).compile().as_text()
    assert "all-reduce" in text and " transpose(%" not in text
    assert_close(step(X, KERNEL), gradients(lax.dot_general)(X, KERNEL))


@pytest.mark.parametrize(
    ("x", "numbers", "options"),
    [
        (X[:5], (((0,), (0,)), ((), ())), {}),
        (X, DENSE, {"precision": lax.Precision.HIGHEST}),
        (X, DENSE, {"preferred_element_type": jnp.bfloat16}),
        (X.astype(jnp.bfloat16), DENSE, {}),
    ],
)
def test_what_is_not_a_dense_layers_is_left_to_lax(x: jax.Array, numbers: Any, options: dict[str, Any]) -> None:
    def traced(dot: Any) -> str:
        return str(jax.make_jaxpr(lambda *arrays: dot(*arrays, numbers, **options))(x, KERNEL))

    assert traced(nn.dot_general) == traced(lax.dot_general)


@pytest.mark.parametrize("options", [{}, {"use_bias": False}, {"dtype": jnp.bfloat16}, {"precision": "highest"}])
def test_the_layer_is_flaxs(options: dict[str, Any]) -> None:
    ours, theirs = nn.Dense(4, **options), linen.Dense(4, **options)
    variables = theirs.init(jax.random.key(0), X)
    assert jax.tree.structure(ours.init(jax.random.key(0), X)) == jax.tree.structure(variables)
    assert_close(ours.apply(variables, X), theirs.apply(variables, X), 1e-6)
    assert ours == nn.Dense(4, **options) and nn.Dense(4, dot_general=lax.dot_general).dot_general is lax.dot_general
