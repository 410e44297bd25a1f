"""The result of a run: its metrics as arrays and its state, from memory or from a record, and methods to use them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxnn import engine, record
from jaxnn.observe import Clock, Throughput, describe_devices, html_table, text_table
from jaxnn.run._record import Session, summarise
from jaxnn.run._report import Summary
from jaxnn.types import Array, ConfigError, Experiment, RecordError, TrainState, check_int, warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A finished, stopped or interrupted run, as `fit` and `open_run` return it.

    >>> run.summary.status, run.metrics["step"][-1]
    ('finished', ...20...)
    >>> run.predict(batch.inputs[:4]).shape
    (4, 10)

    Attributes:
        experiment: what was computed; None if a record was opened without it.
        state: the state after the last step; None likewise.
        config: the experiment's; a mapping if a record was opened without it.
        metrics: arrays by name, one value per report, NaN if a metric was not measured at it; ``step`` among them.
        summary: how it ended and how fast it was.
        dir: the directory of its record, or None.
        monitor: the metric by which an evaluation is best, such as ``test_loss``.
        higher_is_better: whether more of it is better.
    """

    experiment: Experiment[Any]
    state: TrainState
    config: Any
    metrics: Mapping[str, np.ndarray]
    summary: Summary
    dir: Path | None
    monitor: str
    higher_is_better: bool
    _lines: Sequence[Mapping[str, Any]]
    _trainer: engine.Trainer | None
    _facts: Mapping[str, Any] | None = None  # the content of run.json, if it was opened

    @property
    def final(self) -> Mapping[str, float]:
        """The last value of each metric."""
        return self.summary.metrics

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.dir is not None and (self.dir / record.FOLDER).is_dir()

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """Returns exact metrics of ``state`` over a split: ``train``, ``validation`` or ``test``.

        Raises:
            ConfigError: the data have no such split.
        """
        return self._loaded.evaluate(split, self.state)

    def predict(self, inputs: Array, *, batch_size: int = 512) -> Any:
        """Returns the model's outputs ``[examples, ...]`` for ``inputs [examples, ...]``, as the data set holds them.

        Works in batches of one size, so that it compiles once for each shape; the last is padded. Examples may have
        another shape than those of the data if the model accepts it, such as longer sequences.

        Raises:
            ConfigError: the inputs cannot be of the dtype of the training inputs, or the model refuses their shape.
        """
        programs = self._loaded.programs
        trained_on = programs.first_examples.inputs
        inputs = _inputs_like(trained_on, inputs)
        if inputs.shape == trained_on.shape[1:]:
            raise ConfigError(
                f"predict needs inputs [examples, ...], and {list(inputs.shape)} is the shape of one example: add the "
                "axis, inputs[None]."
            )
        check_int("predict's batch_size", batch_size)
        batch_size = min(batch_size, len(inputs))
        predict = programs.predict
        try:
            outputs = jax.eval_shape(predict, self.state, inputs[:batch_size])
        # Any exception: the model's own, for a shape that it does not take.
        except Exception as error:
            if inputs.shape[1:] == trained_on.shape[1:]:
                raise
            expected = ", ".join(map(str, ("examples", *trained_on.shape[1:])))
            raise ConfigError(
                f"predict needs inputs [{expected}] or such as the model takes, not {list(inputs[:batch_size].shape)} "
                f"({(str(error).strip().splitlines() or [''])[0]})."
            ) from error
        shapes = [list(leaf.shape) for leaf in jax.tree.leaves(outputs)]
        if not shapes or any(shape[:1] != [batch_size] for shape in shapes):
            raise ConfigError(
                f"the task's predict gave {f'arrays {shapes}' if shapes else 'nothing'} for {batch_size} examples: "
                "return arrays [examples, ...]."
            )
        padded = np.concatenate([inputs, inputs[: -len(inputs) % batch_size]])
        batches = [
            jax.device_get(predict(self.state, padded[start : start + batch_size]))
            for start in range(0, len(padded), batch_size)
        ]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(inputs)], *batches)

    def best_state(self) -> TrainState:
        """Returns the state of the best checkpoint by the monitored metric; the newest if none was measured.

        Raises:
            RecordError: the run kept no checkpoint.
        """
        _ = self._loaded
        if self.dir is None or not self.resumable:
            raise RecordError("the run kept no checkpoints: run it with a record, and without checkpoint_every=0.")
        checkpoints = record.Checkpoints(
            self.dir / record.FOLDER, monitor=self.monitor, higher_is_better=self.higher_is_better
        )
        step = checkpoints.best()
        if step is None:
            raise RecordError(f"{self.dir / record.FOLDER} holds no complete checkpoint.")
        state: TrainState = record.load_checkpoint(self.dir / record.FOLDER / str(step), self.state)
        return state

    def plot(self) -> Figure:
        """Returns a matplotlib figure of loss, metrics and throughput by step."""
        return record.draw_curves(self._lines, str(self.dir or ""))

    def closing_rows(self) -> list[tuple[str, str]]:
        """Returns what is printed at the end, as (name, value)."""
        rows = [*self.summary.rows(), *([("record", str(self.dir))] if self.dir is not None else [])]
        if self.summary.status == "interrupted" and self.resumable:
            rows.append(("to resume", f"--resume {self.dir}"))
        return rows

    @functools.cached_property
    def _loaded(self) -> engine.Trainer:
        """The trainer; warns if its evaluation is not the recorded one."""
        if self._trainer is None:
            raise ConfigError(f"this needs the experiment of the run: jn.open_run({str(self.dir)!r}, experiment).")
        if self._facts is not None and _evaluates_otherwise(self._facts, self._trainer):
            warn(f"the experiment evaluates another function than the run in {self.dir}: its code changed since.")
        return self._trainer

    def __repr__(self) -> str:
        return text_table(self.closing_rows())

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        return html_table(self.closing_rows())


def _evaluates_otherwise(facts: Mapping[str, Any], trainer: engine.Trainer) -> bool:
    """Whether the evaluation is not that of the record ``facts``; costs a trace."""
    here, programs = describe_devices(), trainer.programs
    if any(facts["devices"][name] != here[name] for name in ("backend", "versions")):
        return False  # they may decide what is traced
    if (first := facts.get("fingerprint_config")) is not None:  # of the member whose fingerprint its group has
        same = dataclasses.replace(trainer.experiment, config=record.config_from_json(first, trainer.experiment.config))
        programs = engine.programs_of(same, trainer.splits)
    return bool(facts["fingerprint"]["evaluation"] != programs.evaluation_fingerprint())


def _inputs_like(examples: Array, inputs: Any) -> np.ndarray:
    """``inputs`` as an array of the dtype that ``examples`` have."""
    try:
        given = np.asarray(inputs)
        with np.errstate(invalid="ignore"):
            converted = given.astype(examples.dtype)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the inputs to predict are not one array of numbers ({error}).") from error
    if given.size == 0 or given.ndim == 0:
        raise ConfigError(f"predict needs inputs [examples, ...], not {list(given.shape)}.")
    # Fractions cast to pixels or tokens would all be 0.
    if np.issubdtype(examples.dtype, np.integer) and not np.array_equal(converted, given):
        raise ConfigError(
            f"the inputs to predict are {given.dtype} and change their values as {examples.dtype}, which the data set "
            "holds: give them as the data set does."
        )
    return converted


def run_of(session: Session) -> Run:
    """Returns the run of ``session`` so far."""
    trainer, summary = session.trainer, session.ending or summarise(session)
    path = trainer.record.path if trainer.record is not None else None
    ranking = trainer.monitored, trainer.options.higher_is_better
    return _run(trainer.experiment.config, trainer, session.log.lines, summary, path, ranking)


def open_run(path: str | Path, experiment: Experiment[Any] | None = None) -> Run:
    """Opens the run that is recorded in ``path``; trains and writes nothing.

    Without ``experiment`` it has its metrics, summary and config, and can be plotted. With it, at the config of the
    record, it also has the state of the newest complete checkpoint, on the default device.

    >>> path = jn.fit(experiment, run_dir="runs/digits", progress="none", steps_per_call=5).dir
    >>> jn.open_run(path).config["learning_rate"]
    0.1
    >>> jn.open_run(path, experiment).state.step
    Array(20, dtype=int32)

    Raises:
        RecordError: there is no run, its record is damaged, or no state of this experiment is in it.
        ConfigError, DataError: the experiment has another config class, or its data cannot be used.
    """
    path = Path(path)
    facts, lines = record.read_run(path), record.read_metrics(path)
    config, final, trainer = facts["config"], record.final_metrics(lines), None
    try:
        options = engine.RunOptions(**{name: facts["options"][name] for name in ("monitor", "monitor_mode")})
        summary = dict(facts.get("summary") or {})
        if (rates := summary.get("throughput")) is not None:
            summary["throughput"] = Throughput(**rates)
        summary["stalls"] = tuple(engine.Stall(**stall) for stall in summary.get("stalls", ()))
        summary |= {"status": facts["status"], "step": lines[-1]["step"] if lines else 0, "metrics": final}
        ending = Summary(**summary)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"run.json in {path} holds other facts than a run's ({error!r}): it is damaged.") from error
    if experiment is not None:
        config = record.config_from_json(config, experiment.config)
        experiment = dataclasses.replace(experiment, config=config)
        splits = engine.load_data(experiment)
        record.check_same_data(path, facts["fingerprint"], record.data_fingerprint(splits))
        # Nothing of its training is compiled.
        programs, options = (
            engine.programs_of(experiment, splits),
            engine.resolve_cadences(options, config, engine.num_evaluated(splits)),
        )
        plan = engine.make_plan(options, config.num_steps)
        trainer = engine.Trainer(options, splits, programs, plan, [engine.MemberLog()], Clock())
        if not (path / record.FOLDER).is_dir():
            raise RecordError(f"the run in {path} kept no checkpoints: open it without the experiment.")
        trainer.state = record.load_checkpoint(path, programs.shapes)
        return _run(config, trainer, lines, ending, path, (trainer.monitored, options.higher_is_better), facts)
    split = next((split for split in ("validation", "test") if f"{split}_{options.monitor}" in final), "train")
    return _run(config, trainer, lines, ending, path, (f"{split}_{options.monitor}", options.higher_is_better))


def _run(
    config: Any,
    trainer: engine.Trainer | None,
    lines: Sequence[Mapping[str, Any]],
    summary: Summary,
    path: Path | None,
    ranking: tuple[str, bool],
    facts: Mapping[str, Any] | None = None,
) -> Run:
    names = dict.fromkeys(name for line in lines for name in line)
    metrics = {name: np.array([line.get(name, np.nan) for line in lines]) for name in names}
    made: tuple[Any, Any] = (None, None) if trainer is None else (trainer.experiment, trainer.state)
    return Run(*made, config, metrics, summary, path, *ranking, lines, trainer, facts)
