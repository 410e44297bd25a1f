"""``jn.autopsy``: why a run diverged: the operation, its line, its inputs, the examples, parameters or data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxnn._json import jsonable
from jaxnn._text import short_path, text_table
from jaxnn.optim import value_and_grad_of
from jaxnn.proof._explosion import Explosion, find_explosion, is_bad
from jaxnn.proof._fault import NumericFault, Program
from jaxnn.proof._replay import Replay, replay
from jaxnn.proof._repro import check_own, write_repro
from jaxnn.proof._walk import Origin, not_finite
from jaxnn.run import Run
from jaxnn.steps import make_train_step
from jaxnn.types import Batch, Experiment, TrainState, TrainStep, named_leaves

_GRADIENT_NORM = "gradient norm"  # as the metric of a step
_BACK = 1, 2, 4, 8, 16, 32, 64  # steps before the fault that are looked at
_MOST_EXAMPLES = 16
_SHOWN_EXAMPLES, _SHOWN_NUMBERS = 4, 6


@dataclasses.dataclass(frozen=True)
class Example:
    """An example without which the step stays finite.

    Attributes:
        row: in the batch.
        number: of the example in the training split, or None if it was generated.
        first: the first numbers of each of its arrays, by name.
    """

    row: int
    number: int | None
    first: Mapping[str, list[float]]

    def __str__(self) -> str:
        parts = (f"{name} {' '.join(f'{x:.4g}' for x in numbers)} …" for name, numbers in self.first.items())
        where = "" if self.number is None else f", example {self.number:,} of the training data"
        return f"row {self.row}{where}: {', '.join(parts)}"


@dataclasses.dataclass(frozen=True)
class Before:
    """An earlier step.

    Attributes:
        step: its number.
        loss: its loss.
        gradient_norm: the norm of its gradient; None: the experiment has a step of its own.
        largest: the largest absolute number that the operation at fault got then; None: it was not reached.
        smallest: the smallest.
    """

    step: int
    loss: float
    gradient_norm: float | None
    largest: float | None
    smallest: float | None


@dataclasses.dataclass(frozen=True, repr=False)
class Autopsy:
    """Why the loss or the state of a run is no longer finite, or left its band.

    >>> print(jn.autopsy("runs/digits", experiment))  # doctest: +SKIP
    step        57 of runs/digits; the state is exact
    operation   log of float32[32, 10]
    line        my_script.py:31: return -jnp.log(probability).mean()
    ...

    Attributes:
        step: the update.
        where: the record, and how exact its state is.
        fault: what is not finite, and where it comes from; None: everything is finite one operation at a time.
        examples: rows of the batch without which the step stays finite, or in the band; empty: none alone do.
        blame: ``data``, ``parameters``, ``both``, ``update``, ``program``, ``compiler`` or ``none``.
        advice: what to do.
        history: earlier steps, oldest first.
        trend: such as ``growing since step 41``.
        explosion: of a run whose loss stays finite, how it left its band.
        repro: the script that shows it again.
    """

    step: int
    where: str
    fault: NumericFault | None
    examples: tuple[Example, ...]
    blame: str
    advice: str
    history: tuple[Before, ...]
    trend: str
    explosion: Explosion | None
    repro: Path | None

    def rows(self) -> list[tuple[str, str]]:
        """What is printed, as (name, value)."""
        rows = [("step", f"{self.step:,} of {self.where}")]
        rows += self.explosion.rows() if self.explosion else []
        rows += self.fault.rows_of_text() if self.fault else []
        rows += [("example" if not at else "", str(one)) for at, one in enumerate(self.examples[:_SHOWN_EXAMPLES])]
        more = len(self.examples) - _SHOWN_EXAMPLES
        rows += [("", f"and {more} more")] if more > 0 else []
        rows += [("history", self.trend)] if self.trend else []
        rows += [("blame", self.blame), ("advice", self.advice)]
        return [*rows, *([("repro", f"python {short_path(self.repro)}")] if self.repro else [])]

    def __repr__(self) -> str:
        text = text_table(self.rows())
        if self.history:
            header: tuple[str, ...] = ("step", "loss", "gradient norm", "largest input", "smallest input")
            lines = [[_show(getattr(one, field.name)) for field in dataclasses.fields(one)] for one in self.history]
            if self.fault is None:
                lines, header = [line[:3] for line in lines], header[:3]
            text += "\n\n" + text_table(lines, header)
        return text

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        plain: dict[str, Any] = jsonable(self)
        return plain


def _show(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def autopsy(
    run: Run | str | Path,
    experiment: Experiment[Any] | None = None,
    *,
    member: int | None = None,
    step: int | None = None,
    folder: str | Path | None = None,
) -> Autopsy:
    """Finds what makes the first number of a recorded run that is not finite, or why its loss exploded.

    The step is replayed, and its forward and backward pass are evaluated one operation at a time. Without ``step`` it
    is the first with a loss or a new state that is not finite; in a run whose losses are finite, the step at which the
    loss, the gradient's norm or the parameters' norm leave their band.

    >>> jn.autopsy("runs/digits", experiment).fault.line  # doctest: +SKIP
    SourceLine(file='my_script.py', line=31, text='return -jnp.log(probability).mean()', of_library=False)

    Args:
        run: what `fit` or `open_run` returned, or its directory.
        experiment: what was trained; default: the one ``run`` has.
        member: the number of a member of the sweep in the directory.
        step: the number of an update, from 1.
        folder: where ``repro.py`` and ``repro.npz`` are written; default: ``autopsy`` in the directory.

    Raises:
        ConfigError: there is no such step or no experiment, or the folder has other files of these names.
        RecordError: as `replay`.
    """
    first = replay(run, experiment, 1 if step is None else step, member=member)
    if folder is None:
        folder = first.dir / "autopsy" / (f"member_{first.member}" if first.member is not None else "")
    check_own(Path(folder))
    search, explosion = _Search(first), None
    window = search.window() if step is None else None
    if window is not None:
        first = search.first_bad(*window)
    elif step is None:
        explosion = find_explosion(first, search.measure)
        first = first.at(explosion.step)
    # A step may be finite as it is compiled, and not one operation at a time: XLA simplifies it.
    fails = explosion is None and (window is not None or search.bad_results(first))
    found = search.program.find(first.state, first.batch) if fails else None
    if found is not None and found[0].kind == "input" and found[0].leaf in named_leaves(first.state) and first.step > 1:
        first = search.first_bad(0, first.step - 1)
        found = search.program.find(first.state, first.batch)
    repro = None
    if fails or (explosion is not None and explosion.window):
        repro = write_repro(Path(folder), first.dir, first.step, first.experiment, first.state, first.batch)
    return search.report(first, found, explosion, repro)


class _Search:
    """The replays of a run, and the programs to look at them."""

    def __init__(self, first: Replay) -> None:
        self.first = first
        self.program = Program.trace(first.step_function, first.state, first.batch)

    def window(self) -> tuple[int, int] | None:
        """The last step before and the last step of the first window whose loss is not finite."""
        last = 0
        for line in self.first.reports:
            if not np.isfinite(line["train_loss"]):
                return last, line["step"]
            last = line["step"]
        return (0, last) if self.first.status == "diverged" else None  # by its parameters

    def first_bad(self, good: int, bad: int) -> Replay:
        """The first step in (good, bad] with results that are not finite; looked for as if all later ones were so."""
        width = 1
        while good > 0 and self._ruined(self.first.at(good)):
            good, bad, width = max(0, good - width), good, 2 * width
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (good, middle) if self._ruined(self.first.at(middle)) else (middle, bad)
        return self.first.at(bad)

    def _ruined(self, step: Replay) -> bool:
        """Whether a result of a step is not finite, or a parameter was not before: a loss can hide it for long."""
        return bool(self.measure(step.state, step.batch)["ruined"])

    def bad_results(self, step: Replay) -> bool:
        """Whether a result of a step is not finite."""
        return bool(self.measure(step.state, step.batch)["bad"].any())

    @functools.cached_property
    def measure(self) -> Callable[[TrainState, Batch], dict[str, Any]]:
        """A compiled program: which results of a step are not finite, its loss, and norms."""
        step, experiment = self.first.step_function, self.first.experiment
        if experiment.step is None:
            step = _noting_step(experiment)

        def measure(state: TrainState, batch: Batch) -> dict[str, Any]:
            after, metrics = step(state, batch)
            before = {**named_leaves(state)}
            results = {**named_leaves(after), **metrics}
            bad = jnp.stack([is_bad(results[name], before.get(name)) for name in self.program.outputs])
            ruined = jnp.any(bad) | ~jnp.isfinite(optax.tree.sum(after.params))
            norms = {"parameter norm": optax.tree.norm(state.params)}
            norms |= {name: metrics[name] for name in (_GRADIENT_NORM,) if name in metrics}
            return {"bad": bad, "ruined": ruined, "loss": metrics["loss"], **norms}

        compiled = jax.jit(measure)
        return lambda state, batch: jax.device_get(compiled(state, batch))

    def report(
        self, at: Replay, found: tuple[NumericFault, Origin] | None, explosion: Explosion | None, repro: Path | None
    ) -> Autopsy:
        """What is known of the step ``at``."""
        where = short_path(at.dir) + (f", member {at.member}" if at.member is not None else "")
        where += "; the state is exact" if at.exact else f"; the state is not exact: {at.why}"
        earlier = [at.at(at.step - back) for back in _BACK if back < at.step][::-1]
        if found is None:
            blame, advice, rows = self._without_fault(at, explosion)
            history = tuple(self._before(one, None) for one in (*earlier, at))
            examples = tuple(_example(at, row) for row in rows)
            return Autopsy(at.step, where, None, examples, blame, advice, history, "", explosion, repro)
        fault, origin = found
        history = tuple(self._before(one, origin) for one in earlier)
        others = [one.batch for one in earlier[-2:]] or [one.batch for one in self._later(at)]
        blame, rows = self._blame(at, fault, others, [one.state for one in earlier[:1]])
        examples = tuple(_example(at, row) for row in rows)
        now = self._before(at, origin)
        trend = _trend([*history, now])
        advice = _advice(fault, blame)
        return Autopsy(at.step, where, fault, examples, blame, advice, (*history, now), trend, explosion, repro)

    def _later(self, at: Replay) -> Iterator[Replay]:
        if at.step < self.first.reports[-1]["step"]:
            yield at.at(at.step + 1)

    def _without_fault(self, at: Replay, explosion: Explosion | None) -> tuple[str, str, list[int]]:
        """What is to blame where no operation is, what to do, and the rows of the batch."""
        if explosion is not None and explosion.name == "parameter norm":
            return "update", explosion.advice, []
        if explosion is not None and explosion.window and at.step > 1:
            other, name = at.at(at.step - 1).batch, explosion.name
            threshold = float(np.sqrt(explosion.value * explosion.usual))

            def is_large(batch: Batch) -> bool:
                return not self.measure(at.state, batch)[name] < threshold

            if is_large(other):
                return "parameters", explosion.advice, []
            return (
                "data",
                "look at the batch: with another one, the same state stays in the band.",
                _rows(at.batch, other, is_large),
            )
        if explosion is not None:
            return "none", explosion.advice, []
        if self.bad_results(at):
            said = (
                "the compiled step is not finite, its operations one at a time are: this points to the compiler or a "
                "native kernel; try JAXNN_NATIVE=off, and jn.verify(experiment) (jax#39741)."
            )
            return "compiler", said, []
        if self.window() is None:
            return "none", "nothing: the step is finite, and so are all losses of the run.", []
        said = "the replayed step is finite, and a loss of the run was not: give the experiment as it was then"
        return "none", f"{said}, or see what differs between processes by jn.verify(experiment).", []

    def _before(self, at: Replay, origin: Origin | None) -> Before:
        measured, inputs = self.measure(at.state, at.batch), None
        if origin is not None and origin.element is not None:
            inputs = self.program.inputs_at(at.state, at.batch, origin)
        sizes = [np.abs(np.asarray(x)).astype(np.float64) for x in inputs or () if not_finite(x) is not None and x.size]
        norm = measured.get(_GRADIENT_NORM)
        largest, smallest = max((x.max() for x in sizes), default=None), min((x.min() for x in sizes), default=None)
        plain = [None if x is None else float(x) for x in (norm, largest, smallest)]
        return Before(at.step, float(measured["loss"]), *plain)

    def _blame(
        self, at: Replay, fault: NumericFault, others: Sequence[Batch], states: Sequence[TrainState]
    ) -> tuple[str, list[int]]:
        """What is to blame, and which rows of the batch."""
        if fault.kind == "input":
            of_batch = (fault.leaf or "").startswith("batch/")
            return ("data", list(fault.rows[:_MOST_EXAMPLES])) if of_batch else ("parameters", [])
        number = self.program.outputs[fault.result]

        def bad(state: TrainState, batch: Batch) -> bool:
            return bool(self.measure(state, batch)["bad"][number])

        good = next((other for other in others if not bad(at.state, other)), None)
        size = len(at.batch.mask)
        copies = (
            jax.tree.map(lambda leaf, row=row: leaf[jnp.full(size, row)], at.batch) for row in range(min(size, 8))
        )
        background = good if good is not None else next((one for one in copies if not bad(at.state, one)), None)
        rows = [] if background is None else _rows(at.batch, background, lambda batch: bad(at.state, batch))
        rows = rows if len(rows) < size else []
        earlier_is_good = any(not bad(state, at.batch) for state in states)
        if good is None:
            return ("parameters" if earlier_is_good else "program"), rows
        return ("both" if earlier_is_good else "data"), rows


def _noting_step(experiment: Experiment[Any]) -> TrainStep:
    """The step of an experiment that has none of its own, with the norm of the gradient as a metric."""
    task, optimizer = experiment.task(experiment.config), experiment.optimizer(experiment.config)

    def value_and_grad(loss: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compute = value_and_grad_of(optimizer)(loss, **options)

        def noting(*arguments: Any) -> Any:
            (value, (model_state, metrics)), gradient = compute(*arguments)
            numbers = [leaf for leaf in jax.tree.leaves(gradient) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
            return (value, (model_state, {**metrics, _GRADIENT_NORM: optax.tree.norm(numbers)})), gradient

        return noting

    return make_train_step(task, optimizer, value_and_grad=value_and_grad)


def _rows(batch: Batch, background: Batch, bad: Callable[[Batch], bool]) -> list[int]:
    """The rows of a batch that make a result non-finite among those of a background that do not."""
    size = len(batch.mask)
    found: list[int] = []

    def only(rows: Sequence[int]) -> bool:
        def mixed(own: Any, other: Any) -> np.ndarray:
            leaf = np.array(other)
            leaf[rows] = np.asarray(own)[rows]
            return leaf

        return bad(jax.tree.map(mixed, batch, background))

    pending = [list(range(size))]
    while pending and len(found) < _MOST_EXAMPLES:
        rows = pending.pop()
        if not only(rows):
            continue
        if len(rows) == 1:
            found += rows
        else:
            pending += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
    return found


def _example(replay: Replay, row: int) -> Example:
    batch, numbers = replay.batch, replay.examples
    leaves = {
        name: np.asarray(leaf)[row].reshape(-1)
        for name, leaf in named_leaves({"inputs": batch.inputs, "targets": batch.targets}).items()
    }
    first = {name: leaf[:_SHOWN_NUMBERS].astype(float).tolist() for name, leaf in leaves.items()}
    return Example(row, None if numbers is None else int(numbers[row]), first)


def _trend(steps: Sequence[Before]) -> str:
    """Whether the inputs of the operation grew, or shrank, for some steps."""
    for name, sign, word in (("largest", 1, "growing"), ("smallest", -1, "shrinking")):
        known = [(one.step, getattr(one, name)) for one in steps if getattr(one, name) is not None]
        run = known[-1:]
        for one in reversed(known[:-1]):
            if sign * one[1] >= sign * run[0][1]:
                break
            run.insert(0, one)
        ends = run[0][1], run[-1][1] if run else (0, 0)
        if len(run) >= 4 and max(ends) >= 2 * min(ends):
            return (
                f"the {name} input of the operation is {word} since step {run[0][0]:,}: {ends[0]:.4g} to {ends[1]:.4g}"
            )
    return "sudden: its inputs neither grew nor shrank steadily" if len(steps) > 1 else ""


def _advice(fault: NumericFault, blame: str) -> str:
    """One sentence of what to do."""
    if fault.kind == "input" and blame == "data":
        return f"clean rows {', '.join(map(str, fault.rows[:8]))} of this batch's {fault.leaf}, or drop such examples."
    if fault.kind == "input":
        return f"{fault.leaf} is not finite from the start: look at the initial or loaded parameters."
    if fault.kind == "finite":
        return "the loop is not finite as a compiled program only: try jn.verify(experiment) (jax#39741)."
    if fault.derivative_of or (fault.became_nan and "backward pass" in fault.became_nan):
        return "keep its input away from this point before it is computed: jnp.where(ok, f(jnp.where(ok, x, 1)), 0)."
    if blame == "data":
        return "look at the examples above; the same parameters are finite on another batch."
    if "float16" in fault.operation and "bfloat16" not in fault.operation:
        return "numbers above 65,504 overflow float16: compute it in bfloat16 or float32."
    here = [one.here for one in fault.inputs if one.here is not None]
    if 0 in here:
        return "keep its input away from 0, as in log(x + 1e-6)."
    if len(here) == 1 and here[0] < 0:
        return "keep its input from becoming negative, as by jnp.maximum(x, 0)."
    return (
        "its inputs are too large: lower the learning rate, clip gradients (jn.optim.with_clipping), or normalise them."
    )
