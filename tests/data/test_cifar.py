"""CIFAR-10: folders and archives give the same examples; damaged files and other layouts raise."""

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc

import convert_cifar
import numpy as np
import pytest

from jaxnn.data import cifar10
from jaxnn.types import DataError

TRAIN = [f"data_batch_{index}" for index in range(1, 6)]
NAMES = [*TRAIN, "test_batch"]
FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"


def fabricated():
    """Pixels ``[2, 3072]`` and two labels of each batch, all different."""
    rng = np.random.default_rng(0)
    return {name: (rng.integers(0, 256, (2, 3072), np.uint8), rng.integers(0, 10, 2).tolist()) for name in NAMES}


def binary(planes, *labels):
    return np.concatenate([*(np.array(column, np.uint8)[:, None] for column in labels), planes], axis=1).tobytes()


def write_folder(root, **changed):
    (root / FOLDER).mkdir(parents=True)
    for name, batch in fabricated().items():
        (root / FOLDER / f"{name}.bin").write_bytes(changed.get(name) or binary(*batch))
    return root / FOLDER


def write_archive(root, leave_out=()):
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / ARCHIVE, "w:gz") as file:
        for name, batch in fabricated().items():
            if name not in leave_out:
                data = binary(*batch)
                member = tarfile.TarInfo(f"{FOLDER}/{name}.bin")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return root / ARCHIVE


def check_complete(splits):
    """Compares with what was fabricated, pixel by pixel, from the layout's definition."""
    batches = fabricated()
    assert splits.train.targets.tolist() == [label for name in TRAIN for label in batches[name][1]]
    assert splits.test.targets.tolist() == batches["test_batch"][1]
    images = splits.test.examples.inputs
    assert (images.shape, images.dtype) == ((2, 32, 32, 3), np.uint8)
    for channel, row, column in ((0, 0, 0), (1, 0, 1), (2, 31, 30), (0, 17, 5)):
        # All red, then all green, then all blue; each row after row.
        expected = batches["test_batch"][0][:, channel * 1024 + row * 32 + column]
        np.testing.assert_array_equal(images[:, row, column, channel], expected)


@pytest.mark.parametrize(
    ("write", "below"), ((write_folder, "cifar10"), (write_archive, "."), (write_archive, "cifar10"))
)
def test_folder_and_archive_give_the_same_examples(tmp_path, write, below):
    write(tmp_path / below)
    before = list(tmp_path.rglob("*"))
    splits = cifar10(tmp_path)
    check_complete(splits)
    assert (len(splits.class_names), splits.class_names[3]) == (10, "cat")
    assert splits.train.examples.inputs.flags.c_contiguous
    assert list(tmp_path.rglob("*")) == before
    splits = cifar10(tmp_path, num_validation=3)
    labels = fabricated()["data_batch_4"][1][-1:] + fabricated()["data_batch_5"][1]
    assert (splits.validation.targets.tolist(), splits.train.num_examples) == (labels, 7)


PLANES = np.zeros((2, 3072), np.uint8)


def cut_archive(root):
    path = write_archive(root)
    path.write_bytes(path.read_bytes()[:-2000])


def enlarge(root):
    with open(write_folder(root) / "data_batch_4.bin", "wb") as file:
        file.truncate(8 << 30)  # sparse: it takes no space


@pytest.mark.parametrize(
    ("write", "message"),
    (
        (
            lambda root: write_folder(root, data_batch_2=binary(PLANES, [0, 1])[:-1]),
            r"data_batch_2\.bin .* 6,145 bytes",
        ),
        (lambda root: write_folder(root, data_batch_2=binary(PLANES, [9, 10])), "record 1 of data_batch_2.* label 10"),
        (lambda root: (write_folder(root) / "test_batch.bin").unlink(), r"test_batch\.bin cannot be read"),
        (lambda root: write_archive(root, leave_out=("data_batch_5",)), r"does not have data_batch_5\.bin"),
        (cut_archive, r"cifar-10-binary\.tar\.gz is truncated or damaged"),
        (enlarge, r"data_batch_4\.bin of .* larger than all of CIFAR"),
    ),
)
def test_damaged_files_raise(tmp_path, write, message):
    write(tmp_path)
    with pytest.raises(DataError, match=message):
        cifar10(tmp_path)


def announced(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def sparse(name, size):
    """A member of ``size`` bytes, none of which are in the archive."""
    buffer = bytearray(announced(name, 0, tarfile.GNUTYPE_SPARSE))
    buffer[483:495] = b"%011o\0" % size
    buffer[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(buffer))[0]
    return bytes(buffer)


@pytest.mark.parametrize(
    ("headers", "message"),
    (
        (announced("data_batch_1.bin", 8 << 30), "decompresses to over"),
        (announced("other", 8 << 30), "decompresses to over"),
        (announced("pax", 8 << 30, tarfile.XHDTYPE), "truncated or damaged"),
        # With a negative size the next header would be this one, forever.
        (announced("other", -512), "truncated or damaged"),
        (sparse("data_batch_1.bin", 1 << 30), "a link or the like|decompresses to over"),
        (announced("other", 200 << 20) + bytes(300 << 20), "decompresses to over"),
    ),
)
def test_hostile_archives_raise_in_bounded_memory(tmp_path, headers, message):
    path = write_archive(tmp_path, leave_out=("data_batch_1",))
    path.write_bytes(gzip.compress(announced("readme", 0) + headers + gzip.decompress(path.read_bytes()), 1))
    tracemalloc.start()
    with pytest.raises(DataError, match=message) as caught:
        cifar10(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 1.5e8


def test_pickles_are_refused_and_can_be_converted(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, (planes, labels) in fabricated().items():
        content = {b"data": planes, b"labels": labels}
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=r"cifar-10-batches-py has CIFAR-10 .* experiments/convert_cifar\.py") as caught:
        cifar10(tmp_path)
    assert "\n" not in str(caught.value)
    convert_cifar.convert(tmp_path / "cifar-10-batches-py")
    check_complete(cifar10(tmp_path))


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


def test_the_converter_refuses_other_names(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(pickle.UnpicklingError, match="system is not part of CIFAR"):
        convert_cifar.convert(tmp_path)
