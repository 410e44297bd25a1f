"""What a study is: cases to measure, and what of the figures is shown beside an article's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxnn.bench.rows import Plain, Quantity, Rows
from jaxnn.record.directory import jsonable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NotMeasured(Exception):
    """A case that cannot be measured here; its message says why. It ends in a row: users never meet it."""


class Bench(NamedTuple):
    """What a study is given.

    Attributes:
        devices: those to measure, ``{"cpu": …, "gpu": …}``, of each kind the first.
        settings: the study's, quick or full.
        data_dir: where the data sets lie; None: where they always do.
        prices: dollars an hour by kind of device, where they are other than a study's own.
    """

    devices: Mapping[str, jax.Device]
    settings: Any
    data_dir: Path | None = None
    prices: Mapping[str, float] = {}


class Begun(NamedTuple):
    """A call to be timed whose work was found out when it was made.

    Attributes:
        call: waits for its result.
        work: how much it does.
        observed: what else was found out, as in `Case.observe`.
    """

    call: Callable[[], object]
    work: float
    observed: Mapping[str, Plain] = {}


class Case(NamedTuple):
    """One thing to measure on one device.

    Attributes:
        device: the key in `Bench.devices`; what the host does by itself is the CPU's.
        what: tells it from the study's other cases, ``{"operation": "relu", "size": 1000}``.
        begin: puts what is needed on the device and gives a call to be timed, which waits for its result. It and the
            first call, which is not timed, may raise `NotMeasured`.
        work: how much one call does, unless ``begin`` gives it.
        unit: of ``work``, such as ``elements``.
        observe: gives figures that are not times, such as an error or an accuracy, from JSON's plain values.
    """

    device: str
    what: Mapping[str, Plain]
    begin: Callable[[], Callable[[], object] | Begun] | None = None
    work: float = 1.0
    unit: str = "call"
    observe: Callable[[], Mapping[str, Plain]] | None = None


class Finding(NamedTuple):
    """A figure that stands in the table, of one device.

    Attributes:
        claim: the article's, such as ``A1``.
        what: what was measured, the same words on every device.
        quantity: what came of it; None: it was not measured there.
        article: what the article says, if it gives a figure.
        note: why there is none, or what is peculiar about it.
        comparable: whether one device's is to be divided by another's.
    """

    claim: str
    what: str
    quantity: Quantity | None
    article: str = ""
    note: str = ""
    comparable: bool = True


@dataclasses.dataclass(frozen=True)
class Study:
    """A claim of the articles as something to measure.

    Attributes:
        name: by which it is asked for.
        claims: those of the articles, such as ``("A1", "A3")``.
        title: what is asked, in a line.
        method: what is timed, what is in the times and what is not.
        full: its settings, a frozen dataclass of plain values with ``rounds`` and ``seconds``.
        quick: the same, for minutes.
        cases: what to measure, in groups: a group is begun together, timed in turn, and its memory freed.
        findings: the rows of the table that the figures of one device make.
        draw: draws all columns, ``{label: rows}``, into an empty figure.
        conclude: sentences that need the figures of several devices.
        goes_on: whether what was measured before an interruption is kept; not where it depends on the bench's prices.
        version: of the definition: raised where figures from before are no longer to be compared.
    """

    name: str
    claims: tuple[str, ...]
    title: str
    method: str
    full: Any
    quick: Any
    cases: Callable[[Bench], Iterable[Sequence[Case]]]
    findings: Callable[[Rows], Sequence[Finding]]
    draw: Callable[[Mapping[str, Rows], Figure], None]
    conclude: Callable[[Mapping[str, Rows]], Sequence[str]] = lambda _: ()
    goes_on: bool = True
    version: int = 1

    def definition(self, settings: Any) -> dict[str, Any]:
        """What must be equal for figures to be compared, in JSON's types."""
        return {"study": self.name, "version": self.version, **jsonable(dataclasses.asdict(settings))}
