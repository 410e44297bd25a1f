"""Dense, Embed, and ids of any integer dtype: the values and gradients of lax and Flax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxnn import models, nn, tasks
from jaxnn.types import Batch, ConfigError
from tests import draws

DENSE = (((1,), (0,)), ((), ()))
X, KERNEL = draws.normal(0, 6, 5), draws.normal(1, 5, 3)
DOTS = (nn.dot_general, lax.dot_general)


def loss(dot: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A sum that is not linear in the product."""
    return jnp.sum(jnp.sin(dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))))


def gradients(dot: Any) -> Any:
    return jax.value_and_grad(partial(loss, dot), argnums=(0, 1))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        np.testing.assert_allclose(*(np.asarray(each, np.float64) for each in (left, right)), atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.2)])
def test_products_and_gradients_equal_lax(dtype: str, tolerance: float) -> None:
    xs = [draws.normal(1, *leading, 5, dtype=dtype) for leading in [(6,), (), (2, 3), (4, 1, 2)]]
    run = jax.jit(lambda kernel: [[gradients(dot)(x, kernel) for x in xs] for dot in DOTS])
    assert_close(*run(KERNEL.astype(dtype)), tolerance)


def test_vmap_over_either_operand_equals_lax() -> None:
    def run(dot: Any) -> Any:
        results = []
        for axes in [(0, None), (None, 0), (0, 0), (1, -1)]:
            pairs = zip((X, KERNEL), axes, strict=True)
            arrays = [a if axis is None else jnp.stack([a, -2 * a], axis) for a, axis in pairs]
            results.append(jax.vmap(gradients(dot), axes)(*arrays))
        return results

    assert_close(*jax.jit(lambda: [run(dot) for dot in DOTS])())


def test_gradients_need_no_transpose() -> None:
    def transposes(dot: Any) -> int:
        return jax.jit(gradients(dot)).lower(X, KERNEL).as_text().count("stablehlo.transpose")

    assert transposes(nn.dot_general) == 0
    assert transposes(lax.dot_general) > 0, "JAX no longer transposes: this layer has no reason to be"


def test_gradients_are_summed_over_devices_without_a_transpose() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows, replicated = (jax.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    out = (replicated, (rows, replicated))
    step = jax.jit(gradients(nn.dot_general), in_shardings=(rows, replicated), out_shardings=out)
    text = step.lower(X, KERNEL).compile().as_text()
    assert "all-reduce" in text and " transpose(%" not in text
    assert_close(step(X, KERNEL), jax.jit(gradients(lax.dot_general))(X, KERNEL))


@pytest.mark.parametrize(
    ("x", "numbers", "options"),
    [
        (X[:5], (((0,), (0,)), ((), ())), {}),
        (X, DENSE, {"precision": lax.Precision.HIGHEST}),
        (X, DENSE, {"preferred_element_type": jnp.bfloat16}),
        (X.astype(jnp.bfloat16), DENSE, {}),
    ],
)
def test_other_products_are_left_to_lax(x: jax.Array, numbers: Any, options: dict[str, Any]) -> None:
    def traced(dot: Any) -> str:
        return str(jax.make_jaxpr(lambda *arrays: dot(*arrays, numbers, **options))(x, KERNEL))

    assert traced(nn.dot_general) == traced(lax.dot_general)


def test_dense_layer_equals_flax() -> None:
    cases = [{}, {"use_bias": False}, {"dtype": jnp.bfloat16}, {"precision": "highest"}]
    pairs = [(nn.Dense(4, **options), linen.Dense(4, **options)) for options in cases]
    for ours, theirs in pairs:
        shapes = [jax.eval_shape(layer.init, jax.random.key(0), X) for layer in (ours, theirs)]
        assert shapes[0] == shapes[1] and ours == ours.clone()
    variables = draws.variables(linen.Dense(4), X)
    rows = jax.jit(lambda: [[layer.apply(variables, X) for layer in pair] for pair in zip(*pairs, strict=True)])
    assert_close(*rows())
    assert nn.Dense(4, dot_general=lax.dot_general).dot_general is lax.dot_general


EMBEDDINGS = [{}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}]
IDS = [draws.integers(0, 7, 2, 3, 4), jnp.int32(3), jnp.array([-1, -8, 7, 2])]


@pytest.mark.parametrize("dtypes", EMBEDDINGS)
def test_embed_equals_flax(dtypes: dict[str, Any]) -> None:
    params = draws.variables(linen.Embed(7, 3, **dtypes), IDS[0])

    def run(layer: linen.Module) -> Any:
        def loss(params: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = layer.apply(params, ids)
            return jnp.sum(jnp.sin(rows.astype(jnp.float32)) * jnp.cos(jnp.arange(rows.size)).reshape(rows.shape)), rows

        return [jax.grad(loss, has_aux=True)(params, ids) for ids in IDS]

    ours, theirs = jax.jit(lambda: [run(layer(7, 3, **dtypes)) for layer in (nn.Embed, linen.Embed)])()
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(np.float64(found), np.float64(expected))
    assert jax.eval_shape(nn.Embed(7, 3, **dtypes).init, jax.random.key(0), IDS[0]) == jax.eval_shape(
        linen.Embed(7, 3, **dtypes).init, jax.random.key(0), IDS[0]
    )


def test_embed_attends_takes_a_table_of_one_row_and_refuses_floats() -> None:
    params, query = draws.variables(linen.Embed(7, 3), IDS[0]), np.ones((2, 3), np.float32)
    ours, theirs = (layer(7, 3).apply(params, query, method="attend") for layer in (nn.Embed, linen.Embed))
    np.testing.assert_array_equal(ours, theirs)
    row = {"params": {"embedding": np.ones((1, 3), np.float32)}}
    assert jax.eval_shape(nn.Embed(1, 3).apply, row, IDS[0]).shape == (2, 3, 4, 3)
    with pytest.raises(ConfigError, match="integer ids, not float32: cast"):
        nn.Embed(7, 3).init(jax.random.key(0), jnp.ones(2))


CLASSES = 300  # more than uint8 can represent
NARROW = np.array([[0, 5, 255], [44, 7, 0]])
WEIGHTS = draws.normal(0, 3, CLASSES)


def by_logits(smoothing: float) -> Callable[[jax.Array], jax.Array]:
    logits = jnp.broadcast_to(WEIGHTS, (2, 3, CLASSES))
    return lambda ids: jax.grad(lambda logits: nn.cross_entropy(logits, ids, smoothing).sum())(logits)


def by_kernel(ids: jax.Array) -> jax.Array:
    hidden = jnp.ones((2, 3, 3))
    return jax.grad(lambda kernel: nn.linear_cross_entropy(hidden, kernel, ids, chunk=64).sum())(WEIGHTS)


def by_table(num_rows: int) -> Callable[[jax.Array], jax.Array]:
    layer, table = nn.Embed(num_rows, 2), np.ones((num_rows, 2), np.float32)
    return lambda ids: jax.grad(lambda table: layer.apply({"params": {"embedding": table}}, ids).sum())(table)


def of_model(model: linen.Module) -> Callable[[jax.Array], jax.Array]:
    variables = draws.variables(model, NARROW)
    return lambda ids: model.apply(variables, ids)


def of_tokens(ids: jax.Array) -> list[jax.Array]:
    task = tasks.next_token((lambda key, x: {}, lambda params, x: jnp.broadcast_to(WEIGHTS, (2, 3, CLASSES))))
    return list(task.evaluate({}, {}, Batch(jnp.zeros((2, 3)), ids, jnp.ones(2))).values())


def test_uint8_ids_equal_int32_ids() -> None:
    classifier = models.RecurrentClassifier(2, vocabulary_size=CLASSES, features=4, embedding_features=3, pad_id=256)
    bag = models.FastText(2, vocabulary_size=CLASSES, pad_id=256)
    cases = [by_logits(0.0), by_logits(0.1), by_kernel, by_table(300), by_table(256), of_tokens]
    cases += [of_model(bag), of_model(classifier)]
    run = jax.jit(lambda ids: [case(ids) for case in cases])
    for found, expected in zip(*map(jax.tree.leaves, (run(NARROW.astype("uint8")), run(NARROW))), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found, expected)
