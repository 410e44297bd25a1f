"""Boosted trees of jaxnn, LightGBM, XGBoost, scikit-learn and CatBoost: four tables, and 64 small models.

Claim     the test metric of jaxnn is that of LightGBM and XGBoost; with its native kernel and once compiled, jaxnn fits
          100,000 rows faster than scikit-learn and LightGBM, and 64 models in 0.3 to 0.5 of LightGBM's time
          (results: docs/performance.md)
Command   make native && python experiments/benchmarks/trees.py --python .venv-peers/bin/python

Each library runs in its own process, on all cores, and is timed in alternation: ``fit`` from the call to the model,
``predict`` of the test rows, the fastest of three. The first fit of each table, which imports modules and compiles, is
a column of its own: later fits of the shape in the process do not compile. All have the same depth, leaves, rounds,
learning rate and penalties; CatBoost's trees are symmetric. With ``--rows``, training rows are drawn again, with
noise of 1 % of each number's deviation, until there are as many.
"""

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from harness import describe_machine, interleaved, ratios

import jaxnn as jn
from jaxnn.cli import exit_on_user_error
from jaxnn.observe import text_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from articles.studies.tables import TABLES, load  # noqa: E402

WORKER = Path(__file__).parent / "contenders" / "trees_worker.py"
LIBRARIES = ("jaxnn", "lightgbm", "xgboost", "sklearn", "catboost")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run, and where to write the results."""

    tables: tuple[str, ...] = tuple(TABLES)
    libraries: tuple[str, ...] = LIBRARIES
    seeds: int = 5
    """Splits of each table; each is one round of the timing."""
    rows: tuple[int, ...] = (0, 100_000)
    """Least numbers of training rows; 0 leaves the tables as they are."""
    population: tuple[int, ...] = (1_000, 5_000, 20_000)
    """Rows of the tables that 64 models are trained on."""
    trees: int = 100
    depth: int = 6
    rate: float = 0.1
    l2: float = 1.0
    least: float = 1.0
    """Least sum of Hessians in a leaf."""
    python: str = ".venv-peers/bin/python"
    """Python interpreter with the other libraries."""
    out: Path = Path("runs/benchmarks")
    """Folder for trees_cpu.json."""


def problem(name: str, seed: int, rows: int, path: Path) -> None:
    """Writes the table ``name``, split by ``seed``, as arrays."""
    splits, _ = load(name, jn.data.data_dir() / name)
    numbers, targets = [], []
    for source in splits.named().values():
        given, target = source.read(np.arange(source.num_examples))
        categories = given.get("categories", np.zeros((len(target), 0)))
        floats = np.where(categories == 0, np.nan, categories - 1.0)
        numbers.append(np.concatenate([given["numbers"], floats], axis=1))
        targets.append(target)
    inputs, target, num_numbers = np.concatenate(numbers), np.concatenate(targets), given["numbers"].shape[1]
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(target))
    first = round(0.8 * len(target))
    train, test = order[:first], order[first:]
    if rows > first:
        train = np.concatenate([train, draw.choice(train, rows - first)])
    known = inputs[train]
    if rows > first:
        noise = 0.01 * np.nanstd(inputs[:, :num_numbers], axis=0)
        known[first:, :num_numbers] += noise * draw.normal(size=(rows - first, num_numbers))
    np.savez(
        path,
        train=known,
        train_targets=target[train],
        test=inputs[test],
        test_targets=target[test],
        categorical=np.arange(num_numbers, inputs.shape[1]),
        task="classification" if splits.class_names else "regression",
    )


class Worker:
    """A library in its own process."""

    def __init__(self, library: str, options: Options) -> None:
        self.library = library
        python = sys.executable if library == "jaxnn" else options.python
        self.process = subprocess.Popen(
            [python, str(WORKER), library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )  # fmt: skip

    def ask(self, command: str, path: Path | None = None, settings: Any = None) -> dict[str, Any]:
        """Returns the answer to ``command``; exits with the error if it failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            request = {"command": command} | ({} if path is None else {"path": str(path), "settings": settings})
            print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process died"}
        if "error" in answer:
            raise SystemExit(f"{self.library}: {command} failed: {answer['error']}")
        return answer


@contextlib.contextmanager
def working(options: Options) -> Iterator[dict[str, Worker]]:
    """Yields a worker for each library and kills them at the end."""
    workers = {library: Worker(library, options) for library in options.libraries}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.wait()


def measure_table(name: str, rows: int, options: Options, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Returns for each library the lists ``[seeds]`` of its times and metric."""
    settings = {key: getattr(options, key) for key in ("trees", "depth", "rate", "l2", "least")}
    found: dict[str, dict[str, list[float]]] = {library: {} for library in options.libraries}
    with working(options) as workers:
        for seed in range(-1, options.seeds):  # the first round imports modules, and compiles
            path = folder / f"{name}_{max(seed, 0)}.npz"
            problem(name, max(seed, 0), rows, path)
            order = [*workers.values()]
            for worker in order[seed % len(order) :] + order[: seed % len(order)]:
                answer = worker.ask("fit", path, settings)
                for key, value in answer.items() if seed >= 0 else [("first_fit", answer["fit"])]:
                    found[worker.library].setdefault(key, []).append(value)
    return found


def show(name: str, rows: int, results: dict[str, dict[str, list[float]]]) -> None:
    """Prints the table of one data set."""
    lines = []
    for library, one in results.items():
        metric = f"{statistics.mean(one['metric']):.4f} ({min(one['metric']):.4f}-{max(one['metric']):.4f})"
        times = (
            f"{one['first_fit'][0]:.2f} s",
            f"{statistics.median(one['fit']):.2f} s",
            f"{1e3 * statistics.median(one['predict']):.0f} ms",
        )
        ratio = str(ratios(results["jaxnn"]["fit"], one["fit"]))
        lines.append((library, metric, *times, ratio))
    title = f"{name}, {rows:,} rows drawn" if rows else name
    metric = "log loss or RMSE / deviation"
    print(f"\n{text_table(lines, (title, metric, 'first fit', 'fit', 'predict', 'fit of jaxnn / this'))}", flush=True)


def measure_population(rows: int, options: Options, folder: Path) -> dict[str, tuple[float, ...]]:
    """Returns the seconds ``[rounds]`` of 64 models on the first ``rows`` of California's housing."""
    path = folder / "population.npz"
    problem("california_housing", 0, 20_000, path)
    with np.load(path) as file:
        np.savez(path, train=file["train"][:rows, :8], train_targets=file["train_targets"][:rows])
    settings: dict[str, Any] = {"trees": 100, "depth": 4, "least": options.least}
    threads = {"lightgbm": os.cpu_count(), "lightgbm, 1 thread": 1, "jaxnn": None}
    with working(dataclasses.replace(options, libraries=("jaxnn", "lightgbm"))) as workers:

        def seconds(label: str) -> float:
            worker = workers[label.partition(",")[0]]
            return float(worker.ask("population", path, settings | {"threads": threads[label]})["seconds"])

        for label in threads:
            workers[label.partition(",")[0]].ask("population", path, settings | {"trees": 1, "threads": threads[label]})
        times = interleaved({label: functools.partial(seconds, label) for label in threads}, rounds=options.seeds)
    lines = [
        (label, f"{statistics.median(each):.2f} s", str(ratios(each, times["jaxnn"]))) for label, each in times.items()
    ]
    print(f"\n{text_table(lines, (f'64 models, {rows:,} rows', 'time', 'this / jaxnn'))}", flush=True)
    return times


def main(options: Options) -> None:
    """Measures and prints all tables, and the populations; finished results are kept if a later one fails."""
    options.out.mkdir(parents=True, exist_ok=True)
    settings = dataclasses.asdict(options) | {"python": "", "out": ""}
    results: dict[str, Any] = {**describe_machine()._asdict(), "settings": settings, "tables": {}, "population": {}}
    with working(options) as workers:
        results["versions"] |= {library: worker.ask("version")["version"] for library, worker in workers.items()}

    def write() -> None:
        (options.out / "trees_cpu.json").write_text(json.dumps(results, indent=1, default=str))

    with tempfile.TemporaryDirectory() as folder:
        for rows in options.rows:
            for name in options.tables:
                found = measure_table(name, rows, options, Path(folder))
                show(name, rows, found)
                results["tables"][f"{name}, {rows} rows" if rows else name] = found
                write()
        for rows in options.population:
            results["population"][rows] = measure_population(rows, options, Path(folder))
            write()


if __name__ == "__main__":
    with exit_on_user_error():
        main(tyro.cli(Options, description=__doc__))
