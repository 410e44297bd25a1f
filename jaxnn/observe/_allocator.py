"""glibc's allocator: whether freed memory is kept for the next call, or returned and paid for in page faults."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator

# glibc maps a block of this size or more each time it is allocated (DEFAULT_MMAP_THRESHOLD_MAX of malloc.c, 64 bit). A
# thread other than the main one allocates from heaps of twice that (HEAP_MAX_SIZE).
MAPPED_BYTES = 32 * 2**20
# Parameters of mallopt, as malloc.h numbers them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
# Map nothing, trim no heap at its top, and keep the heaps of threads: they are freed unless the heap before has less
# room than the padding.
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 2 * MAPPED_BYTES))
# The thresholds grow with the blocks that are freed; these are the ends of that growth. The initial ones would map
# every block of 128 KiB.
_USUAL = ((_MMAP_MAX, 65536), (_TRIM_THRESHOLD, 2 * MAPPED_BYTES), (_TOP_PAD, 2**17), (_MMAP_THRESHOLD, MAPPED_BYTES))


def can_keep_freed_memory() -> bool:
    """Whether the C library is glibc, the only one that can keep freed memory."""
    return _glibc() is not None


@contextlib.contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keeps memory that is freed within the block in the process, mapped and ready for the next allocation.

    It saves a page fault for every 4 KiB of blocks of 32 MiB and more. The process keeps its peak, and each thread with
    a heap of its own up to 64 MiB; see `share_heap` for larger blocks. Without glibc nothing happens.

    The setting is the process's. On exit glibc's own settings are restored and free memory is returned; of two
    overlapping blocks the first to end does so for both. Settings made by others are lost: glibc cannot be asked.
    """
    _set(_KEEPING)
    try:
        yield
    finally:
        _set(_USUAL)
        if (libc := _glibc()) is not None:
            libc.malloc_trim(0)


def share_heap() -> None:
    """Makes threads that start later share the main heap, which holds blocks of any size; it cannot be undone.

    JAX's threads start with its first array; afterwards this has no effect on them. Without glibc nothing happens.
    """
    _set(((_ARENA_MAX, 1),))


def page_faults() -> int:
    """Number of page faults of this process that read no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None
    return ctypes.CDLL(None) if version is not None and version.startswith("glibc") else None


def _set(settings: tuple[tuple[int, int], ...]) -> None:
    if (libc := _glibc()) is not None:
        for parameter, value in settings:
            libc.mallopt(parameter, value)
