"""The results of studies: what a ``results.json`` holds, read, written, and those of several machines merged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxnn.bench.machine import Column
from jaxnn.bench.rows import Row, Rows
from jaxnn.record.directory import make_room, write_json
from jaxnn.types import RecordError

FILE = "results.json"
FORMAT = 1


class Part(NamedTuple):
    """What was measured of one study on one device.

    Attributes:
        column: the device, and when.
        rows: the figures.
        whole: whether they are all of the study; else it was interrupted.
    """

    column: Column
    rows: Rows
    whole: bool = True


class Measured(NamedTuple):
    """What was measured of one study.

    Attributes:
        definition: what must be equal for figures to be compared.
        quick: whether with the quick settings.
        parts: by the label of the column.
    """

    definition: Mapping[str, Any]
    quick: bool
    parts: Mapping[str, Part]

    @property
    def rows(self) -> dict[str, Rows]:
        """The figures of each column; those of a study that was interrupted there are none to conclude from."""
        return {label: part.rows for label, part in self.parts.items() if part.whole}


type Results = Mapping[str, Measured]
"""What was measured, by the study's name."""


def write_results(results: Results, folder: Path) -> Path:
    """Writes ``results.json`` whole into ``folder``, which is made if it is not there.

    Raises:
        RecordError: the disk refuses.
    """
    make_room(folder)
    studies = {name: _study_json(measured) for name, measured in results.items()}
    write_json(folder / FILE, {"format": FORMAT, "studies": studies})
    return folder / FILE


def _study_json(measured: Measured) -> dict[str, Any]:
    parts = [
        {"column": part.column._asdict(), "whole": part.whole, "rows": [row._asdict() for row in part.rows]}
        for part in measured.parts.values()
    ]
    return {"definition": measured.definition, "quick": measured.quick, "parts": parts}


def read_results(path: Path) -> Results:
    """What ``write_results`` wrote.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        RecordError: there is none, or it is cut off, of another format, or lacks something; it names the file.
    """
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise RecordError(f"{file} is no whole JSON file ({error}): measure again, or copy it again.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordError(f"{file} is no results file of format {FORMAT}: it must be what `jaxnn bench` writes.")
    try:
        return {name: _read_study(one) for name, one in content["studies"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{file} is partial or was changed ({type(error).__name__}: {error}): measure again."
        ) from error


def _read_study(content: Mapping[str, Any]) -> Measured:
    parts = [
        Part(Column(**part["column"]), Rows(map(_read_row, part["rows"])), bool(part["whole"]))
        for part in content["parts"]
    ]
    return Measured(dict(content["definition"]), bool(content["quick"]), {part.column.label: part for part in parts})


def _read_row(content: Mapping[str, Any]) -> Row:
    return Row(**{**content, "seconds": tuple(content["seconds"])})


def merge_results(parts: Sequence[tuple[str, Results]]) -> Results:
    """One table of several machines' results.

    Args:
        parts: each with the name that an error calls it by.

    Raises:
        RecordError: a study was interrupted, it was defined differently, or two parts have figures of it of the same
            device.
    """
    merged: dict[str, tuple[str, Measured]] = {}
    for where, part in parts:
        for name, measured in part.items():
            _check_whole(name, where, measured)
            known = merged.get(name)
            merged[name] = (where, measured) if known is None else (known[0], _merged(name, known, (where, measured)))
    return {name: measured for name, (_, measured) in merged.items()}


def _check_whole(name: str, where: str, measured: Measured) -> None:
    for label, part in measured.parts.items():
        if not part.whole:
            raise RecordError(f"{where} has only a part of {name} on {label}, interrupted: measure it again.")


def _merged(name: str, first: tuple[str, Measured], second: tuple[str, Measured]) -> Measured:
    (here, ours), (there, theirs) = first, second
    check_alike(name, first, second)
    if both := sorted(set(ours.parts) & set(theirs.parts)):
        raise RecordError(f"{here} and {there} both have figures of {name} on {both[0]}: leave one of them out.")
    return ours._replace(parts={**ours.parts, **theirs.parts})


def check_alike(name: str, first: tuple[str, Measured], second: tuple[str, Measured]) -> None:
    """Confirms that figures may be compared.

    Args:
        name: the study's.
        first: figures, and the name that an error calls them by.
        second: others.

    Raises:
        RecordError: the study was defined differently.
    """
    (here, ours), (there, theirs) = first, second
    for key in [*ours.definition, *theirs.definition]:
        mine, other = (one.definition.get(key) for one in (ours, theirs))
        if mine != other:
            raise RecordError(
                f"{name} was defined differently: {key} is {mine} in {here} and {other} in {there}. Measure one of "
                "them again, both quick or both full, with one version of jaxnn."
            )
