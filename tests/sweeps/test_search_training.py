"""Searches while they train: members in lanes, paused, continued, copied, interrupted and resumed."""

import dataclasses
import json
import math
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest

import jaxnn as jn
from jaxnn.cli import command
from tests import shell, tiny

LONG = tiny.experiment(num_steps=54)
RATE, LOG = {"learning_rate": jn.search.log_uniform(1e-3, 1.0)}, {"learning_rate": "log"}
QUIET: Any = {"lanes": 4, "progress": "none", "vmap_size": 1, "devices": 2, "steps_per_call": 2}


class Stopping:
    """A metric writer that interrupts the search at its report of a number."""

    def __init__(self, report: int) -> None:
        self.left = report

    def write(self, lines: Any) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def outcome(sweep: jn.Sweep) -> list[Any]:
    """What is equal to the bit in a resumed search."""
    lines = [
        {name: line[name] for name in line if not name.endswith(("second", "seconds", "elapsed"))}
        for line in sweep.lines
    ]
    lines.sort(key=lambda line: (line["member"], line["step"]))
    return [[(member.point, member.status, member.step, member.final) for member in sweep.members], lines]


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> jn.Sweep:
    path = tmp_path_factory.mktemp("search") / "sweep"
    return jn.sweep(LONG, jn.search.asha(RATE, num=18), run_dir=path, **QUIET)


def test_members_of_a_search_equal_their_solo_runs(searched):
    assert searched.status == "finished" and len(searched.members) == 18
    counts = Counter(member.step for member in searched.members)
    # Of 18 members a third goes on after 6 of 54 steps, and a third of these after 18.
    assert 10 <= counts[6] <= 12 and counts[54] >= 1 and {*counts} == {6, 18, 54}
    for member in (searched.best(), next(member for member in searched.members if member.step == 18)):
        alone = tiny.fit(LONG.replace(**member.point), report_every=6, eval_every=6)
        at = list(alone.metrics["step"]).index(member.step)
        assert member.final["test_loss"] == pytest.approx(alone.metrics["test_loss"][at], rel=1e-5)


def test_searched_members_are_opened_evaluated_and_continued(searched, tmp_path):
    best, pruned = searched.best(), next(member for member in searched.members if member.step == 18)
    run = searched.run(best)
    assert run.evaluate("test")["loss"] == pytest.approx(best.final["test_loss"], rel=1e-5)
    again = jn.open_sweep(searched.dir, LONG)
    assert outcome(again) == outcome(searched) and again.axes == searched.axes
    losses = again.evaluate("test", devices=1)["loss"]
    assert losses[best.index] == pytest.approx(best.final["test_loss"], rel=1e-5) and math.isnan(losses[pruned.index])
    rest = jn.fit(LONG, resume=searched.dir, member=pruned.index, run_dir=tmp_path / "rest", progress="none")
    alone = tiny.fit(LONG.replace(**pruned.point))
    assert rest.summary.step == 54 and rest.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-4)
    command(["show", str(searched.dir)])


def test_a_list_in_lanes_is_the_list_as_a_sweep():
    points = jn.grid(learning_rate=[0.01, 0.1, 3.0, 0.2, 0.3, 0.4])
    how = {**QUIET, "record": False, "patience": 2, "report_every": 6, "eval_every": 6}
    lanes, together = (jn.sweep(LONG, points, **{**how, "lanes": lanes}) for lanes in (4, None))
    assert [(one.status, one.step) for one in lanes.members] == [(one.status, one.step) for one in together.members]
    np.testing.assert_allclose(lanes.values("test_loss"), together.values("test_loss"), rtol=1e-5)


SEARCHES = {
    "asha": lambda: jn.search.asha(RATE, num=14),
    "pbt": lambda: jn.search.pbt(RATE, 6, generations=3),
    "patience": lambda: jn.search.patience(RATE, num=10, reports=9, patience=1),
    # The second group's members are all among the worst, so that a resumed search never trains them again.
    "halving": lambda: jn.search.halving(
        jn.search.zip(learning_rate=[0.1, 0.2, 0.3, 1e-4, 2e-4, 3e-4], batch_size=[8, 8, 8, 4, 4, 4]), 2
    ),
    "groups": lambda: jn.search.asha({**RATE, "batch_size": jn.search.choice([4, 8])}, num=12),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name != "asha" else ()) for name in SEARCHES]
)
def test_interrupted_search_resumes_to_the_same_proposals(name, tmp_path):
    make, path = SEARCHES[name], tmp_path / "sweep"
    whole = jn.sweep(LONG, make(), record=False, **QUIET)
    first = jn.sweep(LONG, make(), run_dir=path, writers=(Stopping(3),), **QUIET)
    assert first.status == "interrupted" and len(first.lines) < len(whole.lines)
    second = jn.sweep(LONG, make(), resume=path, writers=(Stopping(2),), **QUIET)
    assert second.status == "interrupted" and len(second.lines) > len(first.lines)
    # Without the searcher: the record describes it.
    assert outcome(jn.sweep(LONG, resume=path, writers=(), **QUIET)) == outcome(whole)
    assert [one["step"] > 0 for one in tiny.read(path)["resumed"]] == [True, True]


def test_copies_continue_from_the_state_of_a_member():
    sweep = jn.sweep(LONG, jn.search.pbt(RATE, 6, generations=3), record=False, **QUIET)
    first = {
        member.index: line["step"]
        for member in sweep.members
        for line in sweep.lines[::-1]
        if line["member"] == member.index
    }
    # Two generations of one copy each begin where their parents were.
    assert [first[member.index] for member in sweep.members] == [18] * 6 + [36, 54]
    assert Counter(member.status for member in sweep.members) == {"finished": 6, "pruned": 2}


def test_members_that_fail_or_diverge_are_told_and_the_rest_goes_on():
    def optimizer(config: tiny.Config) -> Any:
        if config.batch_size == 5:
            raise ValueError("no five")
        return tiny.experiment().optimizer(config)

    points = jn.search.zip(learning_rate=[0.1, math.inf, 0.2, 0.3, 0.05, 0.4], batch_size=[8, 8, 5, 8, 8, 8])
    searcher = jn.search.asha(points, eta=2, min_fraction=0.5)
    sweep = jn.sweep(tiny.experiment(optimizer=optimizer), searcher, record=False, **QUIET)
    assert [sweep.members[index].status for index in (1, 2)] == ["diverged", "failed"]
    assert "no five" in str(sweep.members[2].error)
    assert Counter(member.status for member in sweep.members)["finished"] >= 2 and sweep.status == "finished"


def test_a_back_test_tells_what_searches_spend_and_find(searched):
    points = jn.search.random(17, 0, **RATE) + jn.search.zip(learning_rate=[math.inf])
    whole = jn.sweep(LONG, points, record=False, report_every=6, eval_every=6, progress="none")
    searchers = {
        "all": lambda points: jn.search.halving(points, min_fraction=1.0),
        "asha": jn.search.asha,
        "patience": lambda points: jn.search.patience(points, reports=9, patience=1),
        "extrapolated": lambda points: jn.search.extrapolated(points, reports=9, first=4, confidence=0.6),
    }
    found, steps = whole.backtest(searchers, orders=3, lanes=4), sum(member.step for member in whole.members)
    assert found.regret["all"].tolist() == [0.0] * 3 and "steps spent" in repr(found)
    # Searches that train these points in the first of the orders.
    order = np.random.default_rng(0).permutation(18)
    ordered = jn.search.Points(tuple(points.points[index] for index in order), points.scales)
    statuses = set[str]()
    for name in ("asha", "patience", "extrapolated"):
        live = jn.sweep(LONG, searchers[name](ordered), record=False, **QUIET)
        assert found.spent[name][0] == pytest.approx(live.summary["member_steps"] / steps, rel=1e-6), name
        regret = live.best().final["test_loss"] - whole.best().final["test_loss"]
        assert found.regret[name][0] == pytest.approx(regret, abs=1e-5), name
        statuses |= {member.status for member in live.members}
    assert statuses == {"finished", "pruned", "stopped early", "diverged"}
    with pytest.raises(jn.ConfigError, match="needs members that finished"):
        searched.select(learning_rate=searched.best().point["learning_rate"]).backtest()
    with pytest.raises(jn.ConfigError, match="a back-test needs functions from points to a searcher"):
        searched.backtest({})
    late = dataclasses.replace(whole, lines=tuple(line for line in whole.lines if line["step"] >= 24))
    with pytest.warns(UserWarning, match="asha compares members after step 6, and .* before step 24: .* flatters it"):
        late.backtest({"asha": jn.search.asha}, orders=1)


REFUSED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "and windows of a search fill the steps: choose num_steps=56": (LONG, None, {"eval_every": 8}),
    "which windows of about 111 steps do not fill": (tiny.experiment(num_steps=997), None, {}),
    "a searcher compares all members": (LONG, None, {"shard": "1/2", "run_dir": "there"}),
    "the data are not on the device": (LONG, None, {"resident": False}),
    "must set the fields of its scales: learning_rate": (
        *(
            LONG,
            jn.search.Searcher("mine", lambda: 0, lambda state, count: (0, [jn.search.Propose({})]), scales=LOG),
            {},
        ),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_searches_that_cannot_train_write_nothing(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment, searcher, options = REFUSED[words]
    with pytest.raises(jn.ConfigError, match=words):
        jn.sweep(experiment, searcher or jn.search.asha(RATE, num=9), **QUIET, **options)
    assert not list(tmp_path.iterdir())


def test_a_search_that_fails_before_its_first_checkpoint_starts_again(tmp_path):
    calls: list[int] = []
    searcher = SEARCHES["asha"]()

    def tell(state: Any, reports: Any) -> Any:
        calls.append(len(reports))
        return {}["oops"] if len(calls) == 3 else searcher.tell(state, reports)

    path, how = tmp_path / "sweep", QUIET | {"checkpoint_every": 10**6}
    whole = jn.sweep(LONG, searcher, record=False, **QUIET)
    raised = r"tell of the searcher asha raised KeyError: 'oops', at .*test_search_training.py"
    with pytest.raises(jn.ConfigError, match=raised):
        jn.sweep(LONG, searcher._replace(tell=tell), run_dir=path, **how)
    assert len(jn.open_sweep(path).members) >= 4
    assert outcome(jn.sweep(LONG, resume=path, **how)) == outcome(whole)
    # A finished one is loaded whole.
    assert outcome(jn.sweep(LONG, resume=path, progress="none")) == outcome(whole)


def test_lost_lines_of_a_killed_search_are_reported_and_made_again(tmp_path, capsys):
    path = tmp_path / "sweep"
    whole = jn.sweep(LONG, SEARCHES["asha"](), record=False, **QUIET)
    jn.sweep(LONG, SEARCHES["asha"](), run_dir=path, writers=(Stopping(4),), **QUIET)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    late = lines[-1].replace('"member": ', '"member": 99')
    (path / "metrics.jsonl").write_text("".join([*lines[:2], *lines[3:], late]))
    found = jn.sweep(LONG, resume=path, writers=(), **QUIET | {"progress": "plain"})
    assert "is damaged up to the checkpoint" in " ".join(capsys.readouterr().out.split())
    # What the searcher was told is not lost, and so neither are its decisions.
    assert [member.status for member in found.members] == [member.status for member in whole.members]
    numbers = [(line["member"], line["step"]) for line in jn.open_sweep(path).lines]
    assert len(numbers) == len({*numbers})


def test_values_that_change_the_program_are_refused_or_form_groups():
    space = {**RATE, "batch_size": jn.search.choice([4, 8])}
    with pytest.raises(jn.ConfigError, match="copies states, and another value of batch_size is another program"):
        jn.sweep(LONG, jn.search.pbt(space, 8, key=1, generations=3), record=False, **QUIET)
    with pytest.raises(jn.ConfigError, match="a value of batch_size is a compilation, and max_groups is 1"):
        jn.sweep(LONG, jn.search.asha(space, 8, key=1), record=False, max_groups=1, **QUIET)
    with pytest.warns(UserWarning, match="asks for reports after 6 steps, and the first evaluation is after 27"):
        sweep = jn.sweep(LONG, jn.search.asha(RATE, num=9), eval_every=27, record=False, **QUIET)
    assert {member.status for member in sweep.members} == {"pruned", "finished"}


def test_another_searcher_and_damaged_events_are_refused(searched, tmp_path, capsys):
    for flags in (["--search", "halving"], ["--key", "3"], ["--search", "asha", "--propose", "tpe"]):
        failed = shell.fails(capsys, lambda words: jn.main(LONG, words), "sweep", "--resume", str(searched.dir), *flags)
        assert "the search continues with its asha: leave --search" in failed
    for other in (jn.search.asha(RATE, num=17), jn.search.halving(RATE, num=18), jn.grid(seed=[0])):
        with pytest.raises(jn.ConfigError, match="the searcher of the sweep in .* is not this one"):
            jn.sweep(LONG, other, resume=searched.dir, progress="none")
    path = tmp_path / "sweep"
    jn.sweep(LONG, SEARCHES["asha"](), run_dir=path, writers=(Stopping(4),), **QUIET)
    events = (path / "search.jsonl").read_text().splitlines(keepends=True)
    for content, words in (("".join(events[:-1]), "lacks events"), (json.dumps({"ask": "x"}) + "\n", "does not start")):
        (path / "search.jsonl").write_text(content)
        with pytest.raises(jn.RecordError, match=words):
            jn.sweep(LONG, resume=path, writers=(), **QUIET)


def test_members_that_no_windows_fill_fail_and_others_train(tmp_path):
    points = jn.grid(num_steps=[54, 53, 27])
    found = jn.sweep(LONG, jn.search.asha(points), run_dir=tmp_path / "sweep", **QUIET)
    assert found.status == "finished" and "num_steps is 53" in str(found.members[1].error)
    assert [member.status == "failed" for member in found.members] == [False, True, False]
    assert "finished" in {member.status for member in found.members}


def test_searchers_that_learn_have_fewer_lanes():
    how: Any = {**QUIET, "lanes": None, "plan_only": True, "record": False}
    for points, lanes in ((jn.search.random(40, 0, **RATE), 40), (jn.search.tpe(RATE, num=40), 5)):
        for searcher in (jn.search.asha(points), jn.search.halving(points), jn.search.patience(points)):
            assert len(jn.sweep(LONG, searcher, **how).members) == lanes


def test_search_from_the_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def sweep(words: str) -> Any:
        quiet = "--no-record --progress none --vmap-size 2 --lanes 4 --devices 1 --num-steps 54"
        return jn.main(LONG, ["sweep", *words.split(), *quiet.split()])

    found = sweep("--search asha --propose tpe --space learning_rate=log:1e-3:1 batch-size=4,8 --num 8 --eta 2")
    assert len(found.members) == 8 and {member.point["batch_size"] for member in found.members} == {4, 8}
    assert [axis.scale for axis in found.axes] == ["log", "nominal"]
    drawn = sweep("--space batch_size=4:5 --seed 0 1 --num 2 --search random")
    assert [member.point["seed"] for member in drawn.members] == [0, 1, 0, 1]
    wrong = {
        "--space learning_rate=log:1:x --num 3": "has no two numbers: write learning_rate=",
        "--space lerning_rate=0:1 --num 3": "no field 'lerning_rate': did you mean 'learning_rate'",
        "--space learning_rate --num 3": "is no FIELD=VALUES of the config",
        "--space learning_rate=0:1 --num 3 --learning-rate 1 2": "learning_rate has values and is drawn",
        "--space learning_rate=0:1": "say how many, as in --num 64",
        "--space learning_rate=0:1 learning-rate=1:2 --num 3": "--space has 'learning_rate' twice",
        "--seed 0 1 --num 3": "--num counts draws of a --space",
        "--seed 0 1 --search pbt": "--search pbt draws from a space",
        "--seed 0 1 --search asha --propose tpe": "--propose tpe draws from a space",
        "--space learning_rate=0:1 --num 3 --propose tpe": "--propose is of --search halving, asha",
        "--space learning_rate=0:1 --seed 0 1 --num 3 --search tpe": "tpe: the field 'seed' has [0, 1]",
        "--seed 0 1 --eta 3": "--eta is of --search halving or asha",
    }
    for words, message in wrong.items():
        assert message in shell.fails(capsys, lambda given: sweep(" ".join(given)), *words.split())


def test_member_whose_state_was_dropped_is_trained_again_when_it_is_promoted(searched, tmp_path):
    found = jn.sweep(LONG, jn.search.asha(RATE, num=18), run_dir=tmp_path / "sweep", states_mib=0, **QUIET)
    assert found.summary["member_steps"] > searched.summary["member_steps"]
    lines = [{(line["member"], line["step"]): line["test_loss"] for line in one.lines} for one in (searched, found)]
    shared = lines[0].keys() & lines[1].keys()
    assert len(lines[1]) == len(found.lines) and any(step > 18 for _, step in shared)
    assert all(lines[0][key] == lines[1][key] for key in shared)
