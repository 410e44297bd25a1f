"""A11: photographs are decoded on the CPU while the device computes; does training wait for them?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optax
from articles.studies.study_pictures import draw_dots, panels
from articles.studies.study_rows import relative

import jaxnn as jn
from jaxnn.bench import Bench, Case, Finding, Plain, Quantity, Row, Rows, Study, format_ratio, quantity
from jaxnn.data import StreamSource, cats_vs_dogs
from jaxnn.models import CNN
from jaxnn.tasks import classification
from jaxnn.types import Examples, Experiment, Source, Splits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Who decodes a photograph, and when.
FORMS = {
    "resident": "on the device",
    "prefetched": "prefetched by workers",
    "naive": "decoded in the step loop",
}
# Of the order of the photographs and of the network.
SEED = 0
# A run that waits for so much of its time is bound by its input, in percent.
INPUT_BOUND = 10


@dataclasses.dataclass(frozen=True)
class Settings:
    """Photographs of ``size`` by ``size`` pixels for a CNN of ``channels``; ``steps`` are timed at a time.

    ``num_workers`` decode for `prefetched`; None: one a CPU but one, at most 8.
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
    """Photographs that are decoded one after another when a batch is asked for."""

    def read(self, indices: np.ndarray) -> Examples:
        """The examples at ``indices [n]``: ``[n, ...]`` each."""
        return self.rows([self.example(index) for index in indices.tolist()], indices)

    def batches(self, seed: int, first_step: int, batch_size: int, rows: slice = slice(None)) -> Any:
        """The batches of ``first_step`` and the steps after it."""
        for step in itertools.count(first_step):
            yield self.read(np.asarray(self.order(seed, np.array([step], np.int32), batch_size))[0, rows])


@dataclasses.dataclass(frozen=True)
class Config:
    """A run of more steps than are timed."""

    batch_size: int
    num_steps: int = 2**18
    seed: int = SEED


class FedTraining:
    """A call that trains some steps more, and what they waited for.

    Steps are dispatched as in any run: the host gets the next batch while the device computes, and waits for the
    device if it is too far ahead.
    """

    def __init__(self, form: str, settings: Settings, kind: str) -> None:
        self._source = open_source(form, settings)
        experiment = _experiment(settings, self._source)
        how: dict[str, Any] = {"steps_per_call": 1, "report_every": settings.steps, "eval_every": 0, "progress": "none"}
        self._run = jn.iterate(experiment, device=kind, record=False, **how)
        self._reports = iter(self._run)
        self._first: dict[str, float] | None = None
        self.losses: list[float] = []

    def __call__(self) -> None:
        """Trains; the first call's time, in which workers start, does not count."""
        self.losses.append(next(self._reports).metrics["train_loss"])
        self._first = self._first or dict(self._run.run.summary.seconds)

    def end(self) -> dict[str, Plain]:
        """Ends the workers; returns the share of the time that was waited and the number of workers."""
        seconds, first = self._run.run.summary.seconds, self._first or {}
        self._reports.close()  # type: ignore[attr-defined]
        data, train = (seconds.get(name, 0.0) - first.get(name, 0.0) for name in ("data", "train"))
        return {"waited": data / (data + train), "workers": getattr(self._source, "num_workers", 0)}


def open_source(form: str, settings: Settings) -> Source:
    """The photographs to train on; the batches of all `FORMS` are the same.

    Raises:
        ConfigError: Grain is not installed, which all but ``resident`` read with.
        DataError: the photographs are not there.
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
    # Workers work ahead while another form is timed, and in its way, but soon stop: a turn is long compared with that.
    for kind in bench.devices:
        yield [_case(form, kind, bench.settings) for form in FORMS]


def _case(form: str, kind: str, settings: Settings) -> Case:
    begun: list[FedTraining] = []

    def begin() -> Callable[[], None]:
        begun.append(FedTraining(form, settings, kind))
        return begun[0]

    work = settings.steps * settings.batch_size
    return Case(kind, {"form": form}, begin, work, "examples", lambda: begun.pop().end())


def waited(row: Row) -> Quantity | None:
    """The share of the time in which a step waited for its batch, in percent."""
    share = row.observed.get("waited")
    return None if share is None else quantity([100 * float(share)], "%")


def verdict(row: Row) -> str:
    """Whether training is bound by its input."""
    share = waited(row)
    if share is None:
        return ""
    return "input-bound" if share.median >= INPUT_BOUND else "not input-bound"


def relative_rate(rows: Rows, row: Row) -> Quantity | None:
    """How many times as fast as on resident data in the same round it trains."""
    return relative(row, rows.one(form="resident"))


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for row in rows:
        told = f"photographs {FORMS[_form(row)]}"
        share = f"{told}: share of the time waited for them"
        found += [Finding("A11", told, row.rate), Finding("A11", share, waited(row), note=verdict(row))]
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    told = []
    for label, rows in columns.items():
        for row in rows:
            ratio = relative_rate(rows, row)
            if ratio is not None and _form(row) != "resident":
                workers = f" ({count})" if (count := row.observed.get("workers")) else ""
                told.append(
                    f"{label}: with photographs {FORMS[_form(row)]}{workers} training is "
                    f"{format_ratio(ratio.median)} as fast as with resident ones, {verdict(row)}."
                )
    return told


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    rate, share = panels(figure, ("training", "waiting for photographs"))
    rates = {label: [(_form(row), relative_rate(rows, row)) for row in rows] for label, rows in columns.items()}
    draw_dots(rate, rates, log=False)
    shares = {label: [(_form(row), waited(row)) for row in rows] for label, rows in columns.items()}
    draw_dots(share, shares, log=False)
    rate.set_xlabel("speed over that on resident data")
    share.set_xlabel("percent of the time")
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
    title="Photographs are decoded on the CPU while the device computes: does training wait for them?",
    method=(
        "A small CNN is trained on photographs of cats and dogs, 2,000 JPEG files decoded to one size, without "
        "augmentation: decoded once and resident on the device; decoded by worker processes a few batches ahead and "
        "sent; decoded by the training process when a step needs them and sent. The batches are the same. Steps are "
        "dispatched as a run does it, so the host gets a batch while the device computes; the share of the time "
        f"that it waits for batches is shown, and from {INPUT_BOUND} % on the verdict is input-bound. Compilation, "
        "the start of the workers and decoding what is resident are not counted; workers are a few batches ahead "
        "when they are timed. On a CPU they share the cores with the training."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
