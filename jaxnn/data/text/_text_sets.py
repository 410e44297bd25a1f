"""Texts and their labels as a data set: the user's own, those of a folder, and IMDb's reviews."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jaxnn.data._arrays import ArraySource, arrays, check_pair, given_splits, split_off
from jaxnn.data._files import (
    Listing,
    PathLike,
    check_file,
    classified,
    decoded,
    fetch,
    find,
    list_folder,
    read_members,
    read_text,
)
from jaxnn.data.text._tokenizer import Tokenizer, Vocabulary, checked_texts
from jaxnn.types import DataError, Examples, Splits

_SUFFIXES = (".txt",)
_IMDB = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_IMDB_SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
_IMDB_FOLDER = "aclImdb"
_IMDB_MEMBER = re.compile(r"aclImdb/(train|test)/(neg|pos)/[^./][^/]*\.txt")
_IMDB_ARCHIVES = ("aclImdb_labeled.tar.gz", "aclImdb_v1.tar.gz")
# The complete archive has 50,000 reviews without a label too, as train/unsup.
_IMDB_CLASSES = ("neg", "pos")
# Twice the size of IMDb's.
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
    """The user's own texts as a data set; `vocabulary` gives the meaning of their ids.

    Each split is a pair ``(texts, targets [examples, ...])`` of a list of strings and an array-like. The vocabulary is
    a function of the training texts alone. Inputs become int32 ``[length]``.

    ``tokenizer`` says how texts become ids, by default ``Tokenizer()``; other arguments as of `jaxnn.data.arrays`.

    Raises:
        DataError: not pairs, not texts, an empty text, training texts without tokens, no `Tokenizer`; else as
            `jaxnn.data.arrays`.
    """
    if not isinstance(tokenizer, Tokenizer | None):
        raise DataError(f"tokenizer must be a jn.data.Tokenizer, such as Tokenizer(), not {tokenizer!r}.")
    given = given_splits(train, test, validation)
    for split, pair in given.items():
        check_pair(split, pair, "(texts, targets)", f"write {split}=(texts, targets)")
        lines = checked_texts(f"{split}'s texts", pair[0])
        if empty := [index for index, text in enumerate(lines) if not text.strip()]:
            raise DataError(f"text {empty[0]} of {split} is empty (empty ones: {len(empty):,}): leave them out.")
    found = (tokenizer or Tokenizer()).fit(given["train"][0])
    encoded: dict[str, Any] = {split: (found.encode(lines), targets) for split, (lines, targets) in given.items()}
    splits = arrays(**encoded, name=name, class_names=class_names, num_classes=num_classes)
    sources: dict[str, Any] = {
        split: TextSource(cast(Examples, source.examples), vocabulary=found) for split, source in splits.named().items()
    }
    return splits._replace(**sources)


def vocabulary(splits: Splits) -> Vocabulary:
    """The meaning of the ids of a data set of texts; DataError for a data set of something else."""
    if isinstance(splits.train, TextSource):
        return splits.train.vocabulary
    raise DataError(
        f"{splits.name} has no vocabulary of texts to classify: those made by jn.data.text_arrays, text_folder, "
        "read_csv, read_tsv and the like have one; of char_corpus and word_corpus it is class_names."
    )


def text_folder(path: PathLike, tokenizer: Tokenizer | None = None) -> Splits:
    """Texts in ``path/{train,val,test}/<class>/*.txt``, in UTF-8, as rows of token ids.

    ``validation/`` may stand for ``val/``; it and ``test/`` may be missing. Labels number the classes in the order of
    their names, examples are ordered by class and then by file name. ``tokenizer`` says how texts become ids, by
    default ``Tokenizer()``. Inputs are int32 ``[length]``; `jaxnn.data.vocabulary` gives the tokens.

    Raises:
        DataError: another layout, splits with different classes, a class without texts, a file that is empty or
            not UTF-8; the folder or file is named.
    """
    root = Path(path)
    pairs, class_names = _read_tree(root, list_folder(root, _SUFFIXES))
    return text_arrays(**pairs, tokenizer=tokenizer, name=root.resolve().name, class_names=class_names)


def imdb(
    tokenizer: Tokenizer | None = None, *, validation: float = 0.0, seed: int = 0, data_dir: PathLike | None = None
) -> Splits:
    """Film reviews from IMDb, negative (label 0) and positive: 25,000 to train and 25,000 to test, balanced.

    Maas, Daly, Pham, Huang, Ng & Potts, "Learning Word Vectors for Sentiment Analysis" (2011). 123 texts occur both in
    ``train`` and in ``test``. Reads, in the data directory's ``imdb/`` or in itself, the first that is there of
    ``aclImdb/``, ``aclImdb_labeled.tar.gz`` and ``aclImdb_v1.tar.gz``; archives are not unpacked. Else it downloads
    the last, 84 MB. Numbers are the same from each.

    Keras's IMDb is of these reviews. ``Tokenizer(length=100, pad="start")`` prepares them as its example
    ``imdb_bidirectional_lstm`` does and ``Tokenizer(ngrams=2, length=400, pad="start")``, 1.2 million ids, as its
    ``imdb_fasttext``, but for the numbering of ids and a token that Keras sets before each text.

    Args:
        tokenizer: how texts become ids; None: ``Tokenizer()``, 20,000 words and the last 100 of a text.
        validation: the share of the training reviews held out as ``validation``.
        seed: of the shuffle before that.
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.

    Raises:
        DataError: no such files and no download, files that are damaged or refused, a share that cannot be held out.
    """
    path = find("imdb", (_IMDB_FOLDER, *_IMDB_ARCHIVES), data_dir)
    path = path or fetch("imdb", _IMDB_ARCHIVES[-1], _IMDB, _IMDB_SHA256, data_dir)
    if path.is_dir():
        pairs, class_names = _read_tree(path, list_folder(path, _SUFFIXES, _IMDB_CLASSES))
    else:
        pairs, class_names = _read_tree(path, *_read_archive(path))
    if class_names != _IMDB_CLASSES or "test" not in pairs:
        raise DataError(f"{path} does not hold {_IMDB_FOLDER}/{{train,test}}/{{neg,pos}}/*.txt: download it again.")
    reviews, labels = pairs["train"]
    splits = split_off(reviews, labels, {"validation": validation}, seed)
    return text_arrays(**splits, test=pairs["test"], tokenizer=tokenizer, name="imdb", class_names=class_names)


def _read_archive(path: Path) -> tuple[Listing, dict[str, str]]:
    """The files in IMDb's archive, and the text of each by its path ``<split>/<class>/<file>``."""
    listing: Listing = {}
    contents = {}
    for name, content in read_members(path, _IMDB_MEMBER.fullmatch, _MOST_ARCHIVE_BYTES):
        _, folder, kind, file = name.split("/")
        listing.setdefault(folder, {}).setdefault(kind, []).append(file)
        contents[f"{folder}/{kind}/{file}"] = decoded(content, f"{name} in {path}")
    return listing, contents


def _read_tree(
    path: Path, listing: Listing, contents: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The texts and labels of each split, and the classes' names; ``contents`` are texts that are read already."""
    found, class_names = classified(listing, path, _SUFFIXES)
    pairs = {}
    for split, (folder, names, labels) in found.items():
        if contents is None:
            for name in names:
                check_file(path / folder / name)
            lines = [read_text(path / folder / name) for name in names]
        else:
            lines = [contents[f"{folder}/{name}"] for name in names]
        if empty := [name for name, text in zip(names, lines, strict=True) if not text.strip()]:
            raise DataError(f"{path}/{folder}/{empty[0]} has no text (such files there: {len(empty):,}): remove them.")
        pairs[split] = lines, labels
    return pairs, class_names
