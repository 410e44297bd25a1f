"""Shared by the studies of training: timed steps of the articles' networks, and full runs."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from articles.studies.study_pictures import draw_dots
from articles.studies.study_rows import distinct
from harness import Bench, Case, Finding, Plain, Quantity, Row, Rows, quantity

import jaxnn as jn
from jaxnn.engine import CALL_SECONDS, fastest_steps, load_data, make_calls, programs_of, seconds_per_step
from jaxnn.parallel import computing_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def network(name: str) -> jn.Experiment[Any]:
    """Returns the experiment of the script ``experiments/articles/NAME.py``."""
    experiment: jn.Experiment[Any] = importlib.import_module(f"articles.{name}").experiment
    return experiment


@functools.lru_cache(maxsize=1)
def _data(name: str) -> jn.Splits:
    """Returns the data of a network; cached, since a study measures it on several devices."""
    experiment = network(name)
    return load_data(experiment)


def training_group(bench: Bench, name: str, batch_size: int) -> Sequence[Case]:
    """Returns a case for each device: training steps of one network with one batch size.

    Args:
        bench: the devices; ``settings.steps`` is the number per call, None: as many as a run would choose.
        name: of the network.
        batch_size: examples per step.
    """
    return [
        Case(
            device=kind,
            what={"network": name, "batch_size": batch_size},
            begin=functools.partial(_begin, name, batch_size, kind, bench.settings.steps),
            unit="examples",
            queued=True,  # as in a run
        )
        for kind in bench.devices
    ]


def training_cases(bench: Bench) -> Iterator[Sequence[Case]]:
    """Yields training steps of each of ``settings.networks``, then full runs if ``settings.whole_runs``.

    The steps of all networks come first: they take minutes on an otherwise idle machine, full runs take hours.
    """
    settings = bench.settings
    for name in settings.networks:
        yield training_group(bench, name, network(name).config.batch_size)
    if settings.whole_runs:
        for name in settings.networks:
            yield [Case(kind, _whole(name), observe=functools.partial(_train, name, kind)) for kind in bench.devices]


def training_call(
    experiment: jn.Experiment[Any], splits: jn.Splits, kind: Any, num_steps: int | None = None
) -> tuple[Callable[[], Any], int, dict[str, list[str]]]:
    """Returns a call that trains for some steps and continues where the last call ended, without waiting for it.

    Args:
        experiment: what to train; its ``data`` is not called.
        splits: its data, read once for all devices.
        kind: kind of device, ``cpu``, ``gpu`` or ``tpu``.
        num_steps: steps per call; None: as many as a run would choose by measuring.

    Returns:
        The call, its number of steps, and the implementations of its operations.
    """
    config = experiment.config
    with computing_on(kind):
        programs = programs_of(experiment, splits)
        make_call = make_calls(programs, "start")
        if num_steps is None:
            # Steps this long gain nothing from a scan, which takes minutes to compile.
            long = seconds_per_step(make_call(1), 1) >= CALL_SECONDS
            num_steps = 1 if long else fastest_steps(programs, make_call, config.num_steps)[0]
        call, implementations = make_call(num_steps), programs.traced_step.implementations

    def train() -> Any:
        with computing_on(kind):
            return call()

    return train, num_steps, implementations


def _whole(name: str) -> dict[str, Plain]:
    return {"network": name, "run": "whole"}


def _begin(
    name: str, batch_size: int, kind: str, steps: int | None
) -> tuple[Callable[[], Any], float, dict[str, Plain]]:
    call, steps, used = training_call(network(name).replace(batch_size=batch_size), _data(name), kind, steps)
    return call, steps * batch_size, {name: ", ".join(found) for name, found in used.items()}


def _train(name: str, kind: Any) -> dict[str, Plain]:
    """Returns the final metrics and the seconds of a full run, evaluated only at its end."""
    experiment, started = network(name), time.perf_counter()
    run = jn.fit(experiment, device=kind, record=False, progress="none", eval_every=experiment.config.num_steps)
    seconds = time.perf_counter() - started
    if run.summary.status == "interrupted":
        # The run handled the signal; its metrics are not final.
        raise KeyboardInterrupt
    return {"run_seconds": seconds, **{key: float(value) for key, value in run.summary.metrics.items()}}


def timed(rows: Rows, name: str) -> Row:
    """Returns the row of a network's steps with its own batch size."""
    return rows.one(network=name, batch_size=network(name).config.batch_size)


def run_finding(rows: Rows, name: str, claim: str, article: str = "") -> Finding:
    """Returns the time of all steps of a run, extrapolated; the note has the time of the full run."""
    took = rows.one(**_whole(name)).observed.get("run_seconds")
    notes = [] if took is None else [f"full run {quantity([float(took or 0)], 's')}"]
    # A GPU's time depends on whether cuDNN's LSTM is used.
    notes += [f"recurrence {form}" for form in (timed(rows, name).observed.get("recurrence"),) if form]
    note = "; ".join(notes)
    return Finding(claim, f"{name}, all training steps", run_time(timed(rows, name)), article, note)


def run_time(row: Row) -> Quantity | None:
    """Returns the seconds of all steps of a run, extrapolated from the timed ones."""
    return _scaled(row, network(str(row.what["network"])).config.num_steps)


def step_time(row: Row) -> Quantity | None:
    """Returns the seconds of a step."""
    return _scaled(row, 1)


def _scaled(row: Row, num_steps: int) -> Quantity | None:
    """Returns the seconds of ``num_steps`` steps."""
    steps = row.work / int(row.what["batch_size"] or 1)
    return None if row.time is None else row.time.scaled(num_steps / steps, "s")


def reached(rows: Rows, name: str, metric: str) -> Quantity | None:
    """Returns a metric of the full run of a network, such as ``test_accuracy``."""
    value = rows.one(**_whole(name)).observed.get(metric)
    return None if value is None else quantity([float(value)], "")


def draw_rates(columns: Mapping[str, Rows], figure: Figure) -> None:
    """Draws examples/s of each network and batch size, a dot for each column."""
    axes = figure.subplots()
    several = {
        label: len(distinct(rows, "batch_size")) > len(distinct(rows, "network")) for label, rows in columns.items()
    }
    rates = {
        label: [(_name(row, several[label]), row.rate) for row in rows if row.rate is not None]
        for label, rows in columns.items()
    }
    count = max((len(pairs) for pairs in rates.values()), default=0)
    figure.set_size_inches(8.0, max(3.0, 1.2 + 0.35 * count))
    draw_dots(axes, rates)
    axes.set_xlabel("training examples/s")


def _name(row: Row, with_batch_size: bool) -> str:
    return f"{row.what['network']}, {row.what['batch_size']}" if with_batch_size else str(row.what["network"])
