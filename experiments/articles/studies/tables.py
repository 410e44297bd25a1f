"""A9: boosted trees grow one after another, networks are matrix products; which is better on tables, and faster?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax
from articles.studies.study_pictures import draw_dots, panels
from articles.studies.study_rows import distinct
from harness import Bench, Case, Finding, NotMeasured, Plain, Quantity, Rows, Study, quantity

import jaxnn as jn
from jaxnn.engine import load_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("boosting", "MLP", "MLP with PLR")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Each model is trained on each of ``tables`` with ``seeds``; a network stops after ``patience`` epochs."""

    tables: tuple[str, ...] = ("adult", "california_housing", "diamonds", "higgs_lightgbm")
    seeds: int = 5
    trees: int = 200
    max_depth: int = 6
    epochs: int = 100
    patience: int = 12
    features: tuple[int, ...] = (256, 256)
    learning_rate: float = 2e-3
    batch_size: int = 512
    rounds: int = 1
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int
    num_steps: int
    seed: int


class Work(NamedTuple):
    """What a device does in a run.

    Attributes:
        depth: the number of steps that depend on one another: levels of all trees; layers, forward and backward.
        operations: of each, which may run in parallel.
        num_bytes: that each reads and writes.
    """

    depth: float
    operations: float
    num_bytes: float


def _adult(folder: Path) -> jn.Splits:
    import pandas  # type: ignore[import-untyped]

    lines = (folder / "adult.names").read_text().splitlines()
    names = [line.partition(":")[0] for line in lines if ": " in line and line[0] not in "|>"]
    how: Any = {"names": [*names, "income"], "skipinitialspace": True, "na_values": "?"}
    train, test = (pandas.read_csv(folder / f"adult-{part}.csv", **how) for part in ("train", "test"))
    test["income"] = test["income"].str.rstrip(".")
    return jn.data.table(train, test=test, validation=0.15, target="income")


def _california(folder: Path) -> jn.Splits:
    return jn.data.table(folder / "housing.csv", target="median_house_value", test=0.2, validation=0.12)


def _diamonds(folder: Path) -> jn.Splits:
    return jn.data.table(folder / "diamonds.csv", target="price", classification=False, test=0.2, validation=0.12)


def _higgs(folder: Path) -> jn.Splits:
    how: Any = {"names": ["label", *(f"x{column}" for column in range(28))], "separator": "\t", "target": "label"}
    test = folder / "binary.test"
    return jn.data.table(folder / "binary.train", test=test, validation=0.15, classification=True, **how)


TABLES: Mapping[str, Callable[[Path], jn.Splits]] = {
    "adult": _adult,
    "california_housing": _california,
    "diamonds": _diamonds,
    "higgs_lightgbm": _higgs,
}


@functools.lru_cache(maxsize=1)
def load(name: str, folder: Path) -> tuple[Any, float]:
    """Returns a table with targets of mean 0 and deviation 1, if they are numbers, and that deviation, else 1."""
    if not folder.is_dir():
        raise NotMeasured(f"there is no folder {name} in the data directory: set JAXNN_DATA")
    try:
        splits: Any = TABLES[name](folder)
    except ModuleNotFoundError as error:
        raise NotMeasured(f'{error.name} is missing: pip install "jaxnn[tables]"') from error
    if splits.class_names:
        return splits, 1.0
    targets = splits.train.targets
    mean, deviation = float(targets.mean()), float(targets.std())
    return _changed(
        splits, lambda inputs, targets: (inputs, ((targets - mean) / deviation).astype(np.float32))
    ), deviation


def clipped(splits: Any) -> Any:
    """Returns a table for networks: numbers of mean 0 and deviation 1, at most 5: few rows of diamonds are far off."""

    def change(inputs: Any, targets: np.ndarray) -> tuple[Any, np.ndarray]:
        return {**inputs, "numbers": np.clip(inputs["numbers"], -5, 5)}, targets

    return _changed(jn.data.standardize(splits), change)


def _changed(splits: Any, change: Callable[[Any, np.ndarray], tuple[Any, np.ndarray]]) -> Any:
    """Returns the splits with changed inputs and targets."""
    changed = {}
    for part, source in splits.named().items():
        inputs, targets = change(*source.examples)
        changed[part] = dataclasses.replace(source, examples=source.examples._replace(inputs=inputs, targets=targets))
    return splits._replace(**changed)


def make_experiment(model: str, splits: Any, seed: int, settings: Settings) -> jn.Experiment[Config]:
    """Returns the training of one of `MODELS` on a table."""
    columns, classes, rows = splits.train.columns, len(splits.class_names), splits.train.num_examples
    if model == "boosting":
        binned: Any = jn.data.binned(splits)

        def booster(config: Config) -> jn.trees.Boosting:
            objective = jn.trees.cross_entropy(classes) if classes else jn.trees.squared_error()
            categorical = binned.train.bins.num_categories
            how: Any = {"row_fraction": 0.8, "column_fraction": 0.8, "categorical": categorical}
            return jn.trees.boosting(objective, num_trees=config.num_steps, max_depth=settings.max_depth, **how)

        return jn.trees.experiment(Config(rows, settings.trees, seed), lambda config: binned, booster)
    network = jn.models.TableMLP(
        (*settings.features, classes or 1),
        num_categories=columns.num_categories,
        frequencies=16 if model == MODELS[2] else 0,
        dropout=0.1,
    )
    scaled = clipped(splits)
    return jn.Experiment(
        Config(settings.batch_size, settings.epochs * (rows // settings.batch_size), seed),
        lambda config: scaled,
        lambda config: jn.tasks.classification(network) if classes else jn.tasks.regression(network),
        lambda config: optax.adamw(settings.learning_rate, weight_decay=1e-2),
    )


def error_of(run: jn.Run, test: Any, deviation: float) -> float:
    """Returns the share of wrong labels on ``test``, or the root mean squared error in the targets' units."""
    inputs, targets = test.examples
    outputs = np.asarray(run.predict(inputs))
    if np.issubdtype(targets.dtype, np.integer):
        return float(np.mean((outputs.argmax(axis=1) if outputs.ndim == 2 else outputs > 0) != targets))
    return float(deviation * np.sqrt(np.mean((outputs.reshape(targets.shape) - targets) ** 2)))


def train(name: str, model: str, seed: int, kind: Any, settings: Settings) -> dict[str, Plain]:
    """Returns the test error and the seconds of a run, and what it computes."""
    splits, deviation = load(name, jn.data.data_dir() / name)
    experiment = make_experiment(model, splits, seed, settings)
    data: Any = load_data(experiment)
    test, how = data.test, {"record": False, "progress": "none", "device": kind}
    started = time.perf_counter()
    if model == "boosting":
        run = jn.fit(experiment, steps_per_call=20, eval_every=settings.trees, **how)
        error = error_of(run, test, deviation)
    else:
        # The error at the epoch with the lowest validation loss.
        epoch = splits.train.num_examples // settings.batch_size
        how |= {"eval_every": epoch, "report_every": epoch, "steps_per_call": epoch, "patience": settings.patience}
        run = jn.fit(experiment, probes={"test": lambda run: error_of(run, test, deviation)}, **how)
        best = np.nanargmin(run.metrics["validation_loss"])
        error = float(run.metrics["probe_test"][best])
    if run.summary.status == "interrupted":
        raise KeyboardInterrupt
    steps, batch_size = int(run.metrics["step"][-1]), experiment.config.batch_size
    if model == "boosting":
        work = work_of_trees(batch_size, test.examples.inputs.shape[1], steps * settings.max_depth)
    else:
        work = work_of_updates(run.state.params, batch_size, steps)
    return {
        "error": error,
        "unit": "" if splits.class_names else "RMSE",
        "run_seconds": time.perf_counter() - started,
        "train_seconds": run.summary.seconds["train"],
        "rows": steps * batch_size,
        **work._asdict(),
    }


def work_of_trees(rows: int, columns: int, levels: int) -> Work:
    """Returns the work of summing histograms, of two numbers, on all ``levels`` of the trees of a run."""
    # A byte for each bin, and for each row two gradients and its node.
    return Work(levels, 2.0 * rows * columns, rows * columns + 12.0 * rows)


def work_of_updates(params: Any, batch_size: int, steps: int) -> Work:
    """Returns the work of the products of all layers with kernels, forward and backward, in ``steps`` updates."""
    kernels = [leaf for path, leaf in jax.tree.leaves_with_path(params) if "kernel" in jax.tree_util.keystr(path)]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    outputs = sum(leaf.size // leaf.shape[-2] for leaf in kernels)
    # Forward, and backward for inputs and for kernels.
    operations = 6.0 * batch_size * sum(leaf.size for leaf in kernels)
    # AdamW reads and writes parameters and two moments; activations are written and read forward and backward.
    num_bytes, layers = 4.0 * (10 * count + 4 * batch_size * outputs), 2 * len(kernels)
    return Work(steps * layers, operations / layers, num_bytes / layers)


def _cases(bench: Bench) -> Iterator[Sequence[Case]]:
    settings: Settings = bench.settings
    for name, model, seed in itertools.product(settings.tables, MODELS, range(settings.seeds)):
        what: dict[str, Plain] = {"table": name, "model": model, "seed": seed}
        yield [
            Case(kind, what, observe=functools.partial(train, name, model, seed, kind, settings))
            for kind in bench.devices
        ]


def over_seeds(rows: Rows, name: str, unit: str = "") -> Quantity | None:
    """Returns an observed value: median, minimum and maximum over the seeds of ``rows``."""
    return quantity([float(row.observed[name] or 0) for row in rows if name in row.observed], unit)


def rows_per_second(rows: Rows) -> Quantity | None:
    """Returns the training rows per second, a row counted once for each tree or epoch."""
    seen = [row.observed for row in rows if "rows" in row.observed]
    return quantity([float(one["rows"] or 0) / float(one["train_seconds"] or 1) for one in seen], "rows/s")


def work_in(rows: Rows) -> Work | None:
    """Returns the median work of the runs of one model on one table; None if there are none."""
    parts = [over_seeds(rows, field) for field in Work._fields]
    return Work(*(part.median for part in parts if part)) if all(parts) else None


def _trained(rows: Rows) -> Iterator[tuple[str, str, Rows]]:
    """Yields each table and model that was trained, with the rows of its seeds."""
    for table, model in itertools.product(distinct(rows, "table"), distinct(rows, "model")):
        runs = rows.where(table=table, model=model)
        if any("error" in row.observed for row in runs):
            yield str(table), str(model), runs


def _findings(rows: Rows) -> list[Finding]:
    found = []
    for table, model, runs in _trained(rows):
        error, unit = over_seeds(runs, "error"), next(row.observed["unit"] for row in runs if "unit" in row.observed)
        if error and not unit:
            error = Quantity(1 - error.median, 1 - error.high, 1 - error.low, "")
        found.append(Finding("A9", f"{table}, {model}: {unit or 'accuracy'}", error))
        note = str(rows_per_second(runs))
        if (work := work_in(runs)) is not None:
            note += (
                f"; {work.depth:,.0f} dependent steps of {work.operations / 1e6:.3g} M operations, "
                f"{work.operations / work.num_bytes:.2g} per byte"
            )
        found.append(Finding("A9", f"{table}, {model}: training", over_seeds(runs, "train_seconds", "s"), note=note))
    return found


def _conclude(columns: Mapping[str, Rows]) -> list[str]:
    return [f"{label}: {sentence}" for label, rows in columns.items() for sentence in _of_a_column(rows)]


def _of_a_column(rows: Rows) -> Iterator[str]:
    trained = list(_trained(rows))
    for table in dict.fromkeys(table for table, *_ in trained):
        found = {model: runs for one, model, runs in trained if one == table}
        errors = {model: over_seeds(runs, "error") for model, runs in found.items()}
        ranked = sorted(((one, model) for model, one in errors.items() if one), key=lambda pair: pair[0].median)
        (best, winner), *others = ranked
        beside = "".join(
            f"; {model} {one}" + (", the ranges over seeds overlap" if one.low <= best.high else "")
            for one, model in others
        )
        yield f"on {table} {winner} has the lowest test error, {best}{beside}."
        trees, network = (work_in(found.get(model, Rows())) for model in MODELS[:2])
        if trees and network:
            intensity = (network.operations / network.num_bytes) / (trees.operations / trees.num_bytes)
            yield (
                f"on {table} a layer of the MLP has {network.operations / trees.operations:.3g} times the operations "
                f"of a level of a tree, {intensity:.3g} times as many per byte."
            )


def _draw(columns: Mapping[str, Rows], figure: Figure) -> None:
    error, seconds = panels(figure, ("test error, relative to boosting", "training"))
    errors: dict[str, list[Any]] = {label: [] for label in columns}
    times: dict[str, list[Any]] = {label: [] for label in columns}
    for label, rows in columns.items():
        for table, model, runs in _trained(rows):
            found, base = over_seeds(runs, "error"), over_seeds(rows.where(table=table, model=MODELS[0]), "error")
            errors[label].append(
                (f"{table}, {model}", found and base and base.median and found.scaled(1 / base.median, ""))
            )
            times[label].append((f"{table}, {model}", over_seeds(runs, "train_seconds", "s")))
    draw_dots(error, errors, log=False)
    draw_dots(seconds, times)
    seconds.set_yticklabels([])
    figure.set_size_inches(10.0, 4.6)
    seconds.set_xlabel("seconds")


STUDY = Study(
    name="tables",
    claims=("A9",),
    title="Are boosted trees or networks better on tables, and what does the device do in each?",
    method=(
        "Gradient boosting, a multilayer perceptron, and one whose numbers are embedded by learnt frequencies (PLR), "
        "trained on the same rows of four tables: trees of depth 6 with 80 % of rows and columns each, learning rate "
        "0.1; numbers of mean 0 and deviation 1, clipped at 5, 256 units in two layers, dropout 0.1, AdamW with "
        "learning rate 2e-3 and weight decay 1e-2, batches of 512, the epoch with the lowest validation loss. The "
        "settings are the same for all tables. Test metrics and seconds of training, without compilation and "
        "evaluation: median and range over seeds. Dependent steps are the levels of all trees, and the layers, forward "
        "and backward, of all updates; their operations are the additions to histograms and those of the matrix "
        "products, which can run in parallel; bytes are those of bins, gradients and nodes, or of parameters, moments "
        "and activations, if nothing stays in a cache."
    ),
    full=Settings(),
    quick=Settings(("california_housing", "higgs_lightgbm"), seeds=3, epochs=20),
    cases=_cases,
    findings=_findings,
    draw=_draw,
    conclude=_conclude,
)
