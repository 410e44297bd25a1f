"""The idx format, MNIST and Fashion-MNIST; damaged files raise in bounded memory."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest

from jaxnn.data import fashion_mnist, mnist, read_idx
from jaxnn.types import DataError


def idx_bytes(array, code=0x08):
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


GOOD = idx_bytes(IMAGES)


@pytest.mark.parametrize(
    ("code", "dtype"), ((0x08, "u1"), (0x09, "i1"), (0x0B, "i2"), (0x0C, "i4"), (0x0D, "f4"), (0x0E, "f8"))
)
def test_dtypes_are_big_endian_in_the_file_and_native_in_memory(tmp_path, code, dtype):
    expected = np.array([[[1, 2], [3, 100]]], dtype) - np.array(0 if dtype == "u1" else 5, dtype)
    for name in ("a.gz", "a"):
        array = read_idx(str(write(tmp_path / name, idx_bytes(expected, code))), 3)
        assert array.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(array, expected)


def header(*shape):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


@pytest.mark.parametrize(
    ("data", "num_axes", "message"),
    (
        (b"", 3, "is not an idx file: it starts with nothing"),
        (b"\x89PNG" + GOOD[4:], 3, "is not an idx file: it starts with 89 50 4e 47"),
        (b"\0\0\x07\x03" + GOOD[4:], 3, "is not an idx file"),
        (GOOD, 1, "array of 3 axes, not of 1"),
        (GOOD[:10], 3, "truncated in its header"),
        (GOOD[:-1], 3, "should have 24 bytes .* but has 23"),
        (GOOD + b"\0", 3, "should have 24 bytes .* but has more"),
        (header(2**32 - 1, 2**32 - 1, 2**32 - 1) + b"abc", None, "should have .* but has 3|would decompress to"),
        (header(20, 2**15, 2**15) + b"abc", None, "should have .* but has 3|would decompress to"),
        (header(1000) + bytes(10_000_000), None, "should have .* but has more"),
        (header(*[1] * 65) + b"a", None, r"impossible shape \(1, 1, "),
        (header(0, *[2**32 - 1] * 3), None, "impossible shape"),
    ),
)
@pytest.mark.parametrize("name", ("a.gz", "a"))
def test_damaged_files_raise_in_bounded_memory(tmp_path, name, data, num_axes, message):
    path = write(tmp_path / name, data)
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"{path}.* {message}"):
        read_idx(path, num_axes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6


def damaged_gzips():
    noise = np.random.default_rng(0).integers(0, 256, (2, 30, 40), dtype=np.uint8)
    data = gzip.compress(idx_bytes(noise))
    # The last eight bytes hold the checksum and the length.
    return ((GOOD, "is not a gzip file"), (data[: len(data) // 2], "is truncated"), (data[:-8] + b"\0" * 8, ""))


def test_damaged_gzip_and_missing_files_raise(tmp_path):
    path = tmp_path / "a.gz"
    for data, message in damaged_gzips():
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"a\.gz {message}"):
            read_idx(path)
    with pytest.raises(DataError, match=r"no\.gz cannot be read: No such file"):
        read_idx(tmp_path / "no.gz")


def write_mnist(folder, num_train=6, num_test=4, label=0):
    for split, count in (("train", num_train), ("t10k", num_test)):
        images = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8)
        labels[-1] += label
        write(folder / f"{split}-images-idx3-ubyte.gz", idx_bytes(images))
        write(folder / f"{split}-labels-idx1-ubyte.gz", idx_bytes(labels))


@pytest.mark.parametrize("load", (mnist, fashion_mnist))
def test_four_files_become_splits_with_validation(tmp_path, load):
    write_mnist(tmp_path / load.__name__)
    splits = load(tmp_path, num_validation=2)
    assert splits.train.examples.inputs.shape == (4, 28, 28, 1)
    np.testing.assert_array_equal(splits.validation.examples.targets, [4, 5])
    np.testing.assert_array_equal(splits.validation.examples.inputs[:, 5, 5, 0], [4, 5])
    np.testing.assert_array_equal(splits.test.examples.targets, [0, 1, 2, 3])
    assert load(tmp_path).validation is None


def test_bad_labels_raise(tmp_path):
    write_mnist(tmp_path / "mnist", label=5)
    with pytest.raises(DataError, match="label 10 of example 5 in train"):
        mnist(tmp_path)
    write_mnist(tmp_path / "mnist")
    write(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", idx_bytes(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match="test has 4 inputs but 3 targets"):
        mnist(tmp_path)


@pytest.mark.parametrize("load", (mnist, fashion_mnist))
def test_real_sets_have_their_sizes_and_classes(data_dir, load):
    splits = load(data_dir)
    assert repr(splits) == f"Splits({load.__name__}: 60,000 train, 10,000 test, inputs uint8 [28, 28, 1], 10 classes)"
    counts = np.bincount(splits.train.examples.targets)
    if load is fashion_mnist:
        assert counts.tolist() == [6000] * 10
    else:
        # Of the 60,000 training digits 5,923 are zeros and 6,742 ones (LeCun's page).
        assert counts[:2].tolist() == [5923, 6742]
