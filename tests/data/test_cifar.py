"""CIFAR-10 and CIFAR-100: folders and archives give one result; damage and other layouts are named."""

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc

import convert_cifar
import numpy as np
import pytest
from PIL import Image

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


@pytest.mark.parametrize("write", (write_folder, write_archive))
@pytest.mark.parametrize("below", ("cifar10", "."))
def test_folder_and_archive_give_the_same_examples(tmp_path, write, below):
    write(tmp_path / below)
    before = list(tmp_path.rglob("*"))
    splits = cifar10(tmp_path)
    check_complete(splits)
    assert (len(splits.class_names), splits.class_names[3]) == (10, "cat")
    assert splits.train.examples.inputs.flags.c_contiguous
    assert list(tmp_path.rglob("*")) == before


def test_the_last_of_train_become_validation(tmp_path):
    write_folder(tmp_path)
    splits = cifar10(tmp_path, num_validation=3)
    labels = fabricated()["data_batch_4"][1][-1:] + fabricated()["data_batch_5"][1]
    assert (splits.validation.targets.tolist(), splits.train.num_examples) == (labels, 7)


PLANES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("data", "message"),
    (
        (binary(PLANES, [0, 1])[:-1], r"data_batch_2\.bin of .* 6,145 bytes are no multiple"),
        (binary(PLANES, [9, 10]), r"record 1 of data_batch_2.* has the label 10"),
    ),
)
def test_a_damaged_batch_is_named(tmp_path, data, message):
    write_folder(tmp_path, data_batch_2=data)
    with pytest.raises(DataError, match=message):
        cifar10(tmp_path)


def test_a_missing_file_and_a_damaged_archive_are_named(tmp_path):
    (write_folder(tmp_path / "a") / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin cannot be read"):
        cifar10(tmp_path / "a")
    write_archive(tmp_path / "b", leave_out=("data_batch_5",))
    with pytest.raises(DataError, match=r"does not hold data_batch_5\.bin"):
        cifar10(tmp_path / "b")
    archive = write_archive(tmp_path / "c")
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is truncated or damaged"):
        cifar10(tmp_path / "c")


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
        (announced("data_batch_1.bin", 8 << 30), "announces more than"),
        (announced("other", 8 << 30), "announces more than"),
        (announced("long", 8 << 30, tarfile.GNUTYPE_LONGNAME), "truncated or damaged"),
        (announced("pax", 8 << 30, tarfile.XHDTYPE), "truncated or damaged"),
        # With a negative size the next header would be this one, forever.
        (announced("other", -512), "truncated or damaged"),
        (announced("long", -512, tarfile.GNUTYPE_LONGNAME), "truncated or damaged|does not hold"),
        (sparse("data_batch_1.bin", 1 << 30), "a link or the like|announces more than"),
        (announced("other", 200 << 20) + bytes(300 << 20), "announces more than"),
    ),
)
def test_an_archive_is_read_in_bounded_memory(tmp_path, headers, message):
    path = write_archive(tmp_path, leave_out=("data_batch_1",))
    path.write_bytes(gzip.compress(announced("readme", 0) + headers + gzip.decompress(path.read_bytes()), 1))
    tracemalloc.start()
    with pytest.raises(DataError, match=message) as caught:
        cifar10(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 1.5e8


def test_a_file_is_read_in_bounded_memory(tmp_path):
    with open(write_folder(tmp_path) / "data_batch_4.bin", "wb") as file:
        file.truncate(8 << 30)  # a hole: it takes no room
    with pytest.raises(DataError, match=r"data_batch_4\.bin of .* larger than all of CIFAR"):
        cifar10(tmp_path)


def test_pickles_are_refused_with_their_converter_which_gives_the_binary_layout(tmp_path):
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


def test_without_files_and_network_the_archive_is_named(tmp_path, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz of cifar10 is not in "):
        cifar10(tmp_path)


def test_real_pictures_survive_the_binary_layout(data_dir, tmp_path):
    if not (data_dir / "cifar10" / "jpegs.tar.xz").is_file():
        pytest.skip(f"no cifar10/jpegs.tar.xz in {data_dir}")
    pictures, labels = [], []
    with tarfile.open(data_dir / "cifar10" / "jpegs.tar.xz") as archive:
        for member in archive:
            if member.isfile() and len(pictures) < 60:
                with Image.open(io.BytesIO(archive.extractfile(member).read())) as picture:
                    pictures.append(np.asarray(picture.convert("RGB")))
                labels.append(int(member.name.removesuffix(".jpg").rpartition("_")[2]))
            elif len(pictures) == 60:
                break
    planes = np.stack(pictures).transpose(0, 3, 1, 2).reshape(60, -1)
    parts = [slice(start, start + 10) for start in range(0, 60, 10)]
    batches = {name: binary(planes[part], labels[part]) for name, part in zip(NAMES, parts, strict=True)}
    write_folder(tmp_path, **batches)
    splits = cifar10(tmp_path)
    np.testing.assert_array_equal(splits.train.examples.inputs, pictures[:50])
    assert splits.train.targets.tolist() + splits.test.targets.tolist() == labels
