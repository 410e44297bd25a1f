"""Dense, Embed, and ids of any integer dtype: the values and gradients of lax and Flax."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax

from jaxnn import kernels, models, nn, tasks
from jaxnn._batch_context import BatchSharding, use_batch_sharding
from jaxnn._compat import TARGET
from jaxnn.observe import Traced
from jaxnn.types import Batch, ConfigError
from tests import draws, native
from tests.draws import assert_close, assert_near, graded, weights

KEY = jax.random.key(0)
DENSE = (((1,), (0,)), ((), ()))
X, KERNEL = draws.normal(0, 6, 5), draws.normal(1, 5, 3)
DOTS = (nn.dot_general, lax.dot_general)


def gradients(dot: Any) -> Any:
    """``(x, kernel) -> (squares, gradients)``, which under vmap depend on the member in each product."""
    return graded(lambda x, kernel: dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))) ** 2)


def test_products_and_gradients_equal_lax_also_under_vmap():
    xs = [draws.normal(1, *leading, 5) for leading in [(), (2, 3), (4, 1, 2)]]
    narrow = X.astype(jnp.bfloat16), KERNEL.astype(jnp.bfloat16)
    assert_close(*jax.jit(lambda *narrow: [gradients(dot)(*narrow) for dot in DOTS])(*narrow), 0.2)

    def run(dot: Any, xs: Any) -> Any:
        results = [gradients(dot)(x, KERNEL) for x in xs]
        for axes in [(0, None), (None, 0), (0, 0), (1, -1)]:
            pairs = zip((X, KERNEL), axes, strict=True)
            arrays = [a if axis is None else jnp.stack([a, -2 * a], axis) for a, axis in pairs]
            results.append(jax.vmap(gradients(dot), axes)(*arrays))
        return results

    assert_close(*jax.jit(lambda xs: [run(dot, xs) for dot in DOTS])(xs))


def test_gradients_need_no_transpose():
    def transposes(dot: Any) -> int:
        return jax.jit(gradients(dot)).lower(X, KERNEL).as_text().count("stablehlo.transpose")

    assert transposes(nn.dot_general) == 0
    assert transposes(lax.dot_general) > 0, "JAX no longer transposes: this layer has no reason to be"


def test_other_products_are_left_to_lax():
    def traced(dot: Any, x: jax.Array, numbers: Any, options: Any) -> str:
        return str(jax.make_jaxpr(lambda *arrays: dot(*arrays, numbers, **options))(x, KERNEL))

    cases = [(X[:5], (((0,), (0,)), ((), ())), {}), (X.astype(jnp.bfloat16), DENSE, {})]
    cases += [(X, DENSE, {"precision": lax.Precision.HIGHEST}), (X, DENSE, {"preferred_element_type": jnp.bfloat16})]
    for case in cases:
        assert traced(nn.dot_general, *case) == traced(lax.dot_general, *case)


# Sizes of [batch, in_features] and [in_features, out_features]: cut into blocks of rows or of columns, equal or not.
SIZES = [(70, 160, 128), (90, 65, 300), (129, 300, 97), (400, 2, 1), (1, 5, 3), (0, 5, 3)]


native_product = partial(nn.dot_general, implementation="native")
native_gradients = gradients(native_product)


def assert_exact(found: Any, x: Any, kernel: Any) -> None:
    """The squares of the product and their gradients, by NumPy in float64."""
    x, kernel = np.float64(x), np.float64(kernel)
    slope = 2 * (x @ kernel) * weights(found[0])
    assert_near(found, jax.tree.map(np.float32, ((x @ kernel) ** 2, (slope @ kernel.T, x.T @ slope))))


@native.needed
def test_native_gradients_are_exact_in_every_size():
    pairs = [(draws.normal(0, *size[:2]), draws.normal(1, *size[1:])) for size in SIZES]

    @jax.jit
    def run(pairs: Any) -> Any:
        x, kernel = pairs[0]
        return [native_gradients(*pair) for pair in pairs], native_gradients(x.reshape(7, 5, 2, -1), kernel)

    each, (value, (to_x, to_kernel)) = run(pairs)
    batched = value.reshape(70, -1), (to_x.reshape(70, 160), to_kernel)
    for found, pair in zip([*each, batched], [*pairs, pairs[0]], strict=True):
        assert_exact(found, *pair)
    x, kernel = pairs[0]
    flops = 2 * 3 * 3 * 70 * 160 * 128.0  # of three members: the layer and its gradients
    members = Traced(jax.vmap(native_gradients, (0, None)), np.stack([x] * 3), kernel)
    assert members.product_flops() == {"float32": flops}


@native.needed
def test_native_products_of_bfloat16_are_summed_in_float32_and_run_where_jit_is_disabled():
    x, kernel = draws.normal(0, 1, 5), draws.normal(1, 5, 3)
    with jax.disable_jit():
        assert_exact(native_gradients(x, kernel), x, kernel)
    if not importlib.import_module("jaxnn_native").has_bfloat16():
        pytest.skip("this CPU has no instructions for bfloat16")
    x, kernel = draws.normal(0, 70, 160, dtype=jnp.bfloat16), draws.normal(1, 160, 128, dtype=jnp.bfloat16)
    product = partial(native_product, dimension_numbers=DENSE)
    found = jax.jit(lambda x, kernel: jax.vjp(product, x, kernel)[1](x[:, :128])[1])(x, kernel)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(found), np.float32(x).T @ np.float32(x[:, :128]), rtol=2**-8, atol=1e-5)


@native.needed
def test_small_products_and_other_dtypes_are_left_to_xla():
    def chosen(*shape: int, dtype: str = "float32") -> list[str]:
        arrays = np.ones((128, shape[0]), dtype), np.ones(shape, dtype)
        return Traced(lambda *a: nn.dot_general(*a, DENSE), *arrays).implementations.get("dense", ["xla"])

    assert chosen(65, 64) == ["native"]
    assert chosen(64, 64) == chosen(65, 64, dtype="float16") == ["xla"]
    rows = BatchSharding(80, lambda rows: rows, lambda function, *_: function)
    with use_batch_sharding(rows), pytest.raises(ConfigError, match="whose axis is not the first"):
        native_product(np.ones((1, 80, 5), np.float32), KERNEL, (((2,), (0,)), ((), ())))
    with pytest.raises(ConfigError, match="there is one row"):
        native_product(X[0], KERNEL, (((0,), (0,)), ((), ())))


def test_dense_layer_equals_flax():
    cases = [{}, {"use_bias": False}, {"dtype": jnp.bfloat16}, {"precision": "highest"}]
    pairs = [(nn.Dense(4, **options), linen.Dense(4, **options)) for options in cases]
    for ours, theirs in pairs:
        shapes = [jax.eval_shape(layer.init, KEY, X) for layer in (ours, theirs)]
        assert shapes[0] == shapes[1] and ours == ours.clone()
    variables = draws.variables(linen.Dense(4), X)
    rows = jax.jit(lambda: [[layer.apply(variables, X) for layer in pair] for pair in zip(*pairs, strict=True)])
    for options, ours, theirs in zip(cases, *rows(), strict=True):
        # In bfloat16 the bias is added before rounding, and not after it.
        assert_close(ours, theirs, 2.0**-7 if "dtype" in options else 1e-5)
    assert nn.Dense(4, dot_general=lax.dot_general).dot_general is lax.dot_general


EMBEDDINGS = [{}, {"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}]
IDS = [draws.integers(0, 7, 2, 3, 4), jnp.int32(3), jnp.array([-1, -8, 7, 2])]


def test_embed_equals_flax():
    cases = [(options, draws.variables(linen.Embed(7, 3, **options), IDS[0])) for options in EMBEDDINGS]

    def run(kind: Any, given: Any) -> Any:
        layers = [(kind(7, 3, **options), params) for options, params in zip(EMBEDDINGS, given, strict=True)]
        return [[graded(lambda p, f=f, ids=ids: f.apply(p, ids))(params) for ids in IDS] for f, params in layers]

    both = jax.jit(lambda given: [run(kind, given) for kind in (nn.Embed, linen.Embed)])
    for options, ours, theirs in zip(EMBEDDINGS, *both([params for _, params in cases]), strict=True):
        for (rows, gradient), (their_rows, their_gradient) in zip(ours, theirs, strict=True):
            assert_close(rows, their_rows, 0.0)
            assert_close(gradient, their_gradient, 2.0**-6 if options else 0.0)  # which Flax sums in bfloat16
    for options, _ in cases:
        ours, theirs = (layer(7, 3, **options) for layer in (nn.Embed, linen.Embed))
        assert jax.eval_shape(ours.init, KEY, IDS[0]) == jax.eval_shape(theirs.init, KEY, IDS[0])


def test_embed_takes_negative_ids_of_few_bits_and_a_table_of_one_row():
    negative, table = np.array([-1, 5], np.int8), np.arange(600.0, dtype=np.float32).reshape(300, 2)
    rows = jax.jit(nn.Embed(300, 2).apply)({"params": {"embedding": table}}, negative)
    np.testing.assert_array_equal(rows, table[negative])  # -1 + 300 is no int8
    row = {"params": {"embedding": np.ones((1, 3), np.float32)}}
    assert jax.eval_shape(nn.Embed(1, 3).apply, row, IDS[0]).shape == (2, 3, 4, 3)


def test_a_mean_of_rows_equals_that_of_a_lookup():
    table, ids = draws.normal(0, 2, 7, 3), np.array(IDS[0])
    ids[0, 0, 0] = -2
    counts = np.array([[True, False, True, False], [False] * 4, [True] * 4])

    def by_call(table: jax.Array, where: jax.Array | None) -> jax.Array:
        rows = nn.Embed(7, 3).apply({"params": {"embedding": table}}, ids)
        some = jnp.ones(ids.shape, bool) if where is None else jnp.broadcast_to(where, ids.shape)
        total = jnp.sum(jnp.where(some[..., None], rows, 0), axis=2)
        return total / jnp.maximum(jnp.sum(some, axis=2), 1)[..., None]

    def by_mean(table: jax.Array, where: jax.Array | None) -> jax.Array:
        given = None if where is None else jnp.broadcast_to(where, ids.shape)
        means: jax.Array = nn.Embed(7, 3).apply({"params": {"embedding": table}}, ids, given, method="mean")
        return means

    def run(mean: Any, table: jax.Array) -> Any:
        def derivatives(table: jax.Array, where: jax.Array | None) -> Any:
            def loss(table: jax.Array) -> jax.Array:
                return jnp.sum(jnp.sin(mean(table, where)))

            gradient = jax.grad(loss)
            twice = jax.grad(lambda table: jnp.vdot(gradient(table), jnp.cos(table)))
            return mean(table, where), gradient(table), jax.jvp(gradient, (table,), (table,)), twice(table)

        # Members of a population share their ids or not.
        members = jax.vmap(derivatives, (0, None))(table, counts), jax.vmap(derivatives)(table, np.stack([counts] * 2))
        return derivatives(table[0], None), members

    assert_close(*jax.jit(lambda table: [run(mean, table) for mean in (by_mean, by_call)])(table))
    beyond = nn.Embed(7, 3).apply(
        {"params": {"embedding": np.asarray(table)[0]}}, np.array([[0, 7], [1, 2]]), method="mean"
    )
    assert np.isnan(beyond).all(axis=1).tolist() == [True, False]


@native.needed
def test_native_gradients_of_tables_have_the_bits_of_xla():
    # Enough for several threads; some ids are beyond the table, and some count from its end.
    ids = np.asarray(draws.integers(0, 1100, 64, 30)) - 50
    table, weights = draws.normal(1, 1000, 50), draws.normal(2, 64, 50)
    layer = nn.Embed(1000, 50)

    def loss(method: str, table: jax.Array) -> jax.Array:
        rows = layer.apply({"params": {"embedding": table}}, ids, method=method)
        return jnp.nansum((rows if method == "mean" else rows.sum(axis=1)) * weights)

    def gradients(table: jax.Array) -> Any:
        return [jax.grad(partial(loss, method))(table) for method in ("__call__", "mean")]

    def gradients_by_xla(table: jax.Array) -> Any:
        with kernels.portable():
            return gradients(table)

    assert Traced(gradients, table).implementations["lookup"] == ["native"]
    assert Traced(gradients_by_xla, table).implementations["lookup"] == ["xla"]
    with use_batch_sharding(BatchSharding(64, lambda x: x, lambda f, *_: f)):
        assert Traced(lambda table: gradients(table), table).implementations["lookup"] == ["xla"]
    (found, found_mean), (expected, mean) = jax.jit(lambda table: (gradients(table), gradients_by_xla(table)))(table)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found_mean, mean, 1e-5, 1e-5)  # of a mean, the addends are rounded too


CLASSES = 300  # more than uint8 can represent
NARROW = np.array([[0, 5, 255], [44, 7, 0]])
WEIGHTS = draws.normal(0, 3, CLASSES)


def of_labels(ids: jax.Array) -> list[jax.Array]:
    logits = jnp.broadcast_to(WEIGHTS[0], (2, 3, CLASSES))
    task = tasks.next_token((lambda key, x: {}, lambda params, x: logits))
    metrics = task.evaluate({}, {}, Batch(jnp.zeros((2, 3)), ids, jnp.ones(2)), jax.random.key(0))
    slopes = [jax.grad(lambda x, s=s: nn.cross_entropy(x, ids, s).sum())(logits) for s in (0.0, 0.1)]
    return [*slopes, *metrics.values()]


def of_model(model: linen.Module) -> Callable[[jax.Array], jax.Array]:
    variables = draws.variables(model, NARROW)
    return lambda ids: model.apply(variables, ids)


def test_uint8_ids_equal_int32_ids():
    classifier = models.RecurrentClassifier(2, vocabulary_size=CLASSES, features=4, embedding_features=3, pad_id=256)
    bag = models.FastText(2, vocabulary_size=CLASSES, pad_id=256)
    models_of_ids = nn.Embed(300, 2), nn.Embed(256, 2), bag, classifier
    cases = [of_labels, *map(of_model, models_of_ids)]
    run = jax.jit(lambda ids: [case(ids) for case in cases])
    for found, expected in zip(*map(jax.tree.leaves, (run(NARROW.astype("uint8")), run(NARROW))), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found, expected)


class Gpu:
    """A device to trace for, on which layers are as on a GPU."""

    platform, compute_capability = "gpu", "9.0"


class Heads(linen.Module):
    """Logits of 1,027 classes: of a dense layer, with and without a bias, and of an embedding's rows."""

    dtype: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> Any:
        layers = nn.Dense(1027, dtype=self.dtype), nn.Dense(1027, use_bias=False, dtype=self.dtype)
        return [*(layer(x) for layer in layers), nn.Embed(1027, 5, dtype=self.dtype).attend(x)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padded_classes_change_no_shape_and_no_value(dtype):
    heads = Heads(dtype)

    def run() -> Any:
        params = heads.init(KEY, X[:5])
        total = lambda params, x: sum(jnp.sin(out.astype(float)).sum() for out in heads.apply(params, x))  # noqa: E731
        return params, heads.apply(params, X[:5]), jax.grad(total, argnums=(0, 1))(params, X[:5])

    # Functions of their own: what was traced for one device is not taken for the other.
    plain, text = jax.jit(lambda: run())(), str(jax.make_jaxpr(lambda: run())())
    with TARGET(Gpu()):
        padded, padded_text = jax.jit(lambda: run())(), str(jax.make_jaxpr(lambda: run())())
    assert "1152" in padded_text and "1152" not in text
    assert_close(plain, padded, 1e-5 if dtype == "float32" else 0.02)
