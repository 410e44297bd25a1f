"""Budgets of time beside the time that runs take, from command to exit.

Claim     none yet: the aim is that 27 of 30 runs of three networks, with budgets from 10 s to 5 min, end within 3 %
Command   python experiments/benchmarks/budgets.py

On a machine that nothing else uses, whose own speed does not vary either. Each run is a process of its own, without
compiled programs of earlier ones; its schedule has to be complete. The scripts do nothing after training: a budget
holds for the run, and the text that char_gpt.py then generates is compiled outside of it.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro
from harness import describe_machine

from jaxnn.cli import exit_on_user_error
from jaxnn.observe import text_table

EXPERIMENTS = Path(__file__).parents[1]
NEAR = 0.03  # of a budget


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run, and where to write the results."""

    experiments: tuple[str, ...] = ("digits_mlp", "mnist_mlp", "mnist_cnn")
    seconds: tuple[float, ...] = (10, 12, 15, 20, 25, 30, 40, 60, 120, 300)
    out: Path = Path("runs/benchmarks")
    """Folder for budgets.json."""


def timed(experiment: str, budget: float) -> dict[str, float | str]:
    """Runs an experiment within a budget."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXPERIMENTS / f"{experiment}.py"), "--budget", f"{budget:g} s"]
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
        started = time.perf_counter()
        found = subprocess.run([*command, "--run-dir", f"{folder}/run"], stdout=subprocess.DEVNULL, env=environment)
        seconds = time.perf_counter() - started
        if found.returncode == 2:  # a budget that compilation alone exceeds is refused, and counts as missed
            return {"experiment": experiment, "budget": budget, "seconds": seconds, "steps": 0, "complete": False}
        found.check_returncode()
        facts = json.loads(Path(folder, "run", "record.json").read_text())
    done, asked = facts["summary"]["step"], facts["config"]["num_steps"]
    return {"experiment": experiment, "budget": budget, "seconds": seconds, "steps": done, "complete": done == asked}


@exit_on_user_error()
def main() -> None:
    """Runs everything, and prints a table."""
    options, rows = tyro.cli(Options, description=__doc__), []
    for budget in options.seconds:
        for experiment in options.experiments:
            rows.append(row := timed(experiment, budget))
            print(f"{experiment}  {budget:g} s: {row['seconds']:.2f} s, {row['steps']:,} steps", flush=True)
    table: list[list[str]] = []
    for experiment in options.experiments:
        own = [row for row in rows if row["experiment"] == experiment]
        errors = [f"{100 * (float(row['seconds']) / float(row['budget']) - 1):+.1f} %" for row in own]
        table.append([experiment, *errors])
    print(text_table(table, ["", *(f"{seconds:g} s" for seconds in options.seconds)]))
    near = sum(bool(row["complete"]) and abs(float(row["seconds"]) / float(row["budget"]) - 1) <= NEAR for row in rows)
    whole = sum(bool(row["complete"]) for row in rows)
    print(f"{near} of {len(rows)} within {NEAR:.0%}; {whole} schedules complete")
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"machine": describe_machine(), "runs": rows}
    (options.out / "budgets.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
