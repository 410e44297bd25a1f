"""Augmentation on the device: each output is one of the images that the input may become."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.data import (
    color_jitter,
    compose,
    cutmix,
    cutout,
    mixup,
    random_flip,
    random_resized_crop,
    random_rotation,
    random_shift,
    views,
)
from jaxnn.types import Batch, ConfigError, DataError

KEYS = jax.random.split(jax.random.key(7), 3)
FACTORIES = {"flip": random_flip(), "shift": random_shift(1), "cutout": cutout(4)}
# 300 images of 6×5 pixels without zeros, all pixels different.
IMAGES = (1.0 + np.arange(300 * 6 * 5 * 2, dtype=np.float32)).reshape(300, 6, 5, 2)


def batch_of(images):
    return Batch(images, np.arange(len(images)), np.ones(len(images), np.float32))


@functools.cache
def augmented():
    """The images augmented in each way with each of the keys, ``[3, 300, 6, 5, 2]``, by one compiled program."""

    def every(key):
        ways = {name: augment(key, batch_of(IMAGES)).inputs for name, augment in FACTORIES.items()}
        return ways | {"square": cutout(3)(key, batch_of(IMAGES[:, :5])).inputs}

    every = jax.vmap(every)
    return jax.tree.map(np.asarray, jax.jit(every)(KEYS))


def test_flip_mirrors_about_half_of_the_images_left_to_right():
    outputs = augmented()["flip"][0]
    mirrored = (outputs == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    same = (outputs == IMAGES).all(axis=(1, 2, 3))
    assert np.all(mirrored ^ same)
    # 300 tosses of a coin: 150 with a deviation of 8.7.
    assert 110 < mirrored.sum() < 190


def test_shift_draws_all_shifts_equally():
    padded = np.pad(IMAGES, ((0, 0), (1, 1), (1, 1), (0, 0)))
    outputs = augmented()["shift"][0]
    moves = [(padded[:, row : row + 6, column : column + 5]) for row in range(3) for column in range(3)]
    found = np.array([(outputs == moved).all(axis=(1, 2, 3)) for moved in moves])
    assert (found.sum(axis=0) == 1).all()
    # 300 images over 9 shifts: 33 each with a deviation of 5.4.
    assert ((found.sum(axis=1) > 10) & (found.sum(axis=1) < 60)).all()


def test_cutout_blanks_a_square_around_any_pixel():
    seen = set(), set()
    for image, output in zip(IMAGES, augmented()["cutout"][0], strict=True):
        blank = (output == 0).all(axis=-1)
        rows, columns = np.flatnonzero(blank.any(axis=1)), np.flatnonzero(blank.any(axis=0))
        # A full rectangle, and everything else unchanged.
        expected = image.copy()
        expected[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = 0
        np.testing.assert_array_equal(output, expected)
        for found, places in zip(seen, (rows, columns), strict=True):
            found.add((places[0], places[-1]))
    # From two pixels before any centre to one after it, inside the image.
    for found, length in zip(seen, (6, 5), strict=True):
        assert found == {(max(0, centre - 2), min(length - 1, centre + 1)) for centre in range(length)}
    # Rows and columns are drawn apart: about one centre in five is on the diagonal.
    square = augmented()["square"][0, ..., 0] == 0
    assert 0.1 < (square == square.swapaxes(1, 2)).all(axis=(1, 2)).mean() < 0.4


def test_compose_folds_a_key_for_each_augmentation_in_order():
    keys = []
    first, second = (lambda key, batch, step=step: keys.append(key) or 2 * batch + step for step in (0, 1))
    assert compose(first, second)(KEYS[0], 3) == 13 and compose()(KEYS[0], IMAGES) is IMAGES
    expected = [jax.random.fold_in(KEYS[0], index) for index in (0, 1)]
    assert [jax.random.key_data(key).tolist() for key in keys] == [
        jax.random.key_data(key).tolist() for key in expected
    ]


@pytest.mark.parametrize("name", FACTORIES)
def test_keys_decide_the_draw_and_the_dtype_stays(name):
    outputs = augmented()[name]
    assert not np.array_equal(outputs[0], outputs[1]) and not np.array_equal(outputs[1], outputs[2])
    found = jax.eval_shape(FACTORIES[name], KEYS[0], batch_of(jnp.zeros((2, 6, 5, 2), jnp.bfloat16))).inputs
    assert (found.shape, found.dtype) == ((2, 6, 5, 2), jnp.bfloat16)


@pytest.mark.parametrize("factory", (random_shift, cutout))
def test_bad_sizes_and_inputs_raise(factory):
    for bad in (0, 1.5, True):
        with pytest.raises(ConfigError, match=rf"{factory.__name__}\(.*\) must be an integer >= 1, not {bad}"):
            factory(bad)
    for augmentation in (factory(4), random_flip()):
        with pytest.raises(DataError, match=r"augments images .* shape \(64, 30\)"):
            jax.eval_shape(augmentation, KEYS[0], batch_of(jnp.zeros((64, 30))))
    with pytest.raises(DataError, match=rf"{factory.__name__}\(5\) needs images larger than 5 .* 6×5"):
        jax.eval_shape(factory(5), KEYS[0], batch_of(IMAGES))
    assert jax.eval_shape(factory(4), KEYS[0], batch_of(IMAGES)).inputs.shape == IMAGES.shape


COLORS = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (64, 4, 4, 3)), jnp.float32)


def test_masks_change_with_their_images_and_integers_are_not_interpolated():
    masks = (IMAGES[:64, ..., :1] // 2).astype(np.int32)
    batch = batch_of({"image": IMAGES[:64], "other": np.zeros((64, 2), np.float32)})._replace(targets=masks)
    fields = ("inputs/image", "targets")
    both = compose(random_flip(fields=fields), random_shift(1, fields=fields), random_rotation(90, fields=fields))
    changed = jax.jit(compose(random_flip(fields=fields), random_shift(1, fields=fields)))(KEYS[0], batch)
    moved = np.asarray(changed.targets[..., 0])
    np.testing.assert_array_equal(np.where(moved, np.asarray(changed.inputs["image"][..., 0] // 2), 0), moved)
    assert not np.array_equal(moved, masks[..., 0]) and changed.inputs["other"] is not None
    turned = jax.jit(both)(KEYS[0], batch).targets
    assert turned.dtype == jnp.int32 and set(np.unique(turned)) <= {0, *np.unique(masks)}
    with pytest.raises(DataError, match="random_flip finds no array 'image' in the batch: .*'inputs/image'"):
        random_flip(fields=("image",))(KEYS[0], batch)


def test_crops_rotations_and_colors_are_exact_at_their_ends():
    whole, straight, plain = jax.jit(
        lambda batch: tuple(
            augment(KEYS[0], batch).inputs
            for augment in (random_resized_crop(scale=(1, 1), ratio=(1, 1)), random_rotation(0), color_jitter())
        )
    )(batch_of(COLORS))
    for same in (whole, straight, plain):
        np.testing.assert_allclose(same, COLORS, atol=1e-6)
    ramp = jnp.broadcast_to(jnp.arange(8.0)[None, :, None, None], (64, 8, 8, 1))
    cropped = np.asarray(random_resized_crop(scale=(0.25, 0.25), ratio=(1, 1))(KEYS[0], batch_of(ramp)).inputs)
    # A quarter of the area is half of the height: rows are half a pixel apart, but for those beyond the edge.
    steps = np.diff(cropped[:, :, 0, 0], axis=1)
    assert np.isclose(steps[:, 1:-1], 0.5, atol=1e-5).all() and len(np.unique(cropped[:, 4, 0, 0].round(3))) > 30
    around = np.asarray(random_rotation(180)(KEYS[0], batch_of(jnp.ones((64, 9, 9, 1)))).inputs)
    np.testing.assert_allclose(around[:, 4, 4], 1, atol=1e-6)
    assert (around[:, 0, 0] < 1).any()


def test_color_jitter_keeps_what_each_part_keeps():
    gray = jnp.broadcast_to(COLORS.mean(-1, keepdims=True), COLORS.shape)
    jitter = jax.jit(lambda images: color_jitter(saturation=0.9, hue=0.5)(KEYS[0], batch_of(images)).inputs)
    np.testing.assert_allclose(jitter(gray), gray, atol=1e-3)
    assert np.abs(jitter(COLORS) - COLORS).max() > 0.1
    dim = color_jitter(brightness=0.5)(KEYS[1], batch_of(COLORS * 0.5)).inputs / (COLORS * 0.5)
    np.testing.assert_allclose(dim, jnp.broadcast_to(dim[:, :1, :1, :1], dim.shape), rtol=1e-4)
    assert 0.5 <= dim.min() < 0.7 and 1.3 < dim.max() <= 1.5001
    with pytest.raises(DataError, match="needs 3 channels, and images have 1"):
        color_jitter(hue=0.1)(KEYS[0], batch_of(COLORS[..., :1]))


def test_mixtures_that_cannot_be_are_named():
    with pytest.raises(ConfigError, match="mixup: alpha must be a number > 0, not 0"):
        mixup(3, alpha=0)
    with pytest.raises(ConfigError, match=r"cutmix\(num_classes\) must be an integer >= 1"):
        cutmix(0)
    with pytest.raises(DataError, match="one array of labels or of floats: these are a dict"):
        mixup(3)(KEYS[0], batch_of(COLORS)._replace(targets={"a": np.zeros(64)}))


def test_mixed_examples_have_mixed_targets():
    images = jnp.broadcast_to(jnp.arange(64.0)[:, None, None, None], (64, 8, 8, 1))
    batch = batch_of(images)
    mixed, cut = jax.jit(lambda batch: (mixup(64)(KEYS[0], batch), cutmix(64)(KEYS[0], batch)))(batch)
    for found in (mixed, cut):
        # The mean of an image tells which examples are in it, and the target says the same.
        np.testing.assert_allclose(found.inputs.mean((1, 2, 3)), found.targets @ jnp.arange(64.0), atol=1e-3)
        np.testing.assert_allclose(found.targets.sum(1), 1, atol=1e-5)
        assert ((found.targets > 0).sum(1) == 2).any()
    assert set(np.unique(cut.inputs)) <= set(range(64))
    floats = mixup(64)(KEYS[0], batch._replace(targets=jnp.arange(64.0)[:, None])).targets
    np.testing.assert_allclose(floats[:, 0], mixed.targets @ jnp.arange(64.0), atol=1e-3)


def test_views_draw_apart():
    first, second = views(random_shift(1), random_shift(1))(KEYS[0], batch_of(IMAGES)).inputs
    assert first.shape == IMAGES.shape and not np.array_equal(first, second)
