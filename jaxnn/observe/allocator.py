"""glibc's allocator: whether what one call frees is kept for the next, or given back and paid for in page faults."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

# From here on glibc maps a block anew each time it is asked for (DEFAULT_MMAP_THRESHOLD_MAX of its malloc.c, 64 bit).
MAPPED_BYTES = 32 * 2**20
# A thread other than the main one takes its memory from heaps of this size (HEAP_MAX_SIZE); what is larger is mapped.
HEAP_BYTES = 2 * MAPPED_BYTES

# The names that malloc.h gives to what mallopt sets.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8
# Nothing is mapped, nothing is trimmed off the top of a heap, and no heap of a thread is given back as a whole: that
# happens unless the heap before it has less room than the padding.
_KEEPING = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, HEAP_BYTES))
# Both thresholds grow with the blocks that are freed until one of them is set; these are the ends of that growth, where
# a process that trains has been for long. The constants they start from would map every block of 128 KiB.
_USUAL = (
    (_MMAP_MAX, 65536),
    (_TRIM_THRESHOLD, 2 * MAPPED_BYTES),
    (_TOP_PAD, 128 * 2**10),
    (_MMAP_THRESHOLD, MAPPED_BYTES),
)


def can_keep_freed_memory() -> bool:
    """Whether the C library is glibc, which can be told to."""
    return _glibc() is not None


@contextlib.contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """While in force, memory that is freed stays with the process, mapped and ready for the next allocation.

    It saves a page fault for every 4 KiB of blocks of 32 MiB and more, and costs memory: the process keeps the most it
    ever took, and each thread with a heap of its own up to 64 MiB. Threads that have one cannot keep larger blocks;
    see :func:`share_heap`. Without glibc nothing happens.

    The setting is the whole process's. On the way out glibc's own way is put back and free memory is returned; where
    two such contexts overlap, the first to end does so for both. glibc cannot be asked what was set before: settings
    made by others are lost, and its two thresholds, which grow with the blocks that are freed, stay at the ends of
    that growth, 32 and 64 MiB.
    """
    _set(_KEEPING)
    try:
        yield
    finally:
        _set(_USUAL)
        if (libc := _glibc()) is not None:
            libc.malloc_trim(0)


def share_heap() -> None:
    """Has threads that start from now on share the main heap, which holds blocks of any size.

    JAX's threads start with its first array; called later, this changes nothing for them. It cannot be undone: glibc
    settles the number of heaps for good. Without glibc nothing happens.
    """
    _set(((_ARENA_MAX, 1),))


def page_faults() -> int:
    """Pages that the kernel has given to this process so far without reading a disk; 0 where that is not counted."""
    try:
        import resource
    except ImportError:
        return 0
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
