"""A study: cases to measure, and which of the figures a table shows."""

from __future__ import annotations

import dataclasses
import importlib
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxnn.bench._figures import Plain, Quantity, Rows
from jaxnn.record import jsonable
from jaxnn.types import ConfigError, suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The studies of a checkout, below its folder of experiments.
_STUDIES = Path("articles/studies")


class NotMeasured(Exception):
    """A case cannot be measured here; the message says why. It becomes a row without figures, never an error."""


class Bench(NamedTuple):
    """Input of a study's cases.

    Attributes:
        devices: devices to measure, ``{"cpu": …, "gpu": …}``, the first of each kind.
        settings: the study's settings, quick or full.
        prices: dollars per hour by kind of device, overriding a study's own.
    """

    devices: Mapping[str, jax.Device]
    settings: Any
    prices: Mapping[str, float] = {}


class Prepared(NamedTuple):
    """A call to be timed that comes with its amount of work and with further figures, see `Case`."""

    call: Callable[[], object]
    work: float
    observed: Mapping[str, Plain] = {}


class Case(NamedTuple):
    """One thing to measure on one device.

    Attributes:
        device: key in `Bench.devices`; work of the host itself belongs to ``cpu``.
        what: identifies the case within its study, ``{"operation": "relu", "size": 1000}``.
        begin: puts arrays on the device, compiles, and returns the call to be timed, which waits for its own result.
            It and the first call, which is not timed, may raise `NotMeasured`.
        work: amount of work of one call, unless ``begin`` returns `Prepared`.
        unit: of ``work``, such as ``elements``.
        observe: returns figures that are not times, such as an error or an accuracy.
    """

    device: str
    what: Mapping[str, Plain]
    begin: Callable[[], Callable[[], object] | Prepared] | None = None
    work: float = 1.0
    unit: str = "call"
    observe: Callable[[], Mapping[str, Plain]] | None = None


class Finding(NamedTuple):
    """One cell of the table: a figure of one device.

    Attributes:
        claim: the claim it belongs to, such as ``A1``.
        what: what was measured, in the same words for every device.
        quantity: the figure; None: not measured there.
        article: the published figure, if there is one.
        note: why there is no figure, or what is special about it.
        comparable: whether figures of two devices may be divided by each other.
    """

    claim: str
    what: str
    quantity: Quantity | None
    article: str = ""
    note: str = ""
    comparable: bool = True


@dataclasses.dataclass(frozen=True)
class Study:
    """Something to measure on one or more devices.

    Attributes:
        name: by which it is called.
        title: the question, in one line.
        method: what is timed, and what the times include.
        full: settings, a frozen dataclass of plain values with ``rounds`` and ``seconds``, optionally ``precision``
            (see `interleaved`).
        quick: settings for a run of a few minutes at most.
        cases: the cases, in groups; a group is prepared together, timed in alternation, and its memory freed.
        findings: the rows of the table, from the figures of one device.
        draw: draws all columns, ``{label: rows}``, into an empty figure.
        conclude: statements that need the figures of several devices.
        claims: the published claims it is about, such as ``("A1", "A3")``.
        resumable: whether figures of an interrupted run are kept; not if they depend on `Bench.prices`.
        version: raised whenever the definition changes so that earlier figures do not compare.
    """

    name: str
    title: str
    method: str
    full: Any
    quick: Any
    cases: Callable[[Bench], Iterable[Sequence[Case]]]
    findings: Callable[[Rows], Sequence[Finding]]
    draw: Callable[[Mapping[str, Rows], Figure], None]
    conclude: Callable[[Mapping[str, Rows]], Sequence[str]] = lambda _: ()
    claims: tuple[str, ...] = ()
    resumable: bool = True
    version: int = 1

    def definition(self, settings: Any) -> dict[str, Any]:
        """What must be equal for figures to be comparable, as JSON values."""
        return {"study": self.name, "version": self.version, **jsonable(dataclasses.asdict(settings))}


def find_studies() -> dict[str, Study]:
    """The studies of the checkout in the working directory, else of the one jaxnn is imported from, by claim."""
    roots = (Path.cwd() / "experiments", Path(__file__).parents[2] / "experiments")
    root = next((root for root in roots if (root / _STUDIES).is_dir()), None)
    if root is None:
        return {}
    if str(root) not in sys.path:  # studies import the scripts of the networks that they measure
        sys.path.append(str(root))
    names = sorted(path.stem for path in (root / _STUDIES).glob("*.py") if not path.stem.startswith("study_"))
    found = [importlib.import_module(f"articles.studies.{name}").STUDY for name in names]
    return {study.name: study for study in sorted(found, key=lambda study: int(study.claims[0].strip("A")))}


def load_study(name: str, known: Mapping[str, Study]) -> Study:
    """A study by name, or the ``STUDY`` of a Python file by its path.

    Raises:
        ConfigError: there is no such study or file, or the file defines none.
    """
    if name in known:
        return known[name]
    if not name.endswith(".py"):
        near = f"{suggest(name, known)}; or" if known else "run in a checkout of jaxnn, or"
        raise ConfigError(f"no study {name!r}: {near} give the path of a file with a STUDY.")
    path = Path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"no study at {path}: there is no such file.")
    study = runpy.run_path(str(path)).get("STUDY")
    if not isinstance(study, Study):
        raise ConfigError(f"{path} defines no STUDY: assign a jaxnn.bench.Study to that name.")
    return study
