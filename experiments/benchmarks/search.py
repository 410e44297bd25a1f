"""Searches by jaxnn, by Optuna and by Ray Tune, in PyTorch or LightGBM: the time until a score is reached.

Claim     a digits MLP is tuned 0.9 to 6.6 times as soon as by Optuna and PyTorch, in 90 s on two cores. Networks
          that are bound by arithmetic are not tuned sooner, and boosted trees not at all: of the aims, 15 times for
          digits, 3 for the Fashion MLP and the GPT, 2.5 for the CNN and 2 for trees, none is reached
Command   make native .venv-peers/.installed && python experiments/benchmarks/search.py

All search the same space on the same cores, the peers for the same steps in all, and evaluate the validation split
after each 27th of a run: jaxnn by ASHA over the points of a Parzen estimator (TPE), or over random ones, Optuna by TPE
and Hyperband, Ray Tune by ASHA. Optuna has one process with all cores or a process on each, the one that makes more
steps in a trial of both. Networks have the same kind of initial values, Adam with weight decay, a cosine schedule and
dropout; every member of a search has its own seed. Times are from the command on, with imports, reading of data and
compilation: jaxnn keeps nothing from an earlier process.

The score of a seed is the lowest validation loss that the peer reports. The peer's time is when it first had it,
jaxnn's when a member first reports as low a loss, within four times the steps: steps that it makes faster are among
what is compared. The ratio of times is the product of two:
``search``, the peer's steps until then over jaxnn's, and ``throughput``, jaxnn's steps/s until then over the peer's.

Measured at 198d5865 on two cores of an Intel Xeon beside ``--peers optuna``, three or four seeds, in smaller budgets
than the default ones, ``--num`` in brackets, with 32 lanes for MLPs and 8 for the others (results/search_cpu.json):

task (num)     reached  times sooner      = search          × throughput      steps/s         first report, s
digits (1024)  3 of 3   3.29 (0.88–5.32)  0.53 (0.12–1.57)  6.25 (3.39–7.25)  3,416 : 29,339  2.6 : 7.2
  at 99dde16a  5 of 5   4.30 (2.62–6.57)  1.78 (0.79–2.49)  2.46 (2.32–3.31)  3,902 : 31,258  2.4 : 5.9
fashion (384)  4 of 4   0.84 (0.42–1.31)  0.60 (0.20–1.03)  1.44 (1.27–2.12)  940 : 1,682     2.8 : 8.2
cnn (64)       3 of 3   0.41 (0.26–0.93)  0.47 (0.25–1.06)  0.88 (0.87–1.04)  274 : 269       3.0 : 8.1
gpt (96)       2 of 3   0.38 (0.00–0.64)  0.43 (0.25–0.61)  1.29 (1.06–1.53)  306 : 437       3.1 : 12.4
trees (256)    0 of 3   –                 –                 –                 358 : 306       0.6 : 5.8

Beside ``--peers ray``, at d17aaf86, three seeds, ``--num 256``, 32 lanes (results/search_ray_cpu.json):

digits         3 of 3   2.93 (1.66–3.61)  0.97 (0.39–1.67)  3.04 (2.16–4.26)  2,594 : 27,868  10.7 : 7.7
fashion        2 of 3   1.03 (0.00–1.71)  0.62 (0.44–0.81)  2.24 (2.12–2.35)  772 : 1,922     9.7 : 8.8

What jaxnn gains is throughput, where networks are tiny, and what it loses is its start, which compiles. The searches
are about equal: of two equal ones the first has its lowest loss at a random moment of its budget, and the second is as
low after a whole budget in the median, so that ``search`` has a median r with r ln(1 + 1/r) = 1/2, 0.40, and varies
tenfold: Fashion with 8 lanes was 2.7, 1.6, 0.8 and 0 times as soon, with 4 lanes 1.3, 2.7, 2.0 and 0.2, and digits
with ``--num 2048``, 64 lanes and an earlier estimator 0, 5.2 and 0.8. Lanes do not matter for digits: after ``--num
1024``, four seeds, the lowest losses are 0.036 to 0.044 with 2 lanes and 0.029 to 0.044 with 32, and Optuna's 0.040 to
0.043. LightGBM regularises splits of categories (``cat_l2``, ``cat_smooth``), and its losses on this table are lower by
0.003 for the same config.
"""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from harness import describe_machine

import jaxnn as jn
from jaxnn.cli import exit_on_user_error
from jaxnn.observe import text_table

sys.path.insert(0, str(Path(__file__).parents[1]))
CONTENDERS = Path(__file__).parent / "contenders"
WINDOWS = 27  # evaluations of a full run: the rungs of both are after 1, 3, 9 and 27
OPTUNA = ("optuna_1x2", "optuna_2x1")
OURS = 4  # budgets of jaxnn
PILOT = 0.1  # of the budget, to choose one of them
NETWORK = {
    "learning_rate": ("log_uniform", 1e-4, 1e-1),
    "dropout": ("uniform", 0.0, 0.5),
    "weight_decay": ("log_uniform", 1e-5, 1e-1),
}
TREES = {
    "learning_rate": ("log_uniform", 0.01, 0.5),
    "l2": ("log_uniform", 1e-3, 100.0),
    "min_child_weight": ("log_uniform", 0.1, 100.0),
    "row_fraction": ("uniform", 0.5, 1.0),
    "column_fraction": ("uniform", 0.5, 1.0),
}


class Task(NamedTuple):
    """What is searched, with a budget of about one to three minutes of a peer on two cores."""

    batch_size: int  # of trees: all rows
    num_steps: int  # of a full run
    num: int  # members of an ASHA that would take the budget
    lanes: int
    space: dict[str, tuple[str, float, float]]
    data: Callable[[], dict[str, np.ndarray]]


def pairs(splits: jn.Splits, num_validation: int | None = None, validation: str = "validation") -> dict[str, Any]:
    """Returns the arrays of the training and the validation split."""
    found = {}
    for name, split in (("train", "train"), ("validation", validation)):
        source: Any = splits.named()[split]
        rows = np.arange(source.num_examples)[: num_validation if name == "validation" else None]
        found[f"{name}_inputs"], found[f"{name}_targets"] = source.read(rows)
    return found


def adult() -> dict[str, Any]:
    """Returns numbers, missing ones as NaN, and then categories."""
    from articles.studies.tables import load

    found = pairs(load("adult", jn.data.data_dir() / "adult")[0])
    for split in ("train", "validation"):
        inputs = found[f"{split}_inputs"]
        categories = np.where(inputs["categories"] == 0, np.nan, inputs["categories"] - 1.0)
        found[f"{split}_inputs"] = np.concatenate([inputs["numbers"], categories], axis=1)
    first, width = inputs["numbers"].shape[1], found["train_inputs"].shape[1]
    return found | {"categorical": np.arange(first, width)}


def fashion() -> dict[str, Any]:
    return pairs(jn.data.fashion_mnist(num_validation=1_000))


TASKS = {
    "digits": Task(32, 2_700, 2_048, 64, NETWORK, lambda: pairs(jn.data.digits(0.3), validation="test")),
    "fashion": Task(128, 1_080, 1_024, 32, NETWORK, fashion),
    "cnn": Task(64, 1_080, 192, 16, NETWORK, fashion),
    "trees": Task(0, 108, 1_024, 16, TREES, adult),
    "gpt": Task(16, 1_080, 256, 16, NETWORK, lambda: pairs(jn.data.char_corpus(length=32), 256, "test")),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run, and where to write the results."""

    tasks: tuple[str, ...] = tuple(TASKS)
    seeds: int = 5
    num: int | None = None
    """Sets the budget of every contender: the steps of an ASHA of as many members, a ninth of as many full runs."""
    lanes: int | None = None
    peers: tuple[str, ...] = ("optuna", "ray")
    """optuna (its quicker arrangement), optuna_1x2, optuna_2x1, ray."""
    searchers: tuple[str, ...] = ("asha_tpe",)
    """Of jaxnn: asha (random points), asha_tpe (points of a tree-structured Parzen estimator)."""
    python: str = ".venv-peers/bin/python"
    """Python interpreter with the peers."""
    out: Path = Path("runs/benchmarks")
    """Folder for search_cpu.json."""


def write_problem(name: str, options: Options, folder: Path) -> int:
    """Writes ``spec.json`` and ``data.npz``; returns the budget, in steps."""
    task = TASKS[name]
    data: Any = task.data()
    num = options.num or task.num
    spec: dict[str, Any] = {
        "network": name,
        "num_steps": task.num_steps,
        "windows": WINDOWS,
        "space": task.space,
        "num": num,
    }
    spec |= {"batch_size": task.batch_size or len(data["train_targets"]), "lanes": options.lanes or task.lanes}
    # ASHA takes 1/27 of a run for each member, and as much for those that it promotes, on each of three rungs.
    spec["budget"] = round(num * task.num_steps * (1 / 27 + 2 / 81 + 6 / 243 + 18 / 729))
    (folder / "spec.json").write_text(json.dumps(spec))
    np.savez(folder / "data.npz", **data)
    return spec["budget"]  # type: ignore[no-any-return]


def run(
    contender: str, problem: Path, seed: int, options: Options, budget: int, score: float = -math.inf
) -> dict[str, Any]:
    """Runs a search in its own process; returns its reports ``[time, steps, value]`` within the budget, and times.

    A search by jaxnn ends once a member has the ``score``.
    """
    ours = contender in options.searchers
    budget *= OURS if ours else 1
    script = CONTENDERS / ("search_jaxnn.py" if ours else "search_peers.py")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        spec = json.loads((problem / "spec.json").read_text()) | {"budget": budget, "score": score}
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "data.npz").symlink_to(problem / "data.npz")
        command = [sys.executable if ours else options.python, str(script), contender, place, str(seed)]
        environment = os.environ | {"PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        started = time.time()
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        wall = time.time() - started
        if done.returncode:
            raise SystemExit(f"{contender} failed on {spec['network']}, seed {seed}:\n{done.stderr[-3000:]}")
        lines = [json.loads(line) for path in folder.glob("reports_*.jsonl") for line in path.open()]
        facts = folder / "facts.json"
        more = json.loads(facts.read_text()) if facts.exists() else {}
    reports, steps = [], 0
    for line in sorted(lines, key=lambda line: float(line["time"])):
        steps += line["steps"]
        if steps <= budget:
            reports.append((line["time"] - started, steps, line["value"]))
    more["times"] = {name: at - started for name, at in more.get("times", {}).items()}
    return {"wall": wall, "steps": steps, "reports": reports, **more}


def best_of(result: dict[str, Any]) -> float:
    """Returns the lowest loss that a search reported."""
    return min(value for _, _, value in result["reports"] if not math.isnan(value))


def improvements(reports: list[Any]) -> list[Any]:
    """Returns the reports of lower losses than all before, with the first and the last of all."""
    lowest, found = math.inf, []
    for number, report in enumerate(reports):
        if report[2] < lowest or number in (0, len(reports) - 1):
            found.append(report)
        lowest = min(lowest, report[2])
    return found


def turned[T](values: Sequence[T], number: int) -> list[T]:
    """Returns the values, the first ``number`` of them at the end."""
    first = number % len(values)
    return [*values[first:], *values[:first]]


def first_within(reports: list[Any], score: float) -> tuple[float, int] | None:
    """Returns the time and the steps at which a loss was first as low as ``score``; None: never."""
    return next(((at, steps) for at, steps, value in reports if value <= score), None)


def compare(peer: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """Returns the ratio of times until the peer's best score, 0 if it was not reached, and its two factors."""
    score = best_of(peer)
    theirs, mine = first_within(peer["reports"], score), first_within(ours["reports"], score)
    assert theirs is not None
    found = {"score": score, "peer_seconds": theirs[0], "peer_steps": theirs[1], "ratio": 0.0}
    if mine is None:
        return found | {"ours": best_of(ours)}
    search = theirs[1] / mine[1]
    found |= {"seconds": mine[0], "steps": mine[1], "search": search, "ratio": theirs[0] / mine[0]}
    return found | {"throughput": found["ratio"] / search}


def rate(result: dict[str, Any]) -> float:
    """Returns the steps/s between the first and the last report."""
    (first, before, _), (last, after, _) = result["reports"][0], result["reports"][-1]
    return float((after - before) / (last - first))


_COLUMNS = {"seconds": "jaxnn s", "ratio": "times sooner", "search": "= search", "throughput": "× throughput"}


def show(results: dict[str, Any]) -> None:
    """Prints a line for each task, peer and searcher."""
    lines = []
    for name, task in results["tasks"].items():
        seeds = task["seeds"]
        for peer, searcher in (key.split(" / ") for key in seeds[0]["compared"]):
            every = [seed["compared"][f"{peer} / {searcher}"] for seed in seeds]

            def middle(key: str, form: str, every: list[Any] = every) -> str:
                values = sorted(one[key] for one in every if key in one)
                text = [f"{value:{form}}" for value in (statistics.median(values), values[0], values[-1])]
                return f"{text[0]} ({text[1]}–{text[2]})" if len(values) > 1 else text[0]

            reached = sum("seconds" in one for one in every)
            parts = [middle(key, ".2f") if reached else "–" for key in _COLUMNS]
            rates = [statistics.median(rate(seed["runs"][who]) for seed in seeds) for who in (peer, searcher)]
            first = [
                statistics.median(seed["runs"][who]["reports"][0][0] for seed in seeds) for who in (peer, searcher)
            ]
            score = middle("score", ".4f"), f"{reached} of {len(every)}", middle("peer_seconds", ".1f")
            speed = f"{rates[0]:,.0f} : {rates[1]:,.0f}", f"{first[0]:.1f} : {first[1]:.1f}"
            lines.append((name, peer, searcher, *score, *parts, *speed))
    header = ("task", "peer", "jaxnn", "score", "reached", "peer s", *_COLUMNS.values(), "steps/s", "first report, s")
    print(f"\n{text_table(lines, header)}", flush=True)


def choose(peers: tuple[str, ...], folder: Path, options: Options, budget: int) -> tuple[list[str], dict[str, float]]:
    """Returns the peers, with the quicker arrangement for optuna, and the steps/s of both."""
    if "optuna" not in peers:
        return list(peers), {}
    rates = {name: rate(run(name, folder, 1_000, options, round(PILOT * budget))) for name in OPTUNA}
    quicker = max(rates, key=lambda name: rates[name])
    return [quicker if peer == "optuna" else peer for peer in peers], rates


def main(options: Options) -> None:
    """Runs the contenders seed by seed, the peers first, and prints the table; finished seeds are kept."""
    options.out.mkdir(parents=True, exist_ok=True)
    settings = dataclasses.asdict(options) | {"python": "", "out": ""}
    results: dict[str, Any] = {**describe_machine()._asdict(), "settings": settings, "tasks": {}}
    for name in options.tasks:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            budget = write_problem(name, options, folder)
            peers, rates = choose(options.peers, folder, options, budget)
            results["tasks"][name] = {"budget": budget, "arrangements": rates, "seeds": []}
            for seed in range(options.seeds):
                runs = {one: run(one, folder, seed, options, budget) for one in turned(peers, seed)}
                score = min(best_of(result) for result in runs.values())
                runs |= {one: run(one, folder, seed, options, budget, score) for one in turned(options.searchers, seed)}
                compared = {f"{a} / {b}": compare(runs[a], runs[b]) for a in peers for b in options.searchers}
                for result in runs.values():
                    result["reports"] = improvements(result["reports"])
                results["tasks"][name]["seeds"].append({"runs": runs, "compared": compared})
                (options.out / "search_cpu.json").write_text(json.dumps(results, default=str))
                print(f"{name}, seed {seed}: {', '.join(f'{who} {one["wall"]:.0f} s' for who, one in runs.items())}")
    show(results)


if __name__ == "__main__":
    with exit_on_user_error():
        main(tyro.cli(Options, description=__doc__))
