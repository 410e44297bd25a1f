"""Data sets, in memory or streamed: a batch is a pure function of the seed and the step."""

from jaxnn.data._arrays import (
    ArraySource,
    Augmentation,
    apply_scaling,
    arrays,
    check_labels,
    is_augmented,
    learn_scaling,
    padded_indices,
    split_off_validation,
    standardize,
)
from jaxnn.data._augmentation import (
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
    with_augmentation,
)
from jaxnn.data._examples import check_resolution, check_split_names, given_splits
from jaxnn.data._files import data_dir, fetch
from jaxnn.data._image_folder import cats_vs_dogs, image_folder, read_image
from jaxnn.data._image_sets import cifar10, fashion_mnist, mnist, read_idx
from jaxnn.data._shuffle import batch_indices, permute, steps_per_epoch
from jaxnn.data._sklearn_sets import breast_cancer, diabetes, digits, iris, wine
from jaxnn.data._sources import generated, in_order, iterable, mixture, pad_sequences, subset, without_data
from jaxnn.data._stream import StreamSource, stream
from jaxnn.data.tables._binned import BinnedSource, Bins, binned, learn_bins
from jaxnn.data.tables._tables import Columns, table
from jaxnn.data.text._text_sets import imdb, text_arrays, text_folder, vocabulary
from jaxnn.data.text._text_tables import ag_news, read_csv, read_tsv, sms_spam
from jaxnn.data.text._text_windows import char_corpus, decode_text, encode_text, ptb, word_corpus
from jaxnn.data.text._tokenizer import Tokenizer, Vocabulary

__all__ = [
    "ArraySource",
    "Augmentation",
    "Bins",
    "Columns",
    "Tokenizer",
    "Vocabulary",
    "ag_news",
    "arrays",
    "batch_indices",
    "binned",
    "breast_cancer",
    "cats_vs_dogs",
    "char_corpus",
    "cifar10",
    "color_jitter",
    "compose",
    "cutmix",
    "cutout",
    "data_dir",
    "decode_text",
    "diabetes",
    "digits",
    "encode_text",
    "fashion_mnist",
    "generated",
    "image_folder",
    "imdb",
    "in_order",
    "iris",
    "iterable",
    "learn_bins",
    "mixture",
    "mixup",
    "mnist",
    "pad_sequences",
    "ptb",
    "random_flip",
    "random_resized_crop",
    "random_rotation",
    "random_shift",
    "read_csv",
    "read_idx",
    "read_image",
    "read_tsv",
    "sms_spam",
    "standardize",
    "stream",
    "subset",
    "table",
    "text_arrays",
    "text_folder",
    "views",
    "vocabulary",
    "wine",
    "with_augmentation",
    "word_corpus",
]
