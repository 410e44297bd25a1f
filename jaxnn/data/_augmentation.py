"""Random augmentation of images on the device: pure functions of a key, made by factories.

Each takes ``(key, inputs [batch, height, width, channels])`` and returns inputs of the same shape and dtype. Tracing
raises DataError for inputs of another rank, or images not larger than the augmentation's number of pixels.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxnn.data._arrays import Augmentation, array_source
from jaxnn.types import DataError, Splits, check_int


def with_augmentation(splits: Splits, *augmentations: Augmentation) -> Splits:
    """Augments the training inputs of a data set in memory, on the device, after any augmentation it has already.

    ``augmentations`` are applied in order; each is a function ``(key, inputs) -> inputs``. Raises DataError for a
    source that is not an `ArraySource`.

    >>> splits = jn.data.with_augmentation(jn.data.digits(), jn.data.random_shift(1), jn.data.cutout(2))
    """
    train = array_source(splits.train)
    before = () if train.augment is None else (train.augment,)
    return splits._replace(train=dataclasses.replace(train, augment=compose(*before, *augmentations)))


def random_flip() -> Augmentation:
    """Mirrors each image left to right with probability ½.

    >>> images = jn.data.random_flip()(jax.random.key(0), np.zeros((2, 8, 8, 1)))
    """

    def apply(key: jax.Array, inputs: jax.Array) -> jax.Array:
        _check_images("random_flip", inputs)
        mirrored = jax.random.bernoulli(key, 0.5, inputs.shape[:1])
        return jnp.where(mirrored[:, None, None, None], inputs[:, :, ::-1, :], inputs)

    return apply


def random_shift(pixels: int) -> Augmentation:
    """Shifts each image by up to ``pixels`` along either axis and fills the gap with 0; all shifts are equally likely.

    It is a random crop of the image padded by ``pixels`` zeros. Raises ConfigError unless ``pixels`` is a positive
    integer.

    >>> augment = jn.data.compose(jn.data.random_flip(), jn.data.random_shift(4))
    """
    check_int("random_shift(pixels)", pixels)

    def apply(key: jax.Array, inputs: jax.Array) -> jax.Array:
        _check_images("random_shift", inputs, larger_than=pixels)
        batch, height, width, channels = inputs.shape
        padded = jnp.pad(inputs, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
        corners = jax.random.randint(key, (batch, 2), 0, 2 * pixels + 1)

        def crop(image: jax.Array, corner: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), (height, width, channels))

        return jax.vmap(crop)(padded, corners)

    return apply


def cutout(size: int) -> Augmentation:
    """Sets a square of ``size`` by ``size`` pixels to 0 in each image (DeVries & Taylor 2017).

    Its centre is any pixel with equal probability; a part of it may be outside the image. Raises ConfigError unless
    ``size`` is a positive integer.

    >>> splits = jn.data.with_augmentation(jn.data.digits(), jn.data.cutout(3))
    """
    check_int("cutout(size)", size)

    def apply(key: jax.Array, inputs: jax.Array) -> jax.Array:
        _check_images("cutout", inputs, larger_than=size)
        batch, height, width, _ = inputs.shape

        def inside(key: jax.Array, length: int) -> jax.Array:
            start = jax.random.randint(key, (batch, 1), 0, length) - size // 2
            places = jnp.arange(length)[None, :]
            return (places >= start) & (places < start + size)

        row_key, column_key = jax.random.split(key)
        hole = inside(row_key, height)[:, :, None, None] & inside(column_key, width)[:, None, :, None]
        return jnp.where(hole, jnp.zeros((), inputs.dtype), inputs)

    return apply


def compose(*augmentations: Augmentation) -> Augmentation:
    """Applies ``augmentations`` in order, each with its own key, folded from the given one.

    >>> twice = jn.data.compose(lambda key, inputs: inputs + 1, lambda key, inputs: 2 * inputs)
    >>> twice(jax.random.key(0), 3)
    8
    """

    def apply(key: jax.Array, inputs: jax.Array) -> jax.Array:
        for index, augmentation in enumerate(augmentations):
            inputs = augmentation(jax.random.fold_in(key, index), inputs)
        return inputs

    return apply


def _check_images(name: str, inputs: jax.Array, larger_than: int = 0) -> None:
    """Raises DataError unless ``inputs`` are images, both sides larger than ``larger_than`` pixels."""
    if inputs.ndim != 4:
        raise DataError(
            f"{name} augments images [batch, height, width, channels], but the inputs have shape "
            f"{inputs.shape}: give the examples a shape [height, width, channels]."
        )
    height, width = inputs.shape[1:3]
    if min(height, width) <= larger_than:
        raise DataError(
            f"{name}({larger_than}) needs images larger than {larger_than} pixels, but these are {height}×{width}: "
            "choose a smaller number."
        )
