"""The order of examples: a bijection, uniform, equal in NumPy and JAX, free of the past."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.data import batch_indices, permute, steps_per_epoch
from jaxnn.types import DataError
from tests import shell

SIZES = (1, 2, 3, 5, 7, 100, 1000, 1023, 1024, 1437, 60_000)


@pytest.mark.parametrize("num_examples", SIZES)
@pytest.mark.parametrize("seed", (0, 12345))
def test_permute_is_a_bijection(num_examples, seed):
    for epoch in (0, 1, 999):
        order = permute(np.arange(num_examples), num_examples, seed, epoch)
        assert order.dtype == np.int32
        np.testing.assert_array_equal(np.sort(order), np.arange(num_examples))


def test_permute_is_a_bijection_of_the_largest_set():
    num_examples = 2**31 - 1
    positions = np.concatenate([np.arange(1000), num_examples - 1 - np.arange(1000)])
    order = permute(positions, num_examples, 3, 4)
    assert len(np.unique(order)) == 2000
    assert order.min() >= 0
    assert order.max() > num_examples // 2


@pytest.mark.parametrize("num_examples", (1, 2, 7, 100, 1437, 60_000))
def test_numpy_and_jax_give_the_same_bits(num_examples):
    positions = np.arange(min(num_examples, 2000))
    seeds = (0, 1, -1, 2**31 + 5)
    expected = np.stack([permute(positions, num_examples, seed, 6) for seed in seeds])

    eager = permute(jnp.asarray(positions), num_examples, 2**31 + 5, 6)
    assert isinstance(eager, jax.Array)
    np.testing.assert_array_equal(eager, expected[-1])

    traced = jax.vmap(lambda seed: permute(jnp.asarray(positions), num_examples, seed, 6))
    # The low 32 bits count: 2^31 + 5 is 5 - 2^31 as an int32.
    vmapped = jax.jit(traced)(jnp.asarray([0, 1, -1, 5 - 2**31], jnp.int32))
    np.testing.assert_array_equal(vmapped, expected)


SMALL_SET = """
import jax, jax.numpy as jnp
from jaxnn.data import batch_indices

def batch(inputs, targets, seed, step):
    rows = batch_indices(seed, step[None], 240, 8)[0]
    return inputs[rows], targets[rows]

print(jax.jit(batch)(jnp.ones((240, 3)), jnp.ones((240, 2), jnp.int32), jnp.int32(0), jnp.int32(0))[0].shape)
"""


def test_a_set_of_many_rounds_is_compiled_in_a_moment():
    # In a process of its own, which is given up after two minutes: as one kernel it takes more than ten.
    assert shell.python("-c", SMALL_SET).stdout == "(8, 3)\n"


def test_an_epoch_holds_each_example_at_most_once_and_all_but_the_remainder():
    # 100 examples in batches of 32: 3 steps an epoch, 4 examples left out.
    order = batch_indices(5, np.arange(6), 100, 32)
    assert order.shape == (6, 32)
    first, second = order[:3].ravel(), order[3:].ravel()
    assert len(np.unique(first)) == len(np.unique(second)) == 96
    left_out = [set(range(100)) - set(epoch.tolist()) for epoch in (first, second)]
    assert left_out[0] != left_out[1]


def test_batch_indices_are_the_permutation_cut_into_batches():
    # Step 7 of 3 an epoch is the second of epoch 2: positions 32 to 63.
    expected = permute(np.arange(32, 64), 100, 5, 2)
    np.testing.assert_array_equal(batch_indices(5, np.array([7]), 100, 32)[0], expected)


def test_a_step_does_not_depend_on_the_ones_before_it():
    whole = batch_indices(9, np.arange(50), 1437, 32)
    steps = np.array([49, 3, 44, 0])
    np.testing.assert_array_equal(batch_indices(9, steps, 1437, 32), whole[steps])
    far = batch_indices(9, np.array([10**9]), 1437, 32)
    assert len(np.unique(far)) == 32


def test_batch_indices_of_traced_seeds_and_steps_are_those_of_numpy():
    seeds, steps = np.arange(3, dtype=np.int32), np.arange(40, 90, dtype=np.int32)
    expected = np.stack([batch_indices(int(seed), steps, 1437, 32) for seed in seeds])
    assert expected.dtype == np.int32

    def member(seed, steps):
        return batch_indices(seed, steps, 1437, 32)

    many = jax.jit(jax.vmap(member, in_axes=(0, None)))(seeds, steps)
    assert many.dtype == jnp.int32
    np.testing.assert_array_equal(many, expected)
    closed_over = jax.vmap(lambda seed: batch_indices(seed, steps, 1437, 32))(jnp.asarray(seeds))
    np.testing.assert_array_equal(closed_over, expected)


# num_epochs is chosen for some 100 expected counts a cell or more.
@pytest.mark.parametrize(("num_examples", "num_epochs"), ((3, 3000), (7, 5000), (100, 10_000)))
def test_each_example_is_equally_often_at_each_place(num_examples, num_epochs):
    epochs = np.arange(num_epochs)[:, None]
    positions = np.broadcast_to(np.arange(num_examples), (num_epochs, num_examples))
    order = permute(positions, num_examples, 11, epochs)
    counts = np.zeros((num_examples, num_examples))
    np.add.at(counts, (positions, order), 1)
    expected = num_epochs / num_examples
    statistic = np.sum((counts - expected) ** 2) / expected
    # Rows and columns have fixed sums. Chi-square has mean d and deviation sqrt(2 d).
    freedom = (num_examples - 1) ** 2
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("num_examples", (100, 1437))
def test_neighbours_in_one_epoch_are_unrelated(num_examples):
    num_epochs = 200_000 // num_examples
    epochs = np.arange(num_epochs)[:, None]
    positions = np.broadcast_to(np.arange(num_examples), (num_epochs, num_examples))
    order = permute(positions, num_examples, 11, epochs)
    distances = (order[:, 1:] - order[:, :-1]) % num_examples
    counts = np.bincount(distances.ravel(), minlength=num_examples)
    assert counts[0] == 0
    expected = distances.size / (num_examples - 1)
    statistic = np.sum((counts[1:] - expected) ** 2) / expected
    freedom = num_examples - 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_a_float_is_not_shuffled_forever():
    with pytest.raises(TypeError, match="integer"):
        permute(np.arange(3), 0.1, 0, 0)


def test_steps_per_epoch_counts_whole_batches():
    assert steps_per_epoch(100, 32) == 3
    assert steps_per_epoch(32, 32) == 1


def test_a_batch_larger_than_the_set_is_named_with_both_numbers():
    with pytest.raises(DataError, match=r"batch of 33 .* set of 32 examples"):
        batch_indices(0, np.arange(1), 32, 33)
    with pytest.raises(DataError, match="batch of 0 "):
        batch_indices(0, np.arange(1), 32, 0)


def test_a_single_position_is_permuted_as_in_company():
    for num_examples in (7, 1437):
        whole = permute(np.arange(num_examples), num_examples, 1, 2)
        alone = [int(permute(np.array(place), num_examples, 1, 2)) for place in range(7)]
        np.testing.assert_array_equal(alone, whole[:7])
