"""``iterate``: reports and state between windows, and how a run ends when its loop is left."""

from __future__ import annotations

from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.record import is_locked
from tests import shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def run() -> jn.Run:
    return tiny.fit(tiny.experiment(num_steps=40))


def test_reports_states_and_parameters_equal_those_of_fit(run: jn.Run) -> None:
    iteration = jn.iterate(run.experiment, record=False, **tiny.HOW)
    reports, states = [], []
    for report in iteration:
        reports.append(report)
        states.append(iteration.state)
        assert int(iteration.run.state.step) == report.step
        assert ("test_loss" in report.metrics) == (report.step % 10 == 0)
        assert iteration.run.predict(tiny.points(2)[0]).shape == (2, 3)
    assert [report.step for report in reports] == list(range(5, 41, 5))
    np.testing.assert_array_equal([report.metrics["train_loss"] for report in reports], run.metrics["train_loss"])
    chex.assert_trees_all_equal(iteration.state.params, run.state.params)
    assert iteration.run.summary.status == "finished"
    # Each state is a copy: training reuses the memory of the original.
    assert [int(state.step) for state in states] == list(range(5, 41, 5))
    half = tiny.fit(run.experiment.replace(num_steps=20), eval_every=0)
    chex.assert_trees_all_equal(jax.device_get(states[3]).params, half.state.params)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_leaving_the_loop_saves_and_can_be_resumed(
    run: jn.Run, tmp_path: Path, error: type[BaseException] | None
) -> None:
    path = tmp_path / "run"
    iteration = jn.iterate(run.experiment, run_dir=path, **tiny.HOW, checkpoint_every=10)
    try:
        for report in iteration:
            if report.step == 15:
                if error is not None:
                    raise error
                break
    except BaseException as raised:
        assert type(raised) is error
    facts = tiny.read(path)
    assert facts["status"] == facts["summary"]["status"] == iteration.run.summary.status == "interrupted"
    assert int(iteration.run.state.step) == facts["summary"]["step"] == 15
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["10", "15"]
    assert int(iteration.run.best_state().step) == 10, "a state is ranked by the metrics of its step"
    assert not is_locked(path)
    resumed = tiny.fit(run.experiment, resume=path)
    chex.assert_trees_all_equal(resumed.state.params, run.state.params)
    np.testing.assert_array_equal(resumed.metrics["train_loss"], run.metrics["train_loss"])


def test_leaving_the_loop_after_its_last_window_is_finished(run: jn.Run, tmp_path: Path) -> None:
    iteration = jn.iterate(tiny.experiment(), run_dir=tmp_path / "run", **tiny.HOW)
    for report in iteration:
        if report.step == 20:
            break
    assert iteration.run.summary.status == tiny.read(tmp_path / "run")["status"] == "finished"


OPEN = """
import sys
import jaxnn as jn
from tests import tiny
loop = iter(jn.iterate(tiny.experiment(), run_dir=sys.argv[1], checkpoint_every=5, **tiny.HOW))
print(next(loop).step)
"""


@pytest.mark.slow
def test_loop_left_open_at_exit_completes_the_record(tmp_path: Path) -> None:
    done = shell.python("-c", OPEN, tmp_path / "run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
    assert tiny.read(tmp_path / "run")["status"] == "interrupted"
    assert tiny.fit(tiny.experiment(), resume=tmp_path / "run").summary.status == "finished"
