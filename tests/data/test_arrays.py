"""Arrays in memory: conversion of the user's arrays, gathering, padding, standardization."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn import data
from jaxnn.data import ArraySource, arrays, check_labels, split_off_validation, standardize, with_augmentation
from jaxnn.types import Batch, Examples

GOOD = (np.zeros((5, 2), np.float32), np.zeros(5, np.int32))


def test_splits_have_the_given_arrays_names_and_a_short_repr():
    parts = {size: (np.ones((size, 3), np.float32), np.arange(size) % 2) for size in (2, 3, 4)}
    splits = arrays(parts[4], parts[2], parts[3], name="mine", class_names=["no", "yes"])
    assert (splits.name, splits.class_names) == ("mine", ("no", "yes"))
    assert repr(splits) == "Splits(mine: 4 train, 3 validation, 2 test, inputs float32 [3], 2 classes)"
    assert repr(arrays(parts[2])) == "Splits(arrays: 2 train, inputs float32 [3])"
    assert arrays(parts[2]).test is None
    np.testing.assert_array_equal(splits.train.targets, [0, 1, 0, 1])


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
    splits = standardize(arrays(([[1.0, 0.1], [3.0, 0.1]], [0, 1]), other, others={"more": other}))
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
