"""Budgets of time: the number of steps that fits is chosen by a trial, recorded, and not chosen again."""

import json

import pytest

import jaxnn as jn
from jaxnn.engine import Budget, Pace, RunOptions
from tests import tiny


class Elapsed:
    """A clock that has counted some seconds."""

    seconds = {"compile": 4.0}


def test_steps_evaluations_and_saves_fill_the_budget():
    pace = Pace(opening=2.0, step=1e-3, evaluation=0.1, save=0.5, steps_per_call=10, examples=[64])
    found = Budget.solved(tiny.experiment(), RunOptions(budget="1 min"), [pace], Elapsed())
    # 60 s less 4 s so far, 2 s to compile, 10 evaluations of 0.1 s and a save, to a hundredth.
    assert 52_000 <= found.num_steps <= 52_500 and found.num_steps % 500 == 0
    twice = Budget.solved(tiny.experiment(), RunOptions(budget="1 min", eval_every=100), [pace, pace], Elapsed())
    assert twice.num_steps == pytest.approx(
        51_000 / (2 * (1 + 1)), rel=0.01
    )  # an evaluation takes as long as its steps
    with pytest.raises(jn.ConfigError, match="take 6"):
        Budget.solved(tiny.experiment(), RunOptions(budget="6 s"), [pace], Elapsed())


def test_run_within_a_budget_is_recorded_as_a_plain_one_and_resumed(tmp_path):
    stopped = {"stop": lambda lines: len(lines) > 2}
    run = tiny.fit(tiny.experiment(), tmp_path / "run", budget="5 s", steps_per_call=5, **stopped)
    num_steps = run.config.num_steps
    assert run.summary.status == "stopped early" and num_steps > 20
    facts = tiny.read(tmp_path / "run")
    assert facts["config"]["num_steps"] == num_steps and facts["options"]["budget"] == "5 s"
    again = tiny.fit(tiny.experiment(), resume=tmp_path / "run", stop=None, eval_every=num_steps)
    assert again.summary.step == num_steps and again.summary.status == "finished"
    with pytest.raises(jn.ConfigError, match="recorded run"):
        tiny.fit(tiny.experiment(), resume=tmp_path / "run", budget="5 s")


def test_list_within_a_budget_trains_all_members_equally(tmp_path):
    points = jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1])
    with pytest.raises(jn.ConfigError, match="num_steps is swept"):
        jn.sweep(tiny.experiment(), jn.grid(num_steps=[10, 20]), budget="5 s", record=False, progress="none")
    how = {"vmap_size": 1, "devices": 2, "steps_per_call": 2, "progress": "none", "record": False}
    sweep = jn.sweep(tiny.experiment(), points, budget="6 s", **how)
    (num_steps,) = {member.step for member in sweep.members}
    assert num_steps > 20 and sweep.members[0].config["num_steps"] == num_steps


def test_search_ends_in_time_with_its_best_member_complete(tmp_path):
    searcher = jn.search.asha({"learning_rate": jn.search.log_uniform(1e-3, 1.0)}, num=10_000)
    how = {"lanes": 4, "progress": "none", "vmap_size": 1, "devices": 2, "steps_per_call": 2}
    sweep = jn.sweep(tiny.experiment(num_steps=54), searcher, budget="3 s", run_dir=tmp_path / "sweep", **how)
    assert sweep.status == "finished" and 4 <= len(sweep.members) < 10_000
    assert {member.status for member in sweep.members} == {"finished", "pruned"}
    best = min(sweep.members, key=lambda member: member.final["test_loss"])
    assert best.status == "finished" and sweep.best().index == best.index
    events = [json.loads(line) for line in (tmp_path / "sweep" / "search.jsonl").read_text().splitlines()]
    assert events[-1] == {"end": "budget"}
    assert len(
        jn.sweep(tiny.experiment(num_steps=54), searcher, resume=tmp_path / "sweep", progress="none").members
    ) == len(sweep.members)


@pytest.mark.parametrize(("text", "seconds"), [("90 s", 90), ("10 min", 600), ("1.5h", 5400), ("2 minutes", 120)])
def test_budgets_are_times(text, seconds):
    assert jn.RunOptions(budget=text).budget_seconds == seconds


@pytest.mark.parametrize("text", ["10", "ten minutes", "0 s", "-3 s", "5 parsecs", 300, ""])
def test_what_is_no_budget_is_one_line(text):
    with pytest.raises(jn.ConfigError, match="must be a time such as"):
        jn.RunOptions(budget=text)
