"""Worker processes: the same batches as threads, no accelerator, and no process left behind."""

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

from jaxnn.types import DataError
from tests import shell
from tests.data.test_stream import Counting, assert_same, noise, source, take


class Witness(Counting):
    """Its inputs say whether the process may open an accelerator or heeds SIGTERM, and its process id."""

    def __getitem__(self, index):
        import jax
        from jax._src import xla_bridge

        hidden = os.environ.get("JAX_PLATFORMS") == "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") == "-1"
        started = xla_bridge.backends_are_initialized()
        ignores = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        return np.array([hidden, jax.config.jax_platforms == "cpu", started, ignores, os.getpid()], np.int32), index % 3


def test_workers_give_the_same_batches_and_open_no_accelerator():
    before = dict(os.environ)
    batches = source(Witness(), num_workers=2).batches(5, 3, 4, slice(1, 3))
    assert dict(os.environ) == before
    found = [next(batches) for _ in range(4)]
    pids = [worker.pid for worker in multiprocessing.active_children()]
    batches.close()
    assert not multiprocessing.active_children()
    inputs = np.concatenate([batch.inputs for batch in found])
    np.testing.assert_array_equal(np.unique(inputs[:, :4], axis=0), [[True, True, False, True]])
    assert set(inputs[:, 4]) == set(pids) and len(pids) == 2
    expected = take(source(), 5, 3, 4, rows=slice(1, 3))
    np.testing.assert_array_equal([batch.targets for batch in found], [batch.targets for batch in expected])


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


class Killed(Counting):
    def __getitem__(self, index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("reader", "message"),
    (
        (Counting(at7=DataError("x.jpg is bad.")), r"^x\.jpg is bad\.$"),
        pytest.param(Killed(), "was ended by SIGKILL: .* if memory ran out", marks=pytest.mark.slow),
    ),
)
def test_a_failed_worker_is_reported(reader, message):
    batches = source(reader, num_workers=1).batches(0, 0, 11)
    with pytest.raises(DataError, match=message) as caught:
        next(batches)
    assert not hasattr(caught.value, "__notes__")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert list(batches) == [] and not multiprocessing.active_children()


class Hanging(Counting):
    def __getitem__(self, index):
        if index == 7:
            time.sleep(1000)
        return super().__getitem__(index)


@pytest.mark.slow
def test_close_kills_a_worker_whose_reader_hangs():
    batches = source(Hanging(), num_workers=2).batches(0, 0, 2)
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
    command, pipe = [sys.executable, "-c", PROGRAM + ending], subprocess.PIPE
    program = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=shell.ROOT, start_new_session=True)
    assert program.stdout.readline() == "reading\n", program.communicate()[1]
    if signum == signal.SIGINT:
        os.killpg(program.pid, signum)
    elif signum:
        program.kill()
    _, errors = program.communicate(timeout=60)
    assert program.returncode == status
    if signum != signal.SIGKILL:
        assert errors.strip().splitlines()[-1:] == ([last] if last else []), errors
        assert errors.count("Traceback") == bool(last)
        assert "resource_tracker" not in errors and "Exception ignored" not in errors
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(program.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(program.pid, signal.SIGKILL)
    pytest.fail("a process of the session is left")


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_reported(tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    done = shell.python(tmp_path / "script.py")
    assert done.returncode == 1 and done.stdout == ""
    assert 'put its code under `if __name__ == "__main__":`' in done.stderr.strip().splitlines()[-1]
    assert done.stderr.count("Traceback") == 1
