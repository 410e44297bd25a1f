"""Embeddings as Flax's, whose gradient for a small vocabulary may be a matrix product instead of a scatter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn.nn import implementations
from jaxnn.nn.custom_vjp import custom_vjp
from jaxnn.nn.ids import widened
from jaxnn.nn.varying import varying_alike
from jaxnn.types import ConfigError

# Beyond this the one-hot matrix [ids, num_embeddings] costs more than it saves; reasoned, not measured.
_MOST_ONE_HOT = 512


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
        name = implementations.choose("embedding", self.implementation, {"one_hot": obstacle})
        with implementations.scope("embedding", name):
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


def _rows_pushforward(num_rows: int, ids: jax.Array, tangents: tuple[jax.Array, None]) -> jax.Array:
    return _rows(tangents[0], ids, num_rows)


_rows.defvjp(_rows_forward, _rows_backward, _rows_pushforward)
