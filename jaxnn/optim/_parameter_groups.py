"""Parameters that are updated in other ways than the rest: learning rates by layer, no weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxnn.types import ConfigError, Params, path_matches


def with_rates(
    optimizer: optax.GradientTransformation, rates: Mapping[str, ArrayLike]
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optimizer`` with updates multiplied by a rate for the parameters whose paths match a pattern.

    A pattern is a regular expression for the first names of a path such as ``Dense_0/kernel``; the first that matches
    counts, and 1 if none does. ConfigError in ``init`` for a pattern that matches no parameter.

    >>> optimizer = jn.optim.with_rates(optax.adam(1e-3), {"Dense_1": 1.0, "Dense_.*": 0.1})
    """

    def scale(updates: Any, params: Any) -> Any:
        def scaled(path: Any, update: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            rate = next((rate for pattern, rate in rates.items() if path_matches(pattern, name)), None)
            return update if rate is None else update * jnp.asarray(rate, update.dtype)

        return jax.tree.map_with_path(scaled, updates)

    chained = optax.chain(optimizer, optax.stateless(scale))

    def init(params: Params) -> optax.OptState:
        names = [
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)
        ]
        for pattern in rates:
            if not any(path_matches(pattern, name) for name in names):
                raise ConfigError(f"with_rates: no parameter starts with {pattern!r}: there are {', '.join(names)}.")
        return chained.init(params)

    return optax.GradientTransformationExtraArgs(init, chained.update)


def layer_decay(layers: Sequence[str], decay: ArrayLike) -> dict[str, ArrayLike]:
    """Rates for `with_rates` that fall from the last of ``layers``, which has 1, by a factor of ``decay`` each.

    Layer-wise learning rates for fine-tuning (Howard & Ruder 2018, arXiv:1801.06146; Bao et al. 2021, BEiT).

    >>> jn.optim.layer_decay(["Embed", "Block_0", "Block_1", "head"], 0.5)
    {'Embed': 0.125, 'Block_0': 0.25, 'Block_1': 0.5, 'head': 1.0}
    """
    return {name: decay ** float(len(layers) - 1 - depth) for depth, name in enumerate(layers)}


def is_decayed(params: Params) -> Any:
    """Returns True for each parameter that weight decay usually applies to: those of two axes or more.

    Biases and the gains of normalization are left out: ``optax.adamw(1e-3, mask=jn.optim.is_decayed)``.

    >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=jn.optim.is_decayed)
    """
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) >= 2, params)
