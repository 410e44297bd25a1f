"""Augmentation on the device: each image comes out as one of the pictures it may become."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.data import compose, cutout, random_flip, random_shift
from jaxnn.types import ConfigError, DataError

KEY = jax.random.key(7)
AUGMENTATIONS = {
    "flip": random_flip(),
    "shift": random_shift(2),
    "cutout": cutout(3),
    "chain": compose(random_flip(), random_shift(1), cutout(2)),
}


def images(batch=64, height=6, width=5, channels=2):
    """Images without zeros, all pixels of all of them different."""
    values = 1.0 + jnp.arange(batch * height * width * channels)
    return values.reshape(batch, height, width, channels)


def test_flip_mirrors_about_half_of_the_images_left_to_right():
    inputs = images(batch=400)
    outputs = np.asarray(random_flip()(KEY, inputs))
    mirrored = np.array([np.array_equal(out, image[:, ::-1]) for out, image in zip(outputs, inputs, strict=True)])
    same = np.array([np.array_equal(out, image) for out, image in zip(outputs, inputs, strict=True)])
    assert np.all(mirrored ^ same)
    # 400 throws of a coin: 200 with a deviation of 10.
    assert 150 < mirrored.sum() < 250


def shifted(image, down, right):
    """The image moved by whole pixels, zeros coming in: written without padding or slicing tricks."""
    result = np.zeros_like(image)
    height, width, _ = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                result[row, column] = image[row - down, column - right]
    return result


def test_shift_gives_one_of_the_explicit_shifts_and_all_of_them():
    inputs = np.asarray(images(batch=300, height=4, width=5, channels=1))
    outputs = np.asarray(random_shift(1)(KEY, inputs))
    moves = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    counts = dict.fromkeys(moves, 0)
    for image, output in zip(inputs, outputs, strict=True):
        found = [move for move in moves if np.array_equal(output, shifted(image, *move))]
        assert len(found) == 1
        counts[found[0]] += 1
    # 300 images over 9 moves: 33 each with a deviation of 5.4.
    assert all(10 < count < 60 for count in counts.values())


def test_cutout_blanks_a_square_around_a_pixel_of_the_image():
    inputs = np.asarray(images(batch=300, height=6, width=5, channels=2))
    outputs = np.asarray(cutout(3)(KEY, inputs))
    sizes = set()
    for image, output in zip(inputs, outputs, strict=True):
        blank = (output == 0).all(axis=-1)
        rows, columns = np.flatnonzero(blank.any(axis=1)), np.flatnonzero(blank.any(axis=0))
        # A full rectangle, and everything else as it was.
        expected = image.copy()
        expected[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = 0
        np.testing.assert_array_equal(output, expected)
        sizes.add((rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1))
    # A side is 3 pixels, or 2 where the centre is on the border.
    assert sizes == {(3, 3), (3, 2), (2, 3), (2, 2)}


def test_cutout_draws_rows_and_columns_apart():
    blank = np.asarray(cutout(2)(KEY, images(batch=64, height=8, width=8, channels=1)))[..., 0] == 0
    on_diagonal = (blank == blank.swapaxes(1, 2)).all(axis=(1, 2))
    # One centre in eight lies on the diagonal.
    assert on_diagonal.sum() < 32


def test_chain_applies_each_with_a_key_of_its_own_in_order():
    first, second = (jax.random.fold_in(KEY, index) for index in (0, 1))
    expected = cutout(2)(second, random_shift(1)(first, images()))
    np.testing.assert_array_equal(compose(random_shift(1), cutout(2))(KEY, images()), expected)
    np.testing.assert_array_equal(compose()(KEY, images()), images())


def test_chaining_a_thing_with_itself_draws_anew():
    # With the same key, flipping twice would be the identity.
    assert not np.array_equal(compose(random_flip(), random_flip())(KEY, images()), images())


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_key_decides_the_draw_and_images_have_draws_of_their_own(name):
    augmentation = AUGMENTATIONS[name]
    same = jnp.broadcast_to(images(batch=1), (64, 6, 5, 2))
    outputs = np.asarray(augmentation(KEY, same))
    np.testing.assert_array_equal(outputs, augmentation(KEY, same))
    assert not np.array_equal(outputs, augmentation(jax.random.key(8), same))
    assert len(np.unique(outputs.reshape(64, -1), axis=0)) > 1


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_jit_vmap_and_scan_change_nothing(name):
    augmentation = AUGMENTATIONS[name]
    keys = jax.random.split(KEY, 3)
    expected = jnp.stack([augmentation(key, images()) for key in keys])
    np.testing.assert_array_equal(jax.jit(augmentation)(keys[0], images()), expected[0])
    many = jax.vmap(augmentation, in_axes=(0, None))(keys, images())
    np.testing.assert_array_equal(many, expected)
    _, scanned = jax.lax.scan(lambda carry, key: (carry, augmentation(key, images())), None, keys)
    np.testing.assert_array_equal(scanned, expected)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_dtype_stays(name):
    inputs = images(batch=2).astype(jnp.bfloat16)
    assert AUGMENTATIONS[name](KEY, inputs).dtype == jnp.bfloat16


@pytest.mark.parametrize("bad", (0, -1, 1.5, True, "2"))
def test_bad_arguments_are_named(bad):
    with pytest.raises(ConfigError, match=r"shift\(pixels\) must be .* not "):
        random_shift(bad)
    with pytest.raises(ConfigError, match=r"cutout\(size\) must be .* not "):
        cutout(bad)


@pytest.mark.parametrize("name", ("flip", "shift", "cutout"))
def test_inputs_that_are_no_images_are_named_when_traced(name):
    with pytest.raises(DataError, match=rf"{name} augments images .* shape \(64, 30\)"):
        jax.eval_shape(AUGMENTATIONS[name], KEY, jnp.zeros((64, 30)))


@pytest.mark.parametrize(("name", "factory"), (("random_shift", random_shift), ("cutout", cutout)))
def test_images_not_larger_than_the_change_are_named(name, factory):
    with pytest.raises(DataError, match=rf"{name}\(5\) needs images larger than 5 .* 6×5"):
        factory(5)(KEY, images())
