"""The allocator keeps freed memory: seen in page faults, each case in a process of its own."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from jaxnn.observe import can_keep_freed_memory, keeping_freed_memory, share_heap

MIB = 2**20
needs_glibc = pytest.mark.skipif(not can_keep_freed_memory(), reason="needs glibc, whose settings these are")

# Takes a block, writes to all of it and gives it back; says how many pages each of five rounds cost.
BLOCKS = """
import ctypes, json, sys, threading
from jaxnn.observe import keeping_freed_memory, page_faults, share_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
libc.free.argtypes = (ctypes.c_void_p,)

def faults(num_bytes):
    counts = []
    for _ in range(5):
        before = page_faults()
        block = libc.malloc(ctypes.c_size_t(num_bytes))
        libc.memset(block, 1, num_bytes)
        libc.free(block)
        counts.append(page_faults() - before)
    return counts

def in_a_thread(num_bytes):
    found = []
    thread = threading.Thread(target=lambda: found.extend(faults(num_bytes)))
    thread.start()
    thread.join()
    return found

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

MIB = 2**20
"""
MAIN_THREAD = """
def phase(small):
    return {"large": faults(40 * MIB), "resident": resident_bytes(), "small": faults(small)}

before = phase(MIB)
with keeping_freed_memory():
    within = phase(MIB)
resident = resident_bytes()
print(json.dumps([before, within, phase(20 * MIB) | {"resident": resident}]))
"""
OTHER_THREAD = """
if sys.argv[1] == "shared":
    share_heap()
with keeping_freed_memory():
    print(json.dumps({mib: in_a_thread(mib * MIB) for mib in (40, 80)}))
"""


def run(code: str, *arguments: str) -> object:
    command = [sys.executable, "-c", BLOCKS + code, *arguments]
    # What glibc is told from outside would hide what is told to it here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_", "MALLOC_"))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def pages(num_bytes: int) -> int:
    return num_bytes // os.sysconf("SC_PAGE_SIZE")


@needs_glibc
def test_a_large_block_costs_its_pages_each_time_but_not_while_freed_memory_is_kept() -> None:
    before, within, after = run(MAIN_THREAD)
    # 40 MiB are above 32 MiB, from where on glibc maps: 10,240 pages of 4 KiB, each time.
    if before["large"][-1] < pages(40 * MIB) // 2:
        pytest.skip("this kernel gives huge pages unasked: there is nothing to save")
    assert min(before["large"]) >= pages(40 * MIB)
    assert max(within["large"][1:]) < 100
    assert min(after["large"]) >= pages(40 * MIB)
    # Small blocks cost faults once and must do so afterwards too, in a size not seen before: with the thresholds that
    # glibc starts from, or where a size below 32 MiB was not set, they would be mapped each time.
    assert before["small"][-1] == within["small"][-1] == after["small"][-1] == 0
    assert within["resident"] - after["resident"] > 30 * MIB, "what was kept is given back"


@needs_glibc
@pytest.mark.parametrize("heaps", ["own", "shared"])
def test_a_thread_keeps_what_fits_its_heap_of_64_mib_and_all_of_it_in_a_shared_one(heaps: str) -> None:
    faults = run(OTHER_THREAD, heaps)
    if faults["40"][0] < pages(40 * MIB) // 2:
        pytest.skip("this kernel gives huge pages unasked: there is nothing to save")
    assert faults["40"][-1] < 100
    if heaps == "shared":
        assert faults["80"][-1] < 100
    else:
        assert min(faults["80"]) >= pages(80 * MIB)


class Recorder:
    """A C library that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return 1

    def malloc_trim(self, padding: int) -> int:
        self.calls.append(("trim", padding))
        return 1


# As /usr/include/malloc.h numbers them.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8


@needs_glibc
def test_the_usual_settings_are_put_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Recorder()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    with pytest.raises(RuntimeError), keeping_freed_memory():
        assert dict(libc.calls) == {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 64 * MIB}
        libc.calls.clear()
        raise RuntimeError
    assert dict(libc.calls) == {
        M_MMAP_MAX: 65536,
        M_TRIM_THRESHOLD: 64 * MIB,
        M_TOP_PAD: 128 * 1024,
        M_MMAP_THRESHOLD: 32 * MIB,
        "trim": 0,
    }
    assert libc.calls[-1] == ("trim", 0), "memory is given back once the thresholds allow it"


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    with monkeypatch.context() as patch:
        patch.setattr(os, "confstr", unknown)  # as Python does on musl
        assert not can_keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("the C library was touched"))
    with keeping_freed_memory():
        share_heap()


def test_importing_sets_nothing() -> None:
    code = (
        "import ctypes\n"
        "ctypes.CDLL = lambda *a, **k: (_ for _ in ()).throw(AssertionError('a library was opened'))\n"
        "import jaxnn\n"
    )
    subprocess.run([sys.executable, "-c", "import jax, numpy\n" + code], check=True)
