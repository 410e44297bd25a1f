"""Data sets of texts and labels: the user's own texts, text folders, and IMDb."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from jaxnn.data import _files
from jaxnn.data._arrays import ArraySource, arrays, split_by_fraction
from jaxnn.data._examples import given_splits
from jaxnn.data._files import Listing, PathLike
from jaxnn.data.text._tokenizer import Tokenizer, Vocabulary, checked_texts
from jaxnn.types import DataError, Examples, Splits

_SUFFIXES = (".txt",)
_IMDB = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_IMDB_SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
_IMDB_FOLDER = "aclImdb"
_IMDB_MEMBER = re.compile(r"aclImdb/(train|test)/(neg|pos)/[^./][^/]*\.txt")
_IMDB_ARCHIVES = ("aclImdb_labeled.tar.gz", "aclImdb_v1.tar.gz")
_IMDB_CLASSES = ("neg", "pos")  # the complete archive also has 50,000 unlabelled reviews in train/unsup
_MOST_ARCHIVE_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TextSource(ArraySource):
    """A split of texts as rows of ids, with the ``vocabulary`` of the training texts."""

    vocabulary: Vocabulary


def text_arrays(
    train: Any,
    test: Any = None,
    validation: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    name: str = "texts",
    class_names: Sequence[str] = (),
    num_classes: int | None = None,
) -> Splits:
    """Makes a data set of the user's own texts; `vocabulary` maps their ids back to tokens.

    Each split is a pair ``(texts, targets [examples, ...])`` of a list of strings and an array-like. The vocabulary is
    a function of the training texts alone. Inputs become int32 ``[length]``. ``tokenizer`` is by default
    ``Tokenizer()``; other arguments, and labels that are texts, as for `jaxnn.data.arrays`.

    Raises DataError for splits that are not pairs, inputs that are not texts, an empty text, training texts without
    tokens, and as `jaxnn.data.arrays`.

    >>> jn.data.text_arrays((["good film", "bad film"], [1, 0]), class_names=("bad", "good"))
    Splits(texts: 2 train, inputs int32 [100], 2 classes)
    """
    if not isinstance(tokenizer, Tokenizer | None):
        raise DataError(f"tokenizer must be a jn.data.Tokenizer, such as Tokenizer(), not {tokenizer!r}.")
    given = given_splits(train, test, validation)
    for split, pair in given.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(f"{split} must be a pair (texts, targets), not a {type(pair).__name__}.")
        lines = checked_texts(f"{split}'s texts", pair[0])
        if empty := [index for index, text in enumerate(lines) if not text.strip()]:
            raise DataError(f"text {empty[0]} of {split} is empty (empty texts: {len(empty):,}): remove them.")
    fitted = (tokenizer or Tokenizer()).fit(given["train"][0])
    encoded: dict[str, Any] = {split: (fitted.encode(lines), targets) for split, (lines, targets) in given.items()}
    splits = arrays(**encoded, name=name, class_names=class_names, num_classes=num_classes)
    sources: dict[str, Any] = {
        split: TextSource(cast(Examples, source.examples), vocabulary=fitted)
        for split, source in splits.named().items()
    }
    return splits._replace(**sources)


def vocabulary(splits: Splits) -> Vocabulary:
    """Returns the vocabulary of a data set of labelled texts; DataError for another data set.

    >>> splits = jn.data.text_arrays((["good film", "bad film"], [1, 0]))
    >>> jn.data.vocabulary(splits).tokens[2:]
    ('film', 'bad', 'good')
    """
    if isinstance(splits.train, TextSource):
        return splits.train.vocabulary
    raise DataError(
        f"{splits.name} has no vocabulary: data sets of labelled texts have one, such as those of jn.data.text_arrays; "
        "for char_corpus and word_corpus use class_names."
    )


def text_folder(path: PathLike, tokenizer: Tokenizer | None = None) -> Splits:
    """Reads texts in ``path/{train,val,test}/<class>/*.txt``, in UTF-8, as rows of token ids.

    Folders, labels and the order of examples are those of `jaxnn.data.image_folder`; inputs and ``tokenizer`` those of
    `text_arrays`. Raises DataError, with the folder or file, for another layout, splits with different classes, a class
    without texts, or a file that is empty or not UTF-8.

    >>> Path("films/train/good").mkdir(parents=True)
    >>> _ = Path("films/train/good/1.txt").write_text("a film worth seeing")
    >>> jn.data.text_folder("films").class_names
    ('good',)
    """
    root = Path(path)
    pairs, class_names = _read_tree(root, _files.list_folder(root, _SUFFIXES))
    return text_arrays(**pairs, tokenizer=tokenizer, name=root.resolve().name, class_names=class_names)


def imdb(
    tokenizer: Tokenizer | None = None, *, validation: float = 0.0, seed: int = 0, data_dir: PathLike | None = None
) -> Splits:
    """IMDb film reviews, negative (label 0) and positive: 25,000 training and 25,000 test examples, balanced.

    Maas, Daly, Pham, Huang, Ng & Potts, "Learning Word Vectors for Sentiment Analysis" (2011). 123 texts occur in both
    ``train`` and ``test``. Reads the first that exists of ``aclImdb/``, ``aclImdb_labeled.tar.gz`` and
    ``aclImdb_v1.tar.gz`` in ``imdb/`` of the data directory, or in the directory itself; archives are not unpacked.
    Without any it downloads the last, 84 MB. The examples are the same from each.

    Keras's IMDb has the same reviews. ``Tokenizer(length=100, pad="start")`` prepares them like its example
    ``imdb_bidirectional_lstm``, and ``Tokenizer(ngrams=2, length=400, pad="start")``, 1.2 million ids, like its
    ``imdb_fasttext``, except for the order of ids and a token that Keras inserts at the start of each text.

    >>> splits = jn.data.imdb(jn.data.Tokenizer(length=200), validation=0.1)  # doctest: +SKIP

    ``tokenizer`` is by default ``Tokenizer()``: 20,000 words, and the last 100 of a text. A fraction ``validation`` of
    the training reviews, chosen at random by ``seed``, becomes ``validation``. ``data_dir`` is as for `mnist`. Raises
    DataError for files that are damaged, or missing and cannot be downloaded, or a bad fraction.
    """
    path = _files.find("imdb", (_IMDB_FOLDER, *_IMDB_ARCHIVES), data_dir)
    path = path or _files.fetch("imdb", _IMDB_ARCHIVES[-1], _IMDB, _IMDB_SHA256, data_dir)
    if path.is_dir():
        pairs, class_names = _read_tree(path, _files.list_folder(path, _SUFFIXES, _IMDB_CLASSES))
    else:
        listing, contents = _read_archive(path)
        pairs, class_names = _read_tree(path, listing, contents.__getitem__)
    if class_names != _IMDB_CLASSES or "test" not in pairs:
        raise DataError(f"{path} does not have {_IMDB_FOLDER}/{{train,test}}/{{neg,pos}}/*.txt: download it again.")
    reviews, labels = pairs["train"]
    splits = split_by_fraction(reviews, labels, {"validation": validation}, seed)
    return text_arrays(**splits, test=pairs["test"], tokenizer=tokenizer, name="imdb", class_names=class_names)


def _read_archive(path: Path) -> tuple[Listing, dict[str, str]]:
    """Returns the files in IMDb's archive, and the text of each by its path ``<split>/<class>/<file>``."""
    listing: Listing = {}
    contents = {}
    for name, content in _files.read_members(path, _IMDB_MEMBER.fullmatch, _MOST_ARCHIVE_BYTES):
        _, folder, kind, file = name.split("/")
        listing.setdefault(folder, {}).setdefault(kind, []).append(file)
        contents[f"{folder}/{kind}/{file}"] = _files.decoded(content, f"{name} in {path}")
    return listing, contents


def _read_tree(
    path: Path, listing: Listing, read: Callable[[str], str] | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the texts and labels of each split, and the class names; ``read`` a text by its path, else its file."""
    read = read or (lambda name: _files.read_text(_files.checked_file(path / name)))
    files, class_names = _files.classified(listing, path, _SUFFIXES)
    pairs = {}
    for split, (folder, names, labels) in files.items():
        lines = [read(f"{folder}/{name}") for name in names]
        if empty := [name for name, text in zip(names, lines, strict=True) if not text.strip()]:
            raise DataError(f"{path}/{folder}/{empty[0]} has no text (empty files: {len(empty):,}): remove them.")
        pairs[split] = lines, labels
    return pairs, class_names
