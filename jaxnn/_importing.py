"""Ctrl-C while a script imports jaxnn: one line and status 130 instead of pages of JAX's own imports.

What a script imports before jaxnn, which may be JAX, is out of reach. Interactive sessions keep KeyboardInterrupt.
"""

import importlib
import signal
import sys
import threading
from types import FrameType, ModuleType


def import_module(name: str) -> ModuleType:
    """Imports a module; SIGINT meanwhile ends a script with one line."""
    guarded = _is_script()
    if guarded:
        signal.signal(signal.SIGINT, _leave)
    try:
        return importlib.import_module(name)
    finally:
        if guarded:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.stderr.write("interrupted while importing jaxnn\n")
    raise SystemExit(130)


def _is_script() -> bool:
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or "IPython" in sys.modules
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and not interactive and signal.getsignal(signal.SIGINT) is signal.default_int_handler
