"""How far the arrays of two trees are from each other, bit by bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import TrainState, is_key, named_leaves


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """An array that differs."""

    leaf: str  # its path, such as ``params/Dense_0/kernel``
    numbers: int  # how many of its numbers differ
    of: int  # how many it has
    ulp: int | None  # the largest distance in units of the last place; None: it has no floats, or another shape
    shapes: tuple[str, str] | None = None  # both, if they differ; None: they are equal

    def __str__(self) -> str:
        if self.shapes is not None:
            return f"{self.leaf} ({self.shapes[0]} → {self.shapes[1]})"
        apart = "" if self.ulp is None else f", by up to {self.ulp:,} ulp"
        return f"{self.leaf} ({self.numbers:,} of {self.of:,} numbers{apart})"


def leaf_differences(one: Any, other: Any) -> list[LeafDifference]:
    """The arrays that differ in two states, but for their keys, or in two other trees."""
    nothing: Any = None
    trees = [
        tree._replace(step=nothing, key=nothing) if isinstance(tree, TrainState) else tree for tree in (one, other)
    ]
    leaves = [{name: plain(leaf) for name, leaf in named_leaves(tree).items()} for tree in trees]
    found = []
    for name in dict.fromkeys([*leaves[0], *leaves[1]]):
        a, b = (each.get(name, np.zeros(0)) for each in leaves)
        if a.shape != b.shape or a.dtype != b.dtype:
            size, (old, new) = max(a.size, b.size), (f"{x.dtype}{list(x.shape)}" for x in (a, b))
            found.append(LeafDifference(name, size, size, None, (old, new)))
        elif wrong := int(np.count_nonzero(_bits(a) != _bits(b))):
            found.append(LeafDifference(name, wrong, a.size, _most_ulp(a, b)))
    return found


def plain(leaf: Any) -> np.ndarray:
    """A leaf on the host, with an axis at least; a key as its data."""
    return np.atleast_1d(np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{min(8, array.dtype.itemsize)}")


def _most_ulp(a: np.ndarray, b: np.ndarray) -> int | None:
    """The largest distance of two arrays of floats, counted in numbers of their format between them."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return None
    half = 1 << (8 * a.dtype.itemsize - 1)
    # Of different ones only: Python's integers have the bits for a difference of two of 64.
    places = [_bits(each)[_bits(a) != _bits(b)].astype(object) for each in (a, b)]
    ordered = [np.where(each >= half, half - each, each) for each in places]
    return int(np.abs(ordered[0] - ordered[1]).max())
