"""What Orbax is kept from saying, and from keeping: all of it holds for the whole process, from the first save on."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from typing import Any


def tame_orbax() -> None:
    """Leaves the telling of errors to us, who raise them as one sentence, and lets go of what nobody reads."""
    # Through absl it tells of each phase of each save, and once more of errors that it also raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Of several writes that fail together it raises the first error; the others are found by asyncio and TensorStore.
    logging.getLogger("asyncio").addFilter(_is_news)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
    _stop_counting()


def _stop_counting() -> None:
    """Has Orbax not ask TensorStore, twice a save, how much was ever written: a monitor that nobody runs would read it.

    TensorStore (0.1.86 and before) never frees its answer: 16 KiB a checkpoint. Orbax's name for it is private, and may
    be gone: then it asks.
    """
    try:
        utilities: Any = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
    except ImportError:
        return
    if hasattr(utilities, "get_tensorstore_raw_bytes"):
        utilities.get_tensorstore_raw_bytes = lambda *_, **__: 0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether what asyncio logs is of anything but a write of Orbax's that failed like one before it."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, OSError | ValueError):
        return True
    # TensorStore's errors name its own description of the file; nobody having waited for one, it was never in Orbax.
    if "tensorstore_spec=" in str(error):
        return False
    return not any("orbax" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


class _Hook:
    """Python's hook for errors that nobody can catch, but for TensorStore's complaint that Orbax did not wait."""

    def __init__(self, others: Any) -> None:
        self.others = others

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (unraisable.object is None and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.others(unraisable)
