"""Arrays in memory: conversion, gathering, padding, standardization, and the order of examples as a bijection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn import data
from jaxnn.data import (
    ArraySource,
    arrays,
    batch_indices,
    check_labels,
    permute,
    split_off_validation,
    standardize,
    steps_per_epoch,
    with_augmentation,
)
from jaxnn.types import Batch, Examples

GOOD = (np.zeros((5, 2), np.float32), np.zeros(5, np.int32))


def test_dtypes_become_those_of_models():
    dtypes = {
        np.float64: (np.float32, np.float32),
        np.float16: (np.float32, np.float32),
        np.int64: (np.int32, np.int32),
        np.int8: (np.int32, np.int32),
        np.uint8: (np.uint8, np.int32),
        np.bool_: (np.float32, np.int32),
    }
    for given, expected in dtypes.items():
        values = np.array([0, 1, 1], given)
        examples = arrays((values[:, None], values)).train.examples
        assert (examples.inputs.dtype, examples.targets.dtype) == expected
        assert (examples.inputs.tolist(), examples.targets.tolist()) == ([[0], [1], [1]], [0, 1, 1])
    assert arrays((np.ones((2, 3), jnp.bfloat16), [0, 1])).train.examples.inputs.dtype == np.float32
    # Arrays of the right dtype are not copied.
    for inputs_dtype, targets_dtype in ((np.uint8, np.int32), (np.float32, np.float32)):
        inputs, targets = np.zeros((3, 2), inputs_dtype), np.zeros(3, targets_dtype)
        examples = arrays((inputs, targets)).train.examples
        assert examples.inputs is inputs and examples.targets is targets


def test_values_at_the_limits_pass():
    inputs, labels, tokens = GOOD[0], np.array([0, 1, 2, 3, 2]), np.array([[0, 1], [1, 7], [0, 0], [0, 0], [0, 0]])
    arrays(GOOD, (inputs, labels), num_classes=4)
    arrays((inputs, tokens), num_classes=8)
    arrays((inputs, tokens - 1), num_classes=7)  # -1 in a sequence is ignored
    arrays((np.array([[2**31 - 1], [-(2**31)]]), [0, 1]))
    check_labels(arrays(GOOD, (inputs, labels)), 4)
    check_labels(arrays((inputs, [0, -1, 0, 0, 0])), 1, ignore=-1)


def test_split_off_validation_takes_the_last_examples():
    pair = (np.arange(10)[:, None], np.arange(10))
    train, validation = split_off_validation(pair, 3)
    np.testing.assert_array_equal(train[1], np.arange(7))
    np.testing.assert_array_equal(validation[1], [7, 8, 9])
    np.testing.assert_array_equal(validation[0][:, 0], [7, 8, 9])
    assert split_off_validation(pair, 0) == (pair, None)
    assert len(split_off_validation(pair, 9)[0][0]) == 1


def test_standardize_uses_the_statistics_of_train():
    # Train column 0: 1, 3 -> mean 2, deviation 1. Column 1: constant. Test 5 -> (5 - 2) / 1 = 3.
    other = ([[5.0, 0.4]], [0])
    given = arrays(([[1.0, 0.1], [3.0, 0.1]], [0, 1]), other, name="mine", class_names="ab", others={"more": other})
    splits = standardize(given)
    assert (splits.name, splits.class_names) == ("mine", ("a", "b"))
    np.testing.assert_array_equal(splits.others["more"].examples.inputs, [[3, 0]])
    np.testing.assert_array_equal(splits.train.examples.inputs, [[-1, 0], [1, 0]])
    np.testing.assert_array_equal(splits.test.examples.inputs, [[3, 0]])
    assert splits.train.examples.inputs.dtype == np.float32
    np.testing.assert_array_equal(splits.train.examples.targets, [0, 1])
    # It is accurate far from zero: 0 … 4 have mean 2 and variance 2.
    offsets = np.arange(1000) % 5
    result = standardize(arrays(((1e6 + offsets[:, None]).astype(np.float32), offsets))).train.examples.inputs
    np.testing.assert_allclose(result[:, 0], (offsets - 2) / np.sqrt(2), rtol=1e-6)


def test_with_augmentation_changes_only_training_inputs_in_order():
    first = with_augmentation(arrays(GOOD, GOOD), lambda key, batch: batch._replace(inputs=batch.inputs + 1))
    splits = with_augmentation(first, lambda key, batch: batch._replace(inputs=batch.inputs * 2))
    assert splits.test.augment is None
    batch = Batch(np.full((1, 2), 3.0, np.float32), np.zeros(1), np.ones(1))
    changed = splits.train.transform(batch, jax.random.key(0))
    # (3 + 1) * 2, and not 3 * 2 + 1.
    np.testing.assert_array_equal(changed.inputs, [[8.0, 8.0]])
    assert changed.targets is batch.targets and changed.mask is batch.mask
    assert splits.test.transform(batch, jax.random.key(0)) is batch


def test_inputs_and_targets_may_be_trees():
    texts = np.arange(8).reshape(4, 2)
    inputs = {"image": np.zeros((4, 3), np.uint8), "nested": (texts, [True, False, True, True])}
    source = arrays((inputs, {"class": [0, 1, 2, 0]})).train
    assert source.num_examples == 4
    batch = jax.device_get(jax.jit(source.gather)(source.examples, np.array([2, 0])))
    assert batch.inputs["image"].dtype == np.float32 and batch.inputs["nested"][0].tolist() == [[4, 5], [0, 1]]
    assert batch.inputs["nested"][1].tolist() == [1.0, 1.0] and batch.targets["class"].tolist() == [2, 0]
    alone = arrays(train=inputs)
    assert alone.train.targets is None and alone.train.as_batch(alone.train.examples).targets is None
    assert repr(alone) == (
        "Splits(arrays: 4 train, inputs {image: uint8 [3], nested.0: int32 [2], nested.1: float32 []})"
    )


def test_gather_takes_rows_and_scales_bytes():
    examples = Examples(np.arange(256, dtype=np.uint8)[:, None], np.arange(256, dtype=np.int32))
    floats = Examples(np.array([[3], [-7]], np.int32), np.array([0.5, 1.5]))
    indices, mask = np.arange(256, dtype=np.int32)[::-1].copy(), np.zeros(2, np.float32)

    @jax.jit
    def gather(examples, floats):
        source = ArraySource(examples)
        return source.gather(examples, indices), source.gather(floats, np.array([1, 4]), mask)

    batch, clipped = jax.device_get(gather(examples, floats))
    assert (batch.inputs.dtype, batch.mask.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(batch.inputs[:, 0], np.arange(256)[::-1] / 255, rtol=1e-6)
    assert (batch.inputs[0, 0], batch.inputs[255, 0]) == (1.0, 0.0)
    np.testing.assert_array_equal(batch.targets, indices)
    np.testing.assert_array_equal(batch.mask, np.ones(256))
    # Integers stay; an index out of range is clipped.
    assert clipped.inputs.dtype == np.int32 and clipped.inputs.tolist() == [[-7], [-7]]
    assert clipped.targets.tolist() == [1.5, 1.5] and clipped.mask.tolist() == [0, 0]


def test_padded_indices_have_each_example_once():
    for size, indices, masked in (
        (3, [[0, 1, 2], [3, 4, 5], [6, 0, 0]], [[1, 1, 1], [1, 1, 1], [1, 0, 0]]),
        (7, [[0, 1, 2, 3, 4, 5, 6]], [[1] * 7]),
        (9, [[0, 1, 2, 3, 4, 5, 6, 0, 0]], [[1] * 7 + [0] * 2]),
    ):
        found, mask = data.padded_indices(7, size)
        assert (found.tolist(), mask.tolist(), found.dtype, mask.dtype) == (indices, masked, np.int32, np.float32)


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


# With and without cycle walking, of twelve rounds and of six.
@pytest.mark.parametrize("num_examples", (7, 240, 1437, 60_000))
def test_numpy_and_jax_give_the_same_bits_for_traced_seeds_and_steps(num_examples):
    steps = np.arange(200, 210, dtype=np.int32)
    # The low 32 bits of a seed count: 2^31 + 5 is 5 - 2^31 as an int32.
    expected = np.stack([batch_indices(seed, steps, num_examples, 7) for seed in (0, 1, -1, 2**31 + 5)])
    many = jax.vmap(lambda seed, steps: batch_indices(seed, steps, num_examples, 7), in_axes=(0, None))
    seeds = np.array([0, 1, -1, 5 - 2**31], np.int32)
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
