"""Layers of single elements and rows: dense, embedding, dropout.

JAX writes the gradient of ``inputs @ kernel`` by the kernel as ``(cotangent.T @ inputs).T``. Where the batch is split
over devices, XLA:CPU sums that product over them before it transposes it, and all that follows (an optimizer) reads
it across the grain: twice the step of a wide network. ``inputs.T @ cotangent`` needs no transpose.
"""

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
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from jaxnn.nn._custom_vjp import custom_vjp
from jaxnn.nn._device_axes import rows_of_whole, varying_alike
from jaxnn.nn._layer_arguments import check_rate, choose, scope, widened
from jaxnn.types import ConfigError

# Beyond this the one-hot matrix [ids, num_embeddings] costs more than it saves; reasoned, not measured.
_MOST_ONE_HOT = 512
_BITS = 16  # of an element: four to a block of Threefry, two words of 32
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


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
    result: jax.Array = _dense(*varying_alike(inputs, kernel))
    return result


class Dense(linen.Dense):
    """``flax.linen.Dense`` by `jaxnn.nn.dot_general`: the same parameters, names and results (to rounding).

    Over devices of a CPU that share a batch its step takes about half as long.
    """

    dot_general: Callable[..., Any] | None = dot_general


@jax.custom_jvp
def _dense(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    # Not the primitive below: policies of `jax.checkpoint` that save products know JAX's own alone.
    return _evaluate(inputs, kernel, missing="output")


def _with_tangent(primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    operands = [(tangents[0], primals[1]), (primals[0], tangents[1])]
    terms = [
        _product.bind(*pair, missing="output")
        for pair, tangent in zip(operands, tangents, strict=True)
        if not isinstance(tangent, SymbolicZero)
    ]
    return _evaluate(*primals, missing="output"), functools.reduce(jnp.add, terms)


_dense.defjvp(_with_tangent, symbolic_zeros=True)

# In ``sum(output * (inputs @ kernel))`` inputs, kernel and output are on an equal footing: the derivative of a product
# of two of them by either is again a product of two, and misses the third.
_ROLES = ("inputs", "kernel", "output")


def _evaluate(first: jax.Array, second: jax.Array, *, missing: str) -> jax.Array:
    if missing == "kernel":
        summed = tuple(range(first.ndim - 1))
        return lax.dot_general(first, second, ((summed, summed), ((), ())))
    if missing == "inputs":
        return lax.dot_general(second, first, (((second.ndim - 1,), (1,)), ((), ())))
    return lax.dot_general(first, second, (((first.ndim - 1,), (0,)), ((), ())))


def _abstract(first: Any, second: Any, *, missing: str) -> Any:
    shape = {
        "inputs": (*second.shape[:-1], first.shape[0]),
        "kernel": (first.shape[-1], second.shape[-1]),
        "output": (*first.shape[:-1], second.shape[-1]),
    }[missing]
    return first.update(shape=shape, weak_type=False)


def _transpose(wanted: int, cotangent: jax.Array, *operands: Any, missing: str) -> jax.Array:
    given = [role for role in _ROLES if role != missing]
    arrays = {given[1 - wanted]: operands[1 - wanted], missing: cotangent}
    first, second = (arrays[role] for role in _ROLES if role in arrays)
    result: jax.Array = _product.bind(first, second, missing=given[wanted])
    return result


def _batch(operands: Any, dims: Any, *, missing: str) -> tuple[jax.Array, int]:
    return jax.vmap(lambda *members: _evaluate(*members, missing=missing), dims)(*operands), 0


_product = Primitive("dense_product")
_product.def_impl(jax.jit(_evaluate, static_argnames="missing"))
_product.def_abstract_eval(_abstract)
ad.defbilinear(_product, *(lambda g, *xs, _wanted=wanted, **kw: _transpose(_wanted, g, *xs, **kw) for wanted in (0, 1)))
batching.primitive_batchers[_product] = _batch
mlir.register_lowering(_product, mlir.lower_fun(_evaluate, multiple_results=False))


class Embed(linen.Embed):
    """``flax.linen.Embed``: parameters, results and ``attend`` are its own.

    Rows are always gathered. What differs is the table's gradient:

    - ``"gather"``: a scatter-add of the rows' gradients, as Flax's. On a GPU its sums of repeated ids are in no fixed
      order, so two runs may differ in the last bits.
    - ``"one_hot"``: the one-hot matrix of the ids, transposed, times the rows' gradients: in a fixed order.

    For large vocabularies neither is needed: with ``optim.lazy`` the gradient never is an array of the table's size.

    Ids are as in Flax: negative ones count from the end, ones beyond the table give NaN and no gradient (in a table of
    one row, that row). The gradients of equal ids are summed.

    Attributes:
        implementation: ``"gather"`` or ``"one_hot"``; by default on a GPU one-hot up to 512 embeddings, else gather.
    """

    implementation: str | None = None

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The rows of ``inputs [...]``, integers: ``[..., features]``.

        Raises:
            ConfigError: ``inputs`` are no integers, or an implementation that is unknown or does not suit.
        """
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ConfigError(f"Embed needs integer ids, not {inputs.dtype}: cast them with astype('int32').")
        inputs = widened(inputs)
        obstacle = self._one_hot_obstacle(inputs)
        name = choose("embedding", self.implementation, {"one_hot": obstacle})
        with scope("embedding", name):
            if name == "gather":
                rows: jax.Array = super().__call__(inputs)
                return rows
            (table,) = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
            return _rows(*varying_alike(table, inputs), self.num_embeddings)

    def _one_hot_obstacle(self, inputs: jax.Array) -> str | None:
        if self.num_embeddings == 1 or not jnp.issubdtype(self.param_dtype, jnp.floating):
            return "the table has one row or is not of floats"
        if jax.typeof(inputs).sharding.mesh.explicit_axes:
            return "the mesh has explicit axes"
        if self.implementation is None and self.num_embeddings > _MOST_ONE_HOT:
            return "the vocabulary is large"
        return None


@functools.partial(custom_vjp, nondiff_argnums=(2,))
def _rows(table: jax.Array, ids: jax.Array, num_rows: int) -> jax.Array:
    return jnp.take(table, ids, axis=0)


def _rows_forward(table: jax.Array, ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    return _rows(table, ids, num_rows), ids


def _rows_backward(num_rows: int, ids: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    ids, rows = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
    ids = jnp.where(ids < 0, ids + num_rows, ids)
    # Ids beyond the table gave NaN, and may get it back: in a product it would reach every row.
    rows = jnp.where(((ids >= 0) & (ids < num_rows))[:, None], rows, 0)
    chosen = jax.nn.one_hot(ids, num_rows, dtype=rows.dtype, axis=0)
    # As exact as the sums it stands for: by default a GPU would round the gradients to 10 bits, and bfloat16's sums.
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.matmul(chosen, rows, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
    return total.astype(rows.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


class Dropout(linen.Module):
    """Sets each element to zero with probability ``rate``, else scales it by ``1 / (1 - rate)``.

    Srivastava et al., Dropout, 2014. Unlike ``flax.linen.Dropout`` it is told ``train=`` where it is called, as
    jaxnn's models are, and does not branch on the rate; the masks differ from Flax's. A mask is a function of the key,
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
        """Drops elements of ``x`` of any shape; shape and dtype are kept.

        Args:
            x: floats of any shape.
            train: False is the identity and needs no key.

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
        return _drop(x, self.rate, self.make_rng(self.rng_collection), self.batch_axis)


def _drop(x: jax.Array, rate: ArrayLike, key: jax.Array, batch_axis: int) -> jax.Array:
    threshold = jnp.round(jnp.asarray(rate, jnp.float32) * 2**_BITS)
    bits = rows_of_whole(lambda shape: _random_bits(key, shape), x.shape, batch_axis)
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
    # Without the barrier XLA computes the whole block anew for each of its four elements.
    first, second = jax.lax.optimization_barrier(_threefry(seed, counter))
    halves = [half for word in (first, second) for half in (word & 0xFFFF, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :width].reshape(shape)


def _threefry(seed: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 of ``(counter, 0)`` under ``seed [2]``: two ``uint32`` words shaped as ``counter``.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011: what ``jax.random`` draws from by default, but
    on CPU as a loop over the rounds with the array in memory; unrolled, all of them are one pass.
    """
    keys = (seed[0], seed[1], seed[0] ^ seed[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter + keys[0], jnp.zeros_like(counter) + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
