"""Text for people: tables, bytes, rates, paths; and standard streams that may be closed, full or of any encoding."""

import contextlib
import errno
import html
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxnn.types import printable

_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def text_table(rows: Iterable[Sequence[str]], header: Sequence[str] | None = None) -> str:
    """Returns left-aligned columns two spaces apart, one line per row; an empty string for no rows and no header.

    Control characters are escaped.

    >>> print(jn.observe.text_table([("adam", "0.97"), ("sgd", "0.9")], header=("optimizer", "accuracy")))
    optimizer  accuracy
    adam       0.97
    sgd        0.9
    """
    table = [list(map(printable, row)) for row in [*([header] if header else []), *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


class Table(NamedTuple):
    """A table that displays itself, with notes below: as aligned text in a terminal, as HTML in a notebook."""

    header: Sequence[str] | None  # None: each row's first cell is its heading
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        return "\n".join([text_table(self.rows, self.header), *map(printable, self.notes)])

    def _repr_html_(self) -> str:
        rows = [[("th", cell) for cell in self.header]] if self.header else []
        rows += [[("td" if self.header or n else "th", cell) for n, cell in enumerate(row)] for row in self.rows]
        lines = ("".join(f'<{tag} style="text-align:left">{html.escape(x)}</{tag}>' for tag, x in row) for row in rows)
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table>{table}</table>" + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)


def format_bytes(num_bytes: float) -> str:
    """``512 B``, ``1.5 KiB``, ``2.0 MiB``, up to TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(num_bytes, 1) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def format_split(seconds: Mapping[str, float]) -> str:
    """``train 1.20 s, evaluation 0.10 s``: spans of at least 5 ms, longest first."""
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.2f} s" for name, value in parts if value >= 0.005) or "0.00 s"


def format_rate(rate: float) -> str:
    """``12.3``, ``4,560``: three digits or an integer."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def short_path(path: Path) -> str:
    """Returns ``path`` relative to the working directory if it is below it, as a user would type it."""
    with contextlib.suppress(OSError, ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def autopsy_command(path: Path, member: int | None = None) -> str:
    """Returns the command, or the call, that finds why a run, or a ``member`` of a sweep, diverged."""
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.name not in ("ipykernel_launcher.py", "__main__.py"):
        which = "" if member is None else f" --member {member}"
        return f"jaxnn autopsy {short_path(path)} --script {short_path(script.absolute())}{which}"
    which = "" if member is None else f", member={member}"
    return f"jn.autopsy({str(short_path(path))!r}, experiment{which})"


@contextlib.contextmanager
def any_text() -> Iterator[None]:
    """Within the block standard output escapes characters that its encoding lacks, as standard error does."""
    stream = sys.stdout
    strict = isinstance(stream, io.TextIOWrapper) and stream.errors == "strict"
    # Other settings flush what was printed before, which a full disk refuses.
    with contextlib.suppress(OSError, ValueError):
        if strict:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if strict:
                stream.reconfigure(errors="strict")  # type: ignore[union-attr]


def say_error(text: object) -> None:
    """Prints a line on standard error, if there is one, and it can be written."""
    # RuntimeError: a signal's handler, which interrupted a write that waits for its reader.
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


def is_of_output(error: BaseException) -> bool:
    """Whether ``error`` is one of writing standard output: to a closed pipe or terminal, or on a full disk."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _UNWRITABLE


def flush_output() -> None:
    """Flushes standard output, and drops what cannot be written: Python would end with status 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        drop_output()


def drop_output() -> None:
    """Sends standard output, which cannot be written, to nowhere: Python would write what is left again, and fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
