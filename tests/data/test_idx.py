"""The idx format and the two sets written in it: good files are read, each damage is named."""

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


@pytest.mark.parametrize("name", ("a-idx3-ubyte.gz", "a-idx3-ubyte"))
def test_bytes_are_read_with_and_without_gzip(tmp_path, name):
    array = read_idx(write(tmp_path / name, idx_bytes(IMAGES)), 3)
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, IMAGES)


@pytest.mark.parametrize(("code", "dtype"), ((0x09, "i1"), (0x0B, "i2"), (0x0C, "i4"), (0x0D, "f4"), (0x0E, "f8")))
def test_other_dtypes_are_big_endian_in_the_file_and_native_in_memory(tmp_path, code, dtype):
    expected = np.array([[1, -2], [3, 100]], dtype)
    array = read_idx(write(tmp_path / "a", idx_bytes(expected, code)))
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array, expected)


GOOD = idx_bytes(IMAGES)


@pytest.mark.parametrize(
    ("data", "message"),
    (
        (b"", "is not an idx file: it begins with nothing"),
        (b"\x89PNG" + GOOD[4:], "is not an idx file: it begins with 89 50 4e 47"),
        (b"\0\0\x07\x03" + GOOD[4:], "is not an idx file"),
        (b"\0\0\x08\x01" + GOOD[4:], "array of 1 axes, not of 3"),
        (GOOD[:10], "truncated in its header"),
        (GOOD[:-1], "should hold 24 bytes .* but holds 23"),
        (GOOD + b"\0", "should hold 24 bytes .* but holds more"),
    ),
)
@pytest.mark.parametrize("name", ("a.gz", "a"))
def test_a_damaged_file_is_named_with_its_defect(tmp_path, name, data, message):
    path = write(tmp_path / name, data)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def header(*shape, code=0x08):
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


@pytest.mark.parametrize(
    ("data", "message"),
    (
        (header(2**32 - 1, 2**32 - 1, 2**32 - 1) + b"abc", "should hold .* but holds 3|would unfold to"),
        (header(20, 2**15, 2**15) + b"abc", "should hold .* but holds 3|would unfold to"),
        (header(1000) + bytes(10_000_000), "should hold .* but holds more"),
        (header(*[1] * 65) + b"a", r"holds no array of the shape \(1, 1, "),
        (header(0, *[2**32 - 1] * 3), "holds no array of the shape"),
    ),
)
@pytest.mark.parametrize("name", ("a.gz", "a"))
def test_memory_does_not_grow_with_what_a_header_announces(tmp_path, name, data, message):
    path = write(tmp_path / name, data)
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"{name} {message}"):
        read_idx(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4e6


def test_a_path_may_be_a_string(tmp_path):
    np.testing.assert_array_equal(read_idx(str(write(tmp_path / "a.gz", GOOD))), IMAGES)
    with pytest.raises(DataError, match=r"no\.gz cannot be read: No such file"):
        read_idx(str(tmp_path / "no.gz"))


def test_a_damaged_gzip_is_named(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(GOOD)
    with pytest.raises(DataError, match=r"a\.gz is not a gzip file"):
        read_idx(path)
    noise = np.random.default_rng(0).integers(0, 256, (2, 30, 40), dtype=np.uint8)
    whole = gzip.compress(idx_bytes(noise))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.gz is truncated or damaged"):
        read_idx(path)
    # The last eight bytes hold the checksum and the length.
    path.write_bytes(whole[:-8] + b"\0" * 8)
    with pytest.raises(DataError, match=r"a\.gz"):
        read_idx(path)


def write_mnist(folder, num_train=6, num_test=4, label=0):
    for split, count in (("train", num_train), ("t10k", num_test)):
        images = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8)
        labels[-1] += label
        write(folder / f"{split}-images-idx3-ubyte.gz", idx_bytes(images))
        write(folder / f"{split}-labels-idx1-ubyte.gz", idx_bytes(labels))


@pytest.mark.parametrize("load", (mnist, fashion_mnist))
def test_four_files_become_splits_and_the_last_of_train_validation(tmp_path, load):
    write_mnist(tmp_path / load.__name__)
    splits = load(tmp_path, num_validation=2)
    assert splits.train.examples.inputs.shape == (4, 28, 28, 1)
    np.testing.assert_array_equal(splits.validation.examples.targets, [4, 5])
    np.testing.assert_array_equal(splits.validation.examples.inputs[:, 5, 5, 0], [4, 5])
    np.testing.assert_array_equal(splits.test.examples.targets, [0, 1, 2, 3])
    assert load(tmp_path).validation is None


def test_a_label_out_of_range_and_unequal_numbers_are_named(tmp_path):
    write_mnist(tmp_path / "mnist", label=5)
    with pytest.raises(DataError, match="label 10 of example 5 in train"):
        mnist(tmp_path)
    write_mnist(tmp_path / "mnist")
    write(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz", idx_bytes(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match="test has 4 inputs but 3 targets"):
        mnist(tmp_path)


@pytest.mark.parametrize("load", (mnist, fashion_mnist))
def test_the_real_set_has_its_sizes_and_classes(data_dir, load):
    splits = load(data_dir)
    assert splits.train.examples.inputs.shape == (60_000, 28, 28, 1)
    assert splits.train.examples.inputs.dtype == np.uint8
    assert splits.test.examples.inputs.shape == (10_000, 28, 28, 1)
    assert len(splits.class_names) == 10
    counts = np.bincount(splits.train.examples.targets)
    if load is fashion_mnist:
        assert counts.tolist() == [6000] * 10
    else:
        # Of the 60,000 training digits 5,923 are zeros and 6,742 ones (LeCun's page).
        assert counts[:2].tolist() == [5923, 6742]
