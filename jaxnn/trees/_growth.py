"""One tree of a gradient boosting, grown in fixed shapes from histograms of gradients in fixed point."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_WORDS = 8  # of 32 bits: one bit for each of 256 bins
_BITS = 29  # of the sum of all gradients: an int32 holds four times as much, of which rounding may take a part


class Tree(NamedTuple):
    """A binary tree; more leading axes are more trees. Node 0 is the root, and unused nodes are leaves of value 0."""

    column: Array  # ``[nodes]`` int32, that a node splits by; -1 in a leaf
    left_bins: Array  # ``[nodes, 8]`` uint32, a bit for each bin: whether its rows go left
    left: Array  # ``[nodes]`` int32, the left child; the right one follows it. In a leaf: the node itself
    value: Array  # ``[nodes]`` float32, the prediction of a node without its children, times the learning rate
    gain: Array  # ``[nodes]`` float32, by how much the split lowers the loss
    weight: Array  # ``[nodes]`` float32, the sum of Hessians of the rows in a node


class Growth(NamedTuple):
    """How a tree grows. The numbers may be tracers, the others are static."""

    max_depth: int
    num_leaves: int | None  # None: depth by depth
    num_bins: int  # with that of missing values, the last
    categorical: tuple[int, ...]  # columns
    monotone: tuple[int, ...]  # -1, 0 or 1 for each column; empty: no constraints
    learning_rate: Any
    l1: Any
    l2: Any
    min_child_weight: Any
    min_gain: Any


class Split(NamedTuple):
    """The best split of each node."""

    gain: Array  # ``[nodes]`` float32
    column: Array  # ``[nodes]`` int32
    left_bins: Array  # ``[nodes, 8]`` uint32
    left: Array  # ``[nodes, 2]`` int32, sums of gradients and Hessians of the rows that go left
    middle: Array  # ``[nodes]`` float32, between the values of both children


def fixed_point(gradient: Array, hessian: Array) -> tuple[Array, Array]:
    """Rounds gradients and Hessians ``[rows]`` to ``[rows, 2]`` int32, and returns the size ``[2]`` of one unit.

    Sums of integers do not depend on their order: a tree is the same on any number of devices, in every batch of trees,
    and with any algorithm for its histograms. A unit is a power of two, about 2^-29 of the sum of all absolute values.
    """
    pair = jnp.stack([gradient, hessian], axis=-1)
    total = jnp.maximum(jnp.abs(pair).sum(axis=0), 1e-30)
    unit = jnp.ldexp(jnp.ones(2), jnp.frexp(total)[1] - _BITS)
    return jnp.round(pair / unit[None]).astype(jnp.int32), unit


def _real(sums: Array, unit: Array) -> Array:
    """Sums ``[..., 2]`` of `fixed_point` as floats."""
    return sums * jnp.reshape(unit, (1,) * (sums.ndim - 1) + (2,))


def histograms(bins: Array, slot: Array, pairs: Array, num_slots: int, num_bins: int) -> Array:
    """Sums ``pairs [rows, 2]`` of each slot and bin: ``[slots, columns, bins, 2]`` int32.

    ``bins [columns, rows]`` uint8; ``slot [rows]``, of which ``num_slots`` is none. Under `jax.vmap` one tree follows
    another: on a CPU XLA's scatter of one column at a time is several times as fast as that of a batch.
    """

    def sums(bins: Array, slot: Array, pairs: Array) -> Array:
        def of_column(column: Array) -> Array:
            zeros = jnp.zeros((num_slots * num_bins, 2), jnp.int32)
            return zeros.at[slot * num_bins + column.astype(jnp.int32)].add(pairs)

        summed: Array = jax.lax.map(of_column, bins)
        return summed

    found: Array = jax.custom_batching.sequential_vmap(sums)(bins, slot, pairs)
    return found.reshape(bins.shape[0], num_slots, num_bins, 2).swapaxes(0, 1)


def leaf_value(sums: Array, bounds: Array, growth: Growth) -> Array:
    """The value ``[...]`` that lowers the loss most, from sums ``[..., 2]``, within ``bounds [..., 2]``."""
    gradient, hessian = sums[..., 0], sums[..., 1]
    shrunk = jnp.sign(gradient) * jnp.maximum(jnp.abs(gradient) - growth.l1, 0.0)
    value = -shrunk / jnp.maximum(hessian + growth.l2, 1e-30)
    return jnp.clip(value, bounds[..., 0], bounds[..., 1]) if growth.monotone else value


def _score(sums: Array, value: Array, growth: Growth) -> Array:
    """By how much a leaf of this value lowers the loss, to second order."""
    gradient, hessian = sums[..., 0], sums[..., 1]
    raised: Array = gradient * value + (hessian + growth.l2) * value**2 / 2 + growth.l1 * jnp.abs(value)
    return -raised


def best_splits(histogram: Array, total: Array, unit: Array, bounds: Array, columns: Array, growth: Growth) -> Split:
    """The best split of each node: ``histogram [nodes, columns, bins, 2]``, ``total [nodes, 2]``, in units.

    ``columns [columns]`` bool are those that may split. A missing value goes where the loss becomes lower. Categories
    are ordered by their mean gradient, as in LightGBM (Ke et al. 2017, after Fisher 1958).
    """
    num_nodes, num_columns, num_bins, _ = histogram.shape
    num_values = num_bins - 1
    values, missing = histogram[:, :, :-1], histogram[:, :, -1]
    rank = jnp.broadcast_to(jnp.arange(num_values), (num_nodes, num_columns, num_values))
    if growth.categorical:
        which = np.array(growth.categorical)
        part = values[:, which]
        mean = part[..., 0] * unit[0] / (part[..., 1] * unit[1] + 10.0)  # smoothed by ten rows, as LightGBM does
        order = jnp.argsort(jnp.where(part[..., 1] > 0, mean, jnp.inf), axis=-1)  # those without rows last
        values = values.at[:, which].set(jnp.take_along_axis(part, order[..., None], axis=2))
        rank = rank.at[:, which].set(jnp.argsort(order, axis=-1))
    sums = jnp.cumsum(values, axis=2)
    left = jnp.stack([sums, sums + missing[:, :, None]], axis=1)  # [nodes, 2, columns, values, 2]
    right = total[:, None, None, None] - left
    limits = bounds[:, None, None, None]
    (left_value, left_score), (right_value, right_score) = (
        (value := leaf_value(_real(side, unit), limits, growth), _score(_real(side, unit), value, growth))
        for side in (left, right)
    )
    whole = _real(total, unit)
    before = _score(whole, leaf_value(whole, bounds, growth), growth)
    gain = left_score + right_score - before[:, None, None, None]
    least = jnp.minimum(left[..., 1], right[..., 1])
    allowed = (least > 0) & (least * unit[1] >= growth.min_child_weight) & columns[None, None, :, None]
    if growth.monotone:
        allowed &= jnp.array(growth.monotone)[None, None, :, None] * (right_value - left_value) >= 0
    flat = jnp.where(allowed, gain, -jnp.inf).reshape(num_nodes, -1)
    best = jnp.argmax(flat, axis=1)
    side, column, value = jnp.unravel_index(best, (2, num_columns, num_values))
    node = jnp.arange(num_nodes)
    left_sums = left[node, side, column, value]
    # Without missing values in training, they go with most rows.
    none_missing = missing[node, column, 1] == 0
    missing_left = jnp.where(none_missing, 2 * left_sums[:, 1] >= total[:, 1], side == 1)
    left_side = jnp.concatenate([rank[node, column] <= value[:, None], missing_left[:, None]], axis=1)
    middle = (left_value + right_value)[node, side, column, value] / 2
    return Split(flat[node, best], column.astype(jnp.int32), _packed(left_side), left_sums, middle)


def _packed(bits: Array) -> Array:
    """Booleans ``[nodes, bins]`` as ``[nodes, 8]`` uint32."""
    bits = jnp.pad(bits, ((0, 0), (0, 32 * _WORDS - bits.shape[1])))
    words = bits.reshape(-1, _WORDS, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None]
    return words.sum(axis=2, dtype=jnp.uint32)


def goes_left(left_bins: Array, node: Array, bin_: Array) -> Array:
    """Whether rows ``[rows]`` in ``node``, with ``bin_`` of its column, go to its left child."""
    word = left_bins[node, (bin_ >> 5).astype(jnp.int32)]
    return (word >> (bin_ & 31).astype(jnp.uint32)) & 1 == 1


def grow(bins: Array, pairs: Array, unit: Array, columns: Array, growth: Growth) -> tuple[Tree, Array]:
    """Grows a tree, and returns it with the leaf ``[rows]`` of each row.

    Args:
        bins: ``[columns, rows]`` uint8.
        pairs: ``[rows, 2]`` gradients and Hessians of `fixed_point`.
        unit: ``[2]``, of `fixed_point`.
        columns: ``[columns]`` bool, those that may split.
        growth: the settings.
    """
    return (_grow_by_depth if growth.num_leaves is None else _grow_by_leaf)(bins, pairs, unit, columns, growth)


def empty_tree(num_nodes: int) -> Tree:
    """A tree of leaves with value 0."""
    floats = jnp.zeros(num_nodes)
    words = jnp.zeros((num_nodes, _WORDS), jnp.uint32)
    return Tree(
        jnp.full(num_nodes, -1, jnp.int32), words, jnp.arange(num_nodes, dtype=jnp.int32), floats, floats, floats
    )


def _pairs(left: Array, right: Array) -> Array:
    """Children side by side: two of ``[nodes, ...]`` become ``[2 * nodes, ...]``."""
    return jnp.stack([left, right], axis=1).reshape(-1, *left.shape[1:])


def _child_bounds(split: Split, bounds: Array, growth: Growth) -> tuple[Array, Array]:
    """Bounds of the values below the left and the right child: a constrained split separates them by the middle."""
    if not growth.monotone:
        return bounds, bounds
    way = jnp.array(growth.monotone)[split.column]
    lower, upper = bounds[:, 0], bounds[:, 1]
    below, above = jnp.stack([lower, split.middle], 1), jnp.stack([split.middle, upper], 1)
    left = jnp.where((way > 0)[:, None], below, jnp.where((way < 0)[:, None], above, bounds))
    right = jnp.where((way > 0)[:, None], above, jnp.where((way < 0)[:, None], below, bounds))
    return left, right


def _grow_by_depth(bins: Array, pairs: Array, unit: Array, columns: Array, growth: Growth) -> tuple[Tree, Array]:
    """All nodes of a level at a time; children of node i are 2i + 1 and 2i + 2."""
    rows = jnp.arange(bins.shape[1])
    tree = empty_tree(2 ** (growth.max_depth + 1) - 1)
    node = jnp.zeros(bins.shape[1], jnp.int32)
    sums, alive = pairs.sum(axis=0)[None], jnp.ones(1, bool)
    bounds = jnp.array([[-jnp.inf, jnp.inf]])
    histogram = jnp.zeros(())
    for depth in range(growth.max_depth + 1):
        count, first = 2**depth, 2**depth - 1
        level = slice(first, first + count)
        value = growth.learning_rate * leaf_value(_real(sums, unit), bounds, growth)
        tree = tree._replace(
            value=tree.value.at[level].set(jnp.where(alive, value, 0.0)),
            weight=tree.weight.at[level].set(jnp.where(alive, sums[:, 1] * unit[1], 0.0)),
        )
        if depth == growth.max_depth:
            return tree, node
        slot = jnp.where(node >= first, node - first, count)
        if depth == 0:
            histogram = histograms(bins, slot, pairs, 1, growth.num_bins)
        else:
            # Only the smaller child of two is summed; the other is the rest of its parent.
            left_is_small = sums[0::2, 1] <= sums[1::2, 1]
            parent = slot // 2
            is_small = (slot % 2 == 0) == left_is_small[jnp.minimum(parent, count // 2 - 1)]
            small = histograms(bins, jnp.where(is_small, parent, count // 2), pairs, count // 2, growth.num_bins)
            large, is_left = histogram - small, left_is_small[:, None, None, None]
            histogram = _pairs(jnp.where(is_left, small, large), jnp.where(is_left, large, small))
        split = best_splits(histogram, sums, unit, bounds, columns, growth)
        splits = alive & (split.gain > growth.min_gain)
        tree = tree._replace(
            column=tree.column.at[level].set(jnp.where(splits, split.column, -1)),
            left_bins=tree.left_bins.at[level].set(jnp.where(splits[:, None], split.left_bins, jnp.uint32(0))),
            left=tree.left.at[level].set(jnp.where(splits, 2 * jnp.arange(first, first + count) + 1, tree.left[level])),
            gain=tree.gain.at[level].set(jnp.where(splits, split.gain, 0.0)),
        )
        inside = jnp.minimum(slot, count - 1)
        is_left = goes_left(split.left_bins, inside, bins[split.column[inside], rows])
        node = jnp.where((slot < count) & splits[inside], 2 * node + 2 - is_left, node)
        sums, alive = _pairs(split.left, sums - split.left), jnp.repeat(splits, 2)
        bounds = _pairs(*_child_bounds(split, bounds, growth))
    raise AssertionError


class _Nodes(NamedTuple):
    """What is known of nodes that may be split: ``[nodes, ...]`` each."""

    histogram: Array
    sums: Array
    bounds: Array
    depth: Array
    split: Split


def _grow_by_leaf(bins: Array, pairs: Array, unit: Array, columns: Array, growth: Growth) -> tuple[Tree, Array]:
    """The leaf with the largest gain at a time, up to `Growth.num_leaves`; children are the next two nodes."""
    assert growth.num_leaves is not None
    rows, num_nodes = jnp.arange(bins.shape[1]), 2 * growth.num_leaves - 1

    def described(histogram: Array, sums: Array, bounds: Array, depth: Array) -> _Nodes:
        split = best_splits(histogram, sums, unit, bounds, columns, growth)
        gain = jnp.where(depth < growth.max_depth, split.gain, -jnp.inf)
        return _Nodes(histogram, sums, bounds, depth, split._replace(gain=gain))

    def put(tree: Tree, nodes: _Nodes, at: Array, new: _Nodes) -> tuple[Tree, _Nodes]:
        value = growth.learning_rate * leaf_value(_real(new.sums, unit), new.bounds, growth)
        weight = tree.weight.at[at].set(new.sums[:, 1] * unit[1])
        tree = tree._replace(value=tree.value.at[at].set(value), weight=weight)
        return tree, jax.tree.map(lambda leaf, one: leaf.at[at].set(one), nodes, new)

    def wanted(carry: Any) -> Array:
        count, _, _, nodes = carry
        more: Array = (count < num_nodes) & (nodes.split.gain.max() > growth.min_gain)
        return more

    def split_one(carry: Any) -> Any:
        count, tree, node, nodes = carry
        at = jnp.argmax(nodes.split.gain)
        parent = jax.tree.map(lambda leaf: leaf[at][None], nodes)
        split = parent.split
        is_left = goes_left(split.left_bins, jnp.zeros_like(node), bins[split.column[0], rows])
        node = jnp.where(node == at, count + 1 - is_left, node)
        sums = jnp.concatenate([split.left, parent.sums - split.left])
        small = jnp.argmin(sums[:, 1])
        summed = histograms(bins, jnp.where(node == count + small, 0, 1), pairs, 1, growth.num_bins)
        both = jnp.concatenate([summed, parent.histogram - summed])
        both = jnp.where(small == 0, both, both[::-1])
        bounds = jnp.concatenate(_child_bounds(split, parent.bounds, growth))
        children = described(both, sums, bounds, jnp.repeat(parent.depth + 1, 2))
        tree, nodes = put(tree, nodes, count + jnp.arange(2), children)
        tree = tree._replace(
            column=tree.column.at[at].set(split.column[0]),
            left_bins=tree.left_bins.at[at].set(split.left_bins[0]),
            left=tree.left.at[at].set(count),
            gain=tree.gain.at[at].set(split.gain[0]),
        )
        done = nodes.split._replace(gain=nodes.split.gain.at[at].set(-jnp.inf))
        return count + 2, tree, node, nodes._replace(split=done)

    node, bounds = jnp.zeros(bins.shape[1], jnp.int32), jnp.array([[-jnp.inf, jnp.inf]])
    first = histograms(bins, node, pairs, 1, growth.num_bins)
    root = described(first, pairs.sum(axis=0)[None], bounds, jnp.zeros(1, jnp.int32))
    # A node that is not there yet has no gain, and is not wanted.
    empty = jax.tree.map(lambda leaf: jnp.zeros((num_nodes, *leaf.shape[1:]), leaf.dtype), root)
    tree, nodes = put(empty_tree(num_nodes), empty, jnp.arange(1), root)
    _, tree, node, _ = jax.lax.while_loop(wanted, split_one, (jnp.int32(1), tree, node, nodes))
    return tree, node


def find_leaves(tree: Tree, bins: Array, max_depth: int) -> Array:
    """The leaf ``[rows]`` of each row of ``bins [columns, rows]``."""
    rows = jnp.arange(bins.shape[1])

    def down(_: Any, node: Array) -> Array:
        column = tree.column[node]
        is_left = goes_left(tree.left_bins, node, bins[jnp.maximum(column, 0), rows])
        return jnp.where(column < 0, node, tree.left[node] + 1 - is_left)

    return jax.lax.fori_loop(0, max_depth, down, jnp.zeros(bins.shape[1], jnp.int32))  # type: ignore[no-any-return]
