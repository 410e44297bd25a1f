"""Texts sorted into ``<split>/<class>/``, in a folder or inside a tar archive, which is read and never unpacked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from jaxnn.data.archives import read_members
from jaxnn.data.files import refusals_named
from jaxnn.data.text.reading import decoded, read_text
from jaxnn.types import DataError

_SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
_SUFFIX = ".txt"
# IMDb's takes half of it.
_MOST_ARCHIVE_BYTES = 1 << 30

# By the split's folder, the class and the file's name.
type Tree = dict[str, dict[str, dict[str, str]]]


def read_folder(root: Path, classes: Collection[str] = ()) -> Tree:
    """The texts in ``root/{train,val,validation,test}/<class>/*.txt``; what is hidden is left out.

    Args:
        root: the folder.
        classes: those that are read; empty: all.

    Raises:
        DataError: there is no such folder, or a text that cannot be read or is not UTF-8.
    """
    tree: Tree = {}
    with refusals_named():
        if not root.is_dir():
            raise DataError(f"{root} is not a folder: give the one that holds train/.")
        for split in filter(lambda folder: folder.name in _SPLITS, _folders(root)):
            kinds = [folder for folder in _folders(split) if not classes or folder.name in classes]
            tree[split.name] = {kind.name: {file.name: read_text(file) for file in _files(kind)} for kind in kinds}
    return tree


def read_archive(path: Path, top: str, classes: Collection[str] = ()) -> Tree:
    """The texts in the archive's members ``top/{train,val,validation,test}/<class>/*.txt``.

    Members are read one by one, in memory, whatever their order; nothing is written.

    Args:
        path: a tar archive, compressed by gzip.
        top: the folder in it that all lie in.
        classes: those that are read; empty: all.

    Raises:
        DataError: an archive that `read_members` refuses, or a text that is not UTF-8.
    """
    tree: Tree = {}

    def wanted(parts: tuple[str, ...]) -> bool:
        match parts:
            case (folder, split, kind, name):
                chosen = not classes or kind in classes
                return folder == top and split in _SPLITS and chosen and _is_text(name)
        return False

    for (_, split, kind, name), content in read_members(path, wanted, _MOST_ARCHIVE_BYTES):
        where = f"{top}/{split}/{kind}/{name} in {path}"
        tree.setdefault(split, {}).setdefault(kind, {})[name] = decoded(content, where)
    return tree


def classified(tree: Tree, where: Path) -> tuple[dict[str, tuple[list[str], np.ndarray]], tuple[str, ...]]:
    """The texts and labels of each split, and the classes' names.

    Labels number the classes in the order of their names; texts go by class, and then by the names of their files.

    Args:
        tree: what was read.
        where: from where, for messages.

    Raises:
        DataError: no ``train``, both ``val`` and ``validation``, splits with other classes, a class without texts,
            an empty text.
    """
    if "train" not in tree:
        found = ", ".join(sorted(tree)) or "none of them"
        raise DataError(
            f"{where} has no train/ (of train, val and test it has {found}): arrange the texts as train/<class>/*.txt, "
            "and likewise val/ and test/ if there are such."
        )
    if {"val", "validation"} <= tree.keys():
        raise DataError(f"{where} has both val and validation: keep one of them.")
    names = tuple(sorted(tree["train"]))
    if not names:
        raise DataError(f"{where}/train has no class folders: put the texts into train/<class>/.")
    return {_SPLITS[folder]: _labelled(kinds, names, f"{where}/{folder}") for folder, kinds in tree.items()}, names


def _labelled(
    kinds: dict[str, dict[str, str]], class_names: tuple[str, ...], where: str
) -> tuple[list[str], np.ndarray]:
    """The texts and labels of one split."""
    if odd := sorted(set(kinds) ^ set(class_names)):
        raise DataError(
            f"{where} does not have the classes that train has (they differ in {', '.join(odd)}): make them the same."
        )
    for name in class_names:
        if not kinds[name]:
            raise DataError(f"{where}/{name} holds no {_SUFFIX}: add some or remove it.")
        if empty := sorted(file for file, text in kinds[name].items() if not text.strip()):
            raise DataError(f"{where}/{name}/{empty[0]} has no text (such files there: {len(empty):,}): remove them.")
    texts = [kinds[name][file] for name in class_names for file in sorted(kinds[name])]
    return texts, np.repeat(np.arange(len(class_names), dtype=np.int32), [len(kinds[name]) for name in class_names])


def _folders(parent: Path) -> Iterator[Path]:
    """The folders in ``parent`` that are not hidden."""
    return (item for item in parent.iterdir() if item.is_dir() and not item.name.startswith("."))


def _files(parent: Path) -> Iterator[Path]:
    """The texts in ``parent`` that are not hidden."""
    for item in filter(lambda item: _is_text(item.name), parent.iterdir()):
        if not item.is_file():
            raise DataError(
                f"{item} is a broken link, or a folder or the like, instead of a text: remove or replace it."
            )
        yield item


def _is_text(name: str) -> bool:
    """Whether a file's name is a text's, and not hidden."""
    return name.endswith(_SUFFIX) and not name.startswith(".")
