"""Metric writers for TensorBoard, Weights & Biases and MLflow: each run, or member of a sweep, is a run there."""

import contextlib
import importlib.util
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flax.traverse_util import flatten_dict

from jaxnn._checked_json import parse
from jaxnn._disk import write_json
from jaxnn.record._record_reader import RecordReader
from jaxnn.record._run_directory import FOLDER, Record, read_bytes
from jaxnn.record._schemas import IDS
from jaxnn.record._writers import WriterFacts
from jaxnn.types import ConfigError, RecordError

IDS_FILE = "writers.json"


class Tracker:
    """What the three share: a run of the service per member; ``writers.json`` has its id and the last step it stored.

    Subclasses start, feed and end one run of their service. The runs of members are started by their first lines. Lines
    of the record that the service lacks are sent before the next one: after a resume, or an error of the service.
    """

    extra: ClassVar[str]  # of the package, and the name of the writer
    module: ClassVar[str]  # that it needs
    # (title, config, known id or None, step, member) -> (run, id); (run, numbers, step); (run, name, content, step);
    # (run, status as in record.json).
    _start: Callable[..., tuple[Any, str]]
    _log: Callable[..., None]
    _show: Callable[..., None]
    _end: Callable[..., None]
    _store: Callable[..., None] = lambda tracker, run: None  # (run): what was logged outlives this process

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
        # By member: the run's id, and the last step that it stored.
        self._ids: dict[str, dict[str, Any]] = {} if facts.resumed is None else self._known().get(self.extra, {})
        self._unsent: dict[int | None, list[Mapping[str, Any]]] = {}
        for line in RecordReader(facts.path).lines() if facts.path is not None and facts.resumed is not None else ():
            member = self._member(line)
            if line["step"] > self._ids.get(_key(member), {}).get("sent", 0):
                self._unsent.setdefault(member, []).append(line)
        if not facts.members:
            unsent = self._unsent.get(None, [])
            self._run(None, unsent[0]["step"] if unsent else (facts.resumed or 0) + 1)
            self._send(None)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Logs the numbers of each line at its step."""
        for line in lines:
            member = self._member(line)
            # A resumed sweep reports what follows its checkpoint again.
            earlier = [old for old in self._unsent.get(member, ()) if old["step"] < line["step"]]
            self._unsent[member] = [*earlier, line]
        for member in map(self._member, lines):
            self._send(member)

    def media(self, name: str, content: np.ndarray | str, step: int) -> None:
        """Logs a picture, uint8 ``[height, width, 3]``, or a text, of the run or of the sweep itself."""
        self._show(self._run(None, step), name, content, step)

    def flush(self) -> None:
        """Has the service store what it was sent, and notes up to which step that is."""
        for run in self._runs.values():
            self._store(run)
        self._note()

    def close(self) -> None:
        """Ends the runs, with the status that the record has."""
        runs, self._runs = self._runs, {}
        with contextlib.ExitStack() as stack:  # one that fails keeps none of the others open
            for run in runs.values():
                path = self.facts.path
                stack.callback(self._end, run, "finished" if path is None else RecordReader(path).facts["status"])
        if runs:
            self._note()

    def _member(self, line: Mapping[str, Any]) -> int | None:
        """The member of a sweep that reported a line; None: it is of a run."""
        return line["member"] if self.facts.members else None

    def _send(self, member: int | None) -> None:
        """Logs the lines of a member, or of the run, that wait; those after an error of the service stay."""
        waiting = self._unsent.get(member, [])
        while waiting:
            step = waiting[0]["step"]
            values = {name: value for name, value in waiting[0].items() if name not in ("step", "member", "digest")}
            self._log(self._run(member, step), values, step)
            self._ids[_key(member)]["sent"] = step
            del waiting[0]

    def _note(self) -> None:
        """Writes the ids to the record."""
        if self._file is not None:
            write_json(self._file, self._known() | {self.extra: self._ids})

    def _run(self, member: int | None, step: int) -> Any:
        """The service's run of a member, or of the run or sweep itself, started or continued at ``step`` if need be."""
        if member not in self._runs:
            key, facts = _key(member), self.facts
            title = self._title if member is None else f"{self._title}-{member:04d}"
            config: dict[str, Any] = flatten_dict(dict(facts.config), sep=".")  # type: ignore[no-untyped-call]
            config |= {} if member is None else facts.members[member]
            known = self._ids.get(key, {"sent": 0})
            self._runs[member], name = self._start(title, config, known.get("id"), step, member)
            self._ids[key] = {"id": name, "sent": min(known["sent"], step - 1)}
            self._note()
        return self._runs[member]

    def _known(self) -> dict[str, Any]:
        """The ids of all writers in the record."""
        if self._file is None or not (content := read_bytes(self._file)):
            return {}
        try:
            known: dict[str, Any] = parse(content, IDS)
        except ValueError as error:
            raise RecordError(f"{self._file} is damaged ({error}): delete it to start other runs there.") from error
        return known

    def _checkpoints(self) -> str | None:
        """The folder of a run's checkpoints, if they are to be uploaded."""
        folder = self.facts.path and self.facts.path / FOLDER
        return str(folder) if self.checkpoints and folder and folder.is_dir() else None


def _key(member: int | None) -> str:
    """The key in ``writers.json`` of a member, or of the run or the sweep itself."""
    return "" if member is None else str(member)


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with ``tensorboardX``: ``pip install "jaxnn[tensorboard]"``.

    They are in ``tensorboard/`` of the record, or of a new folder ``runs/NAME/TIME-ID`` without one; those of a sweep's
    members in a folder each. The config is there as hyper-parameters. Events are on the disk before a checkpoint is,
    and those after the step that a run resumes from are purged.

    >>> jn.fit(experiment, writers=("tensorboard",))  # doctest: +SKIP
    """

    extra, module = "tensorboard", "tensorboardX"

    def open(self, facts: WriterFacts) -> None:
        """Chooses the folder; see `Tracker.open`."""
        self._folder = (facts.path or Record.unused_path(facts.name)) / "tensorboard"
        super().open(facts)

    def _start(self, title: str, config: Mapping[str, Any], known: str | None, step: int, member: int | None) -> Any:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import hparams, text

        folder = self._folder if member is None else self._folder / f"{member:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        # Not a SummaryWriter, which hands events to a thread, and cannot wait for them to be written. The name has the
        # time in seconds, and a second file of that name would replace the first.
        events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if known is not None:
            self._add(events, step, session_log=SessionLog(status=SessionLog.START))
        else:
            words = {name: str(value) for name, value in config.items() if not isinstance(value, int | float)}
            for summary in (text("config", json.dumps(config, indent=2)), *hparams({**config, **words}, {})):
                self._add(events, 0, summary=summary)
        return events, str(folder)

    def _add(self, run: Any, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        run.write_event(Event(wall_time=time.time(), step=step, **content))

    def _log(self, run: Any, values: Mapping[str, float], step: int) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._add(run, step, summary=scalar(name, value))

    def _show(self, run: Any, name: str, content: np.ndarray | str, step: int) -> None:
        from tensorboardX.summary import image, text

        is_text = isinstance(content, str)
        self._add(run, step, summary=text(name, content) if is_text else image(name, content, dataformats="HWC"))

    def _store(self, run: Any) -> None:
        run.flush()

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

    def _store(self, run: Any) -> None:
        while self._pending:
            self._pending.pop().wait()

    def _end(self, run: Any, status: str) -> None:
        self._store(run)
        if folder := self._checkpoints():
            self._client.log_artifacts(run, folder, FOLDER)
        self._client.set_terminated(run, self.STATUS.get(status, "FINISHED"))


TRACKERS = {writer.extra: writer for writer in (TensorBoard, WandB, MLflow)}
