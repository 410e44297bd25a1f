"""Streamed data: a batch is a function of seed and step; errors name the example; no worker process stays behind."""

import contextlib
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
from grain.multiprocessing import SharedMemoryArray
from jax._src import xla_bridge

from jaxnn.data import arrays, stream
from jaxnn.types import ConfigError, DataError, Examples
from tests import processes, shell

LENGTH = 11
BATCH_SIZE = 4
IMAGE = np.zeros((2, 3), np.uint8)


class Counting:
    """Example i is filled with i; its label is i % 3. ``at3=...``: this, or what it returns, is example 3."""

    def __init__(self, length=LENGTH, **mistakes):
        self.length = length
        self.mistakes = {int(name.removeprefix("at")): value for name, value in mistakes.items()}

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        found = self.mistakes.get(index, (np.full((2, 3), index, np.uint8), index % 3))
        if isinstance(found, BaseException):
            raise found
        return found() if callable(found) else found


class Listing(Counting):
    """Lists its labels and has a fingerprint."""

    @property
    def targets(self):
        return [index % 3 for index in range(self.length)]

    def fingerprint(self, digest):
        digest.update(b"mine")


def noise(rng, image):
    return rng.integers(0, 256, image.shape, np.uint8)


def halve(rng, image):
    image //= 2
    return image


def source(reader=None, **options):
    return stream(reader or Counting(), **{"num_workers": 0, **options}).train


def take(source, seed, first_step, num_steps, batch_size=BATCH_SIZE, rows=slice(None)):
    batches = source.batches(seed, first_step, batch_size, rows)
    try:
        return [next(batches) for _ in range(num_steps)]
    finally:
        batches.close()


def assert_same(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert (left.inputs.dtype, left.targets.dtype) == (right.inputs.dtype, right.targets.dtype)
        jax.tree.map(np.testing.assert_array_equal, left, right)


def test_batches_are_those_of_the_same_data_in_memory():
    images = np.stack([np.full((2, 3), index, np.uint8) for index in range(LENGTH)])
    held = arrays((images, np.arange(LENGTH) % 3)).train
    order = held.order(3, np.arange(4, dtype=np.int32), BATCH_SIZE)
    found = take(source(), 3, 0, 4)
    assert_same(found, [held.read(indices) for indices in order])
    assert_same([source().as_batch(found[0])], [held.gather(held.examples, order[0])])


def test_batches_depend_on_seed_and_step_alone():
    train = source(augment=noise)
    # Two batches per epoch: step 7 is in the fourth epoch.
    expected = take(train, 1, 0, 9)
    for step in (0, 3, 7):
        assert_same(take(train, 1, step, 2), expected[step : step + 2])
    for size in (1, 2):
        rows = [slice(start, start + size) for start in range(0, BATCH_SIZE, size)]
        parts = [take(train, 1, 1, 2, rows=local) for local in rows]
        together = [Examples(*map(np.concatenate, zip(*step, strict=True))) for step in zip(*parts, strict=True)]
        assert_same(together, expected[1:3])
    # Augmentation differs by seed, step and position.
    drawn = [image.tobytes() for batch in (*expected[:3], *take(train, 2, 0, 3)) for image in batch.inputs]
    assert len(set(drawn)) == len(drawn)
    # The low 32 bits of a seed count, as they do for the order.
    assert_same(take(train, -1, 0, 1), take(train, 2**32 - 1, 0, 1))


def test_evaluation_reads_in_the_given_order_without_augmentation():
    splits = stream(Counting(), test=Counting(5), validation=Listing(6), augment=halve, num_workers=0)
    for held in splits.named().values():
        found = held.read(np.array([4, 0, 4]))
        np.testing.assert_array_equal(found.inputs[:, 0, 0], [4, 0, 4])
        np.testing.assert_array_equal(found.targets, [1, 0, 1])
    assert splits.test.host_augment is None
    assert repr(splits) == "Splits(stream: 11 train, 6 validation, 5 test, streamed)"
    np.testing.assert_array_equal(splits.validation.targets, np.arange(6) % 3)
    np.testing.assert_array_equal(splits.train.targets, [0])
    # An augmentation may modify its input in place; the reader's example stays.
    train = source([(np.full((2, 3), 100, np.uint8), 0)] * LENGTH, augment=halve)
    assert all((batch.inputs == 50).all() for batch in take(train, 0, 0, 3))
    assert (train.read(np.arange(1)).inputs == 100).all()


def test_fingerprints_differ_by_length_shape_and_examples():
    def digest_of(reader):
        digest = hashlib.blake2b()
        source(reader).fingerprint(digest)
        return digest.hexdigest()

    changed = {"at3": (IMAGE, 0)}
    other = Listing()
    other.fingerprint = lambda digest: digest.update(b"other")
    readers = [Counting(), Counting(LENGTH + 1), Counting(**changed), [(IMAGE.T, 0)] * LENGTH, Listing(), other]
    assert len(set(map(digest_of, readers))) == len(readers)
    assert digest_of(Counting()) == digest_of(Counting())
    assert digest_of(Listing(**changed)) == digest_of(Listing())


def test_closed_batches_end_with_their_threads():
    before = threading.active_count()
    batches = source().batches(0, 0, BATCH_SIZE)
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []
    for thread in threading.enumerate():
        if thread.name.startswith("grain"):
            thread.join(5)
    assert threading.active_count() == before


class Wrong(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first}\nand {second}")


@pytest.mark.parametrize(
    ("reader", "augment", "message"),
    (
        (Counting(at7=(IMAGE[:1], 0)), None, r"the input of example 7 of train is uint8 \(1, 3\) but that of ex"),
        (Counting(at7=Wrong(1, 2)), None, r"reading example 7 of train failed with Wrong: 1 and 2 \(test_"),
        (Counting(at7=DataError("x.jpg is bad.")), None, r"^x\.jpg is bad\.$"),
        (Counting(at7=SystemExit(0)), None, r"cannot be read: SystemExit\(0\)"),
        (Counting(), lambda rng, image: image[:1], r"augmented input of example \d+ of train is uint8 \(1, 3\) but "),
        (Counting(), lambda rng, image: image[99], r"augmenting example \d+ of train failed with IndexError.*\(test_"),
    ),
)
def test_errors_in_a_step_end_the_batches(reader, augment, message):
    batches = source(reader, augment=augment).batches(0, 0, LENGTH, slice(None, None, -1))
    with pytest.raises(DataError, match=message) as caught:
        next(batches)
    assert "\n" not in str(caught.value)
    if "Wrong" in message:
        # The traceback of a reader's error is kept as a note.
        assert "in __getitem__" in caught.value.__notes__[0]
    assert list(batches) == []
    if augment is None and "SystemExit" not in message:
        with pytest.raises(DataError, match=message):
            source(reader).read(np.arange(LENGTH))


def test_a_reader_that_cannot_be_sent_is_read_in_threads_alone():
    reader = Counting()
    reader.lock = threading.Lock()
    with pytest.raises(DataError, match="the reader of train, or .*, cannot be sent to .*num_workers=0"):
        source(reader, num_workers=1).batches(0, 0, BATCH_SIZE)
    assert_same(take(source(reader), 0, 0, 1), take(source(), 0, 0, 1))


def test_a_worker_that_runs_the_script_again_exits(monkeypatch):
    train = source()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    for read in (lambda: train.read(np.arange(1)), lambda: train.batches(0, 0, 1)):
        with pytest.raises(SystemExit) as caught:
            read()
        assert caught.value.code == 78


def test_grain_is_optional(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'Grain, which is not installed: pip install "jaxnn\[stream\]"'):
        source()


class Witness(Counting):
    """Its inputs say whether the process may open an accelerator or heeds SIGTERM, and its process id."""

    def __getitem__(self, index):
        _, target = super().__getitem__(index)
        hidden = os.environ.get("JAX_PLATFORMS") == "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") == "-1"
        started = xla_bridge.backends_are_initialized()
        ignores = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        return np.array([hidden, jax.config.jax_platforms == "cpu", started, ignores, os.getpid()], np.int32), target


def test_workers_give_the_same_batches_open_no_accelerator_and_report_errors():
    before, order = dict(os.environ), source(Counting(40)).order(5, np.arange(10), 4)
    # An epoch has ten steps: example order[7, 1] is in step 7 alone.
    bad = {f"at{order[7, 1]}": DataError("x.jpg is bad.")}
    batches = source(Witness(40, **bad), num_workers=2).batches(5, 3, 4, slice(1, 3))
    assert dict(os.environ) == before
    found = [next(batches) for _ in range(4)]
    pids = [worker.pid for worker in multiprocessing.active_children()]
    with pytest.raises(DataError, match=r"^x\.jpg is bad\.$") as caught:
        next(batches)
    assert not hasattr(caught.value, "__notes__")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert list(batches) == [] and not multiprocessing.active_children()
    inputs = np.concatenate([batch.inputs for batch in found])
    np.testing.assert_array_equal(np.unique(inputs[:, :4], axis=0), [[True, True, False, True]])
    assert set(inputs[:, 4]) == set(pids) and len(pids) == 2
    np.testing.assert_array_equal([batch.targets for batch in found], order[3:7, 1:3] % 3)


@pytest.mark.slow
@pytest.mark.parametrize("shares_memory", (False, True))
def test_augmented_batches_are_the_same_from_workers_as_from_threads(shares_memory, monkeypatch):
    free = 2**30 if shares_memory else 10
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    shared = []
    open_shared = SharedMemoryArray.from_metadata
    monkeypatch.setattr(SharedMemoryArray, "from_metadata", lambda found: shared.append(found) or open_shared(found))
    expected = take(source(augment=noise), 5, 3, 5)
    assert_same(take(source(augment=noise, num_workers=1), 5, 3, 5), expected)
    assert bool(shared) == shares_memory


@pytest.mark.slow
def test_a_killed_worker_is_reported():
    killed = Counting(at7=lambda: os.kill(os.getpid(), signal.SIGKILL))
    batches = source(killed, num_workers=1).batches(0, 0, 11)
    with pytest.raises(DataError, match="was ended by SIGKILL: .* if memory ran out"):
        next(batches)
    assert list(batches) == [] and not multiprocessing.active_children()


@pytest.mark.slow
def test_close_kills_a_worker_whose_reader_hangs():
    batches = source(Counting(at7=lambda: time.sleep(1000)), num_workers=2).batches(0, 0, 2)
    next(batches)
    time.sleep(1)
    before = time.monotonic()
    batches.close()
    assert time.monotonic() - before < 25
    assert not multiprocessing.active_children()


PROGRAM = """
import jaxnn
batches = jaxnn.data.stream([([0.0] * 10_000, 0)] * 64, num_workers=2).train.batches(0, 0, 8)
next(batches)
print("reading", flush=True)
"""
READ_ON = "while True: next(batches)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "signum", "status", "last"),
    (
        ("del batches", None, 0, None),
        ("raise ValueError('mine')", None, 1, "ValueError: mine"),
        # A terminal sends Ctrl-C to every process of the group.
        (READ_ON, signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        (READ_ON, signal.SIGKILL, -signal.SIGKILL, None),
    ),
)
def test_workers_end_quietly_with_the_program(ending, signum, status, last):
    with processes.started([[sys.executable, "-c", PROGRAM + ending]]) as running:
        session = running.processes[0].pid
        running.wait_for("reading\n")
        if signum == signal.SIGINT:
            os.killpg(session, signum)
        elif signum:
            running.signal(0, signum)
        (done,) = running.finish()
        assert done.status == status
        if signum != signal.SIGKILL:
            assert done.err.strip().splitlines()[-1:] == ([last] if last else []), done.err
            assert done.err.count("Traceback") == bool(last)
            assert "resource_tracker" not in done.err and "Exception ignored" not in done.err
        deadline = time.monotonic() + 20
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(session, 0)
                time.sleep(0.05)
            pytest.fail("a process of the session is left")


@pytest.mark.slow
def test_evaluation_does_not_import_grain_and_a_script_without_a_main_guard_is_reported(tmp_path):
    evaluated = "import sys, jaxnn; jaxnn.data.stream([(0.0, 0)], num_workers=0).train.read([0])"
    assert shell.python("-c", f"{evaluated}; print('grain' in sys.modules)").stdout == "False\n"
    (tmp_path / "script.py").write_text(PROGRAM)
    done = shell.python(tmp_path / "script.py")
    assert done.returncode == 1 and done.stdout == ""
    assert 'put its code under `if __name__ == "__main__":`' in done.stderr.strip().splitlines()[-1]
    assert done.stderr.count("Traceback") == 1
