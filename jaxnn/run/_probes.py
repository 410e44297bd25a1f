"""Probes: functions of the run so far, called after evaluations; what they return is recorded under their names."""

import io
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxnn import engine
from jaxnn._disk import make_room, write_bytes
from jaxnn._figures import draw_picture
from jaxnn.run._record import Session
from jaxnn.run._run import run_of
from jaxnn.types import RecordError, TrainingError

PROBES = "probes"  # the folder of a record that has their pictures and texts


def call_probes(session: Session, probes: Mapping[str, engine.Probe], step: int) -> dict[str, float]:
    """Calls the ``probes`` of a run after an evaluation; writes files and returns metrics."""
    found: dict[str, float] = {}
    run = run_of(session)
    for name, probe in probes.items():
        try:
            found |= _recorded(session, name, probe(run), step)
        except RecordError:  # the disk's
            raise
        except Exception as error:  # any: the user's
            cause = " ".join([f"{type(error).__name__}:", *str(error).split()])
            raise TrainingError(
                f"the probe {name} failed at step {step} ({cause}): fix it, and resume the run or start it again."
            ) from error
    return found


def _recorded(session: Session, name: str, value: Any, step: int) -> dict[str, float]:
    """Stores what a probe returned; the metrics in it."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        parts = [_recorded(session, f"{name}/{key}", part, step) for key, part in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    if np.ndim(value) == 0 and isinstance(number := np.asarray(value).item(), numbers.Real):
        return {f"probe_{name}": float(number)}
    if isinstance(value, str):
        suffix, content = "txt", value.encode()
    else:
        try:
            value = draw_picture(value)
        except (TypeError, ValueError) as error:
            kinds = "number, picture, matplotlib figure, text, or mapping of these"
            raise TypeError(f"{name} is no {kinds}: {error}") from error
        value.save(drawn := io.BytesIO(), format="png")
        suffix, content = "png", drawn.getvalue()
    if (directory := session.trainer.record) is not None and directory.writes:
        file = directory.path / PROBES / name / f"{step}.{suffix}"
        make_room(file.parent)
        write_bytes(file, content)
    session.trainer.writers.media(name, value, step)
    return {}
