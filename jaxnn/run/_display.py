"""What a run prints: a bar on a terminal, one output cell in a notebook, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import html
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxnn._clock import Clock
from jaxnn._text import any_text, drop_output, say_error, text_table
from jaxnn.observe import device_kind, missing_gpu
from jaxnn.parallel import find_devices, is_primary
from jaxnn.types import cpu_count, printable

# Plain output goes to files and logs: a line now and then, not one per window.
SECONDS_BETWEEN_REPORTS = {"plain": 1.0, "bar": 0.1, "notebook": 0.1}
# A stage that takes longer is announced, within a second: on a terminal in a line that is cleared when the stage ends.
SECONDS_BEFORE_ANNOUNCING, SECONDS_BETWEEN_LOOKS = 0.6, 0.25
CLEAR_LINE = "\r\x1b[K"
# The rows of the device and of the reports at the start are aligned: the longest name is "implementations".
NAME_WIDTH = 15


class Display:
    """Where a run prints: its ``kind`` is ``none``, ``plain``, ``bar`` or ``notebook``."""

    def __init__(self, kind: str = "none") -> None:
        self.kind = kind
        self._last = float("-inf")
        self._live: Any = None
        self._progress: Any = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, progress: str) -> Iterator[Display]:
        """The display for the run option ``progress`` that fits this process; of several processes one prints."""
        kind = progress if is_primary() else "none"
        if kind == "auto":
            # Only if IPython is imported already: importing it would cost every script half a second.
            shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
            in_notebook = type(shell).__name__ == "ZMQInteractiveShell"
            # There is none if its descriptor was closed.
            is_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
            kind = "notebook" if in_notebook else "bar" if is_terminal else "plain"
        display = cls(kind)
        with any_text(), contextlib.closing(display):
            yield display

    def say(self, text: Any) -> None:
        """Prints a line that stays, above the bar if there is one."""
        with self._surviving():
            if self.kind == "bar" and self._live is not None:
                self._live.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
            elif self.kind != "none":
                print(printable(text), flush=True)

    def rows(self, rows: Sequence[tuple[str, str | None]], *, aligned: bool = False) -> None:
        """Prints a table of name and value, without rows that have no value; ``aligned`` with the device's row."""
        width = NAME_WIDTH if aligned else 0
        table = text_table([(f"{name:<{width}}", value) for name, value in rows if value is not None])
        for line in table.splitlines():
            self.say(f"  {line}")

    def device(self, num_used: int | None = None) -> None:
        """Prints the first device, the number used of those there are, CPU cores, JAX's version, and a warning."""
        devices = find_devices()
        device, num_devices = devices[0], len(devices)
        place = f"{device.platform}:{device.id} ({device_kind(device)})"
        used = "" if num_used is None else f"{num_used} of "
        among = f", {used}{num_devices} devices" if num_devices > 1 else ""
        processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
        described = f"{place}{among}{processes}; {cpu_count()} CPU cores; jax {jax.__version__}"
        self.rows([("device", described), ("warning", missing_gpu())], aligned=True)

    def report(self, report: Any) -> None:
        """Shows the progress: milestones always, other reports now and then.

        A report has ``step``, ``num_steps``, ``rates``, ``numbers`` and ``is_milestone``; its text is a line.
        """
        if self.kind == "none":
            return
        due = time.perf_counter() - self._last >= SECONDS_BETWEEN_REPORTS[self.kind]
        if report.is_milestone or due:
            self._last = time.perf_counter()
            show = {"bar": self._move, "notebook": self._redraw}.get(self.kind, self.say)
            with self._surviving():
                show(report)

    def announcing(self, clock: Clock) -> contextlib.AbstractContextManager[None]:
        """Announces the stages of the block that take long, as ``clock`` knows them."""
        if self.kind == "none":
            return contextlib.nullcontext()
        return in_background(lambda over: self._announce(clock, over), "stages")

    def close(self) -> None:
        """Takes the bar down."""
        live, self._live = self._live, None
        if self.kind == "bar" and live is not None:
            with self._surviving():
                live.stop()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Prints nothing more if standard output cannot be written; only a closed pipe is an error, BrokenPipeError."""
        try:
            yield
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            # Python has a ValueError for a closed file.
            if not isinstance(error, OSError) and not sys.stdout.closed:
                raise
            self.kind = "none"
            drop_output()
            say_error(f"standard output cannot be written ({getattr(error, 'strerror', None) or error}): it is dropped")

    def _move(self, report: Any) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        if self._live is None:
            columns = BarColumn(bar_width=16), TimeRemainingColumn(), TextColumn("{task.fields[rates]}")
            self._progress = Progress(MofNCompleteColumn(), *columns)
            self._progress.add_task("train", total=report.num_steps, rates="")
            self._live = Live(self._progress, transient=True)
            self._live.start()
        if report.is_milestone:
            self.say(str(report))
        (task,) = self._progress.task_ids
        self._progress.update(task, total=report.num_steps, completed=report.step, rates=report.rates)
        self._live.update(Group(self._progress, Text(printable(report.numbers))))

    def _redraw(self, report: Any) -> None:
        from IPython.display import HTML, display

        bar = f"<progress value={report.step} max={report.num_steps} style='width:20em'></progress>"
        cell = HTML(f"{bar} <code>{html.escape(str(report))}</code>")
        if self._live is None:
            self._live = display(cell, display_id=True)
        else:
            self._live.update(cell)

    def _announce(self, clock: Clock, over: threading.Event) -> None:
        with contextlib.suppress(BrokenPipeError), self._surviving():  # a closed pipe is the main thread's to notice
            self._announce_stages(clock, over)

    def _announce_stages(self, clock: Clock, over: threading.Event) -> None:
        announced, shown = clock.current, False
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            current = _, stage, since = clock.current
            # On a terminal on which nothing else is drawn yet.
            in_place = self.kind == "bar" and self._live is None
            due = stage is not None and clock.now() - since > SECONDS_BEFORE_ANNOUNCING
            if in_place and (due or shown):
                text = f"{CLEAR_LINE}  {stage} … {clock.now() - since:.0f} s" if due else CLEAR_LINE
                print(text, end="", flush=True)
                shown = due
            elif due and announced != current:
                announced = current
                self.say(f"  {stage} …")
        if shown:
            print(CLEAR_LINE, end="", flush=True)


@contextlib.contextmanager
def in_background(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Runs ``work(over)`` in a thread during the block; it returns soon after the event ``over`` is set at the end."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
