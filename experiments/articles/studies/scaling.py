"""A13: several devices, each with a copy of the network and a share of the batch; how much faster do they train?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from articles.studies.study_pictures import draw_lines, panels

from jaxnn.bench import Bench, Case, Finding, NotMeasured, Plain, Quantity, Row, Rows, Study, call_on, relative
from jaxnn.data import arrays
from jaxnn.loop.quick import TrainConfig
from jaxnn.models import CNN
from jaxnn.observe import cpu_count
from jaxnn.parallel import computing_on
from jaxnn.scaling.cases import Case as Step
from jaxnn.scaling.options import ScalingOptions, powers_of_two
from jaxnn.scaling.programs import Workshop
from jaxnn.scaling.timing import Contender
from jaxnn.tasks import classification
from jaxnn.types import Experiment, Splits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One batch for all devices, as in strong scaling, or one for each, as in weak scaling.
BATCHES = ("shared", "each")
ARTICLE = "3 GPUs 804 % faster than 5 CPU nodes (inference)"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A CNN on random pictures of ``size`` by ``size`` pixels.

    All devices share ``shared`` examples, or have ``each`` each; ``steps`` are one call. 3 devices, as the article
    has, can share 384 too.
    """

    batches: tuple[str, ...] = BATCHES
    shared: int = 384
    each: int = 128
    blocks: tuple[tuple[int, ...], ...] = ((32, 32), (64, 64))
    dense: tuple[int, ...] = (512,)
    size: int = 32
    steps: int = 4
    rounds: int = 5
    seconds: float = 1.0


QUICK = Settings(("shared",), shared=96, blocks=((16,), (32,)), dense=(64,), size=16, rounds=3, seconds=0.2)


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for batch in settings.batches:
        group: list[Case] = []
        for kind in bench.devices:
            most = len(jax.local_devices(backend=kind))
            workshop = functools.cache(functools.partial(_workshop, settings, kind, most))
            group += [_case(settings, batch, kind, count, workshop) for count in powers_of_two(most)]
            if most == 1:
                group.append(Case(kind, {"batch": batch, "devices": 2}, functools.partial(_refuse, kind)))
        yield group


def _case(settings: Settings, batch: str, kind: str, count: int, workshop: Callable[[], Workshop]) -> Case:
    rows = settings.shared // count if batch == "shared" else settings.each
    what: dict[str, Plain] = {"batch": batch, "devices": count}
    made = functools.cache(functools.partial(_make, batch, settings.shared, Step(count, rows), workshop))
    work = count * rows * settings.steps
    begin = functools.partial(_begin, kind, made)
    return Case(kind, what, begin, work, "examples", functools.partial(_observe, kind, made))


def _refuse(kind: str) -> Any:
    told = f"JAX has one {kind.upper()} device here"
    if kind == "cpu":
        told += ", and makes several of it with JAX_NUM_CPU_DEVICES=4 in the environment, which share its cores"
    raise NotMeasured(told)


def _workshop(settings: Settings, kind: Any, most: int) -> Workshop:
    splits = _pictures(settings, max(settings.shared, most * settings.each))
    experiment = Experiment(
        TrainConfig(settings.shared, num_steps=settings.steps, seed=0),
        data=lambda config: splits,
        task=lambda config: classification(CNN(10, blocks=settings.blocks, dense=settings.dense)),
        optimizer=lambda config: optax.adam(1e-3),
    )
    return Workshop(experiment, splits, ScalingOptions(device=kind, steps_per_call=settings.steps))


def _pictures(settings: Settings, count: int) -> Splits:
    random = np.random.default_rng(0)
    pictures = random.integers(0, 256, (count, settings.size, settings.size, 3), np.uint8)
    return arrays(train=(pictures, random.integers(0, 10, count, np.int32)), name="random pictures")


def _make(batch: str, shared: int, step: Step, workshop: Callable[[], Workshop]) -> Contender:
    if batch == "shared" and shared % step.num_devices:
        raise NotMeasured(f"{step.num_devices} devices cannot share {shared} examples evenly")
    return workshop().step(step)


def _begin(kind: str, made: Callable[[], Contender]) -> Callable[[], Any]:
    with computing_on(kind):
        call = made().begin()
    return call_on(kind, call)


def _observe(kind: str, made: Callable[[], Contender]) -> dict[str, Plain]:
    """The mean loss of the first call, and the cores that devices made of one CPU share."""
    with computing_on(kind):
        contender = made()
        totals: Any = contender.begin()()
        shared = {"cores": cpu_count() or 1} if kind == "cpu" and len(jax.local_devices(backend=kind)) > 1 else {}
        return {"loss": float(totals.sums["loss"]) / contender.num_steps, **shared}


def efficiency(rows: Rows, row: Row) -> Quantity | None:
    """Its rate over that of one device in the same round, over the number of devices; None for one device."""
    count, alone = row.what["devices"], rows.one(batch=row.what["batch"], devices=1)
    found = None if count == 1 else relative(row, alone)
    return None if found is None else found.scaled(1 / float(count or 1), "")


def _findings(rows: Rows) -> list[Finding]:
    return [
        Finding("A13", _told(row), row.rate, ARTICLE if row.what["devices"] == 3 else "", _note(rows, row))
        for row in rows
    ]


def _told(row: Row) -> str:
    count = row.what["devices"]
    devices = "1 device" if count == 1 else f"{count} devices"
    return f"{devices}, {'one batch for all' if row.what['batch'] == 'shared' else 'a batch for each'}"


def _note(rows: Rows, row: Row) -> str:
    found = efficiency(rows, row)
    if found is None:
        return ""
    cores = row.observed.get("cores")
    return f"efficiency {100 * found.median:.0f} %" + ("" if cores is None else f", simulated on {cores} cores")


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    return [sentence for label, rows in columns.items() for sentence in _of_a_column(label, rows.measured())]


def _of_a_column(label: str, rows: Rows) -> Iterator[str]:
    shared = [row for row in rows.where(batch="shared") if "loss" in row.observed]
    several = [row for row in shared if row.what["devices"] != 1]
    if not several:
        return
    losses = [row.observed["loss"] for row in shared]
    first = float(losses[0])  # type: ignore[arg-type]
    off = max(abs(float(loss) / first - 1) for loss in losses)  # type: ignore[arg-type]
    yield f"{label}: on several devices the loss of the first steps is off that on one by {off:.1e} of it at most."
    if "cores" in several[0].observed:
        yield (
            f"{label}: these devices are simulated and share {several[0].observed['cores']} cores, so that several "
            "cannot be faster than one: they show that the program is right, not that it is fast."
        )


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    rate, share = panels(figure, ("training", "efficiency"))
    draw_lines(rate, columns, across="devices", lines="batch")
    found = {id(row): efficiency(rows, row) for rows in columns.values() for row in rows}
    draw_lines(share, columns, across="devices", lines="batch", quantity=lambda row: found[id(row)])
    rate.set_ylabel("examples a second")
    share.set_ylabel("speed-up over the number of devices")
    share.set_yscale("linear")
    share.set_ylim(0, 1.2)
    share.axhline(1.0, color="black", lw=0.8, ls=":")
    for axes in (rate, share):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("devices")


STUDY = Study(
    name="scaling",
    claims=("A13",),
    title="Several devices, each with a copy of the network and a share of the batch: how much faster do they train?",
    method=(
        "Training of a CNN on random pictures with data parallelism, on 1, 2, 4 … devices of a kind, as many as there "
        "are: one batch that all share, or as many examples on each. Examples lie on the devices; compilation is not "
        "counted, averaging gradients over the devices is. The efficiency is the rate over that of one device in the "
        "same round and over the number of devices."
    ),
    full=Settings(),
    quick=QUICK,
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
