"""Comparison of results that must agree, and the report of the checks that failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import ConfigError, JaxnnError, error_line, is_key, path_name, suggest

# Largest difference that numbers of 8 bits may make of a loss or an output, in units of 1 plus its size.
BFLOAT16_TOLERANCE = 0.1

PASSED = "passed"
_REMEDIES = {
    "jit": "the function depends on more than its arguments, such as a global, or on Python numbers made of arrays",
    "trace": "what a step returns must have the structure, shapes and dtypes of what it gets",
    "vmap": "a rule, callback or constant treats the members as one; see jax.custom_batching and jax.pure_callback",
    "parameters": "the loss does not depend on the parameter, or it overflows",
    "gradient": "the output does not depend on the parameter, it overflows, or a custom derivative is wrong",
    "padding": "multiply the values of each example by batch.mask before they are summed",
    "padded step": "divide sums of values * batch.mask by batch.mask.sum()",
    "sums": "return sums over the examples and their number, not means: (values * batch.mask).sum(), batch.mask.sum()",
    "bfloat16": "sum many numbers and take exponentials in float32",
    "devices": "the function computes something else when XLA shards its rows",
    "pmap": "it couples the examples of a batch, draws random numbers itself, or is no mean over equally many numbers "
    "on each device: use strategy='data', or layers of jaxnn.nn",
    "description": "shares ascend to 1, and settings are what JSON can hold",
    "proposals": "see jn.search.Searcher for what may be proposed",
    "pure": "keep everything in the state, and draw by a generator that is made from it",
    "end": "propose nothing when there is nothing to propose",
    "losses": "a member that diverged is over, with an infinite value",
    "rows": "an output depends on other examples: leave the check out if that is meant",
}


class ConformanceError(JaxnnError, AssertionError):
    """A function that does not do what jaxnn relies on: a line for each check that failed."""


def run_checks(name: str, known: Mapping[str, Callable[[], str | None]], checks: Sequence[str]) -> dict[str, str]:
    """Runs ``checks``, each of which returns what it found or None, or raises `LeftOut`."""
    checks = (checks,) if isinstance(checks, str) else checks
    if unknown := [check for check in checks if check not in known]:
        raise ConfigError(f"{name} has no check {unknown[0]!r}: {suggest(unknown[0], known)}.")
    results, failed, cause = dict[str, str](), dict[str, list[str]](), None
    for check in checks:
        try:
            fault = known[check]()
            results[check] = PASSED
        except LeftOut as reason:
            fault, results[check] = None, str(reason)
        # The user's code: what it raises is the result of the check.
        except Exception as error:
            cause, fault = error, None
            failed.setdefault(error_line(error), []).append(check)
        if fault is not None:
            failed.setdefault(f"{fault}: {_REMEDIES[check]}", []).append(check)
    if failed:
        count = f"{sum(map(len, failed.values()))} of {len(checks)} checks failed"
        lines = (f"{', '.join(names)}: {text}" for text, names in failed.items())
        raise ConformanceError("\n".join([f"{name}: {count}.", *lines])) from cause
    return results


class LeftOut(Exception):
    """The reason why a check cannot be done here."""


def difference(found: Any, expected: Any, tolerance: float, ways: str) -> str | None:
    """The first array of ``found`` that is not that of ``expected``, and by how much."""
    found, expected = jax.device_get(
        jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, (found, expected))
    )
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    if structures[0] != structures[1]:
        return f"the results have another structure {ways}"
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        name = path_name(path) or "the result"
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{name} is {one.dtype} {list(one.shape)} {ways}, not {other.dtype} {list(other.shape)}"
        one, other = np.float64(one), np.float64(other)
        wrong = ~np.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        if wrong.any():
            at = int(np.argmax(wrong))
            return f"{name} is {np.ravel(one)[at]:.6g} {ways}, not {np.ravel(other)[at]:.6g}"
    return None


def at(tree: Any, *place: Any) -> Any:
    """The entries of each array of ``tree`` at ``place``."""
    return jax.tree.map(lambda leaf: leaf[place], tree)


def stacked(*trees: Any) -> Any:
    """``trees`` as one, of arrays with a first axis for them."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves) if is_key(leaves[0]) else np.stack(leaves), *trees)


def moved(tree: Any, size: float) -> Any:
    """Other numbers: up to ``size`` is added to each float, the same each time, and rows of integers are reversed."""
    numbers = np.random.default_rng(0)

    def move(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return (leaf + numbers.uniform(-size, size, leaf.shape)).astype(leaf.dtype)
        return leaf[::-1] if leaf.ndim else leaf

    return jax.tree.map(move, tree)


def cast(tree: Any, dtype: Any) -> Any:
    """``tree`` with its floating-point arrays in ``dtype``."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
