"""Augmentation on the device: each output is one of the images that the input may become."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.data import compose, cutout, random_flip, random_shift
from jaxnn.types import ConfigError, DataError

KEYS = jax.random.split(jax.random.key(7), 3)
FACTORIES = {
    "flip": random_flip(),
    "shift": random_shift(1),
    "cutout": cutout(3),
    "compose": compose(random_shift(1), cutout(3)),
    "twice": compose(random_flip(), random_flip()),
}
# 300 images of 6×5 pixels without zeros, all pixels different.
IMAGES = (1.0 + np.arange(300 * 6 * 5 * 2, dtype=np.float32)).reshape(300, 6, 5, 2)


@functools.cache
def augmented(name):
    """The images augmented with each of the keys, ``[3, 300, 6, 5, 2]``, by one compiled program."""
    return np.asarray(jax.jit(jax.vmap(FACTORIES[name], in_axes=(0, None)))(KEYS, IMAGES))


def test_flip_mirrors_about_half_of_the_images_left_to_right():
    outputs = augmented("flip")[0]
    mirrored = (outputs == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    same = (outputs == IMAGES).all(axis=(1, 2, 3))
    assert np.all(mirrored ^ same)
    # 300 tosses of a coin: 150 with a deviation of 8.7.
    assert 110 < mirrored.sum() < 190


def shifted(image, down, right):
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    return padded[1 - down : 7 - down, 1 - right : 6 - right]


def test_shift_draws_all_shifts_equally():
    moves = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    counts = dict.fromkeys(moves, 0)
    for image, output in zip(IMAGES, augmented("shift")[0], strict=True):
        (move,) = [move for move in moves if np.array_equal(output, shifted(image, *move))]
        counts[move] += 1
    # 300 images over 9 shifts: 33 each with a deviation of 5.4.
    assert all(10 < count < 60 for count in counts.values())


def test_cutout_blanks_a_square_around_any_pixel():
    sizes = set()
    for image, output in zip(IMAGES, augmented("cutout")[0], strict=True):
        blank = (output == 0).all(axis=-1)
        rows, columns = np.flatnonzero(blank.any(axis=1)), np.flatnonzero(blank.any(axis=0))
        # A full rectangle, and everything else unchanged.
        expected = image.copy()
        expected[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = 0
        np.testing.assert_array_equal(output, expected)
        sizes.add((len(rows), len(columns)))
    # A side is 3 pixels, or 2 with the centre on the border.
    assert sizes == {(3, 3), (3, 2), (2, 3), (2, 2)}
    # Rows and columns are drawn apart: about one centre in five is on the diagonal.
    square = np.asarray(jax.jit(cutout(3))(KEYS[0], IMAGES[:, :5]))[..., 0] == 0
    assert 0.1 < (square == square.swapaxes(1, 2)).all(axis=(1, 2)).mean() < 0.4


def test_compose_folds_a_key_for_each_augmentation_in_order():
    @jax.jit
    def one_after_the_other(key):
        first, second = (jax.random.fold_in(key, index) for index in (0, 1))
        return cutout(3)(second, random_shift(1)(first, IMAGES))

    np.testing.assert_array_equal(augmented("compose")[1], one_after_the_other(KEYS[1]))
    assert compose()(KEYS[0], IMAGES) is IMAGES
    # With one key for both, flipping twice would be the identity.
    assert not np.array_equal(augmented("twice")[0], IMAGES)


@pytest.mark.parametrize("name", FACTORIES)
def test_keys_decide_the_draw_and_the_dtype_stays(name):
    outputs = augmented(name)
    assert not np.array_equal(outputs[0], outputs[1]) and not np.array_equal(outputs[1], outputs[2])
    found = jax.eval_shape(FACTORIES[name], KEYS[0], jnp.zeros((2, 6, 5, 2), jnp.bfloat16))
    assert (found.shape, found.dtype) == ((2, 6, 5, 2), jnp.bfloat16)


@pytest.mark.parametrize("factory", (random_shift, cutout))
def test_bad_sizes_and_inputs_raise(factory):
    for bad in (0, 1.5, True):
        with pytest.raises(ConfigError, match=rf"{factory.__name__}\(.*\) must be .* at least 1, not {bad}"):
            factory(bad)
    for augmentation in (factory(4), random_flip()):
        with pytest.raises(DataError, match=r"augments images .* shape \(64, 30\)"):
            jax.eval_shape(augmentation, KEYS[0], jnp.zeros((64, 30)))
    with pytest.raises(DataError, match=rf"{factory.__name__}\(5\) needs images larger than 5 .* 6×5"):
        jax.eval_shape(factory(5), KEYS[0], IMAGES)
    assert jax.eval_shape(factory(4), KEYS[0], IMAGES).shape == IMAGES.shape
