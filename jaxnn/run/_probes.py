"""Probes of a run, and what metric writers get besides its lines: facts at the start, pictures and texts."""

from __future__ import annotations

import contextlib
import functools
import io
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxnn import engine, parallel, record
from jaxnn.types import ConfigError, RecordError, TrainingError

if TYPE_CHECKING:
    from jaxnn.run._record import Session

PROBES = "probes"  # the folder of a record that has their pictures and texts


@contextlib.contextmanager
def observed(session: Session, writers: Sequence[record.MetricWriter]) -> Iterator[None]:
    """Opens the writers for a run, connects them and its probes to the trainer, and sends the curves at the end."""
    trainer, path = session.trainer, None if session.trainer.record is None else session.trainer.record.path
    step = None if session.resumed is None else session.resumed["step"]
    config = record.config_json(trainer.experiment.config)
    trainer.writers = writers
    open_all(writers, record.WriterFacts(session.name, path, config, resumed=step))
    if probes := engine.named_probes(trainer.options.probes):
        trainer.probe = functools.partial(_call, session, probes)
    yield
    if trainer.logs[0].lines and any(hasattr(writer, "media") for writer in writers):
        curves = record.draw_curves(trainer.logs[0].lines, str(path or session.name))
        send(writers, "curves", curves, trainer.logs[0].step)


def open_all(writers: Sequence[Any], facts: record.WriterFacts) -> None:
    """Calls ``open`` of the writers that have it, in the process that writes; ConfigError if it fails."""
    for writer in writers if parallel.is_primary() else ():
        try:
            getattr(writer, "open", lambda facts: None)(facts)
        except Exception as error:  # any: the service's
            raise ConfigError(
                f"the writer {type(writer).__name__} cannot be opened ({type(error).__name__}: {error}): check its "
                "service and its settings, or leave it out."
            ) from error


def send(writers: Sequence[Any], name: str, content: Any, step: int) -> None:
    """Hands a text, or a picture, as `draw_picture` takes it, to the writers that have ``media``."""
    content = content if isinstance(content, str) else np.asarray(record.draw_picture(content))
    for writer in writers if parallel.is_primary() else ():
        getattr(writer, "media", lambda *_: None)(name, content, step)


def _call(session: Session, probes: Mapping[str, engine.Probe], step: int) -> dict[str, float]:
    """Calls the probes after an evaluation; writes files and returns metrics."""
    from jaxnn.run._run import run_of  # which imports this module's caller

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
    suffix = "txt" if isinstance(value, str) else "png"
    if isinstance(value, str):
        content = value.encode()
    else:
        try:
            value = record.draw_picture(value)
        except (TypeError, ValueError) as error:
            kinds = "number, picture, matplotlib figure, text, or mapping of these"
            raise TypeError(f"{name} is no {kinds}: {error}") from error
        value.save(drawn := io.BytesIO(), format="png")
        content = drawn.getvalue()
    if (directory := session.trainer.record) is not None and directory.writes:
        file = directory.path / PROBES / name / f"{step}.{suffix}"
        record.make_room(file.parent)
        record.write_bytes(file, content)
    send(session.trainer.writers, name, value, step)
    return {}
