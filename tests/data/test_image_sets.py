"""MNIST's and CIFAR-10's files, of which hostile ones raise in bounded memory; sets of scikit-learn; downloads."""

import contextlib
import gzip
import hashlib
import http.server
import io
import os
import pickle
import struct
import tarfile
import threading
import time
import tracemalloc
from typing import ClassVar

import convert_cifar
import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split

from jaxnn import data
from jaxnn.data import cifar10, data_dir, fashion_mnist, fetch, mnist, read_idx
from jaxnn.types import DataError
from tests.data.test_texts import write


@contextlib.contextmanager
def bounded_memory(limit):
    tracemalloc.start()
    try:
        yield
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < limit


def header(*shape, code=0x08):
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


def idx_bytes(array, code=0x08):
    return header(*array.shape, code=code) + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(path, data):
    return write(path, gzip.compress(data) if path.suffix == ".gz" else data)


def test_idx_is_big_endian_in_the_file_and_native_in_memory(tmp_path):
    for code, dtype in ((0x08, "u1"), (0x09, "i1"), (0x0B, "i2"), (0x0C, "i4"), (0x0D, "f4"), (0x0E, "f8")):
        expected = np.array([[[1, 2], [3, 100]]], dtype) - np.array(0 if dtype == "u1" else 5, dtype)
        data = idx_bytes(expected, code)
        for name, content in (("a.gz", gzip.compress(data)), ("a", data), ("b.gz", data), ("b", gzip.compress(data))):
            array = read_idx(str(write(tmp_path / name, content)), 3)
            assert array.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(array, expected)


GOOD = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("data", "num_axes", "message"),
    (
        (b"", 3, "is not an idx file: it starts with nothing"),
        (b"\x89PNG" + GOOD[4:], 3, "is not an idx file: it starts with 89 50 4e 47"),
        (GOOD, 1, "array of 3 axes, not of 1"),
        (GOOD[:10], 3, "truncated in its header"),
        (GOOD[:-1], 3, "should have 24 bytes .* but has 23"),
        (GOOD + b"\0", 3, "should have 24 bytes .* but has more"),
        (header(20, 2**15, 2**15) + b"abc", None, "should have .* but has 3|would decompress to"),
        (header(0, *[2**32 - 1] * 3), None, "impossible shape"),
    ),
)
@pytest.mark.parametrize("name", ("a.gz", "a"))
def test_damaged_idx_files_raise_in_bounded_memory(tmp_path, name, data, num_axes, message):
    path = write_idx(tmp_path / name, data)
    with pytest.raises(DataError, match=rf"{path}.* {message}"), bounded_memory(4e6):
        read_idx(path, num_axes)


def test_damaged_gzip_and_missing_files_raise(tmp_path):
    data = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (2, 30, 40), dtype=np.uint8)))
    # The last eight bytes hold the checksum and the length.
    for damaged, why in ((data[:-9], "Compressed file ended"), (data[:-8] + b"\0" * 8, "")):
        (tmp_path / "a.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=rf"a\.gz cannot be decompressed \({why}"):
            read_idx(tmp_path / "a.gz")
    with pytest.raises(DataError, match=r"no\.gz cannot be read: No such file"):
        read_idx(tmp_path / "no.gz")


@pytest.mark.parametrize("load", (mnist, fashion_mnist))
def test_four_idx_files_become_splits(tmp_path, load):
    folder = tmp_path / load.__name__
    for split, count in (("train", 6), ("t10k", 4)):
        images = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones((28, 28), np.uint8)
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", idx_bytes(images))
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", idx_bytes(np.arange(count, dtype=np.uint8)))
    splits = load(tmp_path, num_validation=2)
    assert splits.train.examples.inputs.shape == (4, 28, 28, 1)
    assert splits.validation.targets.tolist() == splits.validation.examples.inputs[:, 5, 5, 0].tolist() == [4, 5]
    assert splits.test.targets.tolist() == [0, 1, 2, 3] and load(tmp_path).validation is None
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", idx_bytes(np.array([0, 10, 0, 0], np.uint8)))
    with pytest.raises(DataError, match="label 10 of example 1 in test"):
        load(tmp_path)


TRAIN = [f"data_batch_{index}" for index in range(1, 6)]
FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
RNG = np.random.default_rng(0)
# Pixels ``[2, 3072]`` and two labels of each file, all different.
BATCHES = {name: (RNG.integers(0, 256, (2, 3072), np.uint8), RNG.integers(0, 10, 2)) for name in (*TRAIN, "test_batch")}


def binary(planes, labels):
    return np.concatenate([np.array(labels, np.uint8)[:, None], planes], axis=1).tobytes()


def write_folder(root, **changed):
    for name, batch in BATCHES.items():
        write(root / FOLDER / f"{name}.bin", changed.get(name) or binary(*batch))
    return root / FOLDER


def write_archive(root, leave_out=(), first=b""):
    """Writes the archive, with headers ``first`` at its start."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        for name, batch in BATCHES.items():
            if name not in leave_out:
                member = tarfile.TarInfo(f"{FOLDER}/{name}.bin")
                data = binary(*batch)
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    # A gzip file may have several parts.
    (root / ARCHIVE).write_bytes(gzip.compress(first) + gzip.compress(stream.getvalue()))
    return root / ARCHIVE


def check_complete(splits):
    assert splits.train.targets.tolist() == [label for name in TRAIN for label in BATCHES[name][1]]
    planes, labels = BATCHES["test_batch"]
    assert splits.test.targets.tolist() == labels.tolist()
    images = splits.test.examples.inputs
    assert (images.shape, images.dtype) == ((2, 32, 32, 3), np.uint8)
    for channel, row, column in ((0, 0, 0), (1, 0, 1), (2, 31, 30), (0, 17, 5)):
        # All red, then all green, then all blue; each row after row.
        np.testing.assert_array_equal(images[:, row, column, channel], planes[:, channel * 1024 + row * 32 + column])


@pytest.mark.parametrize(("write_files", "below"), ((write_folder, "cifar10"), (write_archive, ".")))
def test_cifar_is_the_same_from_folder_and_archive(tmp_path, write_files, below):
    write_files(tmp_path / below)
    check_complete(cifar10(tmp_path))
    splits = cifar10(tmp_path, num_validation=3)
    labels = [*BATCHES["data_batch_4"][1][-1:], *BATCHES["data_batch_5"][1]]
    assert (splits.validation.targets.tolist(), splits.train.num_examples) == (labels, 7)
    assert (len(splits.class_names), splits.class_names[3]) == (10, "cat")


def member(name, size=0, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, target
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(name, size):
    """A member of ``size`` bytes, none of which are in the archive."""
    buffer = bytearray(member(name, 0, tarfile.GNUTYPE_SPARSE))
    buffer[483:495] = b"%011o\0" % size
    buffer[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(buffer))[0]
    return bytes(buffer)


def archive(*first):
    return lambda root: write_archive(root, ("data_batch_1",), b"".join((member("readme"), *first)))


PLANES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("write_files", "message"),
    (
        (lambda root: write_folder(root, data_batch_2=binary(PLANES, [0, 1])[:-1]), r"data_batch_2\.bin .* 6,145 by"),
        (lambda root: write_folder(root, data_batch_2=binary(PLANES, [9, 10])), "record 1 of data_batch_2.* label 10"),
        (lambda root: (write_folder(root) / "test_batch.bin").unlink(), r"test_batch\.bin cannot be read"),
        # A sparse file, which takes no space.
        (
            lambda root: os.truncate(write_folder(root) / "data_batch_4.bin", 8 << 30),
            r"data_batch_4\.bin of .* larger than all of CIFAR",
        ),
        (archive(), rf"{ARCHIVE} does not have data_batch_1\.bin"),
        (lambda root: os.truncate(write_archive(root), 30_000), rf"{ARCHIVE} is truncated or damaged"),
        (archive(member("data_batch_1.bin", 8 << 30)), "decompresses to over"),
        (archive(sparse("data_batch_1.bin", 1 << 27)), "a link or the like at data_batch_1"),
        # With a negative size the next header would be this one, forever.
        (archive(member("other", -512)), "truncated or damaged"),
        (archive(member("../evil", kind=tarfile.DIRTYPE)), r"would be outside of it, '\.\./evil'"),
        (archive(member("data_batch_1.bin", 0, tarfile.SYMTYPE, "/etc/passwd")), "a link or the like at data_batch_1"),
    ),
)
def test_damaged_and_hostile_cifar_files_raise_in_bounded_memory(tmp_path, write_files, message):
    write_files(tmp_path)
    with pytest.raises(DataError, match=message) as caught, bounded_memory(1.5e8):
        cifar10(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_pickles_are_refused_and_can_be_converted(tmp_path):
    for name, (planes, labels) in BATCHES.items():
        content = {b"data": planes, b"labels": labels.tolist()}
        write(tmp_path / "cifar-10-batches-py" / name, pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=r"cifar-10-batches-py has CIFAR-10 .* experiments/convert_cifar\.py"):
        cifar10(tmp_path)
    convert_cifar.convert(tmp_path / "cifar-10-batches-py")
    check_complete(cifar10(tmp_path))
    write(tmp_path / "data_batch_1", pickle.dumps(os.system))
    with pytest.raises(pickle.UnpicklingError, match="system is not part of CIFAR"):
        convert_cifar.convert(tmp_path)


# Name: examples, shape of an example, classes (0: regression).
SETS = {
    "digits": (1797, (8, 8, 1), 10),
    "iris": (150, (4,), 3),
    "wine": (178, (13,), 3),
    "breast_cancer": (569, (30,), 2),
    "diabetes": (442, (10,), 0),
}


@pytest.mark.parametrize("name", SETS)
def test_each_set_is_complete(name):
    num_examples, shape, num_classes = SETS[name]
    splits = getattr(data, name)(test_fraction=0.2, validation_fraction=0.1)
    examples = [source.examples for source in splits.named().values()]
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*examples, strict=True))
    assert (inputs.shape, inputs.dtype) == ((num_examples, *shape), np.float32)
    assert len(np.unique(inputs.reshape(num_examples, -1), axis=0)) > 0.8 * num_examples
    assert (splits.name, len(splits.class_names)) == (name, num_classes)
    assert targets.dtype == (np.int32 if num_classes else np.float32)
    if num_classes:
        assert set(targets.tolist()) == set(range(num_classes))
    else:  # as they are
        np.testing.assert_array_equal(np.sort(targets), np.sort(load_diabetes().target))
    if name != "digits":
        train = splits.train.examples.inputs
        np.testing.assert_allclose(train.mean(axis=0), 0.0, atol=1e-5)
        np.testing.assert_allclose(train.std(axis=0), 1.0, atol=1e-5)


def test_digits_are_those_of_scikit_learn_stratified():
    # ceil(0.2 * 1797) = 360 and ceil(0.1 * 1797) = 180; 1257 remain.
    splits = data.digits(test_fraction=0.2, validation_fraction=0.1, seed=3)
    assert repr(splits).startswith("Splits(digits: 1,257 train, 180 validation, 360 test, ")
    images, labels = load_digits(return_X_y=True)
    options = {"random_state": 3, "stratify": labels}
    images, expected_images, labels, expected_labels = train_test_split(images, labels, test_size=360, **options)
    np.testing.assert_array_equal(splits.test.targets, expected_labels)
    np.testing.assert_array_equal(splits.test.examples.inputs.reshape(360, 64), expected_images / 16)
    labels, _ = train_test_split(labels, test_size=180, **{**options, "stratify": labels})
    np.testing.assert_array_equal(splits.train.targets, labels)
    assert data.iris(test_fraction=0.0).test is None


BODY = b"sixteen bytes ok" * 4096
SHA256 = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: len(BODY) // 2] if self.path.startswith("/truncated") else BODY)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def files_below(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_download_is_complete_and_logs_one_line(server, tmp_path, capsys):
    path = fetch("digits", "a.bin", [f"{server}/missing", f"{server}/good"], SHA256, tmp_path)
    assert path == tmp_path / "digits" / "a.bin"
    assert path.read_bytes() == BODY and path.stat().st_mode & 0o777 == 0o644
    assert files_below(tmp_path) == ["a.bin"]
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert f"{server}/missing" in output.err
    # Now that it exists, it is used unchecked and without the network.
    path.write_bytes(b"mine")
    assert fetch("digits", "a.bin", "http://127.0.0.1:1/", SHA256, tmp_path).read_bytes() == b"mine"
    assert capsys.readouterr().err == ""


def test_a_failed_download_is_reported_and_leaves_nothing(server, tmp_path):
    for urls, digest, reason in (
        ([f"{server}/truncated"], SHA256, "cut off"),
        ([f"{server}/missing", f"{server}/good"], "0" * 64, "status 404 .*another sha256"),
        (["http://127.0.0.1:1/a.bin"], SHA256, "connection failed, is there a network"),
    ):
        with pytest.raises(DataError, match=reason) as caught:
            fetch("digits", "a.bin", urls, digest, tmp_path)
        message = str(caught.value)
        assert all(part in message for part in ("a.bin", str(tmp_path / "digits"), *urls, "JAXNN_DATA"))
        assert "\n" not in message and files_below(tmp_path) == []
    (tmp_path / "letters").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be written there: "):
        fetch("letters", "a.bin", f"{server}/good", SHA256, tmp_path)


def test_an_address_that_could_not_be_reached_is_tried_once_in_ten_minutes(server, tmp_path, monkeypatch, capsys):
    for minutes, tries in ((0, 1), (9, 1), (11, 2)):
        now = time.monotonic() + 60 * minutes
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        with pytest.raises(DataError, match="cut off .tried again after 10 minutes"):
            fetch("digits", "a.bin", f"{server}/truncated?once", SHA256, tmp_path)
        monkeypatch.undo()
        assert (Handler.asked.count("/truncated?once"), capsys.readouterr().err.count("\n")) == (tries, minutes != 9)
    # Another address is.
    assert fetch("digits", "a.bin", [f"{server}/truncated?once", f"{server}/good"], SHA256, tmp_path).is_file()


def test_data_dir_is_the_argument_else_the_environment_else_a_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXNN_DATA", str(tmp_path / "environment"))
    assert data_dir(tmp_path / "argument") == tmp_path / "argument"
    assert data_dir() == tmp_path / "environment"
    monkeypatch.delenv("JAXNN_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir().name == "jaxnn" and tmp_path in data_dir().parents
    assert data_dir("~/sets") == tmp_path / "sets"
