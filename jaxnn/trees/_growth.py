"""One tree of a gradient boosting, grown in fixed shapes from histograms of gradients in fixed point."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxnn._batch_context import batch_sharding, map_rows
from jaxnn.kernels import Kernel, native_call
from jaxnn.trees._splits import WORDS, Growth, Split, best_splits, is_sequential, leaf_value, real
from jaxnn.types import cpu_count

_BITS = 61  # of the sum of all absolute values: int64 has two more, of which rounding may take a part


class Tree(NamedTuple):
    """A binary tree; more leading axes are more trees. Node 0 is the root, and unused nodes are leaves of value 0."""

    column: Array  # ``[nodes]`` int32, that a node splits by; -1 in a leaf
    left_bins: Array  # ``[nodes, 8]`` uint32, a bit for each bin: whether its rows go left
    left: Array  # ``[nodes]`` int32, the left child; the right one follows it. In a leaf: the node itself
    value: Array  # ``[nodes]`` float32, the prediction of a node without its children, times the learning rate
    gain: Array  # ``[nodes]`` float32, by how much the split lowers the loss
    weight: Array  # ``[nodes]`` float32, the sum of Hessians of the rows in a node


# Makes functions that are traced once for all members of a sweep: tracing takes most of the time to start a small one.
traced_once = functools.partial(jax.jit, inline=True)


@traced_once
def fixed_point(values: Array) -> tuple[Array, Array]:
    """Rounds ``values [rows]`` float32 to int64, and returns them with the size of their unit; under `jax.enable_x64`.

    Sums of integers do not depend on their order: a tree is the same on any number of devices, in every batch of trees,
    and with any algorithm for its histograms. A unit is a power of two, at most 2^-60 of the sum of all absolute
    values, or 2^-126: a sum of n rows errs by at most n * 2^-61 of that sum.
    """
    sizes = jnp.abs(values)
    # The first unit fits the largest value in each row; in it the sum, rounded up, does not depend on the order either.
    first = _exponent(sizes.max()) + len(values).bit_length() - _BITS
    bound = jnp.ceil(sizes * _power(-first)).astype(jnp.int64).sum()
    exponent = jnp.maximum(first + (64 - jax.lax.clz(bound)).astype(jnp.int32) - _BITS, -126)
    rounded = jnp.round(values * _power(-exponent))
    # No integer is NaN: the unit is, so that it is seen if a loss is.
    is_finite = jnp.isfinite(sizes.max())
    return jnp.where(is_finite, rounded, 0).astype(jnp.int64), jnp.where(is_finite, _power(exponent), jnp.nan)


def _exponent(value: Array) -> Array:
    """The binary exponent of a float32 that is not negative, at least -60."""
    return jnp.maximum((jax.lax.bitcast_convert_type(value, jnp.int32) >> 23) - 127, -60)


def _power(exponent: Array) -> Array:
    """2 to a power from -126 to 127, exactly."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def fixed_sum(values: Any) -> Array:
    """The sum of ``values [rows]``, rounded once; the same on any number of devices."""
    with jax.enable_x64(True):
        rounded, unit = fixed_point(jnp.asarray(values, jnp.float32))
        # Otherwise XLA multiplies by the inverse of a sum that it knows.
        total: Array = jax.lax.optimization_barrier(rounded.sum().astype(jnp.float32) * unit)
        return total


def histograms(bins: Array, slot: Array, pairs: Array, num_slots: int, num_bins: int) -> Array:
    """Sums ``pairs [rows, 2]`` of each bin and slot: ``[columns, slots, bins, 2]`` int64.

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
        def next_column(_: None, column: Array) -> Any:
            return None, of_column(slot, pairs, column)

        # XLA runs the columns of one step in parallel.
        summed: Array = jax.lax.scan(next_column, None, bins, unroll=min(8, cpu_count() or 1))[1]
        return summed

    def all_columns(bins: Array, slot: Array, pairs: Array) -> Any:
        if is_sequential():
            found = jax.custom_batching.sequential_vmap(one_by_one)(bins, slot, pairs)
        else:
            found = jax.vmap(of_column, in_axes=(None, None, 0))(slot, pairs, bins)
        return jax.lax.psum(found, jax.sharding.get_abstract_mesh().manual_axes) if is_sharded else found

    is_sharded = batch_sharding(len(slot)) is not None
    found = map_rows(all_columns, len(slot), (1, 0, 0), None)(bins, slot, pairs)
    return found.reshape(bins.shape[0], num_slots, num_bins, 2)  # type: ignore[no-any-return]


def empty_tree(*shape: int) -> Tree:
    """Trees ``[..., nodes]`` of leaves with value 0."""
    floats, words = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, WORDS), jnp.uint32)
    nodes = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape)
    return Tree(jnp.full(shape, -1, jnp.int32), words, nodes, floats, floats, floats)


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

    sums: Array  # ``[nodes, 2]`` int64
    bounds: Array  # ``[nodes, 2]`` float32, of the values below
    depth: Array
    slot: Array  # where the histogram is
    split: Split  # the best; its gain is -inf if there is none
    left: Array  # the left child, or the node itself
    histogram: Array  # ``[slots, columns, bins, 2]`` int64
    children: Array  # ``[parents]``: left children made in the last round; the number of nodes is none
    row: Array  # ``[rows]``: the node of each row


def grow(bins: Array, gradient: Array, hessian: Array, columns: Array, growth: Growth) -> tuple[Tree, Array]:
    """Grows a tree, and returns it with the leaf ``[rows]`` of each row.

    In a round all nodes of a level are split, or the one with the largest gain. Only the histogram of the smaller of
    two children is summed; the other is the rest of their parent's.

    Args:
        bins: ``[columns, rows]`` uint8.
        gradient: ``[rows]``.
        hessian: ``[rows]``.
        columns: ``[columns]`` bool, those that may split.
        growth: the settings.
    """
    growth = jax.tree.map(lambda number: jnp.asarray(number, jnp.float32), growth)
    with jax.enable_x64(True):  # for sums of 64 bits: every dtype below is given
        rounded, units = zip(*map(fixed_point, (gradient, hessian)), strict=True)
        # The native form rounds too, and XLA drops the pairs.
        return _trees(bins, gradient, hessian, jnp.stack(rounded, axis=-1), jnp.stack(units), columns, growth)  # type: ignore[no-any-return]


@traced_once
def _grow_natively(
    bins: Array, gradient: Array, hessian: Array, pairs: Array, unit: Array, columns: Array, growth: Growth
) -> tuple[Tree, Array]:
    """The same tree by ``native/src/trees``: it reads the rows of the smaller children only."""
    like = jax.eval_shape(lambda: empty_tree(num_nodes(growth)))
    *tree, leaf = native_call(
        "jaxnn_grow_trees",
        [*like, jax.ShapeDtypeStruct(bins.shape[1:], jnp.int32)],
        *(bins.T, gradient, hessian, unit, columns, jnp.stack(jax.tree.leaves(growth))),
        vmap_method="expand_dims",
        max_depth=growth.max_depth,
        num_leaves=growth.num_leaves or 0,
        num_bins=growth.num_bins,
        num_categories=growth.num_categories,
        categorical=growth.categorical,
    )
    return Tree(*tree), leaf


def _unfit(bins: Array, *others: Any) -> str | None:
    if others[-1].monotone:
        return "it has no monotone constraints"
    return "the rows are sharded" if batch_sharding(bins.shape[1]) is not None else None


def _grow(
    bins: Array, gradient: Array, hessian: Array, pairs: Array, unit: Array, columns: Array, growth: Growth
) -> tuple[Tree, Array]:
    """As `grow`, from `histograms` of ``pairs [rows, 2]`` int64."""
    by_level, size = growth.num_leaves is None, num_nodes(growth)
    rounds = growth.max_depth if growth.num_leaves is None else growth.num_leaves - 1
    num_parents, num_slots = num_histograms(growth)
    at_once = 1 if is_sequential() else num_parents

    def next_round(index: Array, nodes: _Nodes) -> _Nodes:
        left, right = nodes.sums[nodes.children, 1], nodes.sums[nodes.children + 1, 1]
        small_is_left = (left <= right) | (right == 0)  # the root is a left child without a right one
        small_child = nodes.children + 1 - small_is_left
        parent = jnp.full(size, num_parents, jnp.int32)
        parent = parent.at[small_child].set(jnp.arange(num_parents, dtype=jnp.int32), mode="drop")
        small = histograms(bins, parent[nodes.row], pairs, num_parents, growth.num_bins)
        # The sums of all rows are those of the first histogram.
        nodes = nodes._replace(sums=jnp.where(index == 0, nodes.sums.at[0].set(small[0, 0].sum(axis=0)), nodes.sums))
        count = jnp.int32(1) << jnp.maximum(index - 1, 0) if by_level else jnp.int32(1)  # of parents

        def find_splits(turn: Array, nodes: _Nodes) -> _Nodes:
            first = turn * at_once
            which = first + jnp.arange(at_once, dtype=jnp.int32)
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

        nodes = jax.lax.fori_loop(jnp.int32(0), -(-count // at_once), find_splits, nodes)
        return _with_children(nodes, bins, index, growth)

    zeros, ids = jnp.zeros(size, jnp.int32), jnp.arange(size, dtype=jnp.int32)
    never = jnp.full(size, -jnp.inf, jnp.float32)
    words = jnp.zeros((size, WORDS), jnp.uint32)
    nodes = _Nodes(
        sums=jnp.zeros((size, 2), jnp.int64),
        bounds=growth.largest_step * jnp.full((size, 2), jnp.array([-1, 1], jnp.float32)),
        depth=zeros,
        slot=zeros.at[1].set(1),
        split=Split(never, zeros, words, jnp.zeros((size, 2), jnp.int64), jnp.zeros(size, jnp.float32)),
        left=ids,
        histogram=jnp.zeros((num_slots, bins.shape[0], growth.num_bins, 2), jnp.int64),
        children=jnp.full(num_parents, size, jnp.int32).at[0].set(0),
        row=jnp.zeros(bins.shape[1], jnp.int32),
    )
    nodes = jax.lax.fori_loop(jnp.int32(0), jnp.int32(rounds), next_round, nodes)
    split, is_split, sums = nodes.split, nodes.left != ids, real(nodes.sums, unit)
    tree = Tree(
        column=jnp.where(is_split, split.column, -1),
        left_bins=jnp.where(is_split[:, None], split.left_bins, jnp.uint32(0)),
        left=nodes.left,
        value=growth.learning_rate * leaf_value(sums, nodes.bounds, growth),
        gain=jnp.where(is_split, split.gain, 0.0),
        weight=sums[:, 1],
    )
    return tree, nodes.row


_trees = Kernel("trees", _grow, _grow_natively, _unfit, fallback_name="histograms", portable=False)


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
        left, right_slot, parent = 2 * ids + 1, nodes.slot + (jnp.int32(1) << index), nodes.slot
    else:
        chosen &= ids == jax.lax.argmax(gain, 0, jnp.int32)
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
        children=jnp.full(num_parents, size, jnp.int32)
        .at[jnp.where(chosen, parent, num_parents)]
        .set(child, mode="drop"),
        row=_down(split.column, split.left_bins, left, bins, nodes.row),
    )


def _child_bounds(split: Split, bounds: Array, growth: Growth) -> tuple[Array, Array]:
    """Bounds of the values below the left and the right child: a constrained split separates them by the middle."""
    way = jnp.array(growth.monotone)[split.column][:, None]
    ends, middle = jnp.array([[-1, 1]]), split.middle[:, None]  # lower and upper
    return jnp.where(way == ends, middle, bounds), jnp.where(way == -ends, middle, bounds)


def _down(column: Array, left_bins: Array, left: Array, bins: Array, node: Array) -> Array:
    """The child of ``node [rows]`` that each row of ``bins [columns, rows]`` goes to; leaves stay."""

    def down(column: Array, left_bins: Array, left: Array, bins: Array, node: Array) -> Array:
        bin_ = bins[jnp.maximum(column, 0)[node], jnp.arange(bins.shape[1])]
        word = left_bins[node, (bin_ >> 5).astype(jnp.int32)]
        is_left = (word >> (bin_ & 31).astype(jnp.uint32)) & 1 == 1
        return jnp.where(left[node] == node, node, left[node] + 1 - is_left)

    on_each = map_rows(down, node.shape[0], (None, None, None, 1, 0), 0)  # the shape is symbolic in `jax.export`
    return on_each(column, left_bins, left, bins, node)  # type: ignore[no-any-return]


def find_leaves(tree: Tree, bins: Array, max_depth: int) -> Array:
    """The leaf ``[rows]`` of each row of ``bins [columns, rows]``."""
    root = jnp.zeros(bins.shape[1], jnp.int32)
    return jax.lax.fori_loop(  # type: ignore[no-any-return]
        0, max_depth, lambda _, node: _down(tree.column, tree.left_bins, tree.left, bins, node), root
    )
