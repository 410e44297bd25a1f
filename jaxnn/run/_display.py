"""What a run says while it goes on: a bar on a terminal, a tidy one in a notebook, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxnn.observe import printable
from jaxnn.run._report import aligned

# Plain output goes to files and logs: a line now and then, not one a window.
SECONDS_BETWEEN_LINES = 1.0
SECONDS_BETWEEN_UPDATES = 0.1


class Shown(Protocol):
    """A report as displays show it; its text is a line of its own."""

    @property
    def step(self) -> int:
        """How far it is."""

    @property
    def num_steps(self) -> int:
        """How far it will be."""

    @property
    def rates(self) -> str:
        """How fast."""

    @property
    def numbers(self) -> str:
        """What was learnt."""

    @property
    def is_milestone(self) -> bool:
        """Whether it should stay in sight: an evaluation, or the end."""


class Display(Protocol):
    """Where a run's words go."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def report(self, report: Shown) -> None:
        """How far the run has come."""


class Silent(NamedTuple):
    """Says nothing."""

    def say(self, text: str) -> None:
        """Says nothing."""

    def report(self, report: Shown) -> None:
        """Says nothing."""


class Throttle:
    """Lets something through every so many seconds, and whatever is important.

    Args:
        seconds: the least time between two.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")

    def passes(self, important: bool) -> bool:
        """Whether it may go through now."""
        now = time.perf_counter()
        if important or now - self._last >= self._seconds:
            self._last = now
            return True
        return False


class Plain(NamedTuple):
    """Lines on standard output: each evaluation, the end, and one a second at the most besides."""

    throttle: Throttle

    def say(self, text: str) -> None:
        """Prints the line."""
        print(printable(text), flush=True)

    def report(self, report: Shown) -> None:
        """Prints the report, now and then."""
        if self.throttle.passes(important=report.is_milestone):
            print(printable(report), flush=True)


class Bar(NamedTuple):
    """A bar at the foot of the terminal, the metrics below it; evaluations stay above it as lines."""

    live: Any
    progress: Any
    task: Any
    throttle: Throttle

    def say(self, text: str) -> None:
        """Prints the line above the bar."""
        self.live.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def report(self, report: Shown) -> None:
        """Moves the bar."""
        if report.is_milestone:
            self.say(str(report))
        if self.throttle.passes(important=report.step == report.num_steps):
            from rich.console import Group
            from rich.text import Text

            self.progress.update(self.task, total=report.num_steps, completed=report.step, rates=report.rates)
            self.live.update(Group(self.progress, Text(printable(report.numbers))))


class Notebook(NamedTuple):
    """One output cell with a bar and the latest numbers, updated in place."""

    handle: Any
    throttle: Throttle

    def say(self, text: str) -> None:
        """Prints the line above or below the bar."""
        print(printable(text))

    def report(self, report: Shown) -> None:
        """Redraws the bar."""
        if self.throttle.passes(important=report.is_milestone):
            from IPython.display import HTML

            bar = f"<progress value={report.step} max={report.num_steps} style='width:20em'></progress>"
            self.handle.update(HTML(f"{bar} <code>{html.escape(str(report))}</code>"))


@contextlib.contextmanager
def open_display(kind: str, num_steps: int) -> Iterator[Display]:
    """The display that fits where the process runs, taken down on the way out.

    Args:
        kind: ``auto``, ``bar``, ``plain`` or ``none``.
        num_steps: what full progress is.
    """
    if kind == "none":
        yield Silent()
    elif kind == "auto" and _in_notebook():
        from IPython.display import HTML, display

        handle = display(HTML("<progress></progress>"), display_id=True)
        yield Notebook(handle, Throttle(SECONDS_BETWEEN_UPDATES))
    elif shows_bar(kind):
        from rich.live import Live

        progress = _rich_progress()
        task = progress.add_task("train", total=num_steps, rates="")
        with Live(progress, transient=True) as live:
            yield Bar(live, progress, task, Throttle(SECONDS_BETWEEN_UPDATES))
    else:
        yield Plain(Throttle(SECONDS_BETWEEN_LINES))


def shows_bar(kind: str) -> bool:
    """Whether the display is the bar of a terminal."""
    return kind == "bar" or (kind == "auto" and sys.stdout.isatty() and not _in_notebook())


def say_rows(display: Display, rows: Sequence[tuple[str, str]], name_width: int = 0) -> None:
    """A table of two columns, line by line; the first is at least ``name_width`` characters wide."""
    for line in aligned(rows, name_width):
        display.say(f"  {line}")


def _rich_progress() -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rates]}"),
    )


def _in_notebook() -> bool:
    # Only where IPython runs already: importing it here would cost every script half a second.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"
