"""Arrays that differ over the devices of a mesh, inside `jax.shard_map`."""

from __future__ import annotations

from typing import Any

import jax


def varying_alike[*Ts](*trees: *Ts) -> tuple[*Ts]:
    """``trees`` of arrays as what varies over the same mesh axes in `jax.shard_map`.

    Needed before whatever has a derivative of its own, and for what a loop carries: JAX itself does so for its
    operations, and sums the gradient of what did not vary over the devices.
    """
    leaves = jax.tree.leaves(trees)
    union: frozenset[Any] = frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in leaves))

    def vary(leaf: Any) -> Any:
        axes = tuple(sorted(union - jax.typeof(leaf).mat.varying))
        return jax.lax.pcast(leaf, axes, to="varying") if axes else leaf

    return jax.tree.map(vary, trees)  # type: ignore[no-any-return]
