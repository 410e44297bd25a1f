"""The embedding layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jaxnn.kernels import lookup
from jaxnn.nn._layer_arguments import at_least_int32, padded_classes
from jaxnn.types import ConfigError


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
        rows: jax.Array = lookup(table, ids, where, summed=summed)
        return rows
