"""A study of scaling, as its user has it: asked for predictions, printed, drawn, written."""

from __future__ import annotations

import dataclasses
import html
import io
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxnn.record.directory import make_room, write_bytes, write_json
from jaxnn.record.provenance import script
from jaxnn.scaling.cases import KINDS
from jaxnn.scaling.measurements import Measurements
from jaxnn.scaling.points import point_json, prediction_json
from jaxnn.scaling.table import tell_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class ScalingStudy(Measurements):
    """How fast an experiment trains on more and more devices: `points`, `predict`; it prints as a table."""

    def as_json(self) -> dict[str, Any]:
        """All that is known, in JSON's types: measured and predicted points, and what they come from."""
        return {
            "name": self.name,
            "config": self.config,
            "strategy": self.strategy,
            "machine": {**self.machine._asdict(), "told": str(self.machine)},
            "steps_per_call": self.steps_per_call,
            "parameter_bytes": self.parameter_bytes,
            "link": self.link and self.link._asdict(),
            "reductions": [one._asdict() for one in self.reductions],
            **{kind: [point_json(point) for point in self.points(kind)] for kind in KINDS},
            "predicted": {kind: [prediction_json(one) for one in self.predictions(kind)] for kind in KINDS},
            "timings": [{**case._asdict(), **timing._asdict()} for case, timing in self.timings.items()],
            "collectives": [
                {**case._asdict(), "of_a_step": [one._asdict() for one in found]}
                for case, found in self.collectives.items()
                if not case.alone and case.num_devices > 1
            ],
            "written": time.strftime("%Y-%m-%d"),
            "script": script(),
        }

    def save(self, path: str | Path) -> None:
        """Writes ``path`` with the endings ``.json``, all that is known, and ``.png``, the picture.

        Raises:
            RecordError: the disk refuses.
        """
        path = Path(path)
        picture = io.BytesIO()
        make_room(path.parent)
        self.plot().savefig(picture, format="png", dpi=130)
        write_json(path.with_name(f"{path.name}.json"), self.as_json())
        write_bytes(path.with_name(f"{path.name}.png"), picture.getvalue())

    def plot(self) -> Figure:
        """Speed-up, efficiency and the share in collectives against the number of devices, measured and predicted."""
        from jaxnn.scaling.picture import draw_study

        return draw_study(self)

    def __str__(self) -> str:
        return tell_study(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
