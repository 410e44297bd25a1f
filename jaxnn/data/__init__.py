"""Data sets as sources, in memory or streamed: a batch is a pure function of the seed and the step."""

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
from jaxnn.data.cifar import cifar10
from jaxnn.data.files import data_dir, fetch
from jaxnn.data.folder import cats_vs_dogs, image_folder
from jaxnn.data.idx import fashion_mnist, mnist, read_idx
from jaxnn.data.shuffle import batch_indices, permute, steps_per_epoch
from jaxnn.data.source import ArraySource, Augmentation, padded_indices
from jaxnn.data.streaming.build import stream
from jaxnn.data.streaming.source import StreamSource
from jaxnn.data.text.characters import characters
from jaxnn.data.text.corpus import ptb, words
from jaxnn.data.text.folder import imdb, text_folder
from jaxnn.data.text.small import ag_news, sms_spam
from jaxnn.data.text.source import texts, vocabulary
from jaxnn.data.text.tables import csv, tsv
from jaxnn.data.text.tokenizer import Tokenizer, Vocabulary

__all__ = [
    "ArraySource",
    "Augmentation",
    "StreamSource",
    "Tokenizer",
    "Vocabulary",
    "ag_news",
    "arrays",
    "augmented",
    "batch_indices",
    "breast_cancer",
    "cats_vs_dogs",
    "chain",
    "characters",
    "check_batch_size",
    "check_labels",
    "cifar10",
    "csv",
    "cutout",
    "data_dir",
    "diabetes",
    "digits",
    "fashion_mnist",
    "fetch",
    "flip",
    "hold_out",
    "image_folder",
    "imdb",
    "iris",
    "linnerud",
    "mnist",
    "padded_indices",
    "permute",
    "ptb",
    "read_idx",
    "shift",
    "sms_spam",
    "standardized",
    "steps_per_epoch",
    "stream",
    "text_folder",
    "texts",
    "tsv",
    "vocabulary",
    "wine",
    "words",
]
