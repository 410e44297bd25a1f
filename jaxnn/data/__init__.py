"""Data sets as sources on the device: a batch is a pure function of the seed and the step."""

from jaxnn.data.arrays import (
    arrays,
    augmented,
    check_batch_size,
    check_labels,
    hold_out,
    standardized,
)
from jaxnn.data.augment import chain, cutout, flip, shift
from jaxnn.data.bundled import breast_cancer, diabetes, digits, iris, linnerud, wine
from jaxnn.data.characters import characters
from jaxnn.data.cifar import cifar10
from jaxnn.data.files import data_dir, fetch
from jaxnn.data.folder import image_folder
from jaxnn.data.idx import fashion_mnist, mnist, read_idx
from jaxnn.data.shuffle import batch_indices, permute, steps_per_epoch
from jaxnn.data.source import ArraySource, Augmentation, padded_indices

__all__ = [
    "ArraySource",
    "Augmentation",
    "arrays",
    "augmented",
    "batch_indices",
    "breast_cancer",
    "chain",
    "characters",
    "check_batch_size",
    "check_labels",
    "cifar10",
    "cutout",
    "data_dir",
    "diabetes",
    "digits",
    "fashion_mnist",
    "fetch",
    "flip",
    "hold_out",
    "image_folder",
    "iris",
    "linnerud",
    "mnist",
    "padded_indices",
    "permute",
    "read_idx",
    "shift",
    "standardized",
    "steps_per_epoch",
    "wine",
]
