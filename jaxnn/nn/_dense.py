"""Dense, embedding and dropout layers."""

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

from jaxnn._batch_context import batch_axis, batch_sharding, map_rows
from jaxnn._fields import check_rate
from jaxnn.nn._choice import choose, padded_classes, scope
from jaxnn.nn._custom_vjp import custom_vjp, native_or_xla
from jaxnn.nn._layer_arguments import at_least_int32, narrowed, with_wide_bias
from jaxnn.nn._onednn import native_call, native_obstacle, product, product_obstacle
from jaxnn.types import ConfigError, is_half

_NONE = -(2**31)  # an id that counts for nothing, in the native kernels
_BITS = 16  # per element; a Threefry block, two words of 32 bits, serves four elements
_MIN_DRAWN = 2**12  # elements: fewer are drawn by XLA as fast


def dot_general(
    inputs: jax.Array,
    kernel: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """``lax.dot_general`` of a dense layer, whose kernel gradient needs no transpose; equal to rounding.

    Takes ``inputs [..., in_features]`` and ``kernel [in_features, out_features]``, returns ``[..., out_features]``;
    differentiable in either mode and to any order. Other dimension numbers, and calls with a precision or an element
    type, are passed on to ``lax.dot_general``. ``implementation`` is ``"xla"``, ``"onednn"`` on a CPU with the package
    of ``make onednn``, or None for the faster. In a jaxpr the latter is a ``dense_product``, which `jax.checkpoint`
    policies that save products do not know: it is recomputed, unless its result has a saved name.

    >>> linen.Dense(4, dot_general=jn.nn.dot_general).init_with_output(jax.random.key(0), jnp.ones((2, 3)))[0].shape
    (2, 4)
    """
    of_a_dense_layer = (((inputs.ndim - 1,), (0,)), ((), ()))
    plain = precision is None and preferred_element_type is None and inputs.dtype == kernel.dtype
    if kernel.ndim != 2 or not plain or dimension_numbers != of_a_dense_layer:
        return lax.dot_general(inputs, kernel, dimension_numbers, precision, preferred_element_type)
    obstacle = product_obstacle(inputs, kernel, requested=implementation is not None)
    if choose("dense", implementation, {"onednn": obstacle}) == "xla":
        return _dense(False, inputs, kernel)

    run = map_rows(functools.partial(_dense, True), inputs.shape[0], (0, None), 0)
    with scope("dense", "onednn"):
        return run(inputs, kernel)  # type: ignore[no-any-return]


def _promoted(inputs: Any, kernel: Any, bias: Any, **options: Any) -> list[Any]:
    """Inputs, kernel and bias as `with_wide_bias` gives them, with columns of zeros up to `padded_classes`.

    With the bias, so that XLA pads logits' gradients where it sums them; padded for the product alone it copies them.
    """
    inputs, kernel, bias = with_wide_bias(inputs, kernel, bias, **options)
    if padding := padded_classes(kernel.shape[1]) - kernel.shape[1]:
        kernel = jnp.pad(kernel, ((0, 0), (0, padding)))
        bias = None if bias is None else jnp.pad(bias, (0, padding))
    return [inputs, kernel, bias]


class Dense(linen.Dense):
    """``flax.linen.Dense`` with `jaxnn.nn.dot_general`: the same parameters, names and results (to rounding).

    Over CPU devices that share a batch, a training step takes about half as long. On a GPU 1,024 features or more that
    are no multiple of 8, as the classes of a vocabulary, are computed with zeros up to a multiple of 128.

    >>> jn.models.num_parameters(jn.nn.Dense(10), jax.ShapeDtypeStruct((32, 784), "float32"))
    7850
    """

    dot_general: Callable[..., Any] | None = dot_general
    promote_dtype: Callable[..., Any] = _promoted

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``[..., in_features]`` to ``[..., features]``; the bias is added, and its gradient summed, in float32."""
        outputs = narrowed(linen.Dense.__call__, self, inputs)
        return outputs[..., : self.features] if outputs.shape[-1] > self.features else outputs


def _rows(array: jax.Array) -> jax.Array:
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def _product(native: bool, inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    if native:
        return product(_rows(inputs), kernel).reshape(*inputs.shape[:-1], kernel.shape[1])
    return lax.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())))


def _product_backward(
    native: bool, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # JAX's own kernel gradient is (cotangent.T @ inputs).T. If the batch is sharded, XLA:CPU sums over devices before
    # it transposes, and the optimizer reads the result with strides: a wide network's step takes twice as long.
    inputs, kernel = saved
    if native:
        rows, of_rows = _rows(inputs), _rows(cotangent)
        return product(of_rows, kernel, "right").reshape(inputs.shape), product(rows, of_rows, "left")
    summed = tuple(range(inputs.ndim - 1))
    to_inputs = lax.dot_general(cotangent, kernel, (((inputs.ndim - 1,), (1,)), ((), ())))
    return to_inputs, lax.dot_general(inputs, cotangent, ((summed, summed), ((), ())))


_dense = custom_vjp(_product, num_static=1)
# By XLA the forward rule is a plain product: `jax.checkpoint` policies that save products know only JAX's own.
_dense.defvjp(lambda native, *arrays: (_product(native, *arrays), arrays), _product_backward)


class Embed(linen.Embed):
    """``flax.linen.Embed`` that rejects non-integer ids and widens narrow ones, such as ``uint8``.

    For large vocabularies ``optim.sparse_rows`` avoids gradients of the table's size. Negative ids count from the end;
    ids beyond the table give NaN and no gradient (a table of one row gives that row). On a GPU the gradients of equal
    ids are summed in no fixed order, so two runs may differ in the last bits.

    >>> jn.models.num_parameters(jn.nn.Embed(20_000, 128), jax.ShapeDtypeStruct((32, 80), "int32"))
    2560000
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the rows ``[..., features]`` of the integers ``inputs [...]``; ConfigError for other dtypes."""
        return self._look_up(inputs, summed=False)

    def attend(self, query: jax.Array) -> jax.Array:
        """Returns the products ``[..., num_embeddings]`` of ``query [..., features]`` with each row, as logits."""
        promoted: Any = self.promote_dtype(query, self.embedding, dtype=self.dtype)
        query, table = promoted
        rows = self.num_embeddings
        if padding := padded_classes(rows) - rows:
            return jnp.dot(query, jnp.pad(table, ((0, padding), (0, 0))).T)[..., :rows]
        return jnp.dot(query, table.T)

    def mean(self, inputs: jax.Array, where: jax.Array | None = None) -> jax.Array:
        """Returns the means ``[..., features]`` of the rows of ids ``inputs [..., n]``; on a CPU without these rows.

        ``where [..., n]`` is True for those that count; the mean of none is 0.

        >>> params = {"params": {"embedding": jnp.array([[0.0, 1.0], [2.0, 3.0]])}}
        >>> jn.nn.Embed(2, 2).apply(params, jnp.array([[0, 1, 1, 1]]), method="mean")
        Array([[1.5, 2.5]], dtype=float32)
        """
        total = self._look_up(inputs, where, summed=True)
        count = jnp.sum(jnp.ones_like(inputs, bool) if where is None else where, axis=-1, keepdims=True)
        return (total / jnp.maximum(count, 1).astype(total.dtype)).astype(self.dtype or self.embedding.dtype)

    def _look_up(self, ids: jax.Array, where: jax.Array | None = None, *, summed: bool) -> jax.Array:
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ConfigError(f"Embed needs integer ids, not {ids.dtype}: cast them with astype('int32').")
        table: Any = self.promote_dtype(self.embedding, dtype=self.dtype, inexact=False)[0]
        # As Flax does, all ids are of the only row.
        ids = jnp.zeros_like(ids, jnp.int32) if self.num_embeddings == 1 else at_least_int32(ids)
        obstacle = native_obstacle("jaxnn_lookup_sums")
        if (str(table.dtype), str(ids.dtype)) != ("float32", "int32"):
            obstacle = "the table is not float32, or the ids are not int32"
        elif batch_sharding(0) is not None:
            obstacle = "devices share the batch"
        elif not all(isinstance(size, int) and size for size in ids.shape):
            obstacle = "a size is symbolic or 0"
        name = choose("lookup", None, {"native": obstacle})
        with scope("lookup", name):
            return (_native_look_up if name == "native" else _look_up)(summed, table, ids, where)


@jax.custom_jvp
def _row_sums(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The sums ``[groups, features]`` of the rows of ``ids [groups, n]``, of which `_NONE` has none."""
    return native_call("jaxnn_lookup_sums", [(len(ids), table.shape[1])], table, ids)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _table_gradient(num_rows: int, ids: jax.Array, sums: jax.Array) -> jax.Array:
    """The gradient ``[num_rows, features]`` of the table of `_row_sums`."""
    return native_call("jaxnn_lookup_gradient", [(num_rows, sums.shape[1])], ids, sums)[0]


def _row_sums_by_xla(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(jnp.take(table, ids, axis=0, mode="fill", fill_value=0), axis=1)


# Both are linear: a derivative of a higher order is XLA's.
@_row_sums.defjvp
def _row_sums_jvp(primals: Any, tangents: Any) -> Any:
    return _row_sums(*primals), _row_sums_by_xla(tangents[0], primals[1])


@_table_gradient.defjvp
def _table_gradient_jvp(num_rows: int, primals: Any, tangents: Any) -> Any:
    (ids, sums), table = primals, jnp.zeros((num_rows, primals[1].shape[1]))
    transpose = jax.linear_transpose(lambda table: _row_sums_by_xla(table, ids), table)
    return _table_gradient(num_rows, ids, sums), transpose(tangents[1])[0]


@functools.partial(custom_vjp, num_static=1)
def _half_rows(num_rows: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of a ``table [num_rows, features]`` in half precision, whose gradients are summed in float32."""
    return jnp.take(table, ids, axis=0)


def _half_rows_backward(num_rows: int, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    # XLA would make a constant of the table's size early, and hold it while the activations are.
    zero, rows = lax.optimization_barrier((jnp.float32(0), cotangent))
    zeros = jnp.broadcast_to(zero, (num_rows, cotangent.shape[-1]))
    return zeros.at[saved[1]].add(rows.astype(jnp.float32), mode="drop").astype(cotangent.dtype), None


def _half_rows_forward(num_rows: int, table: jax.Array, ids: jax.Array) -> tuple[jax.Array, Any]:
    return jnp.take(table, ids, axis=0), (table, ids)


_half_rows.defvjp(_half_rows_forward, _half_rows_backward, push_forward=True)


def _look_up(summed: bool, table: jax.Array, ids: jax.Array, where: jax.Array | None) -> jax.Array:
    """The rows of ``ids [...]``, or sums of those of ``ids [..., n]`` that count."""
    rows = _half_rows(len(table), table, ids) if is_half(table.dtype) else jnp.take(table, ids, axis=0)
    if not summed:
        return rows
    counted = rows if where is None else jnp.where(where[..., None], rows, 0)
    return jnp.sum(counted, axis=-2, dtype=jnp.promote_types(rows.dtype, jnp.float32))


def _look_up_forward(summed: bool, table: jax.Array, ids: jax.Array, where: jax.Array | None) -> Any:
    saved = table, ids, where
    if not summed:
        return _look_up(summed, table, ids, where), saved
    sums = _row_sums(table, _counted(ids, where).reshape(-1, ids.shape[-1]))
    return sums.reshape(*ids.shape[:-1], table.shape[1]), saved


def _look_up_backward(summed: bool, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    # XLA's sum runs on one thread, and its operand has a row for each id.
    table, ids, where = saved
    sums = cotangent.reshape(-1, table.shape[1])
    return _table_gradient(len(table), _counted(ids, where).reshape(len(sums), -1), sums), None, None


def _counted(ids: jax.Array, where: jax.Array | None) -> jax.Array:
    return ids if where is None else jnp.where(where, ids, _NONE)


# Outside of a gradient it is XLA's: `optim.sparse_rows` finds lookups by their gather.
_native_look_up = custom_vjp(_look_up, num_static=1)
_native_look_up.defvjp(_look_up_forward, _look_up_backward, push_forward=True)


class Dropout(linen.Module):
    """Sets each element to zero with probability ``rate``, else scales it by ``1 / (1 - rate)``.

    Srivastava et al., Dropout, 2014. Unlike ``flax.linen.Dropout`` it takes ``train=`` in the call, and the rate may be
    a tracer; the masks differ from Flax's. A mask depends on the key, the shape and the rate only, and a higher rate
    drops every element that a lower one drops. Uses 16 random bits per element where ``jax.random`` uses 64, from the
    same generator.

    >>> layer, x = jn.nn.Dropout(0.5), jnp.ones(6)
    >>> layer.apply({}, x, train=False)
    Array([1., 1., 1., 1., 1., 1.], dtype=float32)
    >>> layer.apply({}, x, train=True, rngs={"dropout": jax.random.key(0)})
    Array([0., 2., 0., 2., 0., 2.], dtype=float32)

    Attributes:
        rate: ``[]`` probability 0…1 of zero, rounded to a multiple of ``2**-16``, in the scale too, so that the mean is
            kept. A plain 0 is the identity and needs no key.
        rng_collection: name of the key in ``apply``: ``rngs={"dropout": key}``.
        batch_axis: the axis of the inputs that is sharded if devices share a batch.
    """

    rate: ArrayLike
    rng_collection: str = "dropout"
    batch_axis: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        super().__post_init__()

    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Drops elements of ``x``, floats of any shape; without ``train`` the identity, which needs no key."""
        if not train or (isinstance(self.rate, numbers.Real) and self.rate == 0):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ConfigError(f"dropout scales its input, which must be floats, not {x.dtype}: cast it.")
        if not (self.has_rng(self.rng_collection) or self.has_rng("params")):
            raise ConfigError(
                f"dropout with train=True needs a key: pass rngs={{{self.rng_collection!r}: key}} to apply."
            )
        key = self.make_rng(self.rng_collection)
        threshold = jnp.round(jnp.asarray(self.rate, jnp.float32) * 2**_BITS)
        axis, batch = batch_axis(), self.batch_axis
        if axis is None or x.ndim <= batch:
            bits = _random_bits(key, x.shape)
        else:  # this device's rows of the draws for the full batch
            rows = x.shape[batch]
            full = (*x.shape[:batch], rows * lax.axis_size(axis), *x.shape[batch + 1 :])
            bits = lax.dynamic_slice_in_dim(_random_bits(key, full), lax.axis_index(axis) * rows, rows, batch)
        keep = bits.astype(jnp.uint32) >= threshold.astype(jnp.uint32)
        kept = 1.0 - threshold.astype(jnp.promote_types(x.dtype, jnp.float32)) / 2**_BITS
        # At rate 1 nothing is kept: any finite scale avoids NaN in the gradient.
        scale = 1.0 / jnp.where(kept > 0.0, kept, 1.0)
        return jnp.where(keep, x * scale, 0.0).astype(x.dtype)


def _random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform ``uint16``: quarters of the last axis are the halves of a block's two words."""
    obstacle = native_obstacle("jaxnn_random_bits")
    if batch_sharding(0) is not None:
        obstacle = "devices share the batch"
    elif not all(isinstance(size, int) for size in shape):
        obstacle = "a size is symbolic"
    elif math.prod(shape) < _MIN_DRAWN:
        obstacle = obstacle or "there are few elements, for which it is not faster"
    name = choose("dropout", None, {"native": obstacle})
    with scope("dropout", name):
        seed = jax.random.bits(key, (2,), jnp.uint32)
        return (_native_bits if name == "native" else _bits_by_xla)(seed, shape)


def _native_bits(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    def native(seed: jax.Array) -> jax.Array:
        return native_call("jaxnn_random_bits", [shape], seed, dtype="uint16")[0]

    bits: jax.Array = native_or_xla(native, functools.partial(_bits_by_xla, shape=shape))(seed)
    return bits


@functools.partial(jax.jit, static_argnums=1)
def _bits_by_xla(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    *leading, width = shape or (1,)
    blocks = (*leading, -(-width // 4))
    counter = jax.lax.iota(jnp.uint32, math.prod(blocks)).reshape(blocks)
    # Without the barrier XLA recomputes the block for each of its four elements.
    first, second = jax.lax.optimization_barrier(_threefry(seed, counter))
    halves = [half.astype(jnp.uint16) for word in (first, second) for half in (word, word >> 16)]
    return jnp.concatenate(halves, axis=-1)[..., :width].reshape(shape)


def _threefry(seed: jax.Array, counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 of ``(counter, 0)`` under ``seed [2]``: two ``uint32`` words shaped as ``counter``.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011. The default generator of ``jax.random``, which on
    CPU loops over the rounds with the array in memory; unrolled, all rounds are one pass.
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
