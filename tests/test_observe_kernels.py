"""Implementations are read off the traced program, through every transformation; so are convolutions without one."""

from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest

from jaxnn.nn import scope
from jaxnn.observe import implementations, plain_convolutions, product_dtypes

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
    with scope("convolution", "canonical"):
        return custom(x, kernel)


def scanned(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (layer(carry, kernel), None), x, length=3)[0]


def scanned_within(x: jax.Array, kernel: jax.Array) -> jax.Array:
    with scope("convolution", "canonical"):
        return jax.lax.scan(lambda carry, _: (convolve(carry, kernel), None), x, length=3)[0]


def mapped(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.vmap(layer, (None, 0))(x, jnp.stack([kernel, kernel]))


HIDING_PLACES: dict[str, Callable[..., Any]] = {
    "plain": layer,
    "jit": jax.jit(layer),
    "remat": jax.checkpoint(layer),
    "scan": scanned,
    "scan within the scope": scanned_within,
    "vmap": mapped,
}


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(lambda kernel: function(X, kernel).sum()))


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_an_implementation_is_seen_in_a_training_step(place: str) -> None:
    step = gradient(HIDING_PLACES[place])
    assert implementations(step, KERNEL) == {"convolution": ["canonical"]}
    assert plain_convolutions(step, KERNEL) == 0


def test_the_layers_that_have_implementations_and_observation_spell_them_alike() -> None:
    def step(x: jax.Array) -> jax.Array:
        for operation, name in (("attention", "cudnn"), ("recurrence", "hoisted"), ("attention", "whole")):
            with scope(operation, name):
                x = x + 1
        with scope("attention", "cudnn"), scope("normalization", "analytic"):
            return x * 2

    assert implementations(step, X) == {
        "attention": ["cudnn", "whole"],
        "recurrence": ["hoisted"],
        "normalization": ["analytic"],
    }


def test_other_scopes_are_not_implementations() -> None:
    def step(x: jax.Array) -> jax.Array:
        for name in ("jaxnn", "jaxnn.attention", "mine.jaxnn_like.x", "myjaxnn.attention.mine"):
            with jax.named_scope(name):
                x = x + 1
        return x

    assert implementations(step, X) == {}


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
