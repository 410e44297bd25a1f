"""Metric writers for TensorBoard, Weights & Biases and MLflow: each run, or member of a sweep, is a run there."""

import contextlib
import importlib.util
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flax.traverse_util import flatten_dict

from jaxnn.record._checkpoints import FOLDER
from jaxnn.record._metric_log import WriterFacts
from jaxnn.record._record_reader import read_run, read_sweep
from jaxnn.record._run_directory import write_json
from jaxnn.types import ConfigError, warn

IDS_FILE = "writers.json"


class Tracker:
    """What the three share: a run of the service per member, whose id is in ``writers.json`` of the record.

    Subclasses start, feed and end one run of their service. The runs of members are started by their first lines.
    """

    extra: ClassVar[str]  # of the package, and the name of the writer
    module: ClassVar[str]  # that it needs
    # (title, config, known id or None, step, member) -> (run, id); (run, numbers, step); (run, name, content, step);
    # (run, status as in run.json).
    _start: Callable[..., tuple[Any, str]]
    _log: Callable[..., None]
    _show: Callable[..., None]
    _end: Callable[..., None]

    def __init__(self, *, checkpoints: bool = False) -> None:
        if importlib.util.find_spec(self.module) is None:
            install = f'pip install "jaxnn[{self.extra}]"'
            raise ConfigError(f"the writer {self.extra} needs {self.module}, which is not installed: {install}.")
        self.checkpoints, self._runs = checkpoints, dict[int | None, Any]()

    def open(self, facts: WriterFacts) -> None:
        """Reads the ids of a run or sweep that is resumed; starts or continues a run."""
        self._file: Path | None = None
        self.facts, self._title = facts, facts.name
        if facts.path is not None:
            self._title, self._file = facts.path.name, facts.path / IDS_FILE
        self._ids: dict[str, str] = {} if facts.resumed is None else self._known().get(self.extra, {})
        if not facts.members:
            self._run(None, (facts.resumed or 0) + 1)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Logs the numbers of each line at its step."""
        with self._surviving():
            for line in lines:
                values = {name: value for name, value in line.items() if name not in ("step", "member")}
                self._log(self._run(line.get("member"), line["step"]), values, line["step"])

    def media(self, name: str, content: np.ndarray | str, step: int) -> None:
        """Logs a picture, uint8 ``[height, width, 3]``, or a text, of the run or of the sweep itself."""
        with self._surviving():
            self._show(self._run(None, step), name, content, step)

    def close(self) -> None:
        """Ends the runs, with the status that the record has."""
        for run in self._runs.values():
            with self._surviving():
                path, read = self.facts.path, read_sweep if self.facts.members else read_run
                self._end(run, "finished" if path is None else read(path)["status"])
        self._runs = {}

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Warns of an error of the service: training continues, and the record has all."""
        try:
            yield
        except Exception as error:
            warn(f"the writer {self.extra} could not send all to its service ({error}).")

    def _run(self, member: int | None, step: int) -> Any:
        """The service's run of a member, or of the run or sweep itself, started or continued at ``step`` if need be."""
        if member not in self._runs:
            key, facts = "" if member is None else str(member), self.facts
            title = self._title if member is None else f"{self._title}-{member:04d}"
            config: dict[str, Any] = flatten_dict(dict(facts.config), sep=".")  # type: ignore[no-untyped-call]
            config |= {} if member is None else facts.members[member]
            self._runs[member], self._ids[key] = self._start(title, config, self._ids.get(key), step, member)
            if self._file is not None:
                write_json(self._file, self._known() | {self.extra: self._ids})
        return self._runs[member]

    def _known(self) -> dict[str, Any]:
        """The ids of all writers in the record."""
        return json.loads(self._file.read_text()) if self._file and self._file.exists() else {}

    def _checkpoints(self) -> str | None:
        """The folder of a run's checkpoints, if they are to be uploaded."""
        folder = self.facts.path and self.facts.path / FOLDER
        return str(folder) if self.checkpoints and folder and folder.is_dir() else None


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with ``tensorboardX``: ``pip install "jaxnn[tensorboard]"``.

    They are in ``tensorboard/`` of the record, or of ``runs/NAME`` without one; those of a sweep's members in a folder
    each. The config is there as hyper-parameters. Events after the step that a run resumes from are purged.

    >>> jn.fit(experiment, writers=("tensorboard",))  # doctest: +SKIP
    """

    extra, module = "tensorboard", "tensorboardX"

    def _start(self, title: str, config: Mapping[str, Any], known: str | None, step: int, member: int | None) -> Any:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        folder = (self.facts.path or Path("runs") / self.facts.name) / "tensorboard"
        folder = folder if member is None else folder / f"{member:04d}"
        writer = SummaryWriter(str(folder), purge_step=step if known is not None else None)
        if known is None:
            writer.add_text("config", json.dumps(config, indent=2), 0)
            words = {name: str(value) for name, value in config.items() if not isinstance(value, int | float)}
            for summary in hparams({**config, **words}, {}):
                writer.file_writer.add_summary(summary)
        return writer, str(folder)

    def _log(self, run: Any, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            run.add_scalar(name, value, step)

    def _show(self, run: Any, name: str, content: np.ndarray | str, step: int) -> None:
        if isinstance(content, str):
            run.add_text(name, content, step)
        else:
            run.add_image(name, content, step, dataformats="HWC")

    def _end(self, run: Any, status: str) -> None:
        run.close()


class WandB(Tracker):
    """Logs to Weights & Biases: ``pip install "jaxnn[wandb]"``.

    The project is named as the experiment, a sweep is a group, and the local files are in ``wandb/`` of the record.
    Account and mode come from its own settings: ``WANDB_MODE=offline`` needs no account.

    >>> jn.fit(experiment, writers=("wandb",))  # doctest: +SKIP
    >>> jn.fit(experiment, writers=(WandB(project="digits", checkpoints=True),))  # doctest: +SKIP

    Args:
        checkpoints: whether to upload the checkpoints of the record at the end, as an artifact.
        **settings: further arguments of ``wandb.init``, such as ``project``, ``entity``, ``tags``, ``mode``.
    """

    extra, module = "wandb", "wandb"

    def __init__(self, *, checkpoints: bool = False, **settings: Any) -> None:
        super().__init__(checkpoints=checkpoints)
        self.settings = settings

    def _start(self, title: str, config: Mapping[str, Any], known: str | None, step: int, member: int | None) -> Any:
        import wandb

        run_id = known or secrets.token_hex(4)
        settings: dict[str, Any] = {"project": self.facts.name, "dir": self.facts.path, "reinit": "create_new"}
        settings |= {"id": run_id, "resume": known and "allow", "name": title, "config": dict(config)}
        settings |= {"group": self._title} if self.facts.members else {}
        return wandb.init(**settings | self.settings), run_id

    def _log(self, run: Any, values: Mapping[str, float], step: int) -> None:
        run.log(dict(values), step=step)

    def _show(self, run: Any, name: str, content: np.ndarray | str, step: int) -> None:
        import wandb

        is_text = isinstance(content, str)
        value = wandb.Table(columns=["text"], data=[[content]]) if is_text else wandb.Image(content)
        run.log({name: value}, step=step)

    def _end(self, run: Any, status: str) -> None:
        if folder := self._checkpoints():
            import wandb

            artifact = wandb.Artifact(f"checkpoints-{run.id}", type="model")
            artifact.add_dir(folder)
            run.log_artifact(artifact)
        run.finish(exit_code=int(status in ("failed", "diverged")))


class MLflow(Tracker):
    """Logs to MLflow: ``pip install "jaxnn[mlflow]"``.

    The experiment is named as jaxnn's; the members of a sweep are child runs. ``MLFLOW_TRACKING_URI`` or
    ``tracking_uri`` is the address of the server.

    >>> jn.fit(experiment, writers=("mlflow",))  # doctest: +SKIP
    >>> jn.fit(experiment, writers=(MLflow("http://127.0.0.1:5000"),))  # doctest: +SKIP

    Args:
        tracking_uri: the address of the server, or a store such as ``sqlite:///mlflow.db``; default: MLflow's.
        checkpoints: whether to upload the checkpoints of the record at the end, as artifacts.
    """

    extra, module = "mlflow", "mlflow"
    STATUS: ClassVar = {"interrupted": "KILLED", "failed": "FAILED", "diverged": "FAILED"}

    def __init__(self, tracking_uri: str | None = None, *, checkpoints: bool = False) -> None:
        super().__init__(checkpoints=checkpoints)
        self.tracking_uri = tracking_uri

    def open(self, facts: WriterFacts) -> None:
        """Finds or creates the experiment."""
        from mlflow import MlflowClient

        self._pending: list[Any] = []
        self._client = MlflowClient(self.tracking_uri)
        found = self._client.get_experiment_by_name(facts.name)
        self._experiment_id = found.experiment_id if found else self._client.create_experiment(facts.name)
        super().open(facts)

    def _start(self, title: str, config: Mapping[str, Any], known: str | None, step: int, member: int | None) -> Any:
        from mlflow.entities import Param

        if known is not None:
            self._client.update_run(known, "RUNNING")
            return known, known
        tags = {"mlflow.parentRunId": self._run(None, step)} if member is not None else {}
        run_id = self._client.create_run(self._experiment_id, run_name=title, tags=tags).info.run_id
        self._client.log_batch(run_id, params=[Param(name, str(value)) for name, value in config.items()])
        return run_id, run_id

    def _log(self, run: Any, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(1000 * time.time()), step) for name, value in values.items()]
        self._pending.append(self._client.log_batch(run, metrics, synchronous=False))

    def _show(self, run: Any, name: str, content: np.ndarray | str, step: int) -> None:
        if isinstance(content, str):
            self._client.log_text(run, content, f"{name}/{step}.txt")
        else:
            self._client.log_image(run, content, f"{name}/{step}.png")

    def _end(self, run: Any, status: str) -> None:
        while self._pending:
            self._pending.pop().wait()
        if folder := self._checkpoints():
            self._client.log_artifacts(run, folder, FOLDER)
        self._client.set_terminated(run, self.STATUS.get(status, "FINISHED"))


TRACKERS = {writer.extra: writer for writer in (TensorBoard, WandB, MLflow)}
