"""A page of results on the disk: written whole, or growing while it is measured."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

from jaxnn.bench.page import make_page
from jaxnn.bench.render import to_html, to_markdown
from jaxnn.bench.results import Measured, Results, write_results
from jaxnn.bench.study import Study
from jaxnn.record.directory import write_bytes, write_text


@dataclasses.dataclass
class Page:
    """A page that grows study by study.

    Attributes:
        studies: all that it has a place for, in order.
        folder: where it lies; None: nothing is written.
        results: what is on it.
    """

    studies: Sequence[Study]
    folder: Path | None
    results: Results

    def keep(self, study: Study, so_far: Measured) -> None:
        """Writes the figures of a study under way, as what they are; whole ones of the same device stay until then.

        Raises:
            RecordError: the disk refuses.
        """
        old = self.results.get(study.name)
        before = {} if old is None else old.parts
        new = {label: part._replace(whole=False) for label, part in so_far.parts.items()}
        new = {label: part for label, part in new.items() if label not in before or not before[label].whole}
        alike = old is None or old.definition == so_far.definition
        if self.folder is not None and new and alike:
            write_results({**self.results, study.name: _joined(old, so_far._replace(parts=new))}, self.folder)

    def put(self, study: Study, measured: Measured) -> None:
        """Puts the figures of a study that is over on the page.

        Raises:
            RecordError: the disk refuses.
        """
        self.results = {**self.results, study.name: _joined(self.results.get(study.name), measured)}
        if self.folder is not None:
            write_page(self.results, self.folder, self.studies, changed=[study])


def _joined(old: Measured | None, new: Measured) -> Measured:
    """The new figures, and the old ones of other devices."""
    if old is None or old.definition != new.definition:
        return new
    return new._replace(parts={**old.parts, **new.parts})


def write_page(results: Results, folder: Path, studies: Sequence[Study], *, changed: Sequence[Study]) -> None:
    """Writes ``results.json``, the page as Markdown and HTML, and the pictures.

    Args:
        results: of all the page's studies.
        folder: where.
        studies: all that it has a place for, in order.
        changed: the studies whose pictures are drawn anew; others are where there is none.

    Raises:
        RecordError: the disk refuses.
    """
    write_results(results, folder)
    for study in studies:
        picture = folder / f"{study.name}.png"
        if study.name in results and (study in changed or not picture.exists()):
            write_bytes(picture, draw(study, results[study.name]))
    blocks = make_page(results, studies)
    write_text(folder / "results.md", to_markdown(blocks))
    write_text(folder / "results.html", to_html(blocks))


def draw(study: Study, measured: Measured) -> bytes:
    """The study's picture, PNG."""
    from jaxnn.record.figure import ShownFigure

    figure, picture = ShownFigure(layout="constrained"), io.BytesIO()
    study.draw(measured.rows, figure)
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()
