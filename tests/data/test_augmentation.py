"""Augmentation on the device: each output is one of the images that the input may become."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.data import compose, cutout, random_flip, random_shift
from jaxnn.types import ConfigError, DataError

KEYS = jax.random.split(jax.random.key(7), 3)
FACTORIES = {"flip": random_flip(), "shift": random_shift(1), "cutout": cutout(4)}
# 300 images of 6×5 pixels without zeros, all pixels different.
IMAGES = (1.0 + np.arange(300 * 6 * 5 * 2, dtype=np.float32)).reshape(300, 6, 5, 2)


@functools.cache
def augmented():
    """The images augmented in each way with each of the keys, ``[3, 300, 6, 5, 2]``, by one compiled program."""
    ways = FACTORIES | {"square": lambda key, images: cutout(3)(key, images[:, :5])}
    every = jax.vmap(lambda key, images: {name: augment(key, images) for name, augment in ways.items()}, (0, None))
    return jax.tree.map(np.asarray, jax.jit(every)(KEYS, IMAGES))


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
    first, second = (lambda key, inputs, step=step: keys.append(key) or 2 * inputs + step for step in (0, 1))
    assert compose(first, second)(KEYS[0], 3) == 13 and compose()(KEYS[0], IMAGES) is IMAGES
    expected = [jax.random.fold_in(KEYS[0], index) for index in (0, 1)]
    assert [jax.random.key_data(key).tolist() for key in keys] == [
        jax.random.key_data(key).tolist() for key in expected
    ]


@pytest.mark.parametrize("name", FACTORIES)
def test_keys_decide_the_draw_and_the_dtype_stays(name):
    outputs = augmented()[name]
    assert not np.array_equal(outputs[0], outputs[1]) and not np.array_equal(outputs[1], outputs[2])
    found = jax.eval_shape(FACTORIES[name], KEYS[0], jnp.zeros((2, 6, 5, 2), jnp.bfloat16))
    assert (found.shape, found.dtype) == ((2, 6, 5, 2), jnp.bfloat16)


@pytest.mark.parametrize("factory", (random_shift, cutout))
def test_bad_sizes_and_inputs_raise(factory):
    for bad in (0, 1.5, True):
        with pytest.raises(ConfigError, match=rf"{factory.__name__}\(.*\) must be an integer >= 1, not {bad}"):
            factory(bad)
    for augmentation in (factory(4), random_flip()):
        with pytest.raises(DataError, match=r"augments images .* shape \(64, 30\)"):
            jax.eval_shape(augmentation, KEYS[0], jnp.zeros((64, 30)))
    with pytest.raises(DataError, match=rf"{factory.__name__}\(5\) needs images larger than 5 .* 6×5"):
        jax.eval_shape(factory(5), KEYS[0], IMAGES)
    assert jax.eval_shape(factory(4), KEYS[0], IMAGES).shape == IMAGES.shape
