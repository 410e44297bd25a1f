"""Worker processes: the same batches as threads, no accelerator, and none left however the program ends."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from grain.multiprocessing import SharedMemoryArray

from jaxnn.data import image_folder, stream
from jaxnn.types import DataError
from tests import shell
from tests.data.test_stream import Counting, assert_same, noise, source, take


@pytest.mark.parametrize(("num_workers", "shares_memory"), (pytest.param(1, False, marks=pytest.mark.slow), (2, True)))
def test_batches_are_the_same_from_workers_as_from_threads(num_workers, shares_memory, monkeypatch):
    free = 2**30 if shares_memory else 10
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    shared = []
    open_shared = SharedMemoryArray.from_metadata
    monkeypatch.setattr(SharedMemoryArray, "from_metadata", lambda found: shared.append(found) or open_shared(found))
    rows = slice(1, 3)
    expected = take(source(augment=noise), 5, 3, 5, rows=rows)
    assert_same(take(source(augment=noise, num_workers=num_workers), 5, 3, 5, rows=rows), expected)
    assert bool(shared) == shares_memory
    assert not multiprocessing.active_children()


class Witness:
    """Says of its process what could let it open an accelerator, and who it is."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import jax
        from jax._src import xla_bridge

        told = os.environ.get("JAX_PLATFORMS") == "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") == "-1"
        started = xla_bridge.backends_are_initialized()
        ignores = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        return np.array([told, jax.config.jax_platforms == "cpu", started, ignores, os.getpid()], np.int32), 0


def test_workers_open_no_accelerator_and_the_environment_is_as_before():
    before = dict(os.environ)
    batches = stream(Witness(), num_workers=2).train.batches(0, 0, 4)
    assert dict(os.environ) == before
    said = np.concatenate([next(batches).inputs for _ in range(4)])
    pids = [worker.pid for worker in multiprocessing.active_children()]
    batches.close()
    np.testing.assert_array_equal(np.unique(said[:, :4], axis=0), [[True, True, False, True]])
    assert set(said[:, 4]) == set(pids) and len(pids) == 2
    assert not multiprocessing.active_children()


def test_a_damaged_picture_is_named_by_the_worker_that_meets_it(tmp_path):
    from PIL import Image

    for name in "abcdefgh":
        (tmp_path / "train" / "cats").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "train" / "cats" / f"{name}.jpg")
    damaged = tmp_path / "train" / "cats" / "f.jpg"
    damaged.write_bytes(damaged.read_bytes()[:40])
    batches = image_folder(tmp_path, (2, 2), stream=True, num_workers=1).train.batches(0, 0, 4)
    with pytest.raises(DataError, match=r"cats/f\.jpg does not decode as a picture") as caught:
        for _ in range(2):
            next(batches)
    assert "\n" not in str(caught.value) and not hasattr(caught.value, "__notes__")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert not multiprocessing.active_children()


class Killing(Counting):
    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_of():
    batches = source(Killing(), num_workers=1).batches(0, 0, 11)
    with pytest.raises(DataError, match="a worker process that reads data was ended by SIGKILL: .* if memory ran out"):
        next(batches)
    assert list(batches) == []


class Hanging(Counting):
    def __getitem__(self, index):
        if index == 7:
            time.sleep(1000)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_reader_that_hangs_keeps_nothing_from_ending():
    batches = source(Hanging(), num_workers=2).batches(0, 0, 2)
    next(batches)
    time.sleep(1)
    before = time.monotonic()
    batches.close()
    assert time.monotonic() - before < 25
    assert not multiprocessing.active_children()


PROGRAM = """
import sys
import jaxnn
import numpy as np

class Reader:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return np.zeros((64, 64, 3), np.uint8), 0

batches = jaxnn.data.stream(Reader(), num_workers=2).train.batches(0, 0, 8)
next(batches)
print("reading", flush=True)
"""
GOES_ON = "while True: next(batches)"


def start(ending):
    """The program, in a session of its own, where it has read a batch and goes on with ``ending``."""
    command = [sys.executable, "-c", PROGRAM + ending]
    pipe = subprocess.PIPE
    program = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=shell.ROOT, start_new_session=True)
    assert program.stdout.readline() == "reading\n", program.communicate()[1]
    return program


def assert_all_ended(session):
    """All processes of the session end within seconds: none is left that a signal could be sent to."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(session, signal.SIGKILL)
    pytest.fail("a process of the session is left")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "status", "said"),
    (("", 0, ""), ("del batches", 0, ""), ("raise ValueError('mine')", 1, "ValueError: mine")),
)
def test_workers_end_with_the_program_however_it_ends_and_say_nothing(ending, status, said):
    program = start(ending)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == status
    assert errors.strip().splitlines()[-1:] == ([said] if said else []), errors
    assert "resource_tracker" not in errors and "Exception ignored" not in errors
    assert_all_ended(program.pid)


@pytest.mark.slow
def test_ctrl_c_reaches_the_program_alone():
    program = start(GOES_ON)
    # As a terminal does: to every process of the group.
    os.killpg(program.pid, signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1 and "resource_tracker" not in errors
    assert_all_ended(program.pid)


@pytest.mark.slow
def test_workers_end_where_the_program_is_killed():
    program = start(GOES_ON)
    program.kill()
    program.wait()
    assert_all_ended(program.pid)
    program.communicate()


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    done = shell.python(script)
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert 'put what the script does under `if __name__ == "__main__":`' in last
    assert done.stderr.count("Traceback") == 1
