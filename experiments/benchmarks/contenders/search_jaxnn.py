"""One search by jaxnn in a process of its own; each evaluation of a member is a line in the file of reports.

python search_jaxnn.py SEARCHER FOLDER SEED      SEARCHER is asha, or asha_tpe: TPE proposes, ASHA prunes
"""

import dataclasses
import json
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxnn as jn

# Members for each that the peers' budget is enough for: a number of steps, up to four times theirs, ends the search.
MORE = 12


@dataclasses.dataclass(frozen=True)
class Config:
    """A member of a search; the fields of boosted trees are the last four."""

    learning_rate: float = 1e-3
    dropout: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 32
    num_steps: int = 1_000
    seed: int = 0
    l2: float = 1.0
    min_child_weight: float = 1.0
    row_fraction: float = 1.0
    column_fraction: float = 1.0


class Reports:
    """A metric writer: time, new steps and loss of each member; Ctrl-C after ``budget`` steps or at the ``score``."""

    def __init__(self, path: Path, budget: int, score: float) -> None:
        self.file = path.open("w", buffering=1)
        self.left, self.score = budget, score
        self.steps: dict[int, int] = {}

    def write(self, lines: Any) -> None:
        now = time.time()
        for line in lines:
            steps = line["step"] - self.steps.get(line["member"], 0)
            self.steps[line["member"]] = line["step"]
            report = {"time": now, "steps": steps, "value": float(line["validation_loss"])}
            print(json.dumps(report), file=self.file)
            self.left -= steps
            if report["value"] <= self.score:
                self.left = 0
        if self.left <= 0:
            signal.raise_signal(signal.SIGINT)


def network(config: Config, kind: str) -> jn.Task:
    """Returns the task of a network; contenders/search_peers.py has the same ones in PyTorch."""
    models = jn.models
    if kind == "gpt":
        return jn.tasks.next_token(
            models.GPT(65, num_layers=2, features=32, num_heads=4, max_length=32, dropout=config.dropout)
        )
    if kind == "cnn":
        return jn.tasks.classification(models.CNN(10, blocks=((8,), (16,)), dense=(32,), dropout=config.dropout))
    features = {"digits": (32, 32, 10), "fashion": (128, 64, 10)}[kind]
    return jn.tasks.classification(models.MLP(features, dropout=config.dropout))


def optimizer(config: Config) -> Any:
    schedule = jn.schedules.cosine(config.learning_rate, config.num_steps)
    return jn.optim.adamw(schedule, weight_decay=config.weight_decay)


def experiment_of(spec: dict[str, Any], data: dict[str, np.ndarray], seed: int) -> jn.Experiment[Config]:
    """Returns the experiment of a task, as a user writes it."""
    pairs: Any = {split: (data[f"{split}_inputs"], data[f"{split}_targets"]) for split in ("train", "validation")}
    config = Config(batch_size=spec["batch_size"], num_steps=spec["num_steps"], seed=seed)
    if spec["network"] != "trees":
        splits = jn.data.arrays(**pairs, num_classes=None if spec["network"] == "gpt" else 10)
        return jn.Experiment(config, lambda _: splits, lambda config: network(config, spec["network"]), optimizer)
    binned = jn.data.binned(**pairs, categorical=data["categorical"].tolist())
    categories = binned.train.bins.num_categories  # type: ignore[attr-defined]

    def booster(config: Config) -> jn.trees.Boosting:
        names = ("learning_rate", "l2", "min_child_weight", "row_fraction", "column_fraction")
        how: Any = {name: getattr(config, name) for name in names}
        objective = jn.trees.cross_entropy(2)
        return jn.trees.boosting(objective, num_trees=config.num_steps, max_depth=6, categorical=categories, **how)

    return jn.trees.experiment(config, lambda _: binned, booster)


def seed_of(point: Any) -> int:
    """Returns the seed of a member: a number that looks random and is the same for a point."""
    return zlib.crc32(repr(sorted(point.items())).encode()) % 2**31


def main(searcher: str, folder: Path, seed: int) -> None:
    """Searches, and writes what the record says of the time: ``facts.json``."""
    imported = time.time()
    jax.config.update("jax_num_cpu_devices", jn.observe.cpu_count() or 1)
    spec = json.loads((folder / "spec.json").read_text())
    with np.load(folder / "data.npz") as file:
        data = dict(file)
    space: Any = {name: getattr(jn.search, kind)(low, high) for name, (kind, low, high) in spec["space"].items()}
    space["seed"] = seed_of
    num = {"num": MORE * spec["num"], "key": seed}
    if searcher == "asha_tpe":
        search = jn.search.asha(jn.search.tpe(space, **num))
    else:
        search = jn.search.asha(space, **num)
    reports = Reports(folder / "reports_0.jsonl", spec["budget"], spec["score"])
    how = {"lanes": spec["lanes"], "progress": "none", "run_dir": folder / "record"}
    loaded = time.time()
    experiment = experiment_of(spec, data, seed)
    jn.sweep(experiment, search, writers=(reports,), **how)
    record = json.loads((folder / "record" / "record.json").read_text())
    times = {"imported": imported, "loaded": loaded, "swept": time.time()}
    facts = {"times": times, "summary": record["summary"]}
    facts["groups"] = [{key: group[key] for key in group if key != "members"} for group in record["groups"]]
    (folder / "facts.json").write_text(json.dumps(facts, default=str))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
