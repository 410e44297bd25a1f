"""Texts sorted into ``<split>/<class>/``, in a folder or inside a tar archive, which is read and never unpacked."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from jaxnn.data.text.reading import decoded, read_text
from jaxnn.types import DataError

_SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
_SUFFIX = ".txt"

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
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give the one that holds train/.")
    tree: Tree = {}
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
        DataError: an archive that is truncated or damaged, has a member that would lie outside of it or a link where
            a text should be, or a text that is not UTF-8.
    """
    tree: Tree = {}
    try:
        with gzip.open(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                match _inside(member, path):
                    case (folder, split, kind, name) if folder == top and split in _SPLITS and _is_text(name):
                        if not classes or kind in classes:
                            texts = tree.setdefault(split, {}).setdefault(kind, {})
                            texts[name] = decoded(_content(archive, member, path), f"{member.name} in {path}")
            # To the end, where the checksum is.
            file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged ({error}): download it again.") from error
    return tree


def classified(tree: Tree, where: Path) -> tuple[dict[str, tuple[list[str], np.ndarray]], tuple[str, ...]]:
    """The texts and labels of each split, and the classes' names.

    Labels number the classes in the order of their names; texts go by class, and then by the names of their files.

    Args:
        tree: what was read.
        where: from where, for messages.

    Raises:
        DataError: no ``train``, both ``val`` and ``validation``, splits with other classes, a class without texts.
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
    texts = [kinds[name][file] for name in class_names for file in sorted(kinds[name])]
    return texts, np.repeat(np.arange(len(class_names), dtype=np.int32), [len(kinds[name]) for name in class_names])


def _folders(parent: Path) -> Iterator[Path]:
    """The folders in ``parent`` that are not hidden."""
    return (item for item in parent.iterdir() if item.is_dir() and not item.name.startswith("."))


def _files(parent: Path) -> Iterator[Path]:
    """The texts in ``parent`` that are not hidden."""
    return (item for item in parent.iterdir() if _is_text(item.name))


def _is_text(name: str) -> bool:
    """Whether a file's name is a text's, and not hidden."""
    return name.endswith(_SUFFIX) and not name.startswith(".")


def _inside(member: tarfile.TarInfo, path: Path) -> tuple[str, ...]:
    """The parts of a member's name; DataError if they lead out of the archive."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise DataError(f"{path} has a member {member.name!r}, which would lie outside of it: download it again.")
    return name.parts


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> bytes:
    """What is in a member that is a plain file."""
    file = archive.extractfile(member) if member.isfile() else None
    if file is None:
        raise DataError(f"{path} has a link or the like at {member.name} instead of a text: download it again.")
    return file.read()
