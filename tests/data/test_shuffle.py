"""The order of examples: a bijection, uniform, equal in NumPy and JAX, a function of seed and step alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.data import batch_indices, permute, steps_per_epoch
from jaxnn.types import DataError
from tests import shell


@pytest.mark.parametrize("num_examples", (1, 2, 3, 5, 7, 100, 1000, 1023, 1024, 1437, 60_000))
def test_permute_is_a_bijection(num_examples):
    for seed, epoch in ((0, 0), (0, 1), (12345, 999)):
        order = permute(np.arange(num_examples), num_examples, seed, epoch)
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(num_examples))
        # Positions are permuted one at a time as all together.
        assert permute(np.array(num_examples // 2), num_examples, seed, epoch) == order[num_examples // 2]


def test_permutations_of_the_largest_set_and_of_former_releases():
    positions = np.concatenate([np.arange(1000), 2**31 - 2 - np.arange(1000)])
    order = permute(positions, 2**31 - 1, 3, 4)
    assert len(np.unique(order)) == 2000 and order.min() >= 0 and order.max() > 2**30
    # Resuming a run relies on these.
    assert permute(np.arange(7), 7, 0, 0).tolist() == [0, 1, 5, 2, 3, 6, 4]
    assert permute(np.arange(4), 1024, 1, 2).tolist() == [107, 675, 761, 680]
    assert permute(np.arange(4), 1437, 1, 2).tolist() == [745, 596, 667, 1257]


# The low 32 bits of a seed count: 2^31 + 5 is 5 - 2^31 as an int32.
@pytest.mark.parametrize("num_examples", (1, 7, 100, 1437))
def test_numpy_and_jax_give_the_same_bits(num_examples):
    positions = np.arange(16) % num_examples
    expected = np.stack([permute(positions, num_examples, seed, 6) for seed in (0, 1, -1, 2**31 + 5)])
    vmapped = jax.jit(jax.vmap(lambda seed: permute(jnp.asarray(positions), num_examples, seed, 6)))
    found = vmapped(jnp.asarray([0, 1, -1, 5 - 2**31], jnp.int32))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, expected)


def test_batch_indices_of_traced_seeds_and_steps_are_those_of_numpy():
    seeds, steps = np.arange(3, dtype=np.int32), np.arange(40, 90, dtype=np.int32)
    expected = np.stack([batch_indices(int(seed), steps, 1437, 32) for seed in seeds])
    assert expected.dtype == np.int32
    many = jax.jit(jax.vmap(lambda seed, steps: batch_indices(seed, steps, 1437, 32), in_axes=(0, None)))
    np.testing.assert_array_equal(many(seeds, steps), expected)


SMALL_SET = """
import jax, jax.numpy as jnp
from jaxnn.data import batch_indices

def batch(inputs, targets, seed, step):
    rows = batch_indices(seed, step[None], 240, 8)[0]
    return inputs[rows], targets[rows]

print(jax.jit(batch)(jnp.ones((240, 3)), jnp.ones((240, 2), jnp.int32), jnp.int32(0), jnp.int32(0))[0].shape)
"""


def test_many_rounds_compile_quickly():
    # In another process, with a time limit of two minutes: as one kernel it takes more than ten.
    assert shell.python("-c", SMALL_SET).stdout == "(8, 3)\n"


def test_an_epoch_has_each_example_at_most_once():
    # 100 examples in batches of 32: 3 steps per epoch, 4 examples left out.
    order = batch_indices(5, np.arange(6), 100, 32)
    assert order.shape == (6, 32)
    first, second = order[:3].ravel(), order[3:].ravel()
    assert len(np.unique(first)) == len(np.unique(second)) == 96
    assert set(first.tolist()) != set(second.tolist())
    # Step 7 is the second of epoch 2: positions 32 to 63.
    expected = permute(np.arange(32, 64), 100, 5, 2)
    np.testing.assert_array_equal(batch_indices(5, np.array([7]), 100, 32)[0], expected)


def test_a_step_does_not_depend_on_the_ones_before_it():
    order = batch_indices(9, np.arange(50), 1437, 32)
    steps = np.array([49, 3, 44, 0])
    np.testing.assert_array_equal(batch_indices(9, steps, 1437, 32), order[steps])
    assert len(np.unique(batch_indices(9, np.array([10**9]), 1437, 32))) == 32


# num_epochs is chosen for about 100 expected counts per cell or more.
@pytest.mark.parametrize(("num_examples", "num_epochs"), ((3, 3000), (7, 5000), (100, 10_000)))
def test_examples_and_distances_are_uniform_by_chi_square(num_examples, num_epochs):
    positions = np.broadcast_to(np.arange(num_examples), (num_epochs, num_examples))
    order = permute(positions, num_examples, 11, np.arange(num_epochs)[:, None])
    counts = np.zeros((num_examples, num_examples))
    np.add.at(counts, (positions, order), 1)
    expected = num_epochs / num_examples
    statistic = np.sum((counts - expected) ** 2) / expected
    # Rows and columns have fixed sums. Chi-square has mean d and deviation sqrt(2 d).
    freedom = (num_examples - 1) ** 2
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)
    if num_examples == 100:
        # Neighbours in an epoch are unrelated.
        counts = np.bincount(((order[:2000, 1:] - order[:2000, :-1]) % 100).ravel(), minlength=100)
        expected = counts.sum() / 99
        statistic = np.sum((counts[1:] - expected) ** 2) / expected
        assert counts[0] == 0 and abs(statistic - 98) < 5 * np.sqrt(2 * 98)


def test_bad_sizes_raise():
    assert (steps_per_epoch(100, 32), steps_per_epoch(32, 32)) == (3, 1)
    for size, message in ((33, r"batch of 33 .* set of 32 examples.* at most 32"), (0, "batch_size must be .* not 0")):
        with pytest.raises(DataError, match=message):
            batch_indices(0, np.arange(1), 32, size)
    with pytest.raises(TypeError, match="integer"):
        permute(np.arange(3), 0.1, 0, 0)
