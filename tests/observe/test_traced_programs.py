"""Implementations, plain convolutions and dtypes of products are read from traced programs, wherever they are."""

from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest

from jaxnn.nn._layer_arguments import scope
from jaxnn.observe import implementations, operations, plain_convolutions, product_dtypes

X = jnp.ones((1, 4, 4, 2))
KERNEL = jax.ShapeDtypeStruct((3, 3, 2, 2), jnp.float32)


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def custom(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return convolve(x, kernel)


custom.defvjp(lambda x, kernel: (convolve(x, kernel), (x, kernel)), lambda saved, g: jax.vjp(convolve, *saved)[1](g))


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution as jaxnn's layers trace theirs."""
    with scope("convolution", "channels_last"):
        return custom(x, kernel)


def scanned_within(x: jax.Array, kernel: jax.Array) -> jax.Array:
    with scope("convolution", "channels_last"):
        return jax.lax.scan(lambda carry, _: (convolve(carry, kernel), None), x, length=3)[0]


HIDING_PLACES: dict[str, Callable[..., Any]] = {
    "plain": layer,
    "jit": jax.jit(layer),
    "remat": jax.checkpoint(layer),
    "scan": lambda x, kernel: jax.lax.scan(lambda carry, _: (layer(carry, kernel), None), x, length=3)[0],
    "scan within the scope": scanned_within,
    "vmap": lambda x, kernel: jax.vmap(layer, (None, 0))(x, jnp.stack([kernel, kernel])),
}


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(lambda kernel: function(X, kernel).sum()))


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_an_implementation_is_seen_in_a_training_step(place: str) -> None:
    step = gradient(HIDING_PLACES[place])
    assert implementations(step, KERNEL) == {"convolution": ["channels_last"]}
    assert plain_convolutions(step, KERNEL) == 0


def test_the_layers_that_have_implementations_and_observation_spell_them_alike() -> None:
    def step(x: jax.Array) -> jax.Array:
        for operation, name in (("attention", "cudnn"), ("recurrence", "fused_inputs"), ("attention", "math")):
            with scope(operation, name):
                x = x + 1
        for name in ("jaxnn", "jaxnn.attention", "mine.jaxnn_like.x", "myjaxnn.attention.mine"):
            with jax.named_scope(name):  # none of an implementation
                x = x + 1
        with scope("attention", "cudnn"), scope("normalization", "custom_vjp"):
            return x * 2

    assert implementations(step, X) == {
        "attention": ["cudnn", "math"],
        "recurrence": ["fused_inputs"],
        "normalization": ["custom_vjp"],
    }


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_plain_convolutions_are_counted_without_their_gradients(wrap: Callable[..., Any]) -> None:
    def two(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return wrap(convolve)(layer(wrap(convolve)(x, kernel), kernel), kernel)

    assert plain_convolutions(gradient(two), KERNEL) == 2


def test_a_convolution_of_flax_is_plain_until_it_is_given_another_or_the_choice_is_explicit() -> None:
    def step(module: linen.Module) -> Callable[..., Any]:
        variables = module.init(jax.random.key(0), X)
        return jax.grad(lambda x: module.apply(variables, x).sum())

    def explicit(*args: Any, **kwargs: Any) -> jax.Array:
        with scope("convolution", "xla"):
            return jax.lax.conv_general_dilated(*args, **kwargs)

    assert plain_convolutions(step(linen.Conv(2, (3, 3))), X) == 1
    assert plain_convolutions(step(linen.Conv(2, (3, 3), conv_general_dilated=explicit)), X) == 0
    assert plain_convolutions(step(linen.Dense(2)), X) == 0


def test_all_that_look_into_a_jitted_function_share_one_trace() -> None:
    traces = []

    @jax.jit
    def step(kernel: jax.Array) -> jax.Array:
        traces.append(kernel)
        return layer(X, kernel)

    assert implementations(step, KERNEL) and product_dtypes(step, KERNEL)
    assert plain_convolutions(step, KERNEL) == 0
    assert len(traces) == 1


MATRIX = jax.ShapeDtypeStruct((4, 4), jnp.float32)


@jax.custom_vjp
def product(x: jax.Array) -> jax.Array:
    return x @ x


product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x,
        jax.jit(lambda x: x @ x),
        lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0],
        lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ c, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x),
        jax.checkpoint(lambda x: x @ x),
        product,
        lambda x: jax.vmap(lambda row: row @ x)(x),
    ],
    ids=["plain", "jit", "scan", "while", "cond", "remat", "custom_vjp", "vmap"],
)
def test_a_product_is_found(function: Callable[..., Any]) -> None:
    assert product_dtypes(function, MATRIX) == {"float32": 1}


def test_products_are_counted_by_dtype_the_most_frequent_first() -> None:
    def mixed(x: jax.Array) -> jax.Array:
        low = x.astype(jnp.bfloat16)
        # lax takes operands of unequal dtypes as they are; jnp would promote them.
        unequal = jax.lax.dot_general(low, x, (((1,), (0,)), ((), ())))
        return low @ low @ low + unequal.astype(jnp.bfloat16)

    assert list(product_dtypes(mixed, MATRIX).items()) == [("bfloat16", 2), ("bfloat16*float32", 1)]
    assert product_dtypes(jax.grad(lambda x: product(x).sum()), MATRIX) == {"float32": 3}
    assert product_dtypes(lambda x: x + 1, MATRIX) == {}


def test_a_layer_shows_its_compute_dtype() -> None:
    layer = linen.Conv(2, (3, 3), dtype=jnp.bfloat16)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), images)
    assert product_dtypes(layer.apply, variables, images) == {"bfloat16": 1}


def test_operations_count_products_and_the_steps_of_loops() -> None:
    left, right = jax.ShapeDtypeStruct((4, 5), jnp.float32), jax.ShapeDtypeStruct((5, 6), jnp.float32)
    product = 2 * 4 * 5 * 6 + 4 * 6
    assert operations(jnp.matmul, left, right) == pytest.approx(product)

    def scanned(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (carry, left @ right), 0, length=7)[1]

    assert operations(scanned, left, right) >= 7 * product
    assert operations(lambda x: jax.lax.optimization_barrier((x, jax.lax.create_token(x)))[0], left) >= 4 * 5
    assert operations(lambda x: jax.lax.while_loop(jnp.any, jnp.sin, x), left) == float("inf")
