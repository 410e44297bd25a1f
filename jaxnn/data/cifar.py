"""CIFAR-10 in either of its layouts, from a folder or straight from an archive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxnn.data.archives import read_members
from jaxnn.data.arrays import arrays, hold_out
from jaxnn.data.files import data_dir as find_data_dir
from jaxnn.data.files import fetch, refusals_named
from jaxnn.data.pickles import read_pickle
from jaxnn.types import DataError, Splits

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_NUM_PIXELS = 3 * 32 * 32
# A batch takes 31 MB in either layout, and an archive holds six.
_MOST_BATCH_BYTES, _MOST_ARCHIVE_BYTES = 1 << 25, 1 << 28
_CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

type _Pair = tuple[np.ndarray, np.ndarray]


class _Layout(NamedTuple):
    """How a batch of CIFAR-10 is written.

    Attributes:
        folder: what its files lie in, in an archive too.
        archive: the name of the archive.
        suffix: of each file's name.
        parse: ``(bytes, where) -> (planes uint8 [examples, 3072], labels [examples])``.
    """

    folder: str
    archive: str
    suffix: str
    parse: Callable[[bytes, str], _Pair]


def cifar10(data_dir: str | os.PathLike[str] | None = None, num_validation: int = 0) -> Splits:
    """CIFAR-10: small photographs, uint8 ``[32, 32, 3]``, 50,000 to train and 10,000 to test.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). Reads, in the data
    directory's ``cifar10/`` or in itself, the first that is there of ``cifar-10-batches-bin/``,
    ``cifar-10-binary.tar.gz``, ``cifar-10-batches-py/``, ``cifar-10-python.tar.gz``; archives are
    read as they are and pickles are not unpickled (`jaxnn.data.pickles`). Else it downloads the
    binary archive, 170 MB.

    Args:
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.
        num_validation: how many of the last training examples become ``validation``.

    Raises:
        DataError: no such files and no download, or files that are damaged or refused.
    """
    layout, path = _find(data_dir)
    train_names = [f"data_batch_{index}{layout.suffix}" for index in range(1, 6)]
    test_name = f"test_batch{layout.suffix}"
    read = _read_folder if path.is_dir() else _read_archive
    found = read(path, {*train_names, test_name})
    batches = {name: _images(layout, found[name], f"{name} of {path}") for name in (*train_names, test_name)}
    joined = _join(batches[name] for name in train_names)
    train, validation = hold_out(joined, num_validation)
    return arrays(train, batches[test_name], validation, name="cifar10", class_names=_CLASS_NAMES)


@refusals_named()
def _find(data_dir: str | os.PathLike[str] | None) -> tuple[_Layout, Path]:
    """The first folder or archive that is there, or the archive downloaded."""
    root = find_data_dir(data_dir)
    for layout in _LAYOUTS:
        for parent in (root / "cifar10", root):
            if (parent / layout.folder).is_dir():
                return layout, parent / layout.folder
            if (parent / layout.archive).is_file():
                return layout, parent / layout.archive
    return _LAYOUTS[0], fetch("cifar10", _LAYOUTS[0].archive, _URL, _SHA256, data_dir)


def _read_folder(folder: Path, names: set[str]) -> dict[str, bytes]:
    """The files of these names in a folder."""
    try:
        return {name: _read_file(folder / name) for name in sorted(names)}
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror}): {folder} must hold {', '.join(sorted(names))}."
        ) from error


def _read_file(path: Path) -> bytes:
    """What is in a file, or enough of it to see that it is too long."""
    with open(path, "rb") as file:
        return file.read(_MOST_BATCH_BYTES + 1)


def _read_archive(path: Path, names: set[str]) -> dict[str, bytes]:
    """The files of these names in a tar archive, in any folder in it."""
    members = read_members(path, lambda parts: bool(parts) and parts[-1] in names, _MOST_ARCHIVE_BYTES)
    found = {parts[-1]: content for parts, content in members}
    missing = sorted(names - found.keys())
    if missing:
        raise DataError(f"{path} does not hold {', '.join(missing)}: download it again.")
    return found


def _images(layout: _Layout, data: bytes, where: str) -> _Pair:
    """A batch's images ``[examples, 32, 32, 3]`` and labels ``[examples]``."""
    if len(data) > _MOST_BATCH_BYTES:
        raise DataError(f"{where} is larger than a batch of CIFAR-10, of 31 MB: download it again.")
    planes, labels = layout.parse(data, where)
    if planes.shape[1:] != (_NUM_PIXELS,) or labels.shape != planes.shape[:1]:
        raise DataError(
            f"{where} holds images of shape {planes.shape} and labels of shape {labels.shape} "
            f"instead of [examples, {_NUM_PIXELS}] and [examples]: download it again."
        )
    outside = (labels < 0) | (labels >= len(_CLASS_NAMES))
    if outside.any():
        record = int(outside.argmax())
        raise DataError(
            f"record {record} of {where} has the label {labels[record]}, but labels are 0 to "
            f"{len(_CLASS_NAMES) - 1}: download it again."
        )
    images = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def _parse_binary(data: bytes, where: str) -> _Pair:
    """Records of a byte for the label and 3,072 for the pixels: all red, all green, all blue."""
    record_bytes = 1 + _NUM_PIXELS
    if not data or len(data) % record_bytes:
        raise DataError(
            f"{where} is truncated or damaged: its {len(data):,} bytes are no multiple of a "
            f"record's {record_bytes:,}; download it again."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, record_bytes)
    return records[:, 1:], records[:, 0]


def _parse_pickle(data: bytes, where: str) -> _Pair:
    """A pickled dictionary of ``data``, uint8 ``[examples, 3072]``, and ``labels``, a list."""
    content = read_pickle(data, where)
    planes, labels = content.get(b"data"), content.get(b"labels")
    if not isinstance(planes, np.ndarray) or not isinstance(labels, list):
        raise DataError(f"{where} does not hold an array 'data' and a list 'labels': it is not a batch of CIFAR-10.")
    if not all(isinstance(label, int) and label.bit_length() < 32 for label in labels):
        raise DataError(f"{where} has labels that are not integers, or large ones: it is not a batch of CIFAR-10.")
    return planes, np.array(labels)


def _join(batches: Iterable[_Pair]) -> _Pair:
    """Several batches as one."""
    images, labels = zip(*batches, strict=True)
    return np.concatenate(images), np.concatenate(labels)


_LAYOUTS = (
    _Layout("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _parse_binary),
    _Layout("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _parse_pickle),
)
