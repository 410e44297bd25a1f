"""The metrics that a run reports: any number of writers take them, and a resumed run checks those on the disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxnn._figures import draw_picture
from jaxnn.parallel import is_primary
from jaxnn.types import ConfigError, RecordError, warn

type Line = dict[str, Any]


class WriterFacts(NamedTuple):
    """The run or the sweep that a metric writer is opened for.

    >>> from jaxnn.record import WriterFacts
    >>> WriterFacts("digits", Path("runs/digits"), {"model": {"depth": 2}}).config
    {'model': {'depth': 2}}
    """

    name: str  # of the experiment
    path: Path | None  # the directory of the record, or None
    config: Mapping[str, Any]  # as in ``record.json``
    members: Mapping[int, Mapping[str, Any]] = {}  # of a sweep the points by member, else empty
    resumed: int | None = None  # the step that a run resumes from, 0 for a sweep; None: it is new


class MetricWriter(Protocol):
    """A destination of metrics in addition to ``metrics.jsonl``: a tracking service, a table, a queue.

    Pass instances as the option ``writers``. The training thread of the process that writes the record calls ``write``,
    which should return quickly. A resumed run writes the lines after its checkpoint again, as their ``step`` shows.
    An exception becomes a warning, and training continues.

    Four more methods are called if there are any: ``open(facts: WriterFacts)`` before the first line;
    ``media(name, content, step)`` with pictures, uint8 ``[height, width, 3]``, and texts, ``str``, of
    probes and the curves at the end; ``flush()`` before each checkpoint, which a resumed run may start from;
    ``close()`` when the record is complete, also if there was no ``open``.

    >>> class LossPrinter:
    ...     def write(self, lines):
    ...         for line in lines:
    ...             print(line["step"], line["train_loss"])
    >>> LossPrinter().write([{"step": 100, "train_loss": 0.5, "seconds": 0.1}])
    100 0.5
    """

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes the lines of one report, one for each member in a sweep: ``step``, metrics and throughput by name."""


class Writers:
    """The metric writers of a run or a sweep; their exceptions become warnings, since the record has every line."""

    def __init__(self, writers: Sequence[Any] = ()) -> None:
        self._writers = writers

    @property
    def take_media(self) -> bool:
        """Whether any of the writers takes pictures and texts."""
        return any(hasattr(writer, "media") for writer in self._writers)

    def open(self, facts: WriterFacts) -> None:
        """Opens the writers, in the process that writes the record; ConfigError or RecordError if one fails."""
        for writer in self._writers if is_primary() else ():
            try:
                getattr(writer, "open", lambda facts: None)(facts)
            except RecordError:
                raise
            except Exception as error:  # any: the service's
                raise ConfigError(
                    f"the writer {type(writer).__name__} cannot be opened ({type(error).__name__}: {error}): check its "
                    "service and its settings, or leave it out."
                ) from error

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Sends the lines of one report; each writer gets copies."""
        for writer in self._writers if is_primary() else ():
            _attempt(writer, "write", [dict(line) for line in lines])

    def media(self, name: str, content: Any, step: int) -> None:
        """Sends a text, or a picture, as `draw_picture` takes it, to the writers that have ``media``."""
        content = content if isinstance(content, str) else np.asarray(draw_picture(content))
        for writer in self._writers if is_primary() else ():
            _attempt(writer, "media", name, content, step)

    def flush(self) -> None:
        """Has the writers store what they were sent: a checkpoint that will cover it is about to be saved."""
        for writer in self._writers if is_primary() else ():
            _attempt(writer, "flush")

    def close(self) -> None:
        """Closes the writers, in every process."""
        for writer in self._writers:
            _attempt(writer, "close")


def _attempt(writer: Any, method: str, *arguments: Any) -> None:
    """Calls a method of a user's writer, if it has it; warns of an exception."""
    try:
        getattr(writer, method, lambda *_: None)(*arguments)
    except Exception as error:  # any: the writer's
        cause = " ".join([f"{type(error).__name__}:", *str(error).split()])
        warn(f"the writer {type(writer).__name__} failed in {method} ({cause}): the run continues; check the writer.")
