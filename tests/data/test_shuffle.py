"""The order of examples: a bijection, uniform, equal in NumPy and JAX, a function of seed and step alone."""

import jax
import numpy as np
import pytest

from jaxnn.data import batch_indices, permute, steps_per_epoch


@pytest.mark.parametrize("num_examples", (1, 2, 3, 7, 100, 1023, 1024, 1437, 60_000))
def test_permute_is_a_bijection(num_examples):
    for seed, epoch in ((0, 0), (12345, 999)):
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


# With and without cycle walking; with the rounds in one kernel, 240 examples take minutes to compile.
@pytest.mark.parametrize(("num_examples", "num_barriers"), ((7, 2), (240, 1), (1437, 0)))
def test_numpy_and_jax_give_the_same_bits_for_traced_seeds_and_steps(num_examples, num_barriers):
    steps = np.arange(200, 210, dtype=np.int32)
    # The low 32 bits of a seed count: 2^31 + 5 is 5 - 2^31 as an int32.
    expected = np.stack([batch_indices(seed, steps, num_examples, 7) for seed in (0, 1, -1, 2**31 + 5)])
    many = jax.vmap(lambda seed, steps: batch_indices(seed, steps, num_examples, 7), in_axes=(0, None))
    seeds = np.array([0, 1, -1, 5 - 2**31], np.int32)
    assert str(jax.make_jaxpr(many)(seeds, steps)).count("optimization_barrier") == num_barriers
    found = jax.jit(many)(seeds, steps)
    assert found.dtype == expected.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


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
    # A step does not depend on the ones before it.
    steps = np.array([5, 3, 4, 0])
    np.testing.assert_array_equal(batch_indices(5, steps, 100, 32), order[steps])
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


def test_part_of_a_batch_at_the_end_of_an_epoch_is_left_out():
    assert (steps_per_epoch(100, 32), steps_per_epoch(32, 32)) == (3, 1)
    with pytest.raises(TypeError, match="integer"):
        permute(np.arange(3), 0.1, 0, 0)
