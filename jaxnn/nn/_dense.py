"""Layers of single elements and rows: dense, embedding, dropout."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax
from jax.typing import ArrayLike

from jaxnn.nn._custom_vjp import custom_vjp
from jaxnn.nn._layer_arguments import at_least_int32, batch_axis, check_rate
from jaxnn.types import ConfigError

_BITS = 16  # of an element: four to a block of Threefry, two words of 32


def dot_general(
    inputs: jax.Array,
    kernel: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """``lax.dot_general``, to rounding: that of a dense layer with a gradient that is not transposed.

    Takes ``inputs [..., in_features]`` and ``kernel [in_features, out_features]``, gives ``[..., out_features]``,
    differentiable in either mode and to any order. Other dimension numbers than a dense layer's are left to
    ``lax.dot_general``, and so is all that has a precision or an element type of its own.
    """
    of_a_dense_layer = (((inputs.ndim - 1,), (0,)), ((), ()))
    plain = precision is None and preferred_element_type is None and inputs.dtype == kernel.dtype
    if kernel.ndim != 2 or not plain or dimension_numbers != of_a_dense_layer:
        return lax.dot_general(inputs, kernel, dimension_numbers, precision, preferred_element_type)
    return _dense(inputs, kernel)


class Dense(linen.Dense):
    """``flax.linen.Dense`` by `jaxnn.nn.dot_general`: the same parameters, names and results (to rounding).

    Over devices of a CPU that share a batch its step takes about half as long.
    """

    dot_general: Callable[..., Any] | None = dot_general


def _product(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))


def _product_backward(kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    # JAX's own gradient by the kernel is (cotangent.T @ inputs).T. If the batch is sharded, XLA:CPU sums over devices
    # before it transposes, and the optimizer reads the result across the grain: twice the step of a wide network.
    inputs, kernel = kept
    summed = tuple(range(inputs.ndim - 1))
    to_inputs = lax.dot_general(cotangent, kernel, (((inputs.ndim - 1,), (1,)), ((), ())))
    return to_inputs, lax.dot_general(inputs, cotangent, ((summed, summed), ((), ())))


_dense = custom_vjp(_product)
# The plain product: policies of `jax.checkpoint` that save products know JAX's own alone.
_dense.defvjp(lambda inputs, kernel: (_product(inputs, kernel), (inputs, kernel)), _product_backward)


class Embed(linen.Embed):
    """``flax.linen.Embed``, which refuses ids that are no integers, and takes narrow ones as they are meant.

    For large vocabularies ``optim.sparse_rows`` gives a gradient that never is an array of the table's size. Negative
    ids count from the end; ids beyond the table give NaN and no gradient (in a table of one row, that row). On a GPU
    the gradients of equal ids are summed in no fixed order, so two runs may differ in the last bits.
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The rows of ``inputs [...]``, integers: ``[..., features]``.

        Raises:
            ConfigError: ``inputs`` are no integers.
        """
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ConfigError(f"Embed needs integer ids, not {inputs.dtype}: cast them with astype('int32').")
        rows: jax.Array = super().__call__(at_least_int32(inputs))
        return rows


class Dropout(linen.Module):
    """Sets each element to zero with probability ``rate``, else scales it by ``1 / (1 - rate)``.

    Srivastava et al., Dropout, 2014. Unlike ``flax.linen.Dropout`` it takes ``train=`` when it is called, as
    jaxnn's models do, and does not branch on the rate; the masks differ from Flax's. A mask is a function of the key,
    the shape and the rate alone, and a higher rate drops what a lower one drops and more. Costs 16 random bits an
    element where ``jax.random`` spends 64, from the same generator.

    Attributes:
        rate: ``[]`` the probability of zero, 0…1; may be a tracer. It is rounded to a multiple of ``2**-16``, in the
            scale too, so that the mean stays. A plain 0 is the identity and needs no key.
        rng_collection: the name under which ``apply`` is given the key: ``rngs={"dropout": key}``.
        batch_axis: which axis of the inputs is the batch, of which each device may hold its rows alone.
    """

    rate: ArrayLike
    rng_collection: str = "dropout"
    batch_axis: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Drops elements of ``x``, floats of any shape; without ``train`` it is the identity and needs no key.

        Raises:
            ConfigError: a rate outside 0…1, integers, or no key under ``rng_collection``.
        """
        if not train or (isinstance(self.rate, numbers.Real) and self.rate == 0):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(f"dropout needs floats, for what it keeps is scaled, not {x.dtype}: cast the input.")
        if not (self.has_rng(self.rng_collection) or self.has_rng("params")):
            raise ConfigError(
                f"dropout with train=True needs a random key: pass rngs={{{self.rng_collection!r}: key}} to apply."
            )
        key = self.make_rng(self.rng_collection)
        threshold = jnp.round(jnp.asarray(self.rate, jnp.float32) * 2**_BITS)
        axis, batch = batch_axis(), self.batch_axis
        if axis is None or x.ndim <= batch:
            bits = _random_bits(key, x.shape)
        else:  # this device's rows of what is drawn for the whole batch
            rows = x.shape[batch]
            whole = (*x.shape[:batch], rows * lax.axis_size(axis), *x.shape[batch + 1 :])
            bits = lax.dynamic_slice_in_dim(_random_bits(key, whole), lax.axis_index(axis) * rows, rows, batch)
        keep = bits >= threshold.astype(jnp.uint32)
        kept = 1.0 - threshold.astype(jnp.promote_types(x.dtype, jnp.float32)) / 2**_BITS
        # At rate 1 nothing is kept: any finite scale will do, and gives no NaN in the gradient.
        scale = 1.0 / jnp.where(kept > 0.0, kept, 1.0)
        return jnp.where(keep, x * scale, 0.0).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform integers of 16 bits in ``uint32``: quarters of the last axis are the halves of a block's two words."""
    *leading, width = shape or (1,)
    blocks = (*leading, -(-width // 4))
    counter = jax.lax.iota(jnp.uint32, math.prod(blocks)).reshape(blocks)
    seed = jax.random.bits(key, (2,), jnp.uint32)
    # Without the barrier XLA computes the block again for each of its four elements.
    first, second = jax.lax.optimization_barrier(_threefry(seed, counter))
    halves = [half for word in (first, second) for half in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :width].reshape(shape)


def _threefry(seed: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 of ``(counter, 0)`` under ``seed [2]``: two ``uint32`` words shaped as ``counter``.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011: what ``jax.random`` draws from by default, but
    on CPU as a loop over the rounds with the array in memory; unrolled, all of them are one pass.
    """
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (seed[0], seed[1], seed[0] ^ seed[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter + keys[0], jnp.zeros_like(counter) + keys[1]
    for group in range(5):
        for distance in rotations[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
