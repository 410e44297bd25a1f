"""Sweep records written by hand, without training: for tests of reading, selecting, comparing and drawing."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxnn._disk import write_json
from jaxnn._json import json_line
from jaxnn.record import FORMAT, Checkpoints
from jaxnn.search import grid
from jaxnn.sweeps import Sweep, open_sweep
from jaxnn.types import Experiment, Splits
from tests import tiny

# The experiment and the points of the sweep `finished`: two groups of four members, numbered in turns.
EXPERIMENT = tiny.experiment(num_steps=30)
POINTS = grid(learning_rate=[0.01, 0.1, 0.2, 0.3], batch_size=[8, 16])

BASE = {"learning_rate": 0.1, "features": [8, 8], "model": {"dropout": 0.0}, "num_steps": 20, "seed": 0}
SCALES = {"learning_rate": "log", "model.dropout": "linear", "seed": "nominal"}
SUMMARY = {"seconds": {"load": 0.5, "train": 2.0}, "member_steps": 2468, "member_steps_per_second": 1234.0}


def member(index: int, point: Mapping[str, Any], loss: float | None = None, **changes: Any) -> dict[str, Any]:
    """A line of ``members.jsonl``: finished with a test loss and an accuracy that follows from it."""
    metrics = {} if loss is None else {"train_loss": loss / 2, "test_loss": loss, "test_accuracy": 1 - loss / 10}
    line = {
        **{"member": index, "point": dict(point), "config": nested(BASE, point), "status": "finished", "step": 20},
        **{"final": metrics, "best": {"step": 10, **metrics} if metrics else {}, "error": None},
    }
    return line | changes


def nested(config: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the fields of a point, which may be dotted."""
    found = dict(config)
    for name, value in point.items():
        head, _, rest = name.partition(".")
        found[head] = nested(found[head], {rest: value}) if rest else value
    return found


def write(
    path: Path, members: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]] = (), **changes: Any
) -> Path:
    """A sweep's directory; its axes are the fields of the points. By default each member reported once, at its end."""
    path.mkdir(parents=True, exist_ok=True)
    axes = []
    for name in dict.fromkeys(name for line in members for name in line["point"]):
        values = {json.dumps(line["point"][name]): line["point"][name] for line in members}
        axes.append({"name": name, "values": list(values.values()), "scale": SCALES.get(name, "nominal")})
    points = {line["member"]: line["point"] for line in members}
    facts = {
        **{"format": FORMAT, "devices": {"backend": "cpu", "devices": [], "versions": {}}, "jax_flags": {}},
        **{"name": "tiny", "status": "finished", "started": "2026-01-02T03:04:05+0000", "config": BASE, "axes": axes},
        **{"monitored": "test_loss", "higher_is_better": False, "directions": {}, "options": {"shard": None}},
        **{"points": [points.get(number, {}) for number in range(max(points, default=0) + 1)]},
        **{"groups": [{"members": [*points], "static": {}, "traced": []}]},
        "summary": {**SUMMARY, "num_compilations": 1},
    }
    write_json(path / "record.json", facts | changes)
    (path / "members.jsonl").write_text("".join(map(json_line, members)))
    last = [{"member": line["member"], "step": line["step"]} for line in members if line["step"]]
    (path / "metrics.jsonl").write_text("".join(map(json_line, lines or last)))
    return path


def sweep(path: Path, points: Mapping[tuple[Any, ...], float | None], *names: str, **changes: Any) -> Sweep:
    """A finished sweep over ``names`` with a test loss per point and two reports per member; None: it diverged."""
    members, lines = [], []
    for index, (values, loss) in enumerate(points.items()):
        diverged = {} if loss is not None else {"status": "diverged", "step": 10, "final": {"test_loss": "nan"}}
        members.append(member(index, dict(zip(names, values, strict=True)), loss, **diverged))
        steps = (10, 20) if loss is not None else (10,)
        lines += [{"member": index, "step": step, "test_loss": 20 * (loss or 1.0) / step} for step in steps]
    return open_sweep(write(path, members, lines, **changes))


def indices(sweep: Sweep) -> list[int]:
    return [member.index for member in sweep.members]


def killed_once(plain: Experiment[Any], folder: Path, victim: int | None = None) -> Experiment[Any]:
    """``plain``, whose first worker kills ``victim``, or itself, at its third save, when its first is complete."""

    def data(config: Any) -> Splits:
        # Planning loads the data first, in a process that trains nothing. One process creates the file.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            (folder / "swept" / "mortal").touch(exist_ok=False)
            save, steps = Checkpoints.save, iter(range(2))

            def save_or_end(checkpoints: Checkpoints, *arguments: Any) -> None:
                if next(steps, None) is None:
                    os.kill(victim or os.getpid(), signal.SIGKILL)
                    time.sleep(60)  # until Ray ends this process too
                save(checkpoints, *arguments)

            Checkpoints.save = save_or_end  # type: ignore[method-assign]
        return tiny.splits()

    return Experiment(plain.config, data, plain.task, plain.optimizer)
