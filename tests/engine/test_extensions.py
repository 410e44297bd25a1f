"""A user's own strategy, metric writer and stopping rule, in `fit`, `iterate`, `sweep` and on the command line."""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from tests import tiny


class Table:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.closed = 0

    def write(self, lines: Any) -> None:
        self.rows += lines

    def close(self) -> None:
        self.closed += 1


table = Table()
STRATEGY = "tests.parallel.test_layout:zero1"


def rule(lines: Any) -> bool:
    return lines[-1]["step"] >= 10 and lines[-1]["test_loss"] < 100


HOW: dict[str, Any] = {**tiny.HOW, "eval_every": 5, "steps_per_call": 5}
SWEEP: dict[str, Any] = {**HOW, "vmap_size": 2, "devices": 1}
FLAGS = ("--steps-per-call", "5", "--report-every", "5", "--eval-every", "5", "--progress", "none")
OWN = ("--strategy", STRATEGY, "--writers", f"{__name__}:table", "--stop", f"{__name__}:rule", "--devices", "2")


@pytest.fixture
def parts() -> ModuleType:
    """This module, where its names are imported from, with an empty table."""
    module = importlib.import_module(__name__)
    module.table = Table()
    return module


ALONE = [(5, None), (10, None)]
BOTH = [(5, 0), (5, 1), (10, 0), (10, 1)]


def steps(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int | None]]:
    """The steps and members that reported."""
    return [(row["step"], row.get("member")) for row in rows]


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [([], "run.json", ALONE), (["sweep", "--seed", "0", "1", "--vmap-size", "2"], "sweep.json", BOTH)],
)
def test_command_line_takes_all_three_by_name(parts, tmp_path, words, name, expected):
    jn.main(tiny.experiment(), [*words, *FLAGS, *OWN, "--run-dir", str(tmp_path / "record")])
    assert steps(parts.table.rows) == expected and parts.table.closed == 1
    assert parts.table.rows == tiny.lines(tmp_path / "record")
    options = tiny.read(tmp_path / "record", name)["options"]
    assert (options["strategy"], options["stop"]) == (STRATEGY, f"{__name__}:rule")


def test_resumed_run_keeps_its_stopping_rule(parts, tmp_path):
    for number, rule in enumerate((f"{__name__}:rule", parts.rule)):
        path = tmp_path / str(number)
        for report in jn.iterate(tiny.experiment(), run_dir=path, **HOW, stop=rule):
            if report.step == 5:
                break
    assert tiny.fit(tiny.experiment(), resume=tmp_path / "0").summary.step == 10
    with pytest.raises(jn.ConfigError, match="stopping rule 'rule'.*stop again"):
        tiny.fit(tiny.experiment(), resume=tmp_path / "1")
    assert tiny.fit(tiny.experiment(), resume=tmp_path / "1", stop=parts.rule).summary.step == 10


def test_resumed_sweep_keeps_its_stopping_rule(parts, tmp_path):
    def fail(lines: Any) -> None:
        raise ZeroDivisionError("mine")

    parts.table.write = fail
    where = {"run_dir": tmp_path / "sweep", "writers": (parts.table,)}
    with pytest.raises(ZeroDivisionError, match="mine"):
        jn.sweep(tiny.experiment(), jn.grid(learning_rate=[0.1, 0.2]), stop=parts.rule, **SWEEP, **where)
    again = {"resume": tmp_path / "sweep", "progress": "none", "devices": 1}
    with pytest.raises(jn.ConfigError, match="stopping rule 'rule'.*stop again"):
        jn.sweep(tiny.experiment(), **again)
    sweep = jn.sweep(tiny.experiment(), stop=parts.rule, **again)
    assert [(member.step, member.status) for member in sweep.members] == [(10, "stopped early")] * 2
    # Loaded, not trained further, though the record cannot hold the rule.
    assert int(sweep.run(0).state.step) == 10 and sweep.run(1).summary.status == "stopped early"


def test_writer_gets_no_empty_reports(parts):
    # All members diverge in the first window, and the device is asked for its state at the end only.
    writes: list[int] = []
    parts.table.write = lambda lines: writes.append(len(lines))
    how = {**SWEEP, "eval_every": 0, "record": False, "writers": (parts.table,)}
    jn.sweep(tiny.experiment(), jn.grid(learning_rate=[1e38, 2e38]), **how)
    assert writes == [2]


def test_writers_and_rules_get_copies(parts):
    def clear(lines: list[dict[str, Any]]) -> None:
        lines[0].clear()
        lines.clear()

    writers = SimpleNamespace(write=clear), parts.table
    run = tiny.fit(tiny.experiment(num_steps=10), **HOW, writers=writers, stop=clear)
    assert run.metrics["step"].tolist() == [5, 10] and steps(parts.table.rows) == ALONE


@pytest.mark.parametrize(
    ("stop", "error", "words"),
    [
        (lambda lines: 1 / 0, ZeroDivisionError, "division"),
        (lambda lines: np.array([True, False]), jn.ConfigError, r"stop .*\(2,\).*True or False"),
    ],
)
def test_writer_is_closed_if_a_rule_fails(parts, stop, error, words):
    with pytest.raises(error, match=words):
        tiny.fit(tiny.experiment(), **HOW, writers=[parts.table], stop=stop)
    assert parts.table.closed == 1
