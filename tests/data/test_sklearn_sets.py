"""scikit-learn's bundled sets: sizes, stratified fractions, scales and reproducibility."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split

from jaxnn import data

# Name: examples, shape of an example, classes (0: regression).
SETS = {
    "digits": (1797, (8, 8, 1), 10),
    "iris": (150, (4,), 3),
    "wine": (178, (13,), 3),
    "breast_cancer": (569, (30,), 2),
    "diabetes": (442, (10,), 0),
}


def all_splits(splits):
    examples = [source.examples for source in splits.named().values()]
    return (np.concatenate(arrays) for arrays in zip(*examples, strict=True))


@pytest.mark.parametrize("name", SETS)
def test_each_set_is_complete(name):
    num_examples, shape, num_classes = SETS[name]
    splits = getattr(data, name)(test_fraction=0.2, validation_fraction=0.1)
    inputs, targets = all_splits(splits)
    assert (inputs.shape, inputs.dtype) == ((num_examples, *shape), np.float32)
    assert len(np.unique(inputs.reshape(num_examples, -1), axis=0)) > 0.8 * num_examples
    assert (splits.name, len(splits.class_names)) == (name, num_classes)
    assert targets.dtype == (np.int32 if num_classes else np.float32)
    if num_classes:
        assert set(targets.tolist()) == set(range(num_classes))
    if name != "digits":
        train = splits.train.examples.inputs
        np.testing.assert_allclose(train.mean(axis=0), 0.0, atol=1e-5)
        np.testing.assert_allclose(train.std(axis=0), 1.0, atol=1e-5)


def test_digits_are_those_of_scikit_learn_stratified():
    # ceil(0.2 * 1797) = 360 and ceil(0.1 * 1797) = 180; 1257 remain.
    splits = data.digits(test_fraction=0.2, validation_fraction=0.1, seed=3)
    assert repr(splits).startswith("Splits(digits: 1,257 train, 180 validation, 360 test, ")
    for source in splits.named().values():
        # Each digit is 9.7 to 10.2 % of all.
        np.testing.assert_allclose(np.bincount(source.targets) / source.num_examples, 0.1, atol=0.008)
    images, labels = load_digits(return_X_y=True)
    options = {"random_state": 3, "stratify": labels}
    images, expected_images, labels, expected_labels = train_test_split(images, labels, test_size=360, **options)
    np.testing.assert_array_equal(splits.test.targets, expected_labels)
    np.testing.assert_array_equal(splits.test.examples.inputs.reshape(360, 64), expected_images / 16)
    labels, _ = train_test_split(labels, test_size=180, **{**options, "stratify": labels})
    np.testing.assert_array_equal(splits.train.targets, labels)


def test_seeds_and_targets():
    first, again, other = (data.iris(seed=seed).test.examples.inputs for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert data.iris(test_fraction=0.0).test is None
    # Targets of regression are raw.
    _, targets = all_splits(data.diabetes())
    np.testing.assert_array_equal(np.sort(targets), np.sort(load_diabetes().target))
