"""A11: images are decoded on the CPU while the device computes; does training wait for them?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optax
from articles.studies.study_pictures import draw_dots, panels
from articles.studies.study_rows import relative
from harness import Bench, Case, Finding, Plain, Quantity, Row, Rows, Study, format_ratio, quantity

import jaxnn as jn
from jaxnn.data import StreamSource, cats_vs_dogs
from jaxnn.models import CNN
from jaxnn.tasks import classification
from jaxnn.types import Examples, Experiment, Source, Splits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Where the images of a batch come from.
FORMS = {
    "resident": "on the device",
    "prefetched": "prefetched by workers",
    "naive": "decoded in the step loop",
}
# Of the data order and of the parameters.
SEED = 0
# A run that waits for input for this percentage of its time is input-bound.
INPUT_BOUND = 10


@dataclasses.dataclass(frozen=True)
class Settings:
    """Images of ``size`` by ``size`` pixels for a CNN of ``channels``; ``steps`` are timed per call.

    ``num_workers`` decode for ``prefetched``; None: one less than the CPUs, at most 8.
    """

    size: int = 64
    channels: tuple[int, ...] = (16, 32, 64, 128)
    batch_size: int = 50
    num_workers: int | None = None
    steps: int = 20
    rounds: int = 5
    seconds: float = 4.0


QUICK = Settings(size=48, channels=(16, 32, 64), batch_size=32, steps=6, rounds=2, seconds=0.5)


class InTheLoop(StreamSource):
    """Decodes images one after another when a batch is requested."""

    def read(self, indices: np.ndarray) -> Examples:
        """Returns the examples at ``indices [n]``: ``[n, ...]`` each."""
        return self.rows([self.example(index) for index in indices.tolist()], indices)

    def batches(self, seed: int, first_step: int, batch_size: int, rows: slice = slice(None)) -> Any:
        """Yields the batches from ``first_step``."""
        for step in itertools.count(first_step):
            yield self.read(np.asarray(self.order(seed, np.array([step], np.int32), batch_size))[0, rows])


@dataclasses.dataclass(frozen=True)
class Config:
    """A run with more steps than are timed."""

    batch_size: int
    num_steps: int = 2**18
    seed: int = SEED


class FedTraining:
    """A call that trains for some steps and records how long they waited for input.

    Steps are dispatched as in any run: the host loads the next batch while the device computes, and waits for the
    device if it is too far ahead.
    """

    def __init__(self, form: str, settings: Settings, kind: str) -> None:
        self._source = open_source(form, settings)
        experiment = _experiment(settings, self._source)
        options: dict[str, Any] = {
            "steps_per_call": 1,
            "report_every": settings.steps,
            "eval_every": 0,
            "progress": "none",
        }
        self._run = jn.iterate(experiment, device=kind, record=False, **options)
        self._reports = iter(self._run)
        self._first: dict[str, float] | None = None
        self.losses: list[float] = []

    def __call__(self) -> None:
        """Trains; the first call, in which workers start, is not timed."""
        self.losses.append(next(self._reports).metrics["train_loss"])
        self._first = self._first or dict(self._run.run.summary.seconds)

    def end(self) -> dict[str, Plain]:
        """Stops the workers; returns the share of time spent waiting and the number of workers."""
        seconds, first = self._run.run.summary.seconds, self._first or {}
        self._reports.close()  # type: ignore[attr-defined]
        data, train = (seconds.get(name, 0.0) - first.get(name, 0.0) for name in ("data", "train"))
        return {"waited": data / (data + train), "workers": getattr(self._source, "num_workers", 0)}


def open_source(form: str, settings: Settings) -> Source:
    """Returns the images to train on; the batches of all `FORMS` are the same.

    Raises:
        ConfigError: Grain is not installed, which all forms except ``resident`` need.
        DataError: the data set is missing.
    """
    size = (settings.size, settings.size)
    if form == "resident":
        return cats_vs_dogs(image_size=size, stream=False).train
    source: Any = cats_vs_dogs(image_size=size, num_workers=settings.num_workers).train
    if form == "prefetched":
        return source  # type: ignore[no-any-return]
    return InTheLoop(source.reader, source.split, source.num_classes, num_workers=0)


def _experiment(settings: Settings, source: Source) -> Experiment[Config]:
    blocks = tuple((channels,) for channels in settings.channels)
    return Experiment(
        Config(settings.batch_size),
        data=lambda config: Splits(source),
        task=lambda config: classification(CNN(2, blocks=blocks)),
        optimizer=lambda config: optax.adam(1e-3),
    )


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    # Workers fill their buffers while another form is timed; a round is long compared with that.
    for kind in bench.devices:
        yield [_case(form, kind, bench.settings) for form in FORMS]


def _case(form: str, kind: str, settings: Settings) -> Case:
    started: list[FedTraining] = []

    def begin() -> Callable[[], None]:
        started.append(FedTraining(form, settings, kind))
        return started[0]

    work = settings.steps * settings.batch_size
    return Case(kind, {"form": form}, begin, work, "examples", lambda: started.pop().end())


def waited(row: Row) -> Quantity | None:
    """Returns the percentage of time spent waiting for a batch."""
    share = row.observed.get("waited")
    return None if share is None else quantity([100 * float(share)], "%")


def verdict(row: Row) -> str:
    """Returns whether training is input-bound."""
    share = waited(row)
    if share is None:
        return ""
    return "input-bound" if share.median >= INPUT_BOUND else "not input-bound"


def relative_rate(rows: Rows, row: Row) -> Quantity | None:
    """Returns the speed relative to resident data in the same round."""
    return relative(row, rows.one(form="resident"))


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for row in rows:
        form = f"images {FORMS[_form(row)]}"
        share = f"{form}: share of time waiting for input"
        found += [Finding("A11", form, row.rate), Finding("A11", share, waited(row), note=verdict(row))]
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    sentences = []
    for label, rows in columns.items():
        for row in rows:
            ratio = relative_rate(rows, row)
            if ratio is not None and _form(row) != "resident":
                workers = f" ({count})" if (count := row.observed.get("workers")) else ""
                sentences.append(
                    f"{label}: with images {FORMS[_form(row)]}{workers}, training has {format_ratio(ratio.median)} the "
                    f"speed of resident images: {verdict(row)}."
                )
    return sentences


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    rate, share = panels(figure, ("training", "waiting for input"))
    rates = {label: [(_form(row), relative_rate(rows, row)) for row in rows] for label, rows in columns.items()}
    draw_dots(rate, rates, log=False)
    shares = {label: [(_form(row), waited(row)) for row in rows] for label, rows in columns.items()}
    draw_dots(share, shares, log=False)
    rate.set_xlabel("speed relative to resident data")
    share.set_xlabel("percent of time")
    share.axvline(INPUT_BOUND, color="black", lw=0.8, ls=":")
    for axes, most in ((rate, 1.1), (share, 100)):
        axes.set_xlim(0, most)
    if (legend := rate.get_legend()) is not None:
        legend.remove()  # one for both
        share.legend(fontsize="x-small", loc="upper right")


def _form(row: Row) -> str:
    return str(row.what["form"])


STUDY = Study(
    name="pipeline",
    claims=("A11",),
    title="Images are decoded on the CPU while the device computes: does training wait for them?",
    method=(
        "A small CNN trains on images of cats and dogs, 2,000 JPEG files decoded to one size, without augmentation: "
        "decoded once and resident on the device; decoded by worker processes a few batches ahead; or decoded by the "
        "training process when a step needs them. The batches are the same. Steps are dispatched as in a run, so the "
        "host loads a batch while the device computes; the table shows the share of time that it waits for batches, "
        f"and from {INPUT_BOUND} % training is input-bound. Compilation, the start of the workers and decoding "
        "resident data are not timed; workers are a few batches ahead when timing starts. On a CPU they share the "
        "cores with training."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
