"""Arrays in memory: conversion, gathering, padding, standardization, the order of examples; augmentation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn import data
from jaxnn.data import arrays, batch_indices, permute, standardize, with_augmentation
from jaxnn.types import Batch

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


def test_labels_that_are_texts_are_encoded_by_name():
    texts, labels = ["worth seeing", "forget it", "worth it"], np.array(["good", "bad", "good"])
    splits = data.text_arrays((texts, labels), test=(texts[1:2], labels[1:2].tolist()))
    assert splits.class_names == ("bad", "good") and splits.train.targets.tolist() == [1, 0, 1]
    assert splits.test is not None and splits.test.targets.tolist() == [0]
    assert arrays((np.eye(3), labels), class_names=("good", "fair", "bad")).train.targets.tolist() == [0, 2, 0]


def test_values_at_the_limits_pass():
    inputs, labels, tokens = GOOD[0], np.array([0, 1, 2, 3, 2]), np.array([[0, 1], [1, 7], [0, 0], [0, 0], [0, 0]])
    arrays(GOOD, (inputs, labels), num_classes=4)
    arrays((inputs, tokens), num_classes=8)
    arrays((inputs, tokens - 1), num_classes=7)  # -1 in a sequence is ignored
    arrays((np.array([[2**31 - 1], [-(2**31)]]), [0, 1]))
    data.check_labels(arrays(GOOD, (inputs, labels)), 4)
    data.check_labels(arrays((inputs, [0, -1, 0, 0, 0])), 1, ignore=-1)


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
    assert source.gather(source.examples, np.array([9])).inputs["nested"][0].tolist() == [[6, 7]], "is clipped"
    alone = arrays(train=inputs)
    assert alone.train.targets is None and alone.train.as_batch(alone.train.examples).targets is None
    shapes = "image: uint8 [3], nested.0: int32 [2], nested.1: float32 []"
    assert repr(alone) == f"Splits(arrays: 4 train, inputs {{{shapes}}})"


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
    with pytest.raises(TypeError, match="integer"):
        permute(np.arange(3), 0.1, 0, 0)


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


# 300 images of 6×5 pixels without zeros, all pixels different.
IMAGES = (1.0 + np.arange(300 * 6 * 5 * 2, dtype=np.float32)).reshape(300, 6, 5, 2)
COLORS = np.random.default_rng(0).uniform(0, 1, (64, 4, 4, 3)).astype(np.float32)
GRAY = np.broadcast_to(COLORS.mean(-1, keepdims=True), COLORS.shape)
MASKS = (IMAGES[:64, ..., :1] // 2).astype(np.int32)
NUMBERS = np.arange(64, dtype=np.float32)
RAMP = np.broadcast_to(np.arange(8, dtype=np.float32)[None, :, None, None], (64, 8, 8, 1))
DRAWN = {"flip": data.random_flip(), "shift": data.random_shift(1), "cutout": data.cutout(4)}


def batch_of(images):
    return Batch(images, np.arange(len(images)), np.ones(len(images), np.float32))


@functools.cache
def augmented():
    """The batches that augmentations return, by one program; those of ``DRAWN`` with each of three keys."""
    fields = ("inputs/image", "targets")
    moved = data.compose(data.random_flip(fields=fields), data.random_shift(1, fields=fields))
    jitter = data.color_jitter(saturation=0.9, hue=0.5)
    segmented = batch_of({"image": IMAGES[:64], "other": np.zeros((64, 2), np.float32)})._replace(targets=MASKS)
    ways = {
        "all": (data.random_resized_crop(scale=(1, 1), ratio=(1, 1)), batch_of(COLORS)),
        "unturned": (data.random_rotation(0), batch_of(COLORS)),
        "unchanged": (data.color_jitter(), batch_of(COLORS)),
        "quarter": (data.random_resized_crop(scale=(0.25, 0.25), ratio=(1, 1)), batch_of(RAMP)),
        "turned": (data.random_rotation(180), batch_of(np.ones((64, 9, 9, 1), np.float32))),
        "gray": (jitter, batch_of(GRAY)),
        "colors": (jitter, batch_of(COLORS)),
        "brightness": (data.color_jitter(brightness=0.5), batch_of(COLORS * 0.5)),
        "square": (data.cutout(3), batch_of(IMAGES[:, :5])),
        "views": (data.views(data.random_shift(1), data.random_shift(1)), batch_of(IMAGES)),
        "moved": (moved, segmented),
        "moved and turned": (data.compose(moved, data.random_rotation(90, fields=fields)), segmented),
    }
    functions, batches = ({name: pair[index] for name, pair in ways.items()} for index in (0, 1))

    @jax.jit
    def compute(batches, images):
        keys = jax.random.split(jax.random.key(7), 3)
        drawn = {name: jax.vmap(lambda key, one=one: one(key, images)) for name, one in DRAWN.items()}
        once = {name: function(keys[0], batches[name]) for name, function in functions.items()}
        return once | {name: one(keys) for name, one in drawn.items()}

    return jax.device_get(compute(batches, batch_of(IMAGES)))


def test_flip_mirrors_about_half_of_the_images_left_to_right():
    outputs = augmented()["flip"].inputs[0]
    mirrored = (outputs == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    same = (outputs == IMAGES).all(axis=(1, 2, 3))
    assert np.all(mirrored ^ same)
    # 300 tosses of a coin: 150 with a deviation of 8.7.
    assert 110 < mirrored.sum() < 190


def test_shift_draws_all_shifts_equally():
    padded = np.pad(IMAGES, ((0, 0), (1, 1), (1, 1), (0, 0)))
    outputs = augmented()["shift"].inputs[0]
    moves = [(padded[:, row : row + 6, column : column + 5]) for row in range(3) for column in range(3)]
    found = np.array([(outputs == moved).all(axis=(1, 2, 3)) for moved in moves])
    assert (found.sum(axis=0) == 1).all()
    # 300 images over 9 shifts: 33 each with a deviation of 5.4.
    assert ((found.sum(axis=1) > 10) & (found.sum(axis=1) < 60)).all()


def test_cutout_blanks_a_square_around_any_pixel():
    seen = set()
    for image, output in zip(IMAGES, augmented()["cutout"].inputs[0], strict=True):
        blank = (output == 0).all(axis=-1)
        rows, columns = np.flatnonzero(blank.any(axis=1)), np.flatnonzero(blank.any(axis=0))
        # A full rectangle, and everything else unchanged.
        expected = image.copy()
        expected[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = 0
        np.testing.assert_array_equal(output, expected)
        seen.add((rows[0], rows[-1], columns[0], columns[-1]))
    # From two pixels before any centre to one after it, inside the image.
    spans = [[(max(0, centre - 2), min(n - 1, centre + 1)) for centre in range(n)] for n in (6, 5)]
    assert seen == {(*rows, *columns) for rows in spans[0] for columns in spans[1]}
    # Rows and columns are drawn apart: about one centre in five is on the diagonal.
    square = augmented()["square"].inputs[..., 0] == 0
    assert 0.1 < (square == square.swapaxes(1, 2)).all(axis=(1, 2)).mean() < 0.4


@pytest.mark.parametrize("name", DRAWN)
def test_keys_decide_the_draw_and_the_dtype_stays(name):
    outputs = augmented()[name].inputs
    assert not np.array_equal(outputs[0], outputs[1]) and not np.array_equal(outputs[1], outputs[2])
    narrow = batch_of(np.zeros((2, 6, 5, 2), jnp.bfloat16))
    found = jax.eval_shape(lambda batch: DRAWN[name](jax.random.key(0), batch), narrow).inputs
    assert (found.shape, found.dtype) == ((2, 6, 5, 2), jnp.bfloat16)


def test_compose_folds_a_key_for_each_augmentation_in_order():
    keys = []
    first, second = (lambda key, batch, step=step: keys.append(key) or 2 * batch + step for step in (0, 1))
    key = jax.random.key(7)
    assert data.compose(first, second)(key, 3) == 13 and data.compose()(key, IMAGES) is IMAGES
    assert keys == [jax.random.fold_in(key, index) for index in (0, 1)]


def test_masks_change_with_their_images_and_integers_are_not_interpolated():
    changed, turned = augmented()["moved"], augmented()["moved and turned"].targets
    moved = changed.targets[..., 0]
    np.testing.assert_array_equal(np.where(moved, changed.inputs["image"][..., 0] // 2, 0), moved)
    assert not np.array_equal(moved, MASKS[..., 0]) and not changed.inputs["other"].any()
    assert turned.dtype == np.int32 and set(np.unique(turned)) <= {0, *np.unique(MASKS)}


def test_crops_rotations_and_colors_are_exact_at_their_ends():
    for same in ("all", "unturned", "unchanged"):
        np.testing.assert_allclose(augmented()[same].inputs, COLORS, atol=1e-6)
    cropped = augmented()["quarter"].inputs
    # A quarter of the area is half of the height: rows are half a pixel apart, but for those beyond the edge.
    steps = np.diff(cropped[:, :, 0, 0], axis=1)
    assert np.isclose(steps[:, 1:-1], 0.5, atol=1e-5).all() and len(np.unique(cropped[:, 4, 0, 0].round(3))) > 30
    turned = augmented()["turned"].inputs
    np.testing.assert_allclose(turned[:, 4, 4], 1, atol=1e-6)
    assert (turned[:, 0, 0] < 1).any()


def test_color_jitter_keeps_what_each_part_keeps():
    np.testing.assert_allclose(augmented()["gray"].inputs, GRAY, atol=1e-3)
    assert np.abs(augmented()["colors"].inputs - COLORS).max() > 0.1
    factors = augmented()["brightness"].inputs / (COLORS * 0.5)
    np.testing.assert_allclose(factors, np.broadcast_to(factors[:, :1, :1, :1], factors.shape), rtol=1e-4)
    assert 0.5 <= factors.min() < 0.7 and 1.3 < factors.max() <= 1.5001


@pytest.mark.slow
def test_mixed_examples_have_mixed_targets():
    numbered = batch_of(np.broadcast_to(NUMBERS[:, None, None, None], (64, 8, 8, 1)))
    mixed, cut = (jax.jit(mix(64))(jax.random.key(7), numbered) for mix in (data.mixup, data.cutmix))
    for found in (mixed, cut):
        # The mean of an image tells which examples are in it, and the target says the same.
        np.testing.assert_allclose(found.inputs.mean((1, 2, 3)), found.targets @ NUMBERS, atol=1e-3)
        np.testing.assert_allclose(found.targets.sum(1), 1, atol=1e-5)
        assert ((found.targets > 0).sum(1) == 2).any()
    assert set(np.unique(cut.inputs)) <= set(range(64))
    # Floats are mixed as they are.
    floats = batch_of(RAMP)._replace(targets=NUMBERS[:, None])
    augment = data.compose(data.mixup(64), data.cutmix(64))
    assert jax.eval_shape(lambda batch: augment(jax.random.key(0), batch), floats).targets.shape == (64, 1)
    # NumPy's arrays by a key that is traced.
    assert jax.eval_shape(lambda key: augment(key, floats), jax.random.key(0)).targets.shape == (64, 1)


def test_views_draw_apart():
    first, second = augmented()["views"].inputs
    assert first.shape == IMAGES.shape and not np.array_equal(first, second)
