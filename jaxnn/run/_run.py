"""What a run leaves in memory: its metrics as arrays, its state, and what can be asked of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxnn.engine import Trainer, check_count
from jaxnn.observe import html_table, text_table
from jaxnn.record import FOLDER, Checkpoints, draw_curves, load_checkpoint
from jaxnn.run._record import Session, summarise
from jaxnn.run._report import Summary
from jaxnn.types import Array, ConfigError, Experiment, RecordError, TrainState

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A finished, stopped or interrupted run.

    Attributes:
        experiment: what was computed.
        state: the state after the last step.
        metrics: arrays by name, one value per report, NaN if a metric was not measured at it; ``step`` among them.
        summary: how it ended and how fast it was.
        dir: the directory of its record, or None.
    """

    experiment: Experiment[Any]
    state: TrainState
    metrics: Mapping[str, np.ndarray]
    summary: Summary
    dir: Path | None
    _trainer: Trainer

    @property
    def final(self) -> Mapping[str, float]:
        """The last value of each metric."""
        return self.summary.metrics

    @property
    def monitor(self) -> str:
        """The metric by which an evaluation is best, such as ``test_loss``."""
        return self._trainer.monitored

    @property
    def higher_is_better(self) -> bool:
        """Whether more of it is better."""
        return self._trainer.options.higher_is_better

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.dir is not None and (self.dir / FOLDER).is_dir()

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """Exact metrics of ``state`` over a whole split: ``train``, ``validation`` or ``test``.

        Raises:
            ConfigError: the data have no such split.
        """
        return self._trainer.evaluate(split, self.state)

    def predict(self, inputs: Array, *, batch_size: int = 512) -> Any:
        """The model's outputs for ``inputs [examples, ...]``, as the data set holds them: ``[examples, ...]``.

        Works in batches of one size, so that it compiles once for each shape; the last is padded. Examples may be
        shaped unlike those of the data where the model takes them, such as longer sequences.

        Raises:
            ConfigError: the inputs cannot be of the dtype of the training inputs, or the model refuses their shape.
        """
        trained_on = self._trainer.programs.first_examples.inputs
        inputs = _inputs_like(trained_on, inputs)
        check_count("predict's batch_size", batch_size, 1)
        batch_size = min(batch_size, len(inputs))
        predict = self._trainer.programs.predict
        try:
            given = jax.eval_shape(predict, self.state, inputs[:batch_size])
        # Any exception: the model's own, for a shape that it does not take.
        except Exception as error:
            if inputs.shape[1:] == trained_on.shape[1:]:
                raise
            expected = ", ".join(map(str, ("examples", *trained_on.shape[1:])))
            raise ConfigError(
                f"predict needs inputs [{expected}] or such as the model takes, not {list(inputs[:batch_size].shape)} "
                f"({(str(error).strip().splitlines() or [''])[0]})."
            ) from error
        shapes = [list(leaf.shape) for leaf in jax.tree.leaves(given)]
        if not shapes or any(shape[:1] != [batch_size] for shape in shapes):
            raise ConfigError(
                f"the task's predict gave {f'arrays {shapes}' if shapes else 'nothing'} for {batch_size} examples: "
                "return arrays [examples, ...]."
            )
        padded = np.concatenate([inputs, inputs[: -len(inputs) % batch_size]])
        outputs = [
            jax.device_get(predict(self.state, padded[start : start + batch_size]))
            for start in range(0, len(padded), batch_size)
        ]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(inputs)], *outputs)

    def best_state(self) -> TrainState:
        """The state of the best checkpoint by the monitored metric; the newest where none was measured.

        Raises:
            RecordError: the run kept no checkpoint.
        """
        if self.dir is None or not self.resumable:
            raise RecordError("the run kept no checkpoints: run it with a record, and without checkpoint_every=0.")
        checkpoints = Checkpoints(self.dir / FOLDER, monitor=self.monitor, higher_is_better=self.higher_is_better)
        step = checkpoints.best()
        if step is None:
            raise RecordError(f"{self.dir / FOLDER} holds no complete checkpoint.")
        state: TrainState = load_checkpoint(self.dir / FOLDER / str(step), self.state)
        return state

    def plot(self) -> Figure:
        """Loss, metrics and throughput against the step, as a matplotlib figure."""
        return draw_curves(self._trainer.logs[0].lines, str(self.dir or ""))

    def closing_rows(self) -> list[tuple[str, str]]:
        """What is printed at the end, as (name, value)."""
        rows = [*self.summary.rows(), *([("record", str(self.dir))] if self.dir is not None else [])]
        if self.summary.status == "interrupted" and self.resumable:
            rows.append(("to resume", f"--resume {self.dir}"))
        return rows

    def __repr__(self) -> str:
        return text_table(self.closing_rows())

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        return html_table(self.closing_rows())


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
    """The run that ``session`` has become, so far."""
    names = dict.fromkeys(name for line in session.log.lines for name in line)
    metrics = {name: np.array([line.get(name, np.nan) for line in session.log.lines]) for name in names}
    trainer = session.trainer
    path = trainer.record.path if trainer.record is not None else None
    return Run(trainer.experiment, trainer.state, metrics, summarise(session), path, trainer)
