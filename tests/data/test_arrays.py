"""The user's arrays: what becomes of good ones, and the one sentence about each bad kind."""

import jax
import numpy as np
import pytest

from jaxnn import data as augment
from jaxnn.data import arrays, check_batch_size, check_labels, split_off_validation, standardize, with_augmentation
from jaxnn.types import Batch, DataError, Splits


def pair(num_examples=4, num_features=3):
    inputs = np.arange(num_examples * num_features, dtype=np.float32)
    return inputs.reshape(num_examples, num_features), np.arange(num_examples) % 2


def test_splits_hold_what_was_given_under_the_names_it_was_given():
    splits = arrays(pair(4), pair(2), pair(3), name="mine", class_names=["no", "yes"])
    assert {name: source.num_examples for name, source in splits.named().items()} == {
        "train": 4,
        "validation": 3,
        "test": 2,
    }
    assert (splits.name, splits.class_names) == ("mine", ("no", "yes"))
    assert arrays(pair()).test is None
    np.testing.assert_array_equal(splits.train.examples.inputs, pair(4)[0])


@pytest.mark.parametrize(
    ("given", "inputs_dtype", "targets_dtype"),
    (
        (np.float64, np.float32, np.float32),
        (np.float16, np.float32, np.float32),
        (np.float32, np.float32, np.float32),
        (np.int64, np.int32, np.int32),
        (np.int8, np.int32, np.int32),
        (np.uint16, np.int32, np.int32),
        (np.uint8, np.uint8, np.int32),
        (np.bool_, np.float32, np.int32),
    ),
)
def test_dtypes_become_those_a_model_takes(given, inputs_dtype, targets_dtype):
    values = np.array([0, 1, 1], given)
    examples = arrays((values[:, None], values)).train.examples
    assert (examples.inputs.dtype, examples.targets.dtype) == (inputs_dtype, targets_dtype)
    np.testing.assert_array_equal(examples.inputs, [[0], [1], [1]])
    np.testing.assert_array_equal(examples.targets, [0, 1, 1])


def test_arrays_of_the_right_dtype_are_not_copied_and_others_converted():
    examples = arrays((jax.numpy.ones((2, 3), jax.numpy.bfloat16), [0, 1])).train.examples
    assert isinstance(examples.inputs, np.ndarray) and examples.inputs.dtype == np.float32
    for inputs_dtype, targets_dtype in ((np.uint8, np.int32), (np.float32, np.float32)):
        inputs, targets = np.zeros((3, 2), inputs_dtype), np.zeros(3, targets_dtype)
        examples = arrays((inputs, targets)).train.examples
        assert examples.inputs is inputs
        assert examples.targets is targets


def with_value(value, dtype=np.float32):
    inputs = np.zeros((5, 2), dtype)
    inputs[3, 1] = value
    return inputs


GOOD = (np.zeros((5, 2), np.float32), np.zeros(5, np.int32))


@pytest.mark.parametrize(
    ("splits", "message"),
    (
        ({"train": np.zeros((2, 5))}, "train must be a pair .* not one ndarray"),
        ({"train": None}, "train must be a pair .* not one NoneType"),
        ({"train": (GOOD[0],)}, "train must be a pair .* not one tuple of 1"),
        ({"train": (GOOD[0], np.zeros(4, int))}, "train has 5 inputs but 4 targets"),
        ({"train": (np.zeros((0, 2)), np.zeros(0))}, r"train inputs: empty, of shape \(0, 2\)"),
        ({"train": GOOD, "test": ([], [])}, "test inputs: empty"),
        ({"train": (3.0, GOOD[1])}, "train inputs: one float, not an array"),
        ({"train": ([[1, 2], [3]], [0, 1])}, "train inputs: not one array but a list"),
        ({"train": (with_value(np.nan), GOOD[1])}, r"train inputs: NaN .* example 3 \(such examples: 1\)"),
        ({"train": GOOD, "test": (with_value(-np.inf), GOOD[1])}, "test inputs: .* example 3"),
        ({"train": (with_value(1e300, float), GOOD[1])}, "infinity .as float32. in example 3"),
        ({"train": (GOOD[0], [0.0, np.nan, 0, 0, 0])}, "train targets: NaN .* example 1"),
        ({"train": (GOOD[0], [0, 1, -1, 0, 0]), "num_classes": 2}, "label -1 of example 2 in train .* 0 to 1"),
        ({"train": (with_value(2**31, int), GOOD[1])}, "train inputs: .* beyond int32 in example 3"),
        ({"train": (GOOD[0], [0, 0, 0, 0, -(2**40)])}, "targets: .* beyond int32 in example 4"),
        ({"train": (GOOD[0], list("abcde"))}, "train targets: dtype <U1"),
        ({"train": (np.full((5, 2), None), GOOD[1])}, "train inputs: dtype object"),
        ({"train": (GOOD[0] * 1j, GOOD[1])}, "train inputs: dtype complex64"),
        (
            {"train": GOOD, "test": (np.zeros((5, 3), np.float32), GOOD[1])},
            r"inputs of test is float32 \(3,\) .* those of train is float32 \(2,\)",
        ),
        (
            {"train": GOOD, "validation": (np.zeros((5, 2), np.uint8), GOOD[1])},
            "inputs of validation is uint8 .* those of train is float32",
        ),
        ({"train": GOOD, "test": (GOOD[0], np.zeros(5))}, "targets of test is float32 .* those of train is int32"),
    ),
)
def test_bad_data_are_named(splits, message):
    with pytest.raises(DataError, match=message) as caught:
        arrays(**splits)
    assert "\n" not in str(caught.value)


def test_standardized_columns_have_mean_0_and_variance_1_over_train():
    # Train column 0: 1, 3 -> mean 2, deviation 1. Column 1: constant. Test 5 -> (5 - 2) / 1 = 3.
    train = (np.array([[1.0, 0.1], [3.0, 0.1]]), [0, 1])
    test = (np.array([[5.0, 0.4]]), [0])
    splits = standardize(arrays(train, test))
    np.testing.assert_array_equal(splits.train.examples.inputs, [[-1, 0], [1, 0]])
    np.testing.assert_array_equal(splits.test.examples.inputs, [[3, 0]])
    assert splits.train.examples.inputs.dtype == np.float32
    np.testing.assert_array_equal(splits.train.examples.targets, [0, 1])


def test_standardized_is_accurate_far_from_zero():
    offsets = np.arange(1000) % 5
    values = (1e6 + offsets[:, None]).astype(np.float32)
    result = standardize(arrays((values, np.zeros(1000, int)))).train.examples.inputs
    # 0 … 4 have mean 2 and variance 2.
    np.testing.assert_allclose(result[:, 0], (offsets - 2) / np.sqrt(2), rtol=1e-6)


def test_augmented_changes_training_only_and_composes_in_order():
    def plus_one(key, inputs):
        return inputs + 1

    def double(key, inputs):
        return inputs * 2

    splits = with_augmentation(with_augmentation(arrays(GOOD, GOOD), plus_one), double)
    assert splits.test.augment is None
    batch = Batch(np.full((1, 2), 3.0), np.zeros(1), np.ones(1))
    changed = splits.train.transform(batch, jax.random.key(0))
    # (3 + 1) * 2, and not 3 * 2 + 1.
    np.testing.assert_array_equal(changed.inputs, [[8.0, 8.0]])


def test_hold_out_takes_the_last_examples():
    inputs, targets = np.arange(10)[:, None], np.arange(10)
    train, validation = split_off_validation((inputs, targets), 3)
    np.testing.assert_array_equal(train[1], np.arange(7))
    np.testing.assert_array_equal(validation[1], [7, 8, 9])
    np.testing.assert_array_equal(validation[0][:, 0], [7, 8, 9])
    assert split_off_validation((inputs, targets), 0) == ((inputs, targets), None)


TEST = (GOOD[0], np.array([0, 1, 2, 3, 2]))
TOKENS = (GOOD[0], np.array([[0, 1], [1, 7], [0, 0], [0, 0], [0, 0]]))
PAIR = (np.arange(10)[:, None], np.arange(10))


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: arrays(GOOD, TEST, num_classes=3), "label 3 of example 3 in test .* 0 to 2"),
        (lambda: arrays(GOOD, TEST, class_names=("a", "b", "c")), "label 3 of example 3 in test .* 0 to 2"),
        (lambda: arrays(TOKENS, num_classes=5), "label 7 of example 1 in train"),
        (lambda: arrays(GOOD, class_names=("a", "b"), num_classes=3), "2 class_names but num_classes is 3"),
        *(
            (lambda number=number: arrays(GOOD, num_classes=number), "num_classes must be an integer of at least 1")
            for number in (0, 0.5, "3", [1])
        ),
        (lambda: standardize(arrays((np.zeros((2, 2), np.uint8), [0, 1]))), "uint8 cannot be standardized"),
        (
            lambda: with_augmentation(Splits(object()), augment.random_flip()),
            "a object cannot be changed, only an ArraySource",
        ),
        (lambda: check_batch_size(arrays(GOOD).train, 6), "batch of 6 .* set of 5 examples"),
        (lambda: check_labels(arrays(GOOD, TEST), 3), "label 3 of example 3 in test .* 0 to 2"),
        (lambda: check_labels(arrays((GOOD[0], np.zeros(5))), 10), "targets of train are float32"),
        (lambda: split_off_validation(PAIR, 10), "num_validation = 10 of 10"),
        (lambda: split_off_validation(PAIR, -1), "num_validation, .* must be an integer of at least 0, not -1"),
        (lambda: split_off_validation(PAIR, 0.1), r"counts examples, must be an integer of at least 0, not 0\.1"),
        (lambda: split_off_validation(PAIR, 2.0), r"num_validation, .* must be an integer of at least 0, not 2\.0"),
        (lambda: split_off_validation(PAIR, None), "num_validation, .* must be an integer"),
        (lambda: split_off_validation(PAIR, "3"), "num_validation, .* must be an integer of at least 0, not '3'"),
    ),
)
def test_what_cannot_be_used_is_named(call, message):
    with pytest.raises(DataError, match=message):
        call()


def test_what_can_be_used_passes():
    arrays(GOOD, TEST, num_classes=4)
    check_labels(arrays(GOOD, TEST), 4)
    check_labels(arrays((GOOD[0], [0, -1, 0, 0, 0])), 1, ignore=-1)
    check_batch_size(arrays(GOOD).train, 5)
