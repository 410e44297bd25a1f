"""A folder of texts, one folder a class, and IMDb's reviews, which are such a folder in an archive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxnn.data.files import data_dir as find_data_dir
from jaxnn.data.files import fetch, refusals_named
from jaxnn.data.text.shares import split_off
from jaxnn.data.text.source import texts
from jaxnn.data.text.tokenizer import Tokenizer
from jaxnn.data.text.tree import Tree, classified, read_archive, read_folder
from jaxnn.types import DataError, Splits

_IMDB = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
_IMDB_SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
_IMDB_FOLDER = "aclImdb"
_IMDB_ARCHIVES = ("aclImdb_labeled.tar.gz", "aclImdb_v1.tar.gz")
# The whole archive has 50,000 reviews without a label too, as train/unsup.
_IMDB_CLASSES = ("neg", "pos")


def text_folder(path: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> Splits:
    """Texts in ``path/{train,val,test}/<class>/*.txt``, in UTF-8, as rows of token ids.

    ``validation/`` may stand for ``val/``; it and ``test/`` may be missing. Labels number the classes in the order of
    their names, examples go by class and then by file name.

    Args:
        path: the folder.
        tokenizer: how texts become ids; None: ``Tokenizer()``.

    Returns:
        Inputs int32 ``[length]``, labels int32, and the classes' names; `jaxnn.data.vocabulary` gives the tokens.

    Raises:
        DataError: another layout, splits with different classes, a class without texts, a file that is empty or
            not UTF-8; it names the folder or file.
    """
    root = Path(path)
    pairs, class_names = classified(read_folder(root), root)
    splits: dict[str, Any] = dict(pairs)
    return texts(**splits, tokenizer=tokenizer, name=root.resolve().name, class_names=class_names)


def imdb(
    tokenizer: Tokenizer | None = None,
    *,
    validation: float = 0.0,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
) -> Splits:
    """Film reviews from IMDb, negative (label 0) and positive: 25,000 to train and 25,000 to test, balanced.

    Maas, Daly, Pham, Huang, Ng & Potts, "Learning Word Vectors for Sentiment Analysis" (2011). 123 texts occur both in
    ``train`` and in ``test``. Reads, in the data directory's ``imdb/`` or in itself, the first that is there of
    ``aclImdb/``, ``aclImdb_labeled.tar.gz`` and ``aclImdb_v1.tar.gz``; archives are read as they are. Else it
    downloads the last, 84 MB. Numbers are the same from each.

    Keras's IMDb is of these reviews. ``Tokenizer(length=100, pad="start")`` prepares them as its example
    ``imdb_bidirectional_lstm`` does and ``Tokenizer(ngrams=2, length=400, pad="start")``, 1.2 million ids, as its
    ``imdb_fasttext``, but for the numbering of ids and a token that Keras sets before each text.

    Args:
        tokenizer: how texts become ids; None: ``Tokenizer()``, 20,000 words and the last 100 of a text.
        validation: the share of the training reviews held out as ``validation``.
        seed: of the shuffle before that.
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.

    Returns:
        Inputs int32 ``[length]``, labels int32; `jaxnn.data.vocabulary` gives the tokens.

    Raises:
        DataError: no such files and no download, files that are damaged or refused, a share that cannot be held out.
    """
    tree, where = _read_imdb(data_dir)
    pairs, class_names = classified(tree, where)
    if class_names != _IMDB_CLASSES or "test" not in pairs:
        raise DataError(f"{where} does not hold {_IMDB_FOLDER}/{{train,test}}/{{neg,pos}}/*.txt: download it again.")
    reviews, labels = pairs["train"]
    parts = split_off(len(reviews), {"validation": validation}, seed)
    splits: dict[str, Any] = {split: ([reviews[i] for i in part], labels[part]) for split, part in parts.items()}
    return texts(**splits, test=pairs["test"], tokenizer=tokenizer, name="imdb", class_names=class_names)


@refusals_named()
def _read_imdb(data_dir: str | os.PathLike[str] | None) -> tuple[Tree, Path]:
    """The reviews, and where they were found."""
    root = find_data_dir(data_dir)
    for parent in (root / "imdb", root):
        if (parent / _IMDB_FOLDER).is_dir():
            return read_folder(parent / _IMDB_FOLDER, _IMDB_CLASSES), parent / _IMDB_FOLDER
        for path in (parent / name for name in _IMDB_ARCHIVES):
            if path.is_file():
                return read_archive(path, _IMDB_FOLDER, _IMDB_CLASSES), path
    path = fetch("imdb", _IMDB_ARCHIVES[-1], _IMDB, _IMDB_SHA256, data_dir)
    return read_archive(path, _IMDB_FOLDER, _IMDB_CLASSES), path
