"""The result of a run: its metrics as arrays and its state, from memory or from a record, and methods to use them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jaxnn import engine, record
from jaxnn._clock import Clock, Throughput
from jaxnn._fields import check_config, with_changes
from jaxnn._figures import draw_curves
from jaxnn._fingerprints import changed_implementations, check_same_data, data_fingerprint
from jaxnn._json import check_same_config, config_from_json, config_json, final_metrics, metrics_of
from jaxnn._text import Table, short_path, text_table
from jaxnn.observe import describe_devices
from jaxnn.parallel import Layout, process_count
from jaxnn.run._confusion_matrix import ConfusionMatrix, count_confusions
from jaxnn.run._export import export_model
from jaxnn.run._model_summary import ModelSummary, summarise_model
from jaxnn.run._record import Session, summarise
from jaxnn.run._report import Summary
from jaxnn.run._resume import FIXED, continued_options
from jaxnn.search import Points
from jaxnn.types import ConfigError, Direction, Experiment, RecordError, TrainState, warn

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
        config: the experiment's; a mapping if a record was opened without it.
        metrics: arrays by name, one value per report, NaN if a metric was not measured at it; ``step`` among them.
        summary: how it ended and how fast it was.
        dir: the directory of its record, or None.
        monitor: the metric by which an evaluation is best, such as ``test_loss``.
        higher_is_better: whether more of it is better.
        directions: ``"min"`` or ``"max"`` for other metrics, as the task states it.
    """

    experiment: Experiment[Any]
    config: Any
    metrics: Mapping[str, np.ndarray]
    summary: Summary
    dir: Path | None
    monitor: str
    higher_is_better: bool
    directions: Mapping[str, Direction]
    _lines: Sequence[Mapping[str, Any]]
    _trainer: engine.Trainer | None
    _state: TrainState | None = None  # that at the end; None: the checkpoint holds it
    _recorded: record.Recorded | None = None  # what was opened

    @property
    def final(self) -> Mapping[str, float]:
        """The last value of each metric."""
        return self.summary.metrics

    @property
    def member(self) -> int | None:
        """The number of a member of the sweep in ``dir``; None: a run."""
        return None if self._member is None else int(self._member.about["member"])

    @property
    def _member(self) -> record.Recorded | None:
        """What is recorded of it, if it is a member of a sweep."""
        return None if self._recorded is None or self._recorded.row is None else self._recorded

    @property
    def name(self) -> str | None:
        """The option ``name``, or None."""
        if self._recorded is not None:
            return self._recorded.facts["options"].get("name")  # type: ignore[no-any-return]
        return None if self._trainer is None else self._trainer.options.name

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.member is None and self.dir is not None and (self.dir / record.FOLDER).is_dir()

    @functools.cached_property
    def state(self) -> TrainState:
        """The state after the last step; of a record opened without its experiment as NumPy arrays in dicts.

        Raises:
            RecordError: the run kept no checkpoint, or the newest is damaged.
        """
        if self._state is not None:
            return self._state
        folder = self._checkpoints.folder
        if (member := self._member) is None:
            return TrainState(**record.load_checkpoint(folder.parent))
        newest = record.load_checkpoint(folder / f"{(step := max(self._checkpoints.steps(), default=0))}")
        _, (row,) = self._checkpoints.rows(step, [member.about["member"]], member.group["members"])
        return TrainState(**jax.tree.map(lambda leaf: leaf[row], newest["states"]))

    def evaluate(self, split: str = "test", *, state: TrainState | None = None) -> dict[str, float]:
        """Returns exact metrics over a split: ``train``, ``validation`` or ``test``; of a record, it loads the data.

        ``state`` is ``run.state`` by default, another one ``run.best_state()``.

        Raises:
            ConfigError: the data have no such split.
            RecordError: the data are not those that the run was trained on.
        """
        return self._with_data.evaluate(split, self.state if state is None else state)

    def predict(self, inputs: Any, *, batch_size: int = 512, state: TrainState | None = None) -> Any:
        """Returns the model's outputs ``[examples, ...]`` for ``inputs [examples, ...]``, as the data set holds them.

        Works in batches of one size, so that it compiles once for each shape; the last is padded. They are sharded over
        the run's devices. Examples may have another shape than those of the data if the model accepts it, such as
        longer sequences. ``state`` is ``run.state`` by default, another one ``run.best_state()``.

        Raises:
            ConfigError: the inputs cannot be of the dtype of the training inputs, or the model refuses their shape.
        """
        state = self.state if state is None else state
        return self._loaded.programs.predict_in_batches(state, inputs, batch_size)

    def confusion_matrix(
        self, split: str = "test", *, batch_size: int = 512, state: TrainState | None = None
    ) -> ConfusionMatrix:
        """Returns how often each class of a split was predicted as each class; it is read and predicted in batches.

        Its ``plot()`` is a picture. ``state`` is ``run.state`` by default, another one ``run.best_state()``.

        >>> matrix = run.confusion_matrix()
        >>> matrix.counts.shape, round(matrix.accuracy, 4) == round(run.evaluate()["accuracy"], 4)
        ((10, 10), True)

        Raises:
            ConfigError: the data have no such split, or the task predicts no classes of integer labels.
            RecordError: as `evaluate`.
        """
        trainer, name = self._with_data, f"{self.name or (self.dir.name if self.dir else 'run')}, {split}"
        names = trainer.splits.class_names
        predict = functools.partial(self.predict, batch_size=batch_size, state=state)
        return count_confusions(trainer.programs.finite_source(split), predict, batch_size, names, name)

    def export(
        self,
        path: str | Path,
        *,
        batch: int | Literal["symbolic"] = "symbolic",
        platforms: Sequence[str] | None = None,
        state: TrainState | None = None,
    ) -> Path:
        """Writes the model with its parameters as a file that is used without jaxnn, and returns its path.

        | suffix | content |
        |---|---|
        | ``.stablehlo`` | `jax.export`'s program: ``jax.export.deserialize(bytearray(content)).call(inputs)`` |
        | ``.onnx`` | an ONNX graph by jax2onnx |
        | ``.safetensors`` | the variables of the Flax model, without a program: ``params.Dense_0.kernel`` |

        Programs take inputs ``[batch, ...]`` as the data set holds them. The formats need
        ``pip install "jaxnn[export]"``, ``jaxnn[onnx]`` and ``jaxnn[safetensors]``.

        >>> path = run.export("digits.stablehlo")
        >>> jax.export.deserialize(bytearray(path.read_bytes())).call(batch.inputs[:3]).shape
        (3, 10)

        Args:
            path: the file, which is replaced.
            batch: the number of examples; ``"symbolic"``: any.
            platforms: of a StableHLO program, of ``cpu``, ``cuda``, ``rocm`` and ``tpu``; default: the one here.
            state: default: ``run.state``; another one is ``run.best_state()``.

        Raises:
            ConfigError: another suffix, batch or platform; or the model has an operation that the format lacks.
            RecordError: the file cannot be written.
        """
        state = self.state if state is None else state
        return export_model(self._loaded.programs, state, Path(path), batch, platforms)

    def best_state(self) -> TrainState:
        """Returns the state of the best checkpoint by the monitored metric; the newest if none was measured.

        A sweep keeps the newest states of its members alone.

        Raises:
            RecordError: the run kept no checkpoint.
        """
        if self._member is not None:
            return self.state
        checkpoints, like = self._checkpoints, None if self._trainer is None else self.state
        step = checkpoints.best()
        if step is None:
            raise RecordError(f"{checkpoints.folder} holds no complete checkpoint.")
        found = record.load_checkpoint(checkpoints.folder / str(step), like)
        return TrainState(**found) if like is None else found

    @property
    def _checkpoints(self) -> record.Checkpoints:
        ranking: Any = {"monitor": self.monitor, "higher_is_better": self.higher_is_better}
        if self._member is not None:
            return record.Checkpoints(self._member.states, **ranking)
        if self.dir is None or not self.resumable:
            raise RecordError("the run kept no checkpoints: run it with a record, and without checkpoint_every=0.")
        return record.Checkpoints(self.dir / record.FOLDER, **ranking)

    def model_summary(self, depth: int | None = None) -> ModelSummary:
        """Returns the layers of its model, from shapes, as `jn.model_summary`; of a record, it reads no data."""
        programs = self._loaded.programs
        return summarise_model(programs.task, programs.shapes, programs.batch, depth)

    def plot(self) -> Figure:
        """Returns a matplotlib figure of loss, metrics and throughput by step."""
        return draw_curves(self._lines, str(self.dir or ""))

    def closing_rows(self) -> list[tuple[str, str]]:
        """Returns what is printed at the end, as (name, value)."""
        rows = [*self.summary.rows(), *([("record", short_path(self.dir))] if self.dir is not None else [])]
        if self.dir is not None and self.summary.status == "interrupted" and self.resumable:
            rows.append(("to resume", f"--resume {short_path(self.dir)}"))
        return rows

    @functools.cached_property
    def _loaded(self) -> engine.Trainer:
        """The trainer; warns if its evaluation is not the recorded one."""
        if self._trainer is None:
            which = "" if self.member is None else f", member={self.member}"
            raise ConfigError(f"this needs its experiment: jn.open_run({str(self.dir)!r}, experiment{which}).")
        if self._recorded is not None and _evaluates_otherwise(self._recorded, self._trainer):
            before, now = (
                self._recorded.group.get("implementations") or {},
                self._trainer.programs.traced_step.implementations,
            )
            if others := changed_implementations(before, now):
                # Such as native kernels that were installed since.
                warn(
                    f"the run in {self.dir} was trained with other implementations ({', '.join(others)}): outputs are "
                    "the same to rounding, if nothing else differs."
                )
            else:
                warn(f"the experiment evaluates another function than the run in {self.dir}: its code changed since.")
        return self._trainer

    @functools.cached_property
    def _with_data(self) -> engine.Trainer:
        """The trainer with its data, which are those of the record; they are loaded if it was opened without them."""
        trainer = self._loaded
        if self._recorded is None or self._recorded.group.get("examples") is None:
            return trainer
        assert self.dir is not None
        layout, group = trainer.programs.layout, self._recorded.group
        return _open_trainer(trainer.experiment, trainer.options, self.dir, group, layout, with_data=True)

    def __repr__(self) -> str:
        return text_table(self.closing_rows())

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        return Table(None, self.closing_rows())._repr_html_()


def _evaluates_otherwise(recorded: record.Recorded, trainer: engine.Trainer) -> bool:
    """Whether the evaluation is not the ``recorded`` one; costs a trace."""
    here, programs = describe_devices(), trainer.programs
    if any(recorded.facts["devices"][name] != here[name] for name in ("backend", "versions")):
        return False  # they may decide what is traced
    if recorded.first is not None:
        config = config_from_json(recorded.first, trainer.experiment.config)
        same = dataclasses.replace(trainer.experiment, config=config)
        programs = engine.programs_of(same, trainer.splits, resident=False)
    return bool(recorded.group["fingerprint"].get("evaluation") != programs.evaluation_fingerprint())


def run_of(session: Session) -> Run:
    """Returns the run of ``session`` so far."""
    trainer, summary = session.trainer, session.ending or summarise(session)
    path = trainer.record.path if trainer.record is not None else None
    ranking = trainer.monitored, trainer.higher_is_better, trainer.programs.task.directions
    return _run(trainer.experiment.config, trainer, session.log.lines, summary, path, ranking)


def open_run(
    path: str | Path,
    experiment: Experiment[Any] | None = None,
    *,
    member: int | None = None,
    devices: int | Literal["all"] | None = None,
) -> Run:
    """Opens the run that is recorded in ``path``, or a ``member`` of a sweep; trains and writes nothing.

    Without ``experiment`` it has its metrics, summary, config and state, and can be plotted. With it, at the config of
    the record, it also predicts and exports. Its ``state`` is that of the newest complete checkpoint. ``evaluate``
    loads the data when it is called, and checks that they are the same. ``devices`` is the number to predict and
    evaluate on, one by default. No data are read before they are needed.

    >>> path = jn.fit(experiment, run_dir="runs/digits", progress="none", steps_per_call=5).dir
    >>> jn.open_run(path).config["learning_rate"]
    0.1
    >>> jn.open_run(path, experiment).state.step
    Array(20, dtype=int32)

    Raises:
        RecordError: there is no run, its record is damaged, or no state of this experiment is in it.
        ConfigError, DataError: the experiment has another config class, or its data are needed and cannot be used: the
            record of a source with an ``as_batch`` of its own does not replace it.
    """
    path = Path(path)
    return _open_recorded(path.absolute(), experiment, record.RecordReader(path).member(member), devices)


def _open_recorded(
    path: Path,
    experiment: Experiment[Any] | None,
    recorded: record.Recorded,
    devices: int | Literal["all"] | None = None,
) -> Run:
    """Returns the run of what is ``recorded`` in ``path``, as `open_run`."""
    facts, lines, trainer = recorded.facts, recorded.lines, None
    config, final = recorded.about["config"], final_metrics(lines)
    try:
        options = engine.RunOptions(**{name: facts["options"][name] for name in ("monitor", "monitor_mode")})
        summary = dict(facts.get("summary") or {}) if recorded.row is None else {}  # a sweep's is of all members
        if (rates := summary.get("throughput")) is not None:
            summary["throughput"] = Throughput(**rates)
        summary["stalls"] = tuple(engine.Stall(**stall) for stall in summary.get("stalls", ()))
        summary |= {"status": recorded.about["status"], "step": lines[-1]["step"] if lines else 0, "metrics": final}
        ending = Summary(**summary)
        ranking = str(facts["monitored"]), bool(facts["higher_is_better"]), dict(facts["directions"])
    except (KeyError, TypeError, ValueError) as error:
        message = f"{record.RECORD_FILE} in {path} holds other facts than a run's ({error!r}): it is damaged."
        raise RecordError(message) from error
    if experiment is not None:
        config = config_from_json(config, experiment.config)
        check_config(config)
        experiment = dataclasses.replace(experiment, config=config)
        if not (states := recorded.states).is_dir():
            raise RecordError(f"the run in {path} kept no checkpoints: open it without the experiment.")
        trainer = _open_trainer(experiment, options, path, recorded.group, Layout.make(devices=devices))
        state, shapes = None, trainer.programs.shapes
        if recorded.row is None:
            state = record.load_checkpoint(path, shapes)
        else:
            found = record.Checkpoints(states).restore_members(
                [recorded.about["member"]],
                recorded.group["members"],
                functools.partial(engine.HostStates.shapes, shapes),
            )
            if found is None:
                raise RecordError(f"{states} holds no checkpoint: open the member without the experiment.")
            restored, (row,) = found
            for _, what in restored.damaged[:1]:
                warn(f"the newest checkpoint in {states} is damaged, {what}: the state is an older one.")
            state = restored.state.member(row, shapes)
        trainer.state = jax.device_put(state, trainer.programs.shardings)
    return _run(config, trainer, lines, ending, path, ranking, recorded)


def as_run(experiment: Experiment[Any], options: engine.RunOptions) -> tuple[Experiment[Any], engine.RunOptions]:
    """Returns an experiment and options that continue the option ``member`` of a sweep as a run; others as given.

    The member's reports and newest state are copied to a directory of their own, ``run_dir`` or a new one. The swept
    fields are the member's, except a ``num_steps`` that is not the sweep's.
    """
    if (number := options.member) is None or (path := options.resume) is None:
        return experiment, options
    if process_count() > 1:
        raise ConfigError("a member of a sweep is made a run in one process: continue it there, then resume that run.")
    found = record.RecordReader(path).member(number)
    if found.row is None:
        raise RecordError(f"{path} holds a run, not a sweep: resume it without member.")
    config = config_json(experiment.config)
    for name in found.about["point"].keys() - ({Points.NAME} - config.keys()):
        if name == "num_steps" and config.get(name) != found.facts["config"].get("num_steps"):
            continue
        *way, last = name.split(".")
        of_member, of_config = found.about["config"], config
        try:
            for part in way:
                of_member, of_config = of_member[part], of_config[part]
            of_config[last] = of_member[last]
        except (KeyError, TypeError) as error:
            raise RecordError(
                f"the sweep in {path} swept {name!r:.60}, which the config of this experiment or of the record lacks: "
                "give the experiment that was swept."
            ) from error
    experiment = dataclasses.replace(experiment, config=config_from_json(config, experiment.config))
    facts, about = found.facts_as_run(), found.about
    check_same_config(about["config"], experiment.config, "sweep", path, but="num_steps")
    trains = about["status"] != "finished" or about["config"].get("num_steps") != experiment.config.num_steps
    # Asked before there is a copy, so that its messages name the sweep.
    continued_options(options, facts["options"], path, "sweep", trains=trains, fixed=FIXED)
    opened = _open_recorded(path, experiment, found)
    step = int(opened.state.step)
    target = record.Record.create(options.run_dir or record.Record.unused_path(f"{facts['name']}-{number}"))
    with record.Record.open(target) as copy:
        copy.write(record.RECORD_FILE, facts)
        lines = [{"member": 0, **line} for line in found.lines if line["step"] <= step]
        ranking: Any = {"monitor": opened.monitor, "higher_is_better": opened.higher_is_better}
        with contextlib.closing(record.Checkpoints(target / record.FOLDER, **ranking)) as checkpoints:
            log = copy.digest(copy.report(*lines))
            checkpoints.save(step, opened.state, metrics_of(lines[-1]) if lines else {}, log)
    return experiment, with_changes(options, {"resume": target, "run_dir": None, "member": None})


def _open_trainer(
    experiment: Experiment[Any],
    options: engine.RunOptions,
    path: Path,
    group: Mapping[str, Any],
    layout: Layout,
    *,
    with_data: bool = False,
) -> engine.Trainer:
    """Returns the trainer of a recorded ``group``, without its state; nothing is compiled."""
    splits = None if with_data else record.RecordReader(path).data(group)
    if splits is None:
        splits = engine.load_data(experiment)
        check_same_data(path, group["fingerprint"], data_fingerprint(splits))
    else:
        engine.check_parts(experiment)
    # Zeros that stand for data are not sent to a device.
    programs = engine.programs_of(experiment, splits, resident=None if with_data else False, layout=layout)
    options = options.with_cadences(experiment.config)
    plan = options.plan(experiment.config.num_steps)
    return engine.Trainer(options, splits, programs, plan, [engine.MemberLog()], Clock())


def _run(
    config: Any,
    trainer: engine.Trainer | None,
    lines: Sequence[Mapping[str, Any]],
    summary: Summary,
    path: Path | None,
    ranking: tuple[str, bool, Mapping[str, Direction]],
    recorded: record.Recorded | None = None,
) -> Run:
    names = dict.fromkeys(name for line in lines for name in line if name != "digest")
    metrics = {name: np.array([line.get(name, np.nan) for line in lines]) for name in names}
    experiment: Any = None if trainer is None else trainer.experiment
    # As it is now: if the trainer continues, it has another state.
    state = None if trainer is None else trainer.state
    return Run(experiment, config, metrics, summary, path, *ranking, lines, trainer, state, recorded)
