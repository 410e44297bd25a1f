"""The order of examples as a keyed bijection on indices: computed for any step, never stored."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.types import Array, DataError

# A round's values are used by the two after it: LLVM's time for a kernel grows exponentially with its rounds, from
# tenths of a second for six to more than ten minutes for twelve, where a side of the domain is a power of two.
_ROUNDS_PER_KERNEL = 6


def permute(positions: Array, num_examples: int, seed: Array | int, epoch: Array | int) -> Array:
    """The images of ``positions`` under a keyed permutation of ``0 … num_examples - 1``.

    A generalized Feistel network over ``Z_a × Z_b`` with cycle walking: FE2 of Black & Rogaway, "Ciphers with Arbitrary
    Finite Domains" (2002), its round function the finalizer of MurmurHash3 (Appleby). It shuffles; it keeps no secrets.
    NumPy in, NumPy out; a JAX array or tracer among the arguments makes the result one, with the same bits. Cost: some
    60 integer operations an element, twice that if values walk; no memory of size ``num_examples``.

    ``positions`` are integers of any shape; ``num_examples`` is static and at most 2³¹ - 1. Of the integers ``seed []``
    and ``epoch``, which is ``[]`` or has the rank of ``positions`` and is broadcast against it, the low 32 bits are
    used. Returns int32 of the shape of ``positions``.
    """
    # A float would make the search for a permutation endless.
    num_examples = operator.index(num_examples)
    sizes = _domain(num_examples)
    # NumPy warns of wrap-around, which is meant here, for scalars though not for arrays.
    with np.errstate(over="ignore"):
        key = _mix(_mix(_uint32(seed)) + _uint32(epoch))
        # With these, two examples' places look independent by chi-square over thousands of epochs.
        num_rounds = 6 if num_examples >= 1024 else 12
        keys = [_mix(key + np.uint32(index)) for index in range(num_rounds)]
        values = _rounds(positions.astype(np.uint32), keys, sizes)
        if int(sizes[0]) * int(sizes[1]) > num_examples:
            values = _walk(values, keys, sizes, np.uint32(num_examples))
    return values.astype(np.int32)


def batch_indices(seed: Array | int, steps: Array, num_examples: int, batch_size: int) -> Array:
    """The indices of the examples that each step trains on, as a pure function of ``(seed, step)``.

    Step ``t`` is in epoch ``t // steps_per_epoch``. Each epoch has a different permutation and omits its remainder.

    ``seed []`` may be a tracer; ``steps [k]`` are at least 0, in any order; the sizes are static. Returns
    ``[k, batch]`` int32, NumPy for NumPy. Raises DataError if the batch is larger than the set.
    """
    xp = jnp if isinstance(seed, jax.Array) or isinstance(steps, jax.Array) else np
    per_epoch = steps_per_epoch(num_examples, batch_size)
    steps = xp.asarray(steps)[:, None]
    positions = steps % per_epoch * batch_size + xp.arange(batch_size, dtype=np.int32)[None, :]
    return permute(positions, num_examples, seed, steps // per_epoch)


def steps_per_epoch(num_examples: int, batch_size: int) -> int:
    """The number of full batches of a set; DataError if the batch is larger than the set, or not positive."""
    if batch_size < 1:
        raise DataError(f"a batch of {batch_size} holds no example: batch_size must be at least 1.")
    if batch_size > num_examples:
        raise DataError(
            f"a batch of {batch_size} is larger than the set of {num_examples} examples: "
            f"lower batch_size to at most {num_examples}."
        )
    return num_examples // batch_size


def _walk(values: Array, keys: Sequence[Array], sizes: tuple[np.uint32, np.uint32], limit: np.uint32) -> Array:
    """Sends each value on until it is below ``limit``: a bijection of what is below it."""
    if isinstance(values, jax.Array):
        return jax.lax.while_loop(
            lambda values: jnp.any(values >= limit),
            lambda values: jnp.where(values >= limit, _rounds(values, keys, sizes), values),
            values,
        )
    values = np.asarray(values)
    while np.any(outside := values >= limit):
        own_keys = [np.broadcast_to(key, values.shape)[outside] for key in keys]
        values[outside] = _rounds(values[outside], own_keys, sizes)
    return values


def _domain(num_examples: int) -> tuple[np.uint32, np.uint32]:
    """``a`` and ``b`` of similar size with the least product not below ``num_examples``: then fewer values walk."""
    root = math.isqrt(num_examples - 1) + 1 if num_examples > 1 else 1
    a = min(range(root, root - root // 5 - 1, -1), key=lambda a: -num_examples % a)
    return np.uint32(a), np.uint32(-(-num_examples // a))


def _rounds(values: Array, keys: Sequence[Array], sizes: tuple[np.uint32, np.uint32]) -> Array:
    """The Feistel network: a bijection of ``0 … a * b - 1`` for any round function."""
    a, b = sizes
    left, right = values % a, values // a
    for index, key in enumerate(keys):
        if index and index % _ROUNDS_PER_KERNEL == 0 and isinstance(left, jax.Array):
            left, right = jax.lax.optimization_barrier((left, right))
        size = a if index % 2 == 0 else b
        # Half a hash (31 bits) leaves room for the sum: left < 2^16.
        total = left + (_mix(right ^ key) >> np.uint32(1))
        # The remainder, written so because NumPy's own takes ten times a quotient's time.
        left, right = right, total - total // size * size
    return right * a + left


def _mix(values: Array) -> Array:
    """MurmurHash3's 32-bit finalizer: each bit of the input flips half of the output's."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))


def _uint32(value: Array | int) -> Array:
    """The low 32 bits of an integer, array or tracer."""
    return np.asarray(value & 0xFFFFFFFF, np.uint32) if isinstance(value, int) else value.astype(np.uint32)
