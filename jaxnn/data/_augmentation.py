"""Random augmentation on the device: pure functions ``(key, batch) -> batch``, made by factories.

Those of images change the arrays ``[batch, height, width, channels]`` at the paths ``fields`` of the batch, all by the
same random choice: ``("inputs",)`` by default, ``("inputs/image", "targets")`` for images with masks to segment. Arrays
of integers, such as masks, are never interpolated. Tracing raises DataError for a path that the batch lacks, arrays of
another rank, or images that are too small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxnn._fields import check_range
from jaxnn.data._arrays import Augmentation, IndexedSource
from jaxnn.types import Batch, ConfigError, DataError, Splits, check_call, check_int, suggest

INPUTS = ("inputs",)
# Weights of red, green and blue in the luminance (Rec. 601), and the axes of the chrominance of YIQ.
_LUMINANCE = (0.299, 0.587, 0.114)
_TO_YIQ = (_LUMINANCE, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def with_augmentation(splits: Splits, *augmentations: Augmentation) -> Splits:
    """Augments the training batches of a data set, in memory or streamed, on the device, after what it does already.

    ``augmentations`` are applied in order; each is a function ``(key, batch) -> batch``, which may change inputs and
    targets together, and may add to them, such as a second view. An evaluation sees examples as they are.

    >>> splits = jn.data.with_augmentation(jn.data.digits(), jn.data.random_shift(1), jn.data.cutout(2))
    """
    train = splits.train
    if not isinstance(train, IndexedSource) or not dataclasses.is_dataclass(train):
        raise DataError(f"a {type(train).__name__} cannot be augmented here: augment where its batches are made.")
    before = () if train.augment is None else (train.augment,)
    changed: Any = dataclasses.replace(train, augment=compose(*before, *augmentations))
    return splits._replace(train=changed)


def compose(*augmentations: Augmentation) -> Augmentation:
    """Applies ``augmentations`` in order, each with its own key, folded from the given one.

    >>> augment = jn.data.compose(jn.data.random_flip(), lambda key, batch: batch._replace(inputs=2 * batch.inputs))
    """
    for each in augmentations:
        check_call("an augmentation is a function (key, batch) -> batch, such as random_flip() returns", each, 2)

    def apply(key: jax.Array, batch: Batch) -> Batch:
        for index, augmentation in enumerate(augmentations):
            batch = augmentation(jax.random.fold_in(key, index), batch)
        return batch

    return apply


def views(*augmentations: Augmentation) -> Augmentation:
    """Makes the inputs a tuple of views, one by each of ``augmentations``, as for contrastive learning.

    >>> augment = jn.data.views(jn.data.random_flip(), jn.data.random_shift(1))
    >>> first, second = augment(jax.random.key(0), batch._replace(inputs=np.zeros((32, 8, 8, 1)))).inputs
    """

    def apply(key: jax.Array, batch: Batch) -> Batch:
        seen = (one(jax.random.fold_in(key, index), batch).inputs for index, one in enumerate(augmentations))
        return batch._replace(inputs=tuple(seen))

    return apply


def at_fields(
    name: str, fields: Sequence[str], function: Callable[[jax.Array, jax.Array], jax.Array], larger_than: int = 0
) -> Augmentation:
    """The augmentation ``name`` that replaces each image array at ``fields`` by ``function(key, array)``, by one key.

    Raises DataError as the functions below do.
    """

    def apply(key: jax.Array, batch: Batch) -> Batch:
        found = set()

        def change(path: Any, leaf: Any) -> Any:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            if where not in fields:
                return leaf
            found.add(where)
            leaf = jnp.asarray(leaf)
            _check_images(name, where, leaf, larger_than)
            return function(key, leaf)

        changed: Batch = jax.tree.map_with_path(change, batch)
        for field in fields:
            if field not in found:
                paths = [
                    jax.tree_util.keystr(at, simple=True, separator="/") for at, _ in jax.tree.leaves_with_path(batch)
                ]
                raise DataError(f"{name} finds no array {field!r} in the batch: {suggest(field, paths)}.")
        return changed

    return apply


def random_flip(*, fields: Sequence[str] = INPUTS) -> Augmentation:
    """Mirrors each image left to right with probability ½.

    >>> augment = jn.data.random_flip(fields=("inputs", "targets"))  # images, and masks that segment them
    """

    def flip(key: jax.Array, images: jax.Array) -> jax.Array:
        mirrored = jax.random.bernoulli(key, 0.5, images.shape[:1])
        return jnp.where(mirrored[:, None, None, None], images[:, :, ::-1, :], images)

    return at_fields("random_flip", fields, flip)


def random_shift(pixels: int, *, fields: Sequence[str] = INPUTS) -> Augmentation:
    """Shifts each image by up to ``pixels`` along either axis and fills the gap with 0; all shifts are equally likely.

    It is a random crop of the image padded by ``pixels`` zeros. Raises ConfigError unless ``pixels`` is a positive
    integer.

    >>> augment = jn.data.compose(jn.data.random_flip(), jn.data.random_shift(4))
    """
    check_int("random_shift(pixels)", pixels)

    def shift(key: jax.Array, images: jax.Array) -> jax.Array:
        batch, height, width, channels = images.shape
        padded = jnp.pad(images, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)))
        corners = jax.random.randint(key, (batch, 2), 0, 2 * pixels + 1)

        def crop(image: jax.Array, corner: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), (height, width, channels))

        return jax.vmap(crop)(padded, corners)

    return at_fields("random_shift", fields, shift, pixels)


def cutout(size: int, *, fields: Sequence[str] = INPUTS) -> Augmentation:
    """Sets a square of ``size`` by ``size`` pixels to 0 in each image (DeVries & Taylor 2017).

    Its centre is any pixel with equal probability; a part of it may be outside the image. Raises ConfigError unless
    ``size`` is a positive integer.

    >>> splits = jn.data.with_augmentation(jn.data.digits(), jn.data.cutout(3))
    """
    check_int("cutout(size)", size)

    def cut(key: jax.Array, images: jax.Array) -> jax.Array:
        hole = _box(key, images.shape, size, size)
        return jnp.where(hole, jnp.zeros((), images.dtype), images)

    return at_fields("cutout", fields, cut, size)


def _box(key: jax.Array, shape: tuple[int, ...], height: Any, width: Any) -> jax.Array:
    """``[batch, h, w, 1]`` bool: a box of ``height`` by ``width`` pixels around a random centre of each image."""

    def inside(key: jax.Array, length: int, size: Any) -> Any:
        start = jax.random.randint(key, (shape[0], 1), 0, length) - size // 2
        places = jnp.arange(length)[None, :]
        return (places >= start) & (places < start + size)

    row_key, column_key = jax.random.split(key)
    box: jax.Array = inside(row_key, shape[1], height)[:, :, None] & inside(column_key, shape[2], width)[:, None, :]
    return box[..., None]


def random_resized_crop(
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    fields: Sequence[str] = INPUTS,
) -> Augmentation:
    """Crops a random part of each image and resizes it to the whole size, bilinearly (Szegedy et al. 2015).

    ``scale`` are the least and the largest share of the area, ``ratio`` of width over height. ConfigError unless
    0 < least <= largest, and the area at most 1.

    >>> augment = jn.data.random_resized_crop(scale=(0.5, 1.0))
    """
    if not (0 < scale[0] <= scale[1] <= 1 and 0 < ratio[0] <= ratio[1]):
        raise ConfigError(
            f"random_resized_crop needs 0 < least <= largest, and a scale of at most 1, not {scale} and {ratio}."
        )

    def crop(key: jax.Array, images: jax.Array) -> jax.Array:
        batch, height, width, _ = images.shape
        area_key, ratio_key, corner_key = jax.random.split(key, 3)
        area = jax.random.uniform(area_key, (batch,), minval=scale[0], maxval=scale[1])
        log_ratio = jnp.log(jnp.array(ratio))
        shape = jnp.exp(jax.random.uniform(ratio_key, (batch,), minval=log_ratio[0], maxval=log_ratio[1]))
        sizes = jnp.stack([jnp.sqrt(area / shape), jnp.sqrt(area * shape)], -1).clip(0, 1)  # of height and width
        corners = jax.random.uniform(corner_key, (batch, 2)) * (1 - sizes)
        places = [
            corners[:, axis, None] * length + sizes[:, axis, None] * (jnp.arange(length)[None] + 0.5) - 0.5
            for axis, length in enumerate((height, width))
        ]
        return _sample(images, jnp.broadcast_to(places[0][:, :, None], (batch, height, width)), places[1][:, None, :])

    return at_fields("random_resized_crop", fields, crop)


def random_rotation(degrees: float, *, fields: Sequence[str] = INPUTS) -> Augmentation:
    """Rotates each image around its centre by up to ``degrees`` either way, bilinearly, and fills the corners with 0.

    >>> augment = jn.data.random_rotation(15)
    """

    def rotate(key: jax.Array, images: jax.Array) -> jax.Array:
        batch, height, width, _ = images.shape
        angles = jnp.deg2rad(jax.random.uniform(key, (batch, 1, 1), minval=-degrees, maxval=degrees))
        y = jnp.arange(height)[None, :, None] - (height - 1) / 2
        x = jnp.arange(width)[None, None, :] - (width - 1) / 2
        rows = jnp.cos(angles) * y - jnp.sin(angles) * x + (height - 1) / 2
        columns = jnp.sin(angles) * y + jnp.cos(angles) * x + (width - 1) / 2
        return _sample(images, rows, columns, outside=0.0)

    return at_fields("random_rotation", fields, rotate)


def _sample(images: jax.Array, rows: jax.Array, columns: jax.Array, outside: float | None = None) -> jax.Array:
    """The pixels of ``images`` at ``rows`` and ``columns [batch, h, w]``; beyond the edge ``outside``, or the edge."""
    order = 1 if jnp.issubdtype(images.dtype, jnp.floating) else 0
    how: dict[str, Any] = {"mode": "nearest"} if outside is None else {"mode": "constant", "cval": outside}
    rows, columns = jnp.broadcast_arrays(rows, columns)

    def channel(plane: jax.Array, row: jax.Array, column: jax.Array) -> Any:
        return jax.scipy.ndimage.map_coordinates(plane, [row, column], order, **how)

    over_channels = jax.vmap(channel, (-1, None, None), -1)
    sampled: jax.Array = jax.vmap(over_channels)(images, rows, columns)
    return sampled.astype(images.dtype)


def color_jitter(
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
    fields: Sequence[str] = INPUTS,
) -> Augmentation:
    """Changes the colors of each image at random, in this order, and clips to 0…1 (Krizhevsky et al. 2012 and later).

    Brightness, contrast and saturation are multiplied by a number in ``1 - x … 1 + x``; the hue is turned by up to
    ``hue`` of a full turn either way, in YIQ. Saturation and hue need images of three channels. ConfigError for a
    negative number, or a hue beyond ½.

    >>> augment = jn.data.color_jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    """
    if min(brightness, contrast, saturation, hue) < 0 or hue > 0.5:
        raise ConfigError("color_jitter needs numbers of at least 0, and a hue of at most 0.5.")

    def jitter(key: jax.Array, images: jax.Array) -> jax.Array:
        if (saturation or hue) and images.shape[-1] != 3:
            raise DataError(f"color_jitter of saturation or hue needs 3 channels, and images have {images.shape[-1]}.")
        keys = jax.random.split(key, 4)

        def factor(index: int, x: float) -> Any:
            return jax.random.uniform(keys[index], (len(images), 1, 1, 1), images.dtype, 1 - x, 1 + x)

        def gray(images: jax.Array) -> jax.Array:
            channels = images.shape[-1]
            weights = jnp.array(_LUMINANCE if channels == 3 else [1 / channels] * channels, images.dtype)
            return (images @ weights)[..., None]

        def blend(images: jax.Array, other: jax.Array, index: int, x: float) -> jax.Array:
            return jnp.clip(other + factor(index, x) * (images - other), 0, 1) if x else images

        images = blend(images, jnp.zeros((), images.dtype), 0, brightness)
        images = blend(images, gray(images).mean((1, 2), keepdims=True), 1, contrast)
        images = blend(images, gray(images), 2, saturation)
        if not hue:
            return images
        to_yiq = jnp.array(_TO_YIQ, images.dtype)
        turn = 2 * jnp.pi * jax.random.uniform(keys[3], (len(images),), images.dtype, -hue, hue)
        cos, sin, zero = jnp.cos(turn), jnp.sin(turn), jnp.zeros_like(turn)
        rotation = jnp.array([[zero + 1, zero, zero], [zero, cos, -sin], [zero, sin, cos]])
        matrix = jnp.einsum("ij,jkb,kl->bil", jnp.linalg.inv(to_yiq), rotation, to_yiq)
        return jnp.clip(jnp.einsum("bhwc,bdc->bhwd", images, matrix), 0, 1)

    return at_fields("color_jitter", fields, jitter)


def mixup(num_classes: int, alpha: float = 0.2) -> Augmentation:
    """Mixes each example with another one of the batch (Zhang et al. 2018, arXiv:1710.09412).

    Inputs and targets become ``x * a + other * (1 - a)``, ``a`` from a beta distribution, one number a batch. Labels
    become probabilities ``[batch, num_classes]``, which `tasks.classification` takes; floats are mixed as they are.

    >>> splits = jn.data.with_augmentation(jn.data.digits(), jn.data.mixup(10))
    """
    check_int("mixup(num_classes)", num_classes)
    check_range("mixup", "alpha", alpha, positive=True)

    def apply(key: jax.Array, batch: Batch) -> Batch:
        share_key, order_key = jax.random.split(key)
        share = jax.random.beta(share_key, alpha, alpha)
        other = jax.random.permutation(order_key, len(batch.mask))

        def mix(x: jax.Array) -> jax.Array:
            return share * x + (1 - share) * jnp.asarray(x)[other]

        _check_floats("mixup", batch.inputs)
        return batch._replace(inputs=jax.tree.map(mix, batch.inputs), targets=mix(_soft(batch.targets, num_classes)))

    return apply


def cutmix(num_classes: int, alpha: float = 1.0) -> Augmentation:
    """Replaces a box of each image by that of another one of the batch (Yun et al. 2019, arXiv:1905.04899).

    The share of the area is from a beta distribution, and targets are mixed by it, as in `mixup`.

    >>> splits = jn.data.with_augmentation(jn.data.digits(), jn.data.cutmix(10))
    """
    check_int("cutmix(num_classes)", num_classes)
    check_range("cutmix", "alpha", alpha, positive=True)

    def apply(key: jax.Array, batch: Batch) -> Batch:
        images = jnp.asarray(batch.inputs)
        _check_images("cutmix", "inputs", images, 0)
        share_key, order_key, box_key = jax.random.split(key, 3)
        side = jnp.sqrt(1 - jax.random.beta(share_key, alpha, alpha))
        other = jax.random.permutation(order_key, len(images))
        box = _box(box_key, images.shape, *((side * length).astype(int) for length in images.shape[1:3]))
        targets = _soft(batch.targets, num_classes)
        kept = 1 - box.mean((1, 2, 3)).reshape(-1, *[1] * (targets.ndim - 1))
        return batch._replace(
            inputs=jnp.where(box, images[other], images), targets=kept * targets + (1 - kept) * targets[other]
        )

    return apply


def _soft(targets: Any, num_classes: int) -> jax.Array:
    if not hasattr(targets, "dtype"):
        given = "there are none" if targets is None else f"these are a {type(targets).__name__}"
        raise DataError(f"mixup and cutmix mix targets that are one array of labels or of floats: {given}.")
    targets = jnp.asarray(targets)
    return jax.nn.one_hot(targets, num_classes) if jnp.issubdtype(targets.dtype, jnp.integer) else targets


def _check_floats(name: str, inputs: Any) -> None:
    if any(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(inputs)):
        raise DataError(f"{name} mixes inputs of floats, and some are integers: mix after their embedding.")


def _check_images(name: str, where: str, images: jax.Array, larger_than: int) -> None:
    """Raises DataError unless ``images`` are images, both sides larger than ``larger_than`` pixels."""
    if images.ndim != 4:
        raise DataError(
            f"{name} augments images [batch, height, width, channels], but the {where} have shape "
            f"{images.shape}: give the examples a shape [height, width, channels]."
        )
    height, width = images.shape[1:3]
    if min(height, width) <= larger_than:
        raise DataError(
            f"{name}({larger_than}) needs images larger than {larger_than} pixels, but these are {height}×{width}: "
            "choose a smaller number."
        )
