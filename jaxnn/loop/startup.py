"""What is printed while a run or a sweep starts: the device at once, then each stage that takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence

import jax

from jaxnn.loop.progress import Display, Silent, open_display, say_rows, shows_bar
from jaxnn.observe import Clock, cpu_count, device_kind, missing_gpu
from jaxnn.parallel import find_devices, is_primary

# A stage that takes longer is announced: on a terminal in a line that goes away again, elsewhere in one that stays.
SECONDS_ON_TERMINAL = 0.5
SECONDS_IN_LINES = 2.0
SECONDS_BETWEEN_LOOKS = 0.25
# The rows of the device and of the startup report are aligned: the longest name is "implementations".
NAME_WIDTH = 15
CLEAR_LINE = "\r\x1b[K"


@dataclasses.dataclass(frozen=True)
class Startup:
    """Where the start of a run is reported.

    Attributes:
        display: gets lines.
        clock: the run's, whose stages are announced.
    """

    display: Display = dataclasses.field(default_factory=Silent)
    clock: Clock = dataclasses.field(default_factory=Clock)

    def rows(self, rows: Sequence[tuple[str, str | None]]) -> None:
        """Prints rows of name and value, those that have a value."""
        found = [(name, value) for name, value in rows if value is not None]
        if found:
            say_rows(self.display, found, NAME_WIDTH)

    def device(self, num_used: int | None = None) -> None:
        """Prints what is computed on, as soon as JAX has opened it."""
        self.rows([("device", describe_device(num_used)), ("warning", missing_gpu())])


@contextlib.contextmanager
def starting(progress: str) -> Iterator[Startup]:
    """A start that is reported within the block, in the process that prints; its long stages are announced.

    Args:
        progress: the run option.
    """
    kind = "plain" if progress != "none" and is_primary() else "none"
    with open_display(kind, 0) as display, announcing(startup := Startup(display), on_terminal=shows_bar(progress)):
        yield startup


@contextlib.contextmanager
def announcing(startup: Startup, *, on_terminal: bool = False) -> Iterator[None]:
    """Announces the stages of the block that take long.

    Args:
        startup: whose clock tells the stages; without a display nothing is announced.
        on_terminal: in a line that goes away again; needs a terminal on which nothing else is drawn.
    """
    if isinstance(startup.display, Silent):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_announce, args=(startup, over, on_terminal), name="startup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe_device(num_used: int | None = None) -> str:
    """The first device, how many of how many are used, the CPU cores, and JAX's version."""
    devices = find_devices()
    device, num_devices = devices[0], len(devices)
    place = f"{device.platform}:{device.id} ({device_kind(device)})"
    used = "" if num_used is None else f"{num_used} of "
    among = f", {used}{num_devices} devices" if num_devices > 1 else ""
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{place}{among}{processes}; {cpu_count()} CPU cores; jax {jax.__version__}"


def _announce(startup: Startup, over: threading.Event, on_terminal: bool) -> None:
    clock, announced = startup.clock, startup.clock.stage
    shown = False
    while not over.wait(SECONDS_BETWEEN_LOOKS):
        stage, since = clock.stage
        seconds = clock.now() - since
        due = stage is not None and seconds > (SECONDS_ON_TERMINAL if on_terminal else SECONDS_IN_LINES)
        if on_terminal and (due or shown):
            _write(f"{CLEAR_LINE}  {stage} … {seconds:.0f} s" if due else CLEAR_LINE)
            shown = due
        elif due and announced != (stage, since):
            announced = stage, since
            startup.display.say(f"  {stage} …")
    if shown:
        _write(CLEAR_LINE)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
