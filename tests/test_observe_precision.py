"""The dtypes of products are found wherever they hide."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxnn.observe import product_dtypes

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


@jax.custom_vjp
def product(x: jax.Array) -> jax.Array:
    return x @ x


product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))

HIDING_PLACES = {
    "plain": lambda x: x @ x,
    "jit": jax.jit(lambda x: x @ x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ c, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x),
    "remat": jax.checkpoint(lambda x: x @ x),
    "custom_vjp": product,
    "vmap": lambda x: jax.vmap(lambda row: row @ x)(x),
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_product_is_found(place: str) -> None:
    assert product_dtypes(HIDING_PLACES[place], X) == {"float32": 1}


def test_a_gradient_has_both_products_of_the_backward_pass() -> None:
    assert product_dtypes(jax.grad(lambda x: product(x).sum()), X) == {"float32": 3}


def test_mixed_precision_is_told_apart_commonest_first() -> None:
    def mixed(x: jax.Array) -> jax.Array:
        low = x.astype(jnp.bfloat16)
        # lax takes operands of unequal dtypes as they are; jnp would promote them.
        unequal = jax.lax.dot_general(low, x, (((1,), (0,)), ((), ())))
        return low @ low @ low + unequal.astype(jnp.bfloat16)

    counts = product_dtypes(mixed, X)
    assert list(counts.items()) == [("bfloat16", 2), ("bfloat16*float32", 1)]


def test_a_convolution_counts_and_a_layer_shows_its_compute_dtype() -> None:
    layer = nn.Conv(2, (3, 3), dtype=jnp.bfloat16)
    images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), images)
    assert product_dtypes(layer.apply, variables, images) == {"bfloat16": 1}


def test_no_product_no_entry() -> None:
    assert product_dtypes(lambda x: x + 1, X) == {}
