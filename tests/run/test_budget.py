"""Budgets of time: the number of steps that fits is chosen by a trial, recorded, and not chosen again."""

import json

import pytest

import jaxnn as jn
from jaxnn.engine import Budget, Pace, RunOptions
from tests import tiny


class Elapsed:
    """A clock that has counted some seconds."""

    passed = 4.0


def test_steps_evaluations_and_saves_fill_the_budget():
    pace = Pace(opening=2.0, step=1e-3, evaluation=0.1, save=0.5, steps_per_call=10, examples=[64])
    found = Budget.solved(tiny.experiment(), RunOptions(budget="1 min"), [pace], Elapsed())
    # 60 s less 4 s so far, 2 s to compile, 10 evaluations of 0.1 s and a save, to a hundredth.
    assert 52_000 <= found.num_steps <= 52_500 and found.num_steps % 500 == 0
    twice = Budget.solved(tiny.experiment(), RunOptions(budget="1 min", eval_every=100), [pace, pace], Elapsed())
    # An evaluation takes as long as its steps.
    assert twice.num_steps == pytest.approx(51_000 / 4, rel=0.03)
    with pytest.raises(jn.ConfigError, match="give 7 s"):
        Budget.solved(tiny.experiment(), RunOptions(budget="6 s"), [pace], Elapsed())


def stops_at(step):
    return {"stop": lambda lines: lines[-1]["step"] >= step, "eval_every": 50, "steps_per_call": 5}


def test_run_within_a_budget_is_recorded_as_a_plain_one_and_resumed(tmp_path):
    path, experiment = tmp_path / "run", tiny.experiment()
    run = tiny.fit(experiment, path, budget="40 s", **stops_at(50))
    num_steps = run.config.num_steps
    assert run.summary.step == 50 and num_steps > 500
    facts = tiny.read(path)
    assert facts["config"]["num_steps"] == num_steps and facts["options"]["budget"] == "40 s"
    again = tiny.fit(experiment, resume=path, **stops_at(150))
    assert again.summary.step == 150 and again.config.num_steps == num_steps
    longer = tiny.fit(tiny.experiment(num_steps=200), resume=path, budget=None, **stops_at(999))
    assert (longer.summary.status, longer.summary.step) == ("finished", 200)
    with pytest.raises(jn.ConfigError, match="recorded run"):
        tiny.fit(experiment, resume=path, budget="5 s")


def test_list_within_a_budget_trains_all_members_equally():
    how = {"devices": 2, "progress": "none", "record": False, "vmap_size": 1, **stops_at(50)}
    with pytest.raises(jn.ConfigError, match="num_steps is swept"):
        jn.sweep(tiny.experiment(), jn.grid(num_steps=[10, 20]), budget="5 s", **how)
    sweep = jn.sweep(tiny.experiment(), jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1]), budget="40 s", **how)
    (num_steps,) = {member.config["num_steps"] for member in sweep.members}
    assert num_steps > 500 and {member.step for member in sweep.members} == {50}


def test_search_ends_in_time_with_its_best_member_complete(tmp_path):
    searcher = jn.search.asha({"learning_rate": jn.search.log_uniform(1e-3, 1.0)}, num=10_000)
    how = {"lanes": 4, "progress": "none", "vmap_size": 1, "devices": 2, "steps_per_call": 2}
    experiment, path = tiny.experiment(num_steps=54), tmp_path / "sweep"
    sweep = jn.sweep(experiment, searcher, budget="3 s", run_dir=path, **how)
    # On a busy machine it ends after the first window.
    assert sweep.status == "finished" and 4 <= len(sweep.members) < 10_000
    assert {member.status for member in sweep.members} == {"finished", "pruned"}
    assert sweep.best().status == "finished"
    events = [json.loads(line) for line in (path / "search.jsonl").read_text().splitlines()]
    assert events[-1] == {"end": "budget"}
    assert len(jn.sweep(experiment, searcher, resume=path, progress="none").members) == len(sweep.members)


@pytest.mark.parametrize(("text", "seconds"), [("90 s", 90), ("10 min", 600), ("1.5h", 5400), ("2 minutes", 120)])
def test_budgets_are_times(text, seconds):
    assert jn.RunOptions(budget=text).budget_seconds == seconds


@pytest.mark.parametrize("text", ["10", "ten minutes", "0 s", "-3 s", "5 parsecs", 300, ""])
def test_what_is_no_budget_is_one_line(text):
    with pytest.raises(jn.ConfigError, match="must be a time such as"):
        jn.RunOptions(budget=text)
