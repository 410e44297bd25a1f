"""``metrics.jsonl`` held against what a checkpoint says was written of it, and cut to that when a run resumes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxnn.record.directory import METRICS_FILE, write_bytes
from jaxnn.record.reader import numbers, read_bytes

type Line = dict[str, Any]


class LogDigest:
    """The number and the SHA-256 of lines, one after another.

    Args:
        lines: what was written so far, each with its end.
    """

    def __init__(self, lines: Iterable[bytes] = ()) -> None:
        self.lines = 0
        self._digest = hashlib.sha256()
        self.add(lines)

    def add(self, lines: Iterable[bytes]) -> None:
        """Takes in more lines."""
        for line in lines:
            self.lines += 1
            self._digest.update(line)

    @property
    def sha256(self) -> str:
        """In hexadecimal."""
        return self._digest.hexdigest()

    def fits(self, noted: Mapping[str, Any] | None) -> bool:
        """Whether these are the ``lines`` and the ``sha256`` that were noted."""
        return noted is not None and (noted["lines"], noted["sha256"]) == (self.lines, self.sha256)


def rewind_metrics(
    path: Path,
    end_of: Callable[[Line], int],
    noted: Mapping[str, Any] | None,
    where: str,
    members: Sequence[int] | None = None,
) -> tuple[list[Line], LogDigest, str | None]:
    """Drops from ``metrics.jsonl`` what was reported after a checkpoint, which a resumed run reports again.

    If the lines up to the checkpoint are not those it notes, those that can be read are kept, in the order of their
    steps and each step once; the file as it was found is kept beside it.

    Args:
        path: the run directory.
        end_of: the step of the checkpoint, for a line; in a sweep each member has its own.
        noted: the ``lines`` and the ``sha256`` that belong to the checkpoint; None if there is no checkpoint.
        where: the checkpoint, for messages.
        members: in a sweep, those whose checkpoint it is; the lines of others stay.

    Returns:
        The lines that were kept, their digest, and what to tell the user if they are not those that were reported.

    Raises:
        RecordError: the disk refuses.
    """
    file = path / METRICS_FILE
    content = read_bytes(file)
    others, lines = _split(content, members)
    kept = lines[: noted["lines"]] if noted is not None else []
    told = None
    digest = LogDigest(kept)
    if lines and noted is None:
        told = f"there is no checkpoint of {where}, so that it starts again; what it had reported is kept in {{}}"
    elif noted is not None and not digest.fits(noted):
        kept = _readable(lines, end_of)
        digest = LogDigest(kept)
        told = f"{file} is damaged up to {where}, {_loss(noted, digest)}; the file as it was found is {{}}"
    if told is not None:
        write_bytes(aside := _unused(file), content)
        told = told.format(aside)
    if (rewound := b"".join([*others, *kept])) != content:
        write_bytes(file, rewound)
    return [numbers(json.loads(line)) for line in kept], digest, told


def check_metrics(path: Path, noted: Mapping[str, Any], where: str, members: Sequence[int]) -> str | None:
    """What to tell the user if the lines of ``members`` are not those that were noted when they were over."""
    file = path / METRICS_FILE
    _, lines = _split(read_bytes(file), members)
    digest = LogDigest(lines)
    return None if digest.fits(noted) else f"{file} is damaged for {where}, {_loss(noted, digest)}"


def _loss(noted: Mapping[str, Any], found: LogDigest) -> str:
    if found.fits(noted):
        return "with lines twice or out of order, and is repaired"
    if (lost := noted["lines"] - found.lines) > 0:
        return f"{lost} of {noted['lines']} lines are lost"
    return "its lines are not those that were reported"


def _split(content: bytes, members: Sequence[int] | None) -> tuple[list[bytes], list[bytes]]:
    """The whole lines of others than ``members``, and theirs; what cannot be read is theirs too."""
    whole = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    if members is None:
        return [], whole
    others: list[bytes] = []
    own: list[bytes] = []
    for raw in whole:
        line = _parsed(raw)
        (others if line is not None and line.get("member") not in members else own).append(raw)
    return others, own


def _readable(lines: Iterable[bytes], end_of: Callable[[Line], int]) -> list[bytes]:
    """The lines up to their checkpoint that are reports, by member and step, the first of each."""
    found: dict[tuple[str, int], bytes] = {}
    for raw in lines:
        line = _parsed(raw)
        if line is not None and type(step := line.get("step")) is int and 0 < step <= end_of(line):
            found.setdefault((str(line.get("member")), step), raw)
    return [found[key] for key in sorted(found, key=lambda key: key[1])]


def _parsed(raw: bytes) -> Line | None:
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(raw)
        return line if isinstance(line, dict) else None
    return None


def _unused(file: Path) -> Path:
    names = (file.with_name(f"{file.stem}.damaged-{number}{file.suffix}") for number in itertools.count(1))
    return next(path for path in names if not path.exists())
