"""Random arrays by NumPy, for JAX compiles a draw of its own for each shape, and the comparison of trees.

`jax.device_put` compiles nothing; `jnp.asarray` compiles a program for each shape.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from PIL import Image


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Of mean 0 and variance 1."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def uniform(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Between 0 and 1."""
    return jax.device_put(np.random.default_rng(seed).random(shape).astype(dtype))


def integers(seed: int, stop: int, *shape: int) -> jax.Array:
    """From 0 on, below ``stop``."""
    return jax.device_put(np.random.default_rng(seed).integers(0, stop, shape))


def variables(model: linen.Module, *inputs: Any) -> Any:
    """Variables of ``model``, none of them zero; all but kernels and embeddings are positive, as a variance must be."""
    shapes = linen.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs))
    numbers = np.random.default_rng(0)

    def fill(path: Any, leaf: Any) -> jax.Array:
        lowest = -1.0 if path[-1].key in ("kernel", "embedding") else 0.2
        return jax.device_put(numbers.uniform(lowest, 1.0, leaf.shape).astype(leaf.dtype))

    with jax.ensure_compile_time_eval():  # callers keep them, also while they trace
        return jax.tree.map_with_path(fill, shapes)


def write_images(folder: Path, counts: Mapping[str, int], shape: tuple[int, ...]) -> None:
    """Writes ``counts`` of each split: images of noise, half of them cats, half dogs, named by their numbers."""
    numbers = np.random.default_rng(0)
    for split, count in counts.items():
        for index in range(count):
            path = folder / split / ("cats" if index < count // 2 else "dogs") / f"{index:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numbers.integers(0, 256, shape, np.uint8)).save(path)


def graded(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """``(*arrays) -> (outputs, gradients)`` by all arrays, of the sum of the outputs times their `weights`."""

    def run(*arrays: Any) -> tuple[Any, Any]:
        outputs, pull = jax.vjp(function, *arrays)
        return outputs, pull(weights(outputs))

    return run


def weights(outputs: Any) -> Any:
    """A factor for each element."""
    return jax.tree.map(lambda leaf: normal(leaf.size, *leaf.shape, dtype=leaf.dtype), outputs)


def assert_near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Of the same shapes and dtypes, and equal to ``tolerance`` of each array's largest element."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        ours, theirs = np.float32(ours), np.float32(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max(initial=0))


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5, atol: float | None = None, name: str = "") -> None:
    """Of equal structure, shapes and dtypes; equal to a relative ``tolerance`` or to ``atol``, by default the same."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    how = {"rtol": tolerance, "atol": tolerance if atol is None else atol, "err_msg": name}
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype), name
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_allclose(np.float64(left), np.float64(right), **how)
