"""What is printed while a run or a sweep starts: the device at once, then each stage that takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxnn.engine import Choice, Trainer
from jaxnn.nn import platform
from jaxnn.observe import Clock, cpu_count, device_kind, missing_gpu
from jaxnn.parallel import find_devices, is_primary
from jaxnn.run._display import Display, Silent, open_display, say_rows, shows_bar

# A stage that takes longer is announced: on a terminal in a line that goes away again, elsewhere in one that stays.
SECONDS_ON_TERMINAL = 0.5
SECONDS_IN_LINES = 2.0
SECONDS_BETWEEN_LOOKS = 0.25
# The rows of the device and of the startup report are aligned: the longest name is "implementations".
NAME_WIDTH = 15
CLEAR_LINE = "\r\x1b[K"
# A loop this much slower than a step alone is worth a word.
SLOW_LOOP = 1.5


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


def startup_report(trainer: Trainer, record: str | None, resumed: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Rows of what and value, for a table."""
    choice = trainer.choice
    assert isinstance(choice, Choice)
    rows: list[tuple[str, str | None]] = [
        ("strategy", _strategy(trainer)),
    ]
    rows += [("placement", line) for line in trainer.placement().lines()]
    rows += [
        ("precision", _precision(trainer)),
        ("implementations", _implementations(trainer.programs.implementations)),
        ("steps per call", _explain(choice.steps_per_call, choice.seconds_per_step)),
        ("hint", convolution_hint(trainer)),
        ("record", record),
        ("resumed", None if resumed is None else _resumed(resumed)),
    ]
    return [(name, value) for name, value in rows if value is not None]


def convolution_hint(trainer: Trainer) -> str | None:
    """What to change where convolutions that are not jaxnn's make loops slow, with what that costs here."""
    count, choice = trainer.programs.plain_convolutions, trainer.choice
    assert isinstance(choice, Choice)
    if count == 0 or platform() != "cpu":
        return None
    if choice.seconds_per_step:
        alone = choice.seconds_per_step[1]
        looped = min((seconds for steps, seconds in choice.seconds_per_step.items() if steps > 1), default=0.0)
        cost = f"{_format_milliseconds(alone)} a step alone, {_format_milliseconds(looped)} in a loop"
        slow = looped > SLOW_LOOP * alone
    else:
        cost, slow = "not measured here", choice.steps_per_call > 1
    if not slow:
        return None
    subject = "1 convolution is" if count == 1 else f"{count} convolutions are"
    return (
        f"{subject} not jaxnn's, and slow in a loop on a CPU ({cost}): use jn.nn.Conv, which has the same parameters, "
        "or flax.linen.Conv(…, conv_general_dilated=jn.nn.conv_general_dilated)"
    )


def _strategy(trainer: Trainer) -> str | None:
    """How the run lies on its devices; what to do where others are idle."""
    layout, size = trainer.programs.layout, trainer.experiment.config.batch_size
    if layout.mesh is None:
        idle = len(find_devices()) - 1
        return f"1 device; --devices all would use the other {idle} too" if idle else None
    return f"{layout}: a batch of {size} is {layout.data_size} × {size // layout.data_size} examples"


def _precision(trainer: Trainer) -> str:
    parameters = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(trainer.state.params)})
    products = trainer.programs.product_dtypes
    listed = ", ".join(f"{count} in {dtype}" for dtype, count in products.items())
    return f"parameters {', '.join(parameters)}; matrix products and convolutions: {listed or 'none'}"


def _implementations(found: dict[str, list[str]]) -> str | None:
    return ", ".join(f"{operation} {' and '.join(names)}" for operation, names in found.items()) or None


def _explain(steps_per_call: int, measured: dict[int, float]) -> str:
    tried = ", ".join(f"{n}: {_format_milliseconds(seconds)} a step" for n, seconds in measured.items())
    return f"{steps_per_call} ({tried})" if tried else str(steps_per_call)


def _resumed(resumed: dict[str, Any]) -> str:
    changed = "; ".join(resumed["changed"])
    note = f", not bit for bit, since these changed: {changed}" if changed else ""
    return "; ".join([f"after step {resumed['step']}{note}", *resumed["damaged"]])


def _format_milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
