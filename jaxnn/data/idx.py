"""MNIST and Fashion-MNIST, and the idx format they are written in."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from jaxnn.data.arrays import arrays, hold_out
from jaxnn.data.files import fetch
from jaxnn.types import DataError, Splits

_DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(">u1"),
    0x09: np.dtype(">i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}

_MOST_AXES = 16
# What a gzipped file may grow to: pictures become some 5 times as large, and nothing but zeros 1,000 times.
_GROWS_TO, _GROWS_BY = 1 << 30, 200

_MNIST_PLACES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_MNIST_SHA256 = {
    "train-images": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_FASHION_PLACES = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_FASHION_SHA256 = {
    "train-images": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
_DIGIT_NAMES = tuple("0123456789")
_FASHION_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def mnist(data_dir: str | os.PathLike[str] | None = None, num_validation: int = 0) -> Splits:
    """MNIST: handwritten digits, uint8 ``[28, 28, 1]``, 60,000 to train and 10,000 to test.

    LeCun, Bottou, Bengio & Haffner, "Gradient-Based Learning Applied to Document Recognition"
    (1998). Reads ``mnist/*.gz`` in the data directory, and downloads 12 MB if they are not there.

    Args:
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.
        num_validation: how many of the last training examples become ``validation``.

    Raises:
        DataError: files that are missing and cannot be downloaded, or are damaged.
    """
    return _images("mnist", _MNIST_PLACES, _MNIST_SHA256, _DIGIT_NAMES, data_dir, num_validation)


def fashion_mnist(data_dir: str | os.PathLike[str] | None = None, num_validation: int = 0) -> Splits:
    """Fashion-MNIST: pictures of clothes, in 10 classes, of MNIST's shape and sizes.

    Xiao, Rasul & Vollgraf (2017). Reads ``fashion_mnist/*.gz`` in the data directory, and downloads
    31 MB if they are not there. Arguments and errors as of `mnist`.
    """
    return _images("fashion_mnist", _FASHION_PLACES, _FASHION_SHA256, _FASHION_NAMES, data_dir, num_validation)


def read_idx(path: str | os.PathLike[str], num_axes: int | None = None) -> np.ndarray:
    """The array in an idx file, gzipped if its name ends in ``.gz``.

    The format: two zero bytes, a byte for the dtype, a byte for the number of axes, each axis's
    length as a big-endian uint32, and the values, big-endian, in C order (LeCun's MNIST page).

    Args:
        path: the file.
        num_axes: how many axes the array must have; by default any number.

    Raises:
        DataError: not idx, not gzip, another number of axes, truncated, something behind the
            values, or a gzip file that would grow beyond 1 GiB and 200 times its size; it names the file.
    """
    path = Path(path)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            most_bytes = max(_GROWS_TO, _GROWS_BY * path.stat().st_size) if path.suffix == ".gz" else None
            return _parse_idx(cast(BinaryIO, file), path, num_axes, most_bytes)
    except gzip.BadGzipFile as error:
        raise DataError(f"{path} is not a gzip file: download it again ({error}).") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged: download it again ({error}).") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _parse_idx(file: BinaryIO, path: Path, num_axes: int | None, most_bytes: int | None) -> np.ndarray:
    """The array in an open idx file, if it has no more than ``most_bytes`` of values."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
        raise DataError(f"{path} is not an idx file: it begins with {magic.hex(' ') or 'nothing'}; download it again.")
    dtype, rank = _DTYPES[magic[2]], magic[3]
    if rank > _MOST_AXES:
        raise DataError(f"{path} announces an array of {rank} axes, which no data set has: download it again.")
    if num_axes is not None and rank != num_axes:
        raise DataError(f"{path} holds an array of {rank} axes where {num_axes} are expected: were files mixed up?")
    header = file.read(4 * rank)
    if len(header) < 4 * rank:
        raise DataError(f"{path} is truncated in its header: download it again.")
    shape = tuple(int(length) for length in np.frombuffer(header, ">u4"))
    num_bytes = math.prod(shape) * dtype.itemsize
    if most_bytes is not None and num_bytes > most_bytes:
        raise DataError(
            f"{path} would unfold to {num_bytes:,} bytes, as its header says {shape}, too many for a file of its size: "
            "download it again; or, if you trust it, gunzip it first."
        )
    # One byte more than there should be, to see what is too long.
    body = _read_up_to(file, num_bytes + 1)
    if len(body) != num_bytes:
        found = "more" if len(body) > num_bytes else f"{len(body):,}"
        raise DataError(
            f"{path} should hold {num_bytes:,} bytes of values, as its header says {shape}, but "
            f"holds {found}: download it again."
        )
    try:
        return np.frombuffer(body, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
    except ValueError as error:
        raise DataError(f"{path} holds no array of the shape {shape} that its header says ({error}).") from error


def _read_up_to(file: BinaryIO, num_bytes: int) -> bytearray:
    """As many bytes as there are, and no more than that: memory grows with the file, not with what it announces."""
    body = bytearray()
    while chunk := file.read(min(num_bytes - len(body), 1 << 20)):
        body += chunk
    return body


def _images(
    name: str,
    places: tuple[str, ...],
    sha256: dict[str, str],
    class_names: tuple[str, ...],
    data_dir: str | os.PathLike[str] | None,
    num_validation: int,
) -> Splits:
    """A data set of four idx files in MNIST's manner."""

    def read(split: str, kind: str, num_axes: int) -> np.ndarray:
        file_name = f"{split}-{kind}-idx{num_axes}-ubyte.gz"
        urls = [place + file_name for place in places]
        path = fetch(name, file_name, urls, sha256[f"{split}-{kind}"], data_dir)
        return read_idx(path, num_axes)

    def pair(split: str) -> tuple[np.ndarray, np.ndarray]:
        return read(split, "images", 3)[..., None], read(split, "labels", 1)

    train, validation = hold_out(pair("train"), num_validation)
    return arrays(train, pair("t10k"), validation, name=name, class_names=class_names)
