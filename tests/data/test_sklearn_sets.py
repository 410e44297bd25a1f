"""scikit-learn's bundled sets: their sizes, shares, scales and reproducibility."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits

from jaxnn import data as bundled
from jaxnn.types import DataError

# Name: examples, shape of an example, classes (0: regression).
SETS = {
    "digits": (1797, (8, 8, 1), 10),
    "iris": (150, (4,), 3),
    "wine": (178, (13,), 3),
    "breast_cancer": (569, (30,), 2),
    "diabetes": (442, (10,), 0),
    "linnerud": (20, (3,), 0),
}


def everything(splits):
    sources = splits.named().values()
    return (
        np.concatenate([source.examples.inputs for source in sources]),
        np.concatenate([source.examples.targets for source in sources]),
    )


@pytest.mark.parametrize("name", SETS)
def test_each_set_is_whole_and_of_the_shape_it_says(name):
    num_examples, shape, num_classes = SETS[name]
    splits = getattr(bundled, name)(test_fraction=0.2, validation_fraction=0.1)
    inputs, targets = everything(splits)
    assert inputs.shape == (num_examples, *shape)
    assert inputs.dtype == np.float32
    assert len(np.unique(inputs.reshape(num_examples, -1), axis=0)) > 0.8 * num_examples
    assert splits.name == name
    assert len(splits.class_names) == num_classes
    assert targets.dtype == (np.int32 if num_classes else np.float32)
    if num_classes:
        assert set(targets.tolist()) == set(range(num_classes))


def test_digits_are_scikit_learns_pictures_in_the_unit_interval():
    bunch = load_digits()
    inputs, targets = everything(bundled.digits())
    assert (inputs.min(), inputs.max()) == (0.0, 1.0)
    # The same pictures with the same labels, in another order.
    ours = {(picture.tobytes(), int(label)) for picture, label in zip(inputs, targets, strict=True)}
    pictures = (bunch.images / 16).astype(np.float32)[..., None]
    theirs = {(picture.tobytes(), int(label)) for picture, label in zip(pictures, bunch.target, strict=True)}
    assert ours == theirs


def test_the_split_has_the_asked_sizes_and_keeps_the_shares_of_the_classes():
    # ceil(0.2 * 1797) = 360 and ceil(0.1 * 1797) = 180 are held out; 1257 remain.
    splits = bundled.digits(test_fraction=0.2, validation_fraction=0.1)
    sizes = {name: source.num_examples for name, source in splits.named().items()}
    assert sizes == {"train": 1257, "validation": 180, "test": 360}
    for source in splits.named().values():
        shares = np.bincount(source.examples.targets) / source.num_examples
        # Each digit is 9.7 to 10.2 % of the whole.
        np.testing.assert_allclose(shares, 0.1, atol=0.008)


def test_the_seed_decides_the_split():
    first, again, other = (bundled.iris(seed=seed).test.examples.inputs for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert bundled.iris(test_fraction=0.0).test is None and bundled.iris().validation is None
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("name", ("iris", "wine", "breast_cancer", "diabetes", "linnerud"))
def test_tabular_inputs_are_standardized_by_the_training_split(name):
    train = getattr(bundled, name)().train.examples.inputs
    np.testing.assert_allclose(train.mean(axis=0), 0.0, atol=1e-5)
    np.testing.assert_allclose(train.std(axis=0), 1.0, atol=1e-5)


def test_targets_of_regression_are_raw():
    np.testing.assert_array_equal(np.sort(everything(bundled.diabetes())[1]), np.sort(load_diabetes().target))
    assert everything(bundled.linnerud())[1].shape == (20, 3)


@pytest.mark.parametrize(
    ("fractions", "message"),
    (
        ({"test_fraction": 1.0}, "test_fraction must be a share of the examples, at least 0 and below 1, not 1.0"),
        ({"test_fraction": -0.1}, "test_fraction must be .* not -0.1"),
        ({"validation_fraction": float("nan")}, "validation_fraction must be .* not nan"),
        ({"test_fraction": 0.6, "validation_fraction": 0.4}, "leave nothing to train on"),
        ({"test_fraction": 0.01}, "2 of 150 examples cannot be held out as test"),
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"test_fraction": "3"}, "test_fraction must be .* not '3'"),
        ({"seed": None}, "seed must be"),
    ),
)
def test_bad_fractions_are_named(fractions, message):
    with pytest.raises(DataError, match=message):
        bundled.iris(**fractions)
