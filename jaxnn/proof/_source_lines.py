"""The lines of code that made an equation of a jaxpr."""

from __future__ import annotations

import importlib.util
import itertools
import linecache
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn._text import short_path

# A line of the user's code is one outside of these.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "chex", "jaxnn")


class SourceLine(NamedTuple):
    """A line of code.

    Attributes:
        file: its path.
        line: its number, from 1.
        text: what stands there, without indentation.
        of_library: whether no line of the user's code led to the equation; it is then the innermost outside JAX.
    """

    file: str
    line: int
    text: str
    of_library: bool

    def __str__(self) -> str:
        where = f"{short_path(Path(self.file))}:{self.line}"
        return f"{where}: {self.text}" + " (a library's; none of yours led there)" * self.of_library


def source_line(tracebacks: Sequence[Any], caller: str) -> SourceLine | None:
    """The user's line that made an equation, from the tracebacks of the equations around it, outermost first.

    Frames outside of ``caller``, the file that traced the program, are left out.
    """
    folders = _folders()
    stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    fallback = None
    for traceback in reversed(tracebacks):
        for frame in () if traceback is None else traceback.frames:
            file = frame.file_name
            if file == caller:
                break
            if (file.startswith(stdlib) and not file.startswith(packages)) or file.startswith("<frozen"):
                continue
            library = next((name for name, folder in folders.items() if file.startswith(folder)), None)
            if library is None or (fallback is None and library not in ("jax", "jaxlib")):
                text = linecache.getline(file, frame.line_num).strip()
                line = SourceLine(file, frame.line_num, text, library is not None)
                if library is None:
                    return line
                fallback = line
    return fallback


def calls(tracebacks: Sequence[Any]) -> list[list[Any]]:
    """The calls that led to the operation of an equation, outermost first: code objects and places in them.

    There is a list for each of the equations around it. Calls within JAX that transform the operation are left out: an
    operation and what JAX makes of it in a derivative have the same calls.
    """
    found = []
    for traceback in tracebacks:
        pairs = [] if traceback is None else list(zip(*traceback.raw_frames(), strict=True))[::-1]
        names = [code.co_name for code, _ in pairs]
        found.append(pairs[: names.index("process_primitive")] if "process_primitive" in names else pairs)
    return found


def num_common(a: Sequence[Sequence[Any]], b: Sequence[Sequence[Any]]) -> int:
    """How many calls two operations have in common."""
    return sum(
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        for one, other in zip(a, b, strict=False)
    )


def _folders() -> dict[str, str]:
    specs = {name: importlib.util.find_spec(name) for name in _LIBRARIES}
    return {name: f"{Path(spec.origin).parent}/" for name, spec in specs.items() if spec is not None and spec.origin}
