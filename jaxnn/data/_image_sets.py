"""MNIST and Fashion-MNIST in the idx format, and CIFAR-10 in its binary layout."""

import gzip
import math
from pathlib import Path

import numpy as np

from jaxnn.data._arrays import arrays, split_off_validation
from jaxnn.data._files import PathLike, fetch, find, opened, os_errors_named, read_members
from jaxnn.types import DataError, Splits

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# Largest decompressed size of a gzipped file: images grow about 5 times, zeros 1,000 times.
_GROWS_TO, _GROWS_BY = 1 << 30, 200

_IDX_PLACES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "fashion_mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
}
_IDX_SHA256 = {
    "mnist": {
        "train-images": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "fashion_mnist": {
        "train-images": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
}
_FASHION = "T-shirt/top|Trouser|Pullover|Dress|Coat|Sandal|Shirt|Sneaker|Bag|Ankle boot"
_CIFAR10 = "airplane|automobile|bird|cat|deer|dog|frog|horse|ship|truck"
_CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
_CIFAR_URL = f"https://www.cs.toronto.edu/~kriz/{_CIFAR_ARCHIVE}"
_CIFAR_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR_FILES = (*(f"data_batch_{index}.bin" for index in range(1, 6)), "test_batch.bin")
_RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then the red, green and blue plane of an image
_MOST_CIFAR_BYTES = 1 << 28  # CIFAR takes 184 MB


def mnist(data_dir: PathLike | None = None, num_validation: int = 0) -> Splits:
    """MNIST: handwritten digits, uint8 ``[28, 28, 1]``; 60,000 training and 10,000 test examples.

    LeCun, Bottou, Bengio & Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998). Reads
    ``mnist/*.gz`` in the data directory, and downloads 12 MB if they are missing.

    ``data_dir`` is the data directory, by default ``JAXNN_DATA``, else the user's cache. The last ``num_validation``
    training examples become ``validation``. Raises DataError for files that are damaged, or missing and cannot be
    downloaded.

    >>> jn.data.mnist(num_validation=5_000)
    Splits(mnist: 55,000 train, 5,000 validation, 10,000 test, inputs uint8 [28, 28, 1], 10 classes)
    """
    return _idx_images("mnist", tuple("0123456789"), data_dir, num_validation)


def fashion_mnist(data_dir: PathLike | None = None, num_validation: int = 0) -> Splits:
    """Fashion-MNIST: images of clothes in 10 classes, with MNIST's shapes and sizes.

    Xiao, Rasul & Vollgraf (2017). Reads ``fashion_mnist/*.gz`` in the data directory, and downloads 31 MB if they are
    missing. Arguments and errors as for `mnist`.

    >>> jn.data.fashion_mnist().class_names[:3]
    ('T-shirt/top', 'Trouser', 'Pullover')
    """
    return _idx_images("fashion_mnist", tuple(_FASHION.split("|")), data_dir, num_validation)


def _idx_images(name: str, class_names: tuple[str, ...], data_dir: PathLike | None, num_validation: int) -> Splits:
    """Reads a data set of four idx files, named like MNIST's."""

    def read(split: str, kind: str, num_axes: int) -> np.ndarray:
        file_name = f"{split}-{kind}-idx{num_axes}-ubyte.gz"
        urls = [place + file_name for place in _IDX_PLACES[name]]
        return read_idx(fetch(name, file_name, urls, _IDX_SHA256[name][f"{split}-{kind}"], data_dir), num_axes)

    pairs = {split: (read(split, "images", 3)[..., None], read(split, "labels", 1)) for split in ("train", "t10k")}
    train, validation = split_off_validation(pairs["train"], num_validation)
    return arrays(train, pairs["t10k"], validation, name=name, class_names=class_names)


@os_errors_named()
def read_idx(path: PathLike, num_axes: int | None = None) -> np.ndarray:
    """Reads the array in an idx file, which may be gzipped; ``num_axes`` checks its number of axes.

    The format (LeCun's MNIST page): two zero bytes, a byte for the dtype, a byte for the number of axes, each axis's
    length as a big-endian uint32, and the values, big-endian, in C order. Raises DataError, with the path, for a file
    that is not idx or gzip, has another number of axes, is truncated, has bytes after the values, or decompresses to
    more than 1 GiB and 200 times its size. `jaxnn.data.arrays` makes a data set of inputs and labels:

    >>> _ = Path("images.idx").write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 10, 20, 30, 40, 50, 60]))
    >>> jn.data.arrays((jn.data.read_idx("images.idx"), [0, 1]))
    Splits(arrays: 2 train, inputs uint8 [3])
    """
    path = Path(path)
    with opened(path) as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
            found = magic.hex(" ") or "nothing"
            raise DataError(f"{path} is not an idx file: it starts with {found}; download it again.")
        dtype, rank = np.dtype(_DTYPES[magic[2]]), magic[3]
        if num_axes is not None and rank != num_axes:
            raise DataError(f"{path} has an array of {rank} axes, not of {num_axes}: is it the right file?")
        header = file.read(4 * rank)
        if len(header) < 4 * rank:
            raise DataError(f"{path} is truncated in its header: download it again.")
        shape = tuple(np.frombuffer(header, ">u4").tolist())
        num_bytes = math.prod(shape) * dtype.itemsize
        if isinstance(file, gzip.GzipFile) and num_bytes > max(_GROWS_TO, _GROWS_BY * path.stat().st_size):
            raise DataError(
                f"{path} would decompress to {num_bytes:,} bytes for its shape {shape}, too many for a file of "
                "its size: download it again; or, if you trust it, gunzip it first."
            )
        # In chunks, since the header may claim any size; one more byte detects a file that is too long.
        body = bytearray()
        while chunk := file.read(min(num_bytes + 1 - len(body), 1 << 20)):
            body += chunk
    if len(body) != num_bytes:
        actual = "more" if len(body) > num_bytes else f"{len(body):,}"
        raise DataError(f"{path} should have {num_bytes:,} bytes of shape {shape} but has {actual}: download it again.")
    try:
        return np.frombuffer(body, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
    except ValueError as error:
        raise DataError(f"{path} has a header with an impossible shape {shape} ({error}).") from error


@os_errors_named()
def cifar10(data_dir: PathLike | None = None, num_validation: int = 0) -> Splits:
    """CIFAR-10: small photographs, uint8 ``[32, 32, 3]``, 50,000 to train and 10,000 to test, in 10 classes.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). Reads the official binary layout: in the
    data directory's ``cifar10/`` or in the data directory itself, the folder ``cifar-10-batches-bin/`` or the archive
    ``cifar-10-binary.tar.gz``, which is not unpacked. Else it downloads the archive, 170 MB.

    Arguments as for `mnist`. Raises DataError for Python pickles, damaged files, or files that are missing and cannot
    be downloaded.

    >>> splits = jn.data.cifar10(num_validation=5_000)  # doctest: +SKIP
    """
    path = find("cifar10", ("cifar-10-batches-bin", _CIFAR_ARCHIVE), data_dir)
    if path is None:
        if pickles := find("cifar10", ("cifar-10-batches-py", "cifar-10-python.tar.gz"), data_dir):
            raise DataError(
                f"{pickles} has CIFAR-10 as Python pickles, which may run code and are not read: convert it by "
                f"experiments/convert_cifar.py, or get {_CIFAR_URL}."
            )
        path = fetch("cifar10", _CIFAR_ARCHIVE, _CIFAR_URL, _CIFAR_SHA256, data_dir)
    if path.is_dir():
        if large := [name for name in _CIFAR_FILES if (path / name).stat().st_size > _MOST_CIFAR_BYTES]:
            raise DataError(f"{large[0]} of {path} is larger than all of CIFAR: download it again.")
        contents = {name: (path / name).read_bytes() for name in _CIFAR_FILES}
    else:
        members = read_members(path, lambda name: name.rpartition("/")[2] in _CIFAR_FILES, _MOST_CIFAR_BYTES)
        contents = {name.rpartition("/")[2]: content for name, content in members}
        if missing := sorted({*_CIFAR_FILES} - contents.keys()):
            raise DataError(f"{path} does not have {', '.join(missing)}: download it again.")
    images, labels = [], []
    for name in _CIFAR_FILES:
        if not contents[name] or len(contents[name]) % _RECORD_BYTES:
            raise DataError(
                f"{name} of {path} is truncated or damaged: its {len(contents[name]):,} bytes are not a multiple "
                f"of {_RECORD_BYTES:,}, a record's size; download it again."
            )
        records = np.frombuffer(contents[name], np.uint8).reshape(-1, _RECORD_BYTES)
        if bad := np.flatnonzero(records[:, 0] > 9).tolist():
            label = records[bad[0], 0]
            raise DataError(f"record {bad[0]} of {name} of {path} has the label {label}, not 0 to 9: get it again.")
        labels.append(records[:, 0])
        images.append(np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)))
    train, validation = split_off_validation((np.concatenate(images[:-1]), np.concatenate(labels[:-1])), num_validation)
    return arrays(train, (images[-1], labels[-1]), validation, name="cifar10", class_names=_CIFAR10.split("|"))
