"""CIFAR-10: two layouts, folders and archives, one result; damage named; hostile pickles inert."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest

from jaxnn.data.cifar import cifar10
from jaxnn.data.pickles import read_pickle
from jaxnn.types import DataError

TRAIN = [f"data_batch_{index}" for index in range(1, 6)]
NAMES = [*TRAIN, "test_batch"]


def fabricated(num_records=2):
    """Pixels ``[records, 3072]`` and labels of each batch, all different."""
    generator = np.random.default_rng(0)
    return {
        name: (
            generator.integers(0, 256, (num_records, 3072), dtype=np.uint8),
            generator.integers(0, 10, num_records).tolist(),
        )
        for name in NAMES
    }


def binary(planes, labels):
    records = zip(planes, labels, strict=True)
    return b"".join(bytes([label]) + row.tobytes() for row, label in records)


def pickled(planes, labels):
    return pickle.dumps({b"data": planes, b"labels": labels}, protocol=2)


def pickled_by_python_2(planes, labels):
    """What Python 2 and its NumPy wrote, as in the original files, opcode by opcode."""
    raw = planes.tobytes()
    return b"".join(
        (
            b"\x80\x02}(U\x04data",
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01K" + bytes([len(planes)]) + b"M\x00\x0c\x86",
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb",
            b"U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eu.",
        )
    )


LAYOUTS = {
    "binary": ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", binary),
    "pickle": ("cifar-10-batches-py", "cifar-10-python.tar.gz", "", pickled),
    "python 2": ("cifar-10-batches-py", "cifar-10-python.tar.gz", "", pickled_by_python_2),
}


def write_folder(root, layout="binary", **changed):
    """A folder of the layout below ``root``; ``changed`` are other bytes for some batches."""
    folder, _, suffix, encode = LAYOUTS[layout]
    (root / folder).mkdir(parents=True)
    for name, batch in fabricated().items():
        (root / folder / f"{name}{suffix}").write_bytes(changed.get(name) or encode(*batch))
    return root / folder


def write_archive(root, layout="binary", leave_out=()):
    """An archive of the layout in ``root``, and no folder."""
    folder, archive, suffix, encode = LAYOUTS[layout]
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / archive, "w:gz") as file:
        for name, batch in fabricated().items():
            if name not in leave_out:
                data = encode(*batch)
                member = tarfile.TarInfo(f"{folder}/{name}{suffix}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return root / archive


def check_whole(splits):
    """Compares with what was fabricated, pixel by pixel, from the layout's definition."""
    batches = fabricated()
    expected_labels = [label for name in TRAIN for label in batches[name][1]]
    assert splits.train.examples.targets.tolist() == expected_labels
    assert splits.test.examples.targets.tolist() == batches["test_batch"][1]
    images = splits.test.examples.inputs
    assert images.shape == (2, 32, 32, 3)
    assert images.dtype == np.uint8
    for channel, row, column in ((0, 0, 0), (1, 0, 1), (2, 31, 30), (0, 17, 5)):
        # All red, then all green, then all blue; each row after row.
        place = channel * 1024 + row * 32 + column
        expected = batches["test_batch"][0][:, place]
        np.testing.assert_array_equal(images[:, row, column, channel], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("write", (write_folder, write_archive))
@pytest.mark.parametrize("below", ("cifar10", "."))
def test_every_layout_gives_the_same_examples(tmp_path, layout, write, below):
    write(tmp_path / below, layout)
    splits = cifar10(tmp_path)
    check_whole(splits)
    assert len(splits.class_names) == 10
    assert splits.class_names[3] == "cat"
    assert splits.train.examples.inputs.flags.c_contiguous


def test_archives_are_read_without_writing_anything(tmp_path):
    archive = write_archive(tmp_path)
    cifar10(tmp_path)
    assert list(tmp_path.rglob("*")) == [archive]


def test_the_last_of_train_become_validation(tmp_path):
    write_folder(tmp_path)
    splits = cifar10(tmp_path, num_validation=3)
    labels = fabricated()["data_batch_4"][1][-1:] + fabricated()["data_batch_5"][1]
    assert splits.validation.examples.targets.tolist() == labels
    assert splits.train.num_examples == 7


def test_a_truncated_batch_is_named(tmp_path):
    planes, labels = fabricated()["data_batch_2"]
    write_folder(tmp_path / "a", data_batch_2=binary(planes, labels)[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin of .* 6,145 bytes are no multiple"):
        cifar10(tmp_path / "a")
    write_folder(tmp_path / "b", "pickle", data_batch_2=pickled(planes, labels)[:-9])
    with pytest.raises(DataError, match="data_batch_2 of .* truncated or damaged"):
        cifar10(tmp_path / "b")


@pytest.mark.parametrize(("layout", "encode"), (("binary", binary), ("pickle", pickled)))
def test_a_label_of_ten_is_named_with_its_file_and_record(tmp_path, layout, encode):
    planes, _ = fabricated()["data_batch_3"]
    write_folder(tmp_path, layout, data_batch_3=encode(planes, [9, 10]))
    with pytest.raises(DataError, match=r"record 1 of data_batch_3.* has the label 10"):
        cifar10(tmp_path)


def test_a_missing_file_and_a_damaged_archive_are_named(tmp_path):
    folder = write_folder(tmp_path / "a")
    (folder / "test_batch.bin").unlink()
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
        (announced("long", 8 << 30, tarfile.GNUTYPE_LONGNAME), "announces more than"),
        (announced("pax", 8 << 30, tarfile.XHDTYPE), "announces more than"),
        # With a negative size the next header would be this one, forever.
        (announced("other", -512), "truncated or damaged"),
        (announced("long", -512, tarfile.GNUTYPE_LONGNAME), "truncated or damaged"),
        (sparse("data_batch_1.bin", 1 << 30), "a link or the like"),
        (announced("data_batch_1.bin", 40 << 20) + bytes(40 << 20), "larger than a batch"),
    ),
)
def test_no_more_is_read_of_an_archive_than_the_layout_can_have(tmp_path, headers, message):
    path = write_archive(tmp_path, leave_out=("data_batch_1",))
    path.write_bytes(gzip.compress(announced("readme", 0) + headers + gzip.decompress(path.read_bytes()), 1))
    if "batch" in message:
        path = f"data_batch_1.bin of {path}"
    tracemalloc.start()
    with pytest.raises(DataError, match=message) as caught:
        cifar10(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 1.5e8


def test_no_more_is_read_of_a_file_than_the_layout_can_have(tmp_path):
    with open(write_folder(tmp_path) / "data_batch_4.bin", "wb") as file:
        file.truncate(8 << 30)  # a hole: it takes no room
    with pytest.raises(DataError, match=r"data_batch_4\.bin of .* larger than a batch"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("data", "opcode"),
    (
        # The unpickler would make room for 2^31 values.
        (b"\x80\x02}r\xff\xff\xff\x7f.", "2, LONG_BINPUT"),
        (b"}p2147483647\n.", "1, PUT"),
        # Its stack would overflow, and with it the process.
        (b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.", "1003, TUPLE1"),
    ),
)
def test_a_pickle_that_ends_the_process_is_refused(data, opcode):
    with pytest.raises(DataError, match=f"x is refused, since its opcode {opcode}"):
        read_pickle(data, "x")


@pytest.mark.parametrize(
    ("content", "message"),
    (
        ([1, 2], "does not hold a dictionary"),
        ({b"labels": [1]}, "does not hold an array 'data' and a list 'labels'"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "does not hold an array 'data'"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, r"labels of shape \(1,\)"),
        ({b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]}, r"images of shape \(1, 3071\)"),
        ({b"data": np.zeros((1, 3072)), b"labels": [1]}, "not of uint8 .*f8"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1.5]}, "not integers"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1 << 20_000]}, "or large ones"),
    ),
)
def test_a_pickle_of_something_else_is_named(tmp_path, content, message):
    write_folder(tmp_path, "pickle", data_batch_1=pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=rf"data_batch_1 .*{message}"):
        cifar10(tmp_path)


class Hostile:
    """What runs a command wherever it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, protocol):
    witness = tmp_path / "ran"
    data = pickle.dumps({b"data": Hostile(witness), b"labels": []}, protocol)
    with pytest.raises(DataError, match=r"x is refused, since it names posix\.system"):
        read_pickle(data, "x")
    assert not witness.exists()
    # The same bytes do run where they are unpickled: the test can tell the difference.
    pickle.loads(data)
    assert witness.exists()


@pytest.mark.parametrize(
    ("data", "name"),
    (
        (b"cbuiltins\neval\n.", "builtins.eval"),
        (b"c__builtin__\neval\n.", "__builtin__.eval"),
        (b"cnumpy\nload\n.", "numpy.load"),
        (b"ibuiltins\nprint\n(.", "builtins.print"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "numpy.ndarray.tofile"),
        (b"\x80\x04\x8c\x07_codecs\x8c\x06lookup\x93.", "_codecs.lookup"),
    ),
)
def test_any_other_name_is_refused(data, name):
    with pytest.raises(DataError, match=f"names {name}, "):
        read_pickle(data if not data.startswith(b"i") else b"(" + data, "x")


@pytest.mark.parametrize(
    "name", (b"numpy\nndarray", b"numpy\ndtype", b"_codecs\nencode", b"numpy.core.multiarray\n_reconstruct")
)
def test_a_pickle_cannot_set_attributes_of_the_stand_ins(name):
    from jaxnn.data import pickles

    before = [dict(vars(stand_in)) for stand_in in pickles._STAND_INS.values()]
    # BUILD with (None, {"planted": 1}) sets attributes of whatever lies below it, a class too.
    with pytest.raises(DataError, match="truncated or damaged"):
        read_pickle(b"\x80\x02c" + name + b"\nN}U\x07plantedK\x01s\x86b.", "x")
    assert [dict(vars(stand_in)) for stand_in in pickles._STAND_INS.values()] == before


def test_without_files_and_network_the_archive_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxnn.data.cifar._URL", "http://127.0.0.1:1/cifar-10-binary.tar.gz")
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz of cifar10 is not in "):
        cifar10(tmp_path)
