"""Augmentation on the device: each output is one of the images that the input may become."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn import data
from jaxnn.types import Batch

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
