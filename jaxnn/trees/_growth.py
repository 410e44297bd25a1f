"""One tree of a gradient boosting, grown in fixed shapes from histograms of gradients in fixed point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxnn.nn import batch_sharding, choose
from jaxnn.types import cpu_count

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
    num_categories: int  # the most of a column
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
    total = jnp.maximum(jnp.stack([jnp.abs(gradient).sum(), jnp.abs(hessian).sum()]), 1e-25)
    # No integer is NaN: the unit is, so that a loss that is no longer finite is seen.
    unit = jnp.where(jnp.isfinite(total), jnp.ldexp(jnp.ones(2), jnp.frexp(total)[1] - _BITS), jnp.nan)
    rounded = [jnp.round(each / one).astype(jnp.int32) for each, one in zip((gradient, hessian), unit, strict=True)]
    return jnp.stack(rounded, axis=-1), unit


def _real(sums: Array, unit: Array) -> Array:
    """Sums ``[..., 2]`` of `fixed_point` as floats."""
    return sums * jnp.reshape(unit, (1,) * (sums.ndim - 1) + (2,))


def histograms(bins: Array, slot: Array, pairs: Array, num_slots: int, num_bins: int) -> Array:
    """Sums ``pairs [rows, 2]`` of each bin and slot: ``[columns, slots, bins, 2]`` int32.

    ``bins [columns, rows]`` uint8, where the last stands for those that are higher; ``slot [rows]``, of which
    ``num_slots`` is none. On a CPU columns follow one another, and so do the trees of a `jax.vmap`: XLA's scatter of
    one column is several times as fast as that of a batch.
    """

    def of_column(slot: Array, pairs: Array, column: Array) -> Array:
        index = slot * num_bins + jnp.minimum(column.astype(jnp.int32), num_bins - 1)
        # Rows of no slot are summed too, since a branch that is often mispredicted takes longer.
        zeros = jnp.zeros(((num_slots + 1) * num_bins, *pairs.shape[1:]), pairs.dtype)
        return zeros.at[index].add(pairs, mode="promise_in_bounds")[:-num_bins]

    def one_by_one(bins: Array, slot: Array, pairs: Array) -> Array:
        with jax.enable_x64(True):  # one addition of 64 bits is faster than two of 32
            both = (pairs[:, 0].astype(jnp.int64) << 32) + pairs[:, 1].astype(jnp.int64)

            def next_column(_: None, column: Array) -> Any:
                return None, of_column(slot, both, column)

            # XLA runs the columns of one step in parallel.
            summed = jax.lax.scan(next_column, None, bins, unroll=min(8, cpu_count() or 1))[1]
            hessian = summed.astype(jnp.int32)
            return jnp.stack([((summed - hessian.astype(jnp.int64)) >> 32).astype(jnp.int32), hessian], axis=-1)

    def all_columns(bins: Array, slot: Array, pairs: Array) -> tuple[Array]:
        if _is_sequential():
            found = jax.custom_batching.sequential_vmap(one_by_one)(bins, slot, pairs)
        else:
            found = jax.vmap(of_column, in_axes=(None, None, 0))(slot, pairs, bins)
        return (found if sharding is None else jax.lax.psum(found, jax.sharding.get_abstract_mesh().manual_axes),)

    sharding = batch_sharding(len(slot))
    on_each = all_columns if sharding is None else sharding.map_rows(all_columns, (1, 0, 0), (None,))
    (found,) = on_each(bins, slot, pairs)
    return found.reshape(bins.shape[0], num_slots, num_bins, 2)


def _is_sequential() -> bool:
    return choose("histogram", None, {}) == "by_column"


def leaf_value(sums: Array, bounds: Array, growth: Growth) -> Array:
    """The value ``[...]`` that lowers the loss most, from sums ``[..., 2]``, within ``bounds [..., 2]``."""
    gradient, hessian = sums[..., 0], sums[..., 1]
    value = -_shrunk(gradient, growth) / jnp.maximum(hessian + growth.l2, 1e-30)
    return jnp.clip(value, bounds[..., 0], bounds[..., 1]) if growth.monotone else value


def _shrunk(gradient: Array, growth: Growth) -> Array:
    return gradient - jnp.clip(gradient, -growth.l1, growth.l1)


def _score(sums: Array, value: Array, growth: Growth) -> Array:
    """By how much a leaf of this value lowers the loss, to second order."""
    gradient, hessian = sums[..., 0], sums[..., 1]
    if not growth.monotone:  # the best value
        return -_shrunk(gradient, growth) * value / 2
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
        which, most = np.array(growth.categorical), min(growth.num_categories, num_values)
        part = values[:, which, :most]
        mean = part[..., 0] * unit[0] / (part[..., 1] * unit[1] + 10.0)  # smoothed by ten rows, as LightGBM does
        order = jnp.argsort(jnp.where(part[..., 1] > 0, mean, jnp.inf), axis=-1)  # those without rows last
        values = values.at[:, which, :most].set(jnp.take_along_axis(part, order[..., None], axis=2))
        rank = rank.at[:, which, :most].set(jnp.argsort(order, axis=-1))

    def sides(left: Array, total: Array, bounds: Array) -> Any:
        """Values and scores of both children."""
        both = (_real(left, unit), _real(total - left, unit))
        made = [leaf_value(each, bounds, growth) for each in both]
        return made, [_score(each, value, growth) for each, value in zip(both, made, strict=True)]

    def gain_of(left: Array, columns: Array, ways: Array) -> Array:
        """Of ``left [nodes, k, 2]``, without what the node had before: ``[nodes, k]``."""
        (left_value, right_value), scores = sides(left, total[:, None], bounds[:, None])
        least = jnp.minimum(left[..., 1], total[:, None, 1] - left[..., 1])
        allowed = (least > 0) & (least * unit[1] >= growth.min_child_weight) & columns
        if growth.monotone:
            allowed &= ways * (right_value - left_value) >= 0
        return jnp.where(allowed, scores[0] + scores[1], -jnp.inf)

    ways = jnp.array(growth.monotone or (0,) * num_columns)

    def gain_here(left: Array) -> Array:
        given = columns[None], ways[None]
        return jnp.maximum(gain_of(left, *given), gain_of(left + missing, *given))

    def next_bin(carry: Any, bin_: Array) -> Any:
        left, best = carry
        return (left + bin_, jnp.maximum(best, gain_here(left + bin_))), None

    by_value = jnp.moveaxis(values, 2, 0)
    if _is_sequential():  # nothing of the size of the histogram is stored
        none = jnp.full((num_nodes, num_columns), -jnp.inf)
        (_, best), _ = jax.lax.scan(next_bin, (jnp.zeros_like(missing), none), by_value)
    else:
        best = jax.vmap(gain_here)(jnp.cumsum(by_value, axis=0)).max(axis=0)
    # Where the best column is split, and with or without its missing values on the left.
    node, column = jnp.arange(num_nodes), best.argmax(axis=1)
    sums, absent = jnp.cumsum(values[node, column], axis=1), missing[node, column]
    left = jnp.stack([sums, sums + absent[:, None]], axis=2).reshape(num_nodes, -1, 2)
    gains = gain_of(left, columns[column][:, None], ways[column][:, None])
    at = gains.argmax(axis=1)
    last, with_missing, left = at >> 1, at & 1 == 1, left[node, at]
    (left_value, right_value), _ = sides(left, total, bounds)
    before = _real(total, unit)
    gain = gains[node, at] - _score(before, leaf_value(before, bounds, growth), growth)
    # Without missing values in training, they go with most rows.
    missing_left = jnp.where(absent[:, 1] == 0, 2 * left[:, 1] >= total[:, 1], with_missing)
    left_side = jnp.pad(rank[node, column] <= last[:, None], ((0, 0), (0, 32 * _WORDS - num_bins)))
    left_side = jnp.concatenate([left_side, missing_left[:, None]], axis=1)
    return Split(gain, column.astype(jnp.int32), _packed(left_side), left, (left_value + right_value) / 2)


def _packed(bits: Array) -> Array:
    """Booleans ``[nodes, 256]`` as ``[nodes, 8]`` uint32."""
    words = bits.reshape(-1, _WORDS, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None]
    return words.sum(axis=2, dtype=jnp.uint32)


def empty_tree(num_nodes: int) -> Tree:
    """A tree of leaves with value 0."""
    floats = jnp.zeros(num_nodes)
    words = jnp.zeros((num_nodes, _WORDS), jnp.uint32)
    return Tree(
        jnp.full(num_nodes, -1, jnp.int32), words, jnp.arange(num_nodes, dtype=jnp.int32), floats, floats, floats
    )


def num_nodes(growth: Growth) -> int:
    """How many nodes a tree has room for."""
    return 2 ** (growth.max_depth + 1) - 1 if growth.num_leaves is None else 2 * growth.num_leaves - 1


def num_histograms(growth: Growth) -> tuple[int, int]:
    """How many histograms a round sums at most, and how many are kept for later ones."""
    if growth.num_leaves is not None:
        return 1, growth.num_leaves + 1  # the last is not read
    parents = 2 ** max(growth.max_depth - 2, 0)
    return parents, 2 * parents


class _Nodes(NamedTuple):
    """What is known of nodes while a tree grows, ``[nodes, ...]`` each, and where the rows are."""

    sums: Array  # ``[nodes, 2]`` int32
    bounds: Array  # ``[nodes, 2]`` float32, of the values below
    depth: Array
    slot: Array  # where the histogram is
    split: Split  # the best; its gain is -inf if there is none
    left: Array  # the left child, or the node itself
    histogram: Array  # ``[slots, columns, bins, 2]`` int32
    children: Array  # ``[parents]``: left children made in the last round; the number of nodes is none
    row: Array  # ``[rows]``: the node of each row


def grow(bins: Array, pairs: Array, unit: Array, columns: Array, growth: Growth) -> tuple[Tree, Array]:
    """Grows a tree, and returns it with the leaf ``[rows]`` of each row.

    In a round all nodes of a level are split, or the one with the largest gain. Only the histogram of the smaller of
    two children is summed; the other is the rest of their parent's.

    Args:
        bins: ``[columns, rows]`` uint8.
        pairs: ``[rows, 2]`` gradients and Hessians of `fixed_point`.
        unit: ``[2]``, of `fixed_point`.
        columns: ``[columns]`` bool, those that may split.
        growth: the settings.
    """
    by_level, size = growth.num_leaves is None, num_nodes(growth)
    rounds = growth.max_depth if growth.num_leaves is None else growth.num_leaves - 1
    num_parents, num_slots = num_histograms(growth)
    at_once = 1 if _is_sequential() else num_parents

    def next_round(index: Array, nodes: _Nodes) -> _Nodes:
        left, right = nodes.sums[nodes.children, 1], nodes.sums[nodes.children + 1, 1]
        small_is_left = (left <= right) | (right == 0)  # the root is a left child without a right one
        small_child = nodes.children + 1 - small_is_left
        parent = jnp.full(size, num_parents).at[small_child].set(jnp.arange(num_parents), mode="drop")
        small = histograms(bins, parent[nodes.row], pairs, num_parents, growth.num_bins)
        # The sums of all rows are those of the first histogram.
        nodes = nodes._replace(sums=jnp.where(index == 0, nodes.sums.at[0].set(small[0, 0].sum(axis=0)), nodes.sums))
        count = 1 << jnp.maximum(index - 1, 0) if by_level else jnp.int32(1)  # of parents

        def find_splits(turn: Array, nodes: _Nodes) -> _Nodes:
            first = turn * at_once
            which = first + jnp.arange(at_once)
            child = nodes.children[which]
            # A left child takes the place of its parent.
            slots = [first, first + count]
            if not by_level:
                slots = [jnp.where(one < size, nodes.slot[one], num_slots - 1)[0] for one in (child, child + 1)]
            some = jax.lax.dynamic_slice_in_dim(small, first, at_once, axis=1).swapaxes(0, 1)
            nodes, both = _with_histograms(nodes, some, small_is_left[which, None, None, None], slots)
            child = jnp.concatenate([child, child + 1])
            split = best_splits(both, nodes.sums[child], unit, nodes.bounds[child], columns, growth)
            split = split._replace(gain=jnp.where(nodes.depth[child] < growth.max_depth, split.gain, -jnp.inf))
            return nodes._replace(
                split=jax.tree.map(lambda all_, new: all_.at[child].set(new, mode="drop"), nodes.split, split)
            )

        nodes = jax.lax.fori_loop(0, -(-count // at_once), find_splits, nodes)
        return _with_children(nodes, bins, index, growth)

    zeros, infinite = jnp.zeros(size, jnp.int32), jnp.full(size, jnp.inf)
    words = jnp.zeros((size, _WORDS), jnp.uint32)
    nodes = _Nodes(
        sums=jnp.zeros((size, 2), jnp.int32),
        bounds=jnp.stack([-infinite, infinite], axis=1),
        depth=zeros,
        slot=zeros.at[1].set(1),
        split=Split(-infinite, zeros, words, jnp.zeros((size, 2), jnp.int32), jnp.zeros(size)),
        left=jnp.arange(size, dtype=jnp.int32),
        histogram=jnp.zeros((num_slots, bins.shape[0], growth.num_bins, 2), jnp.int32),
        children=jnp.full(num_parents, size).at[0].set(0),
        row=jnp.zeros(bins.shape[1], jnp.int32),
    )
    nodes = jax.lax.fori_loop(0, rounds, next_round, nodes)
    split, is_split, sums = nodes.split, nodes.left != jnp.arange(size), _real(nodes.sums, unit)
    tree = Tree(
        column=jnp.where(is_split, split.column, -1),
        left_bins=jnp.where(is_split[:, None], split.left_bins, jnp.uint32(0)),
        left=nodes.left,
        value=growth.learning_rate * leaf_value(sums, nodes.bounds, growth),
        gain=jnp.where(is_split, split.gain, 0.0),
        weight=sums[:, 1],
    )
    return tree, nodes.row


def _with_histograms(nodes: _Nodes, small: Array, small_is_left: Array, slots: Sequence[Array]) -> tuple[_Nodes, Array]:
    """Stores the histograms of children, of which ``small [parents, ...]`` are known, and returns the children's."""
    rest = jax.lax.dynamic_slice_in_dim(nodes.histogram, slots[0], len(small)) - small
    both = jnp.where(small_is_left, small, rest), jnp.where(small_is_left, rest, small)
    both = jax.lax.optimization_barrier(both)  # otherwise XLA copies all histograms to overwrite one in place
    histogram = nodes.histogram
    for slot, one in zip(slots, both, strict=True):
        histogram = jax.lax.dynamic_update_slice_in_dim(histogram, one, slot, axis=0)
    return nodes._replace(histogram=histogram), jnp.concatenate(both)


def _with_children(nodes: _Nodes, bins: Array, index: Array, growth: Growth) -> _Nodes:
    """Splits the nodes of round ``index``, and moves their rows."""
    size, split = len(nodes.left), nodes.split
    ids, num_parents = jnp.arange(size, dtype=jnp.int32), len(nodes.children)
    gain = jnp.where(nodes.left == ids, split.gain, -jnp.inf)
    chosen = gain > growth.min_gain
    if growth.num_leaves is None:
        left, right_slot, parent = 2 * ids + 1, nodes.slot + (1 << index), nodes.slot
    else:
        chosen &= ids == gain.argmax()
        left, right_slot, parent = 2 * index + 1 + 0 * ids, index + 1 + 0 * ids, 0 * ids
    child = jnp.where(chosen, left, size)

    def put(all_: Array, of_left: Array, of_right: Array) -> Array:
        return all_.at[child].set(of_left, mode="drop").at[child + 1].set(of_right, mode="drop")

    left = jnp.where(chosen, left, nodes.left)
    return nodes._replace(
        sums=put(nodes.sums, split.left, nodes.sums - split.left),
        bounds=put(nodes.bounds, *_child_bounds(split, nodes.bounds, growth)) if growth.monotone else nodes.bounds,
        depth=put(nodes.depth, nodes.depth + 1, nodes.depth + 1),
        slot=put(nodes.slot, nodes.slot, right_slot),
        left=left,
        children=jnp.full(num_parents, size).at[jnp.where(chosen, parent, num_parents)].set(child, mode="drop"),
        row=_down(split.column, split.left_bins, left, bins, nodes.row),
    )


def _child_bounds(split: Split, bounds: Array, growth: Growth) -> tuple[Array, Array]:
    """Bounds of the values below the left and the right child: a constrained split separates them by the middle."""
    way = jnp.array(growth.monotone)[split.column]
    lower, upper = bounds[:, 0], bounds[:, 1]
    below, above = jnp.stack([lower, split.middle], 1), jnp.stack([split.middle, upper], 1)
    left = jnp.where((way > 0)[:, None], below, jnp.where((way < 0)[:, None], above, bounds))
    right = jnp.where((way > 0)[:, None], above, jnp.where((way < 0)[:, None], below, bounds))
    return left, right


def _down(column: Array, left_bins: Array, left: Array, bins: Array, node: Array) -> Array:
    """The child of ``node [rows]`` that each row of ``bins [columns, rows]`` goes to; leaves stay."""

    def down(column: Array, left_bins: Array, left: Array, bins: Array, node: Array) -> tuple[Array]:
        bin_ = bins[jnp.maximum(column, 0)[node], jnp.arange(bins.shape[1])]
        word = left_bins[node, (bin_ >> 5).astype(jnp.int32)]
        is_left = (word >> (bin_ & 31).astype(jnp.uint32)) & 1 == 1
        return (jnp.where(left[node] == node, node, left[node] + 1 - is_left),)

    sharding = batch_sharding(node.shape[0])  # symbolic in `jax.export`
    on_each = down if sharding is None else sharding.map_rows(down, (None, None, None, 1, 0), (0,))
    return on_each(column, left_bins, left, bins, node)[0]


def find_leaves(tree: Tree, bins: Array, max_depth: int) -> Array:
    """The leaf ``[rows]`` of each row of ``bins [columns, rows]``."""

    def down(_: Any, node: Array) -> Array:
        return _down(tree.column, tree.left_bins, tree.left, bins, node)

    return jax.lax.fori_loop(0, max_depth, down, jnp.zeros(bins.shape[1], jnp.int32))  # type: ignore[no-any-return]
