"""The best splits of nodes, from their histograms of gradients and Hessians."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxnn._fields import bounded
from jaxnn.kernels import choose

MAX_DEPTH = 10  # nodes double with each level
WORDS = 8  # of 32 bits: one bit for each of 256 bins


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Growth:
    """How a tree grows: a pytree of the numbers, in the order of the native kernel; the other settings are static."""

    max_depth: int = bounded(least=1, most=MAX_DEPTH, static=True)
    num_leaves: int | None = bounded(None, least=2, static=True)  # None: depth by depth
    max_bins: int = bounded(255, least=2, most=255, static=True)
    categorical: tuple[int, ...] = bounded((), static=True)  # columns
    num_categories: int = bounded(0, static=True)  # the most of a column
    monotone: tuple[int, ...] = bounded((), static=True)  # -1, 0 or 1 for each column; empty: no constraints
    learning_rate: Any = bounded(0.1, positive=True)
    l1: Any = bounded(0.0, positive=False)
    l2: Any = bounded(1.0, positive=False)
    min_child_weight: Any = bounded(1e-3, positive=False)
    min_gain: Any = bounded(0.0, positive=False)
    largest_step: Any = bounded(math.inf, positive=True)  # the largest absolute value of a leaf, before the rate

    @property
    def num_bins(self) -> int:
        """The number of bins with that of missing values, the last."""
        return self.max_bins + 1


class Split(NamedTuple):
    """The best split of each node."""

    gain: Array  # ``[nodes]`` float32
    column: Array  # ``[nodes]`` int32
    left_bins: Array  # ``[nodes, 8]`` uint32
    left: Array  # ``[nodes, 2]`` int64, sums of gradients and Hessians of the rows that go left
    middle: Array  # ``[nodes]`` float32, between the values of both children


_HISTOGRAMS = {"cpu": ("by_column", "all_columns"), "other": ("all_columns", "by_column")}


def is_sequential() -> bool:
    """Whether histograms are summed, and splits found, a column or a bin after another."""
    return choose("histogram", None, {}, _HISTOGRAMS) == "by_column"


def real(sums: Array, unit: Array, dtype: Any = jnp.float32) -> Array:
    """Sums ``[..., 2]`` of `fixed_point` as floats, rounded once: the units are powers of two."""
    return sums.astype(dtype) * jnp.reshape(unit, (1,) * (sums.ndim - 1) + (2,))


def leaf_value(sums: Array, bounds: Array, growth: Growth) -> Array:
    """The value ``[...]`` that lowers the loss most, from sums ``[..., 2]``, within ``bounds [..., 2]``.

    It is 0 if the sum of Hessians is below ``min_child_weight``, as it may be of a root, or is not above 0.
    """
    gradient, hessian = sums[..., 0], sums[..., 1]
    value = jnp.clip(
        -_shrunk(gradient, growth) / _curvature(hessian, growth), -growth.largest_step, growth.largest_step
    )
    value = jnp.where((hessian <= 0) | (hessian < growth.min_child_weight), 0.0, value)
    return jnp.clip(value, bounds[..., 0], bounds[..., 1]) if growth.monotone else value


def _shrunk(gradient: Array, growth: Growth) -> Array:
    return gradient - jnp.clip(gradient, -growth.l1, growth.l1)


def _curvature(hessian: Array, growth: Growth) -> Array:
    return jnp.maximum(hessian + growth.l2, 1e-30)


def _score(sums: Array, value: Array, growth: Growth) -> Array:
    """By how much a leaf of this value lowers the loss, to second order."""
    gradient, hessian = sums[..., 0], sums[..., 1]
    if not growth.monotone:  # no product is added, which some programs would round and others not
        size, curvature = _shrunk(gradient, growth), _curvature(hessian, growth)
        limit = growth.largest_step * curvature
        # Of the best step. No quotient is divided by: XLA would make it a product.
        share = jnp.where(jnp.abs(size) > limit, limit / jnp.abs(size), 1.0)
        return size**2 * (share * (2 - share)) / curvature / 2
    raised: Array = gradient * value + (hessian + growth.l2) * value**2 / 2 + growth.l1 * jnp.abs(value)
    return -raised


def _first_largest(values: Array) -> Array:
    """The place of the first largest of ``values [rows, n]``, float64: JAX lowers its argmax for float32."""
    return jax.lax.argmax((values == values.max(axis=1, keepdims=True)).astype(jnp.int32), 1, jnp.int32)


def best_splits(histogram: Array, total: Array, unit: Array, bounds: Array, columns: Array, growth: Growth) -> Split:
    """The best split of each node: ``histogram [nodes, columns, bins, 2]``, ``total [nodes, 2]``, int64.

    ``columns [columns]`` bool are those that may split. A missing value goes where the loss becomes lower. Categories
    are ordered by their mean gradient, as in LightGBM (Ke et al. 2017, after Fisher 1958).
    """
    num_nodes, num_columns, num_bins, _ = histogram.shape
    num_values = num_bins - 1
    values, missing = histogram[:, :, :-1], histogram[:, :, -1]
    rank = jnp.broadcast_to(jnp.arange(num_values, dtype=jnp.int32), (num_nodes, num_columns, num_values))
    if growth.categorical:
        which, most = np.array(growth.categorical), min(growth.num_categories, num_values)
        part = values[:, which, :most]
        gradient, hessian = jnp.moveaxis(real(part, unit, jnp.float64), -1, 0)
        mean = gradient / (hessian + 10.0)  # smoothed by ten rows, as LightGBM does
        order = jnp.argsort(jnp.where(hessian > 0, mean, jnp.inf), axis=-1)  # those without rows last
        values = values.at[:, which, :most].set(jnp.take_along_axis(part, order[..., None], axis=2))
        rank = rank.at[:, which, :most].set(jnp.argsort(order, axis=-1).astype(jnp.int32))

    def sides(left: Array, total: Array, bounds: Array) -> Any:
        """Values and scores of both children, and the smaller of their sums of Hessians.

        In float64: a gain is the difference of scores, and may be much smaller.
        """
        both = (real(left, unit, jnp.float64), real(total - left, unit, jnp.float64))
        made = [leaf_value(each, bounds, growth) for each in both]
        scores = [_score(each, value, growth) for each, value in zip(both, made, strict=True)]
        return made, scores, jnp.minimum(*(each[..., 1] for each in both))

    def gain_of(left: Array, columns: Array, ways: Array) -> Array:
        """Of ``left [nodes, k, 2]``, without what the node had before: ``[nodes, k]``."""
        (left_value, right_value), scores, least = sides(left, total[:, None], bounds[:, None])
        allowed = (least > 0) & (least >= growth.min_child_weight) & columns
        if growth.monotone:
            allowed &= ways * (right_value - left_value) >= 0
        return jnp.where(allowed, scores[0] + scores[1], -jnp.inf)

    ways = jnp.array(growth.monotone or (0,) * num_columns)

    def gain_here(left: Array) -> Array:
        return jnp.maximum(*(gain_of(one, columns[None], ways[None]) for one in (left, left + missing)))

    def next_bin(carry: Any, bin_: Array) -> Any:
        left, best = carry
        return (left + bin_, jnp.maximum(best, gain_here(left + bin_))), None

    by_value = jnp.moveaxis(values, 2, 0)
    if is_sequential():  # nothing of the size of the histogram is stored
        none = jnp.full((num_nodes, num_columns), -jnp.inf, jnp.float64)
        (_, best), _ = jax.lax.scan(next_bin, (jnp.zeros_like(missing), none), by_value)
    else:
        best = jax.vmap(gain_here)(jnp.cumsum(by_value, axis=0)).max(axis=0)
    # Where the best column is split, and with or without its missing values on the left.
    node, column = jnp.arange(num_nodes), _first_largest(best)
    sums, absent = jnp.cumsum(values[node, column], axis=1), missing[node, column]
    left = jnp.stack([sums, sums + absent[:, None]], axis=2).reshape(num_nodes, -1, 2)
    gains = gain_of(left, columns[column][:, None], ways[column][:, None])
    at = _first_largest(gains)
    last, with_missing, left = at >> 1, at & 1 == 1, left[node, at]
    (left_value, right_value), *_ = sides(left, total, bounds)
    before = real(total, unit, jnp.float64)
    gain = (gains[node, at] - _score(before, leaf_value(before, bounds, growth), growth)).astype(jnp.float32)
    # Without missing values in training, they go with most rows.
    missing_left = jnp.where(absent[:, 1] == 0, left[:, 1] >= total[:, 1] - left[:, 1], with_missing)
    left_side = jnp.pad(rank[node, column] <= last[:, None], ((0, 0), (0, 32 * WORDS - num_bins)))
    left_side = jnp.concatenate([left_side, missing_left[:, None]], axis=1)
    bits = left_side.reshape(-1, WORDS, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None]
    words = bits.sum(axis=2, dtype=jnp.uint32)
    return Split(gain, column, words, left, ((left_value + right_value) / 2).astype(jnp.float32))
