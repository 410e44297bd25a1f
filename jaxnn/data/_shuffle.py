"""The order of examples as a keyed bijection on indices: computed for any step, never stored."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import Array, DataError


def permute(positions: Array, num_examples: int, seed: Array | int, epoch: Array | int) -> Array:
    """Returns the images of ``positions`` under a keyed permutation of ``0 … num_examples - 1``.

    A generalized Feistel network over ``Z_a × Z_b`` with cycle walking: FE2 of Black & Rogaway, "Ciphers with Arbitrary
    Finite Domains" (2002). Its round function is the finalizer of MurmurHash3 (Appleby). It is not cryptographically
    secure. NumPy in, NumPy out; with a JAX array or tracer among the arguments the result is one, with the same bits:
    int32 of the shape of ``positions``. ``num_examples`` is static and at most 2³¹ - 1; ``seed`` is a scalar, and
    ``epoch`` too or broadcast against ``positions``. It takes about 60 integer operations per element, 120 if it walks.
    """
    # A float would make cycle walking endless.
    num_examples = operator.index(num_examples)
    sizes = _domain(num_examples)
    # Integer overflow is intended; NumPy warns about it for scalars.
    with np.errstate(over="ignore"):
        key = _mix(_mix(_uint32(seed)) + _uint32(epoch))
        # With these, two examples' positions are independent by chi-square tests over thousands of epochs.
        cipher = functools.partial(_rounds, num_rounds=6 if num_examples >= 1024 else 12, sizes=sizes)
        is_numpy = not isinstance(key, jax.Array) and not isinstance(positions, jax.Array)
        values = positions.astype(np.uint32) if is_numpy else jnp.asarray(positions).astype(np.uint32)
        if int(sizes[0]) * int(sizes[1]) > num_examples:
            values = _walk(values, key, cipher, np.uint32(num_examples))
        else:
            values = cipher(values, key)
    return values.astype(np.int32)


def batch_indices(seed: Array | int, steps: Array, num_examples: int, batch_size: int) -> Array:
    """Returns the indices of the examples that each step trains on, as a pure function of ``(seed, step)``.

    Step ``t`` is in epoch ``t // steps_per_epoch``. Each epoch has a different permutation and omits its remainder.

    ``seed []`` may be a tracer; ``steps [k]`` are at least 0, in any order; the sizes are static. Returns
    ``[k, batch]`` int32, NumPy for NumPy. Raises DataError if the batch is larger than the set.

    >>> indices = jn.data.batch_indices(0, np.arange(2), num_examples=5, batch_size=2)  # one epoch omits one example
    >>> indices.shape, len(set(indices.ravel().tolist()))
    ((2, 2), 4)
    """
    xp = jnp if isinstance(seed, jax.Array) or isinstance(steps, jax.Array) else np
    per_epoch = steps_per_epoch(num_examples, batch_size)
    steps = xp.asarray(steps)[:, None]
    positions = steps % per_epoch * batch_size + xp.arange(batch_size, dtype=np.int32)[None, :]
    return permute(positions, num_examples, seed, steps // per_epoch)


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """Returns the number of full batches per epoch; DataError if a batch is larger than the split or not positive."""
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, not {batch_size}.")
    if batch_size > num_examples:
        raise DataError(
            f"a batch of {batch_size} is larger than the set of {num_examples} examples: "
            f"lower batch_size to at most {num_examples}."
        )
    return num_examples // batch_size


def _walk(values: Array, key: Array, cipher: Callable[[Array, Array], Array], limit: np.uint32) -> Array:
    """Cycle walking: repeats ``cipher`` for each value until it is below ``limit``, which keeps a bijection."""
    if isinstance(values, jax.Array):

        def again(walk: tuple[Any, Any]) -> tuple[Any, Any]:
            values, is_first = walk
            return jnp.where(is_first | (values >= limit), cipher(values, key), values), False

        # One loop for the first time and the others: the cipher is compiled once.
        return jax.lax.while_loop(lambda walk: walk[1] | jnp.any(walk[0] >= limit), again, (values, True))[0]
    values = np.asarray(cipher(values, key))
    while np.any(outside := values >= limit):
        values[outside] = cipher(values[outside], np.broadcast_to(key, values.shape)[outside])
    return values


def _domain(num_examples: int) -> tuple[np.uint32, np.uint32]:
    """Returns similar ``a`` and ``b`` with the least product of at least ``num_examples``, so that few values walk."""
    root = math.isqrt(num_examples - 1) + 1 if num_examples > 1 else 1
    a = min(range(root, root - root // 5 - 1, -1), key=lambda a: -num_examples % a)
    return np.uint32(a), np.uint32(-(-num_examples // a))


def _rounds(values: Array, key: Array, num_rounds: int, sizes: tuple[np.uint32, np.uint32]) -> Array:
    """The Feistel network: a bijection of ``0 … a * b - 1`` for any round function."""
    a, b = sizes

    def two_rounds(index: Any, halves: tuple[Array, Array]) -> tuple[Array, Array]:
        left, right = halves
        for number, size in enumerate(sizes):
            round_key = _mix(key + (2 * index + number).astype(np.uint32))
            # 31 bits of a hash leave room for the sum: left < 2^16.
            total = left + (_mix(right ^ round_key) >> np.uint32(1))
            # total % size, which NumPy computes ten times slower than a quotient.
            left, right = right, total - total // size * size
        return left, right

    halves = values % a, values // a
    if isinstance(values, jax.Array):
        # Compiled as one kernel: twelve rounds in a row took half of the time to compile a small network's training.
        halves = jax.lax.fori_loop(0, num_rounds // 2, two_rounds, halves)
    else:
        for index in np.arange(num_rounds // 2):
            halves = two_rounds(index, halves)
    left, right = halves
    return right * a + left


def _mix(values: Array) -> Array:
    """MurmurHash3's 32-bit finalizer: flipping a bit of the input flips half of the output's bits on average."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))


def _uint32(value: Array | int) -> Array:
    """Returns the low 32 bits of an integer, array or tracer."""
    return np.asarray(value & 0xFFFFFFFF, np.uint32) if isinstance(value, int) else value.astype(np.uint32)
