"""A sweep while it goes on: members that diverge, stop early or are taken out; interruptions; what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.record import Checkpoints
from jaxnn.sweeps import SweepOptions, plan_sweep
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

HOW: dict[str, Any] = {
    "report_every": 5,
    "eval_every": 10,
    "steps_per_call": 5,
    "progress": "none",
    "vmap_size": 2,
    "devices": 1,
}


@dataclasses.dataclass(frozen=True)
class Breaking(tiny.Config):
    bad_step: float = 0.0  # The update from which on the gradient is NaN; 0: never


def breaking() -> jn.Experiment[Breaking]:
    """SGD whose gradient becomes NaN at a step that is a member's own."""

    def optimizer(config: Breaking) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            bad = (config.bad_step > 0) & (state + 1 >= config.bad_step)
            spoilt = {name: jnp.where(bad, jnp.nan, value) for name, value in updates.items()}
            return spoilt, state + 1

        spoil = optax.GradientTransformation(lambda params: jnp.int32(0), update)
        return optax.chain(spoil, optax.sgd(config.learning_rate, momentum=0.9))

    tiny_parts = tiny.experiment()
    return jn.Experiment(Breaking(), tiny_parts.data, lambda config: tiny_parts.task(tiny.Config()), optimizer)


def told(sweep: jn.Sweep) -> list[str]:
    """Every report without its speed, in an order that does not depend on which group came first."""
    speed = ("seconds", "steps_per_second", "examples_per_second")
    return sorted(json.dumps({k: v for k, v in line.items() if k not in speed}, sort_keys=True) for line in sweep.lines)


def outcome(sweep: jn.Sweep) -> list[tuple[Any, ...]]:
    return [(m.index, m.status, m.step, dict(m.final), dict(m.best)) for m in sweep.members]


# --- members that diverge ---


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    """Three members of which the second sees a NaN gradient at update 7, so that the loss of step 8 is not finite."""
    points = jn.search.zip(learning_rate=[0.1, 0.2, 0.3], bad_step=[0.0, 7.0, 0.0])
    return jn.sweep(breaking(), points, run_dir=tmp_path_factory.mktemp("diverged") / "sweep", member_runs=True, **HOW)


def test_a_diverged_member_is_frozen_and_marked(diverged: jn.Sweep) -> None:
    member = diverged.members[1]
    assert [m.status for m in diverged.members] == ["finished", "diverged", "finished"]
    # The window from 5 to 10 tells of it; the state is that before its call.
    assert member.step == 10 and np.isnan(member.final["train_loss"])
    assert [line["step"] for line in diverged.lines if line["member"] == 1] == [5, 10]
    assert member.dir is not None
    before = tiny.fit(breaking().replace(learning_rate=0.2, bad_step=7.0, num_steps=5)).state
    assert Checkpoints(member.dir / "checkpoints").steps() == [5]
    kept = jn.load_checkpoint(member.dir, before)
    for name, value in before.params.items():
        np.testing.assert_allclose(kept.params[name], value, rtol=1e-5)
    with pytest.raises(jn.ConfigError, match="member 1 is diverged, and loading it would train it on"):
        diverged.run(1)


def test_the_others_are_untouched_bit_for_bit(diverged: jn.Sweep) -> None:
    points = jn.search.zip(learning_rate=[0.1, 0.2, 0.3], bad_step=[0.0, 70.0, 0.0])
    sound = jn.sweep(breaking(), points, record=False, **HOW)
    assert [member.status for member in sound.members] == ["finished"] * 3
    for index in (0, 2):
        assert [line for line in told(sound) if f'"member": {index}' in line] == [
            line for line in told(diverged) if f'"member": {index}' in line
        ]


def test_a_sweep_of_which_all_diverge_ends(tmp_path: Path) -> None:
    points = jn.search.zip(learning_rate=[0.1, 0.2, 0.3], bad_step=[1.0, 2.0, 8.0])
    sweep = jn.sweep(breaking(), points, run_dir=tmp_path / "sweep", **HOW)
    assert [(member.status, member.step) for member in sweep.members] == [
        ("diverged", 5),
        ("diverged", 5),
        ("diverged", 10),
    ]
    assert sweep.status == "finished"


# --- members that stop early ---


def test_members_stop_early_each_for_itself_and_free_their_chunk() -> None:
    rates = [0.5, 0.01, 3.0, 0.02, 5.0, 0.03]
    long = tiny.experiment(num_steps=60)
    sweep = jn.sweep(long, jn.grid(learning_rate=rates), record=False, patience=2, **HOW)
    for index, rate in ((0, 0.5), (2, 3.0), (5, 0.03)):
        alone = tiny.fit(long.replace(learning_rate=rate), patience=2)
        member = sweep.members[index]
        assert (member.status, member.step) == (alone.summary.status, alone.summary.step)
        assert member.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-4)
    assert {member.status for member in sweep.members} == {"finished", "stopped early"}
    # Whoever is left moves together in the program that is there.
    assert sweep.summary["num_compilations"] == 3


# --- halving ---


def test_rungs_end_where_windows_do() -> None:
    nine = jn.search.halving(jn.grid(learning_rate=range(1, 10)))
    assert nine.rungs == pytest.approx([1 / 9, 1 / 3, 1])
    assert jn.search.halving(jn.grid(seed=range(1000)), 2, min_fraction=0.2).rungs == pytest.approx([1 / 4, 1 / 2, 1])
    assert jn.search.halving(jn.grid(seed=[0])).rungs == [1.0]
    plan = plan_sweep(tiny.experiment(num_steps=100), nine, SweepOptions(report_every=20, eval_every=20))
    assert [plan.rung_end(plan.groups[0], share) for share in (0.01, 0.33, 1.0)] == [20, 40, 100]


def test_rungs_that_would_end_in_one_window_are_one() -> None:
    points = jn.search.halving(jn.grid(learning_rate=np.logspace(-2, 0, 27)))
    windows = [SweepOptions(report_every=every, eval_every=every) for every in (1, 30)]
    plans = [plan_sweep(tiny.experiment(num_steps=90), points, options) for options in windows]
    ends = [[plan.rung_end(plan.groups[0], share) for share in plan.rungs] for plan in plans]
    # 90/27 and so on; in windows of 30 steps the first two rungs are the third.
    assert ends == [[3, 10, 30, 90], [30, 90]]
    # 27 members to step 3, 9 on to 10, 3 on to 30 and 1 to the end.
    assert plans[0].num_left == 27 * 3 + 9 * 7 + 3 * 20 + 60


def test_survivors_are_the_best_and_nan_is_not() -> None:
    values = {4: 0.5, 7: float("nan"), 1: 0.2, 3: 0.2, 9: 0.9}
    points = jn.grid(seed=range(5))
    assert jn.search.halving(points, 2).survivors(values, higher_is_better=False) == [1, 3, 4]
    assert jn.search.halving(points, 5).survivors(values, higher_is_better=True) == [9]


def test_halving_gives_the_best_members_of_each_rung_the_next(tmp_path: Path) -> None:
    rates = np.logspace(-3, 0, 9).tolist()
    points = jn.grid(learning_rate=rates, batch_size=[4, 8])
    sweep = jn.sweep(
        tiny.experiment(num_steps=90), jn.search.halving(points), run_dir=tmp_path / "sweep", member_runs=True, **HOW
    )
    steps = [member.step for member in sweep.members]
    # Eighteen members in two groups: a third of all goes on, wherever it is.
    assert sorted(steps) == [10] * 12 + [30] * 4 + [90] * 2
    for rung, after in ((10, 30), (30, 90)):
        at = {line["member"]: line["test_loss"] for line in sweep.lines if line["step"] == rung and "test_loss" in line}
        kept = [member for member in at if steps[member] >= after]
        assert max(at[member] for member in kept) <= min(at[member] for member in at if member not in kept)
    survivor = sweep.best()
    assert survivor.status == "finished"
    whole = tiny.fit(tiny.experiment(num_steps=90, **survivor.point))
    assert survivor.final["test_loss"] == pytest.approx(whole.final["test_loss"], rel=1e-4)
    # What was taken out can go on alone, to where its own run would have been.
    pruned = next(member for member in sweep.members if member.step == 30)
    rest = jn.fit(tiny.experiment(num_steps=90, **pruned.point), resume=pruned.dir, progress="none")
    alone = tiny.fit(tiny.experiment(num_steps=90, **pruned.point))
    assert rest.summary.step == 90 and rest.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-4)


# --- what a sweep leaves behind ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> jn.Sweep:
    """Two groups of four members in two chunks each."""
    points = jn.grid(learning_rate=[0.01, 0.1, 0.2, 0.3], batch_size=[8, 16])
    path = tmp_path_factory.mktemp("finished") / "sweep"
    return jn.sweep(tiny.experiment(num_steps=30), points, run_dir=path, checkpoint_every=10, **HOW)


def test_each_member_is_a_run_that_is_exported_when_it_is_opened(finished: jn.Sweep) -> None:
    member = finished.members[3]
    run = finished.run(3)
    assert member.dir is None and run.final == member.final and run.dir is not None
    own = tiny.read(run.dir)
    assert own["status"] == "finished" and own["config"]["batch_size"] == 16 and own["member"] == 3
    alone = tiny.fit(tiny.experiment(num_steps=30, **member.point))
    tiny_params = {name: np.asarray(value) for name, value in alone.state.params.items()}
    for name, value in run.state.params.items():
        np.testing.assert_allclose(value, tiny_params[name], rtol=1e-5, atol=1e-6)
    assert run.evaluate()["loss"] == pytest.approx(member.final["test_loss"], rel=1e-5)
    again = jn.open_sweep(finished.dir, tiny.experiment())  # type: ignore[arg-type]
    assert again.run(3).dir == run.dir and tiny.read(run.dir) == own, "loading a run leaves its record as it is"
    # It continues alone, to where its own run would be.
    longer = jn.fit(tiny.experiment(num_steps=40, **member.point), resume=run.dir, progress="none")
    alone = tiny.fit(tiny.experiment(num_steps=40, **member.point))
    assert longer.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)
    assert "the program of a step" in tiny.read(run.dir)["resumed"][0]["changed"]


def test_a_finished_sweep_exports_its_members_when_asked(finished: jn.Sweep) -> None:
    again = jn.sweep(tiny.experiment(num_steps=30), resume=finished.dir, member_runs=True, progress="none")
    assert outcome(again) == outcome(finished)
    dirs = [member.dir for member in again.members]
    assert [path.name for path in dirs if path] == [f"{index:04d}" for index in range(8)]
    assert [member.dir for member in jn.open_sweep(finished.dir).members] == dirs  # type: ignore[arg-type]


def test_the_record_is_read_back_as_it_was(finished: jn.Sweep) -> None:
    assert finished.dir is not None
    again = jn.open_sweep(finished.dir, tiny.experiment(num_steps=30))
    assert outcome(again) == outcome(finished) and told(again) == told(finished)
    assert again.axes == finished.axes and again.monitor == "test_loss"


def test_without_a_record_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), record=False, **HOW)
    assert sweep.dir is None and not list(tmp_path.iterdir())


# --- interruptions ---


class Ending:
    """A metric writer that ends a sweep after some windows, by a signal or by an exception."""

    def __init__(self, num_windows: int, error: BaseException | None = None) -> None:
        self.left, self.error = num_windows, error

    def write(self, lines: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.error is not None:
            raise self.error
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def interrupted(num_windows: int) -> dict[str, Any]:
    """Options of a sweep that gets SIGINT in a window."""
    return {**HOW, "writers": (Ending(num_windows),)}


@pytest.mark.parametrize("stop_at", [2, 7])
def test_an_interrupted_sweep_ends_as_if_nothing_had_been(finished: jn.Sweep, stop_at: int, tmp_path: Path) -> None:
    long, points = tiny.experiment(num_steps=30), jn.grid(learning_rate=[0.01, 0.1, 0.2, 0.3], batch_size=[8, 16])
    first = jn.sweep(long, points, run_dir=tmp_path / "sweep", checkpoint_every=10, **interrupted(stop_at))
    assert first.status == "interrupted" and {m.status for m in first.members} & {"interrupted", "waiting"}
    rest = jn.sweep(long, points, resume=tmp_path / "sweep", progress="none")
    assert rest.status == "finished"
    assert outcome(rest) == outcome(finished) and told(jn.open_sweep(tmp_path / "sweep")) == told(finished)


@pytest.mark.slow
def test_an_interrupted_halving_takes_out_the_same_members(tmp_path: Path) -> None:
    # The second group's members are all among the worst, so that a resumed sweep never opens it again.
    points = jn.search.zip(learning_rate=[0.1, 0.2, 0.3, 1e-4, 2e-4, 3e-4], batch_size=[8, 8, 8, 4, 4, 4])
    long, design = tiny.experiment(num_steps=40), jn.search.halving(points, 2)
    whole = jn.sweep(long, design, record=False, **HOW)
    assert [member.status for member in whole.members[3:]] == ["pruned"] * 3
    # Two groups of two windows each are the first rung; the fifth window is in the second.
    first = jn.sweep(long, design, run_dir=tmp_path / "sweep", **interrupted(5))
    assert first.status == "interrupted" and first.members[4].status == "pruned"
    assert outcome(jn.sweep(long, resume=tmp_path / "sweep", progress="none")) == outcome(whole)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_from_its_newest_checkpoint(finished: jn.Sweep, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    long, points = tiny.experiment(num_steps=30), jn.grid(learning_rate=[0.01, 0.1, 0.2, 0.3], batch_size=[8, 16])
    # After the checkpoint of step 20 of the first group, and a report later.
    how = {**HOW, "writers": (Ending(6, Killed()),)}
    with pytest.raises(Killed):
        jn.sweep(long, points, run_dir=tmp_path / "sweep", checkpoint_every=10, **how)
    rest = jn.sweep(long, points, resume=tmp_path / "sweep", progress="none")
    assert outcome(rest) == outcome(finished) and told(jn.open_sweep(tmp_path / "sweep")) == told(finished)


def test_a_finished_sweep_is_loaded_and_compiles_nothing(finished: jn.Sweep) -> None:
    points = jn.grid(learning_rate=[0.01, 0.1, 0.2, 0.3], batch_size=[8, 16])
    assert finished.dir is not None
    before = {file: file.read_bytes() for file in finished.dir.rglob("*") if file.is_file() and file.name[0] != "."}
    again = jn.sweep(tiny.experiment(num_steps=30), points, resume=finished.dir, progress="none")
    assert outcome(again) == outcome(finished) and again.summary == finished.summary
    bare = jn.sweep(tiny.experiment(num_steps=30), resume=finished.dir, progress="none")
    assert outcome(bare) == outcome(finished)
    assert before == {f: f.read_bytes() for f in finished.dir.rglob("*") if f.is_file() and f.name[0] != "."}


def test_an_interruption_in_the_last_window_leaves_a_sweep_that_is_over(tmp_path: Path) -> None:
    sweep = jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), run_dir=tmp_path / "sweep", **interrupted(4))
    assert sweep.status == "finished" and sweep.run(1).final == sweep.members[1].final


def test_a_sweep_goes_on_with_the_devices_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, layout = tmp_path / "sweep", {"devices": 2, "strategy": "data"}
    jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), run_dir=path, **{**interrupted(1), **layout})
    facts = json.loads((path / "sweep.json").read_text())
    (path / "sweep.json").write_text(json.dumps({**facts, "options": {**facts["options"], "devices": 8}}))
    with pytest.raises(jn.ConfigError, match=r"the sweep in .*sweep used devices=8: give --devices 4 "):
        jn.sweep(tiny.experiment(), resume=path, progress="none")
    (path / "sweep.json").write_text(json.dumps(facts))
    rest = jn.sweep(tiny.experiment(), resume=path, progress="plain")
    assert rest.status == "finished" and "2 of 4 devices" in capsys.readouterr().out
    assert {name: tiny.read(path, "sweep.json")["options"][name] for name in layout} == layout


def test_a_sweep_goes_on_in_another_width(tmp_path: Path) -> None:
    points = jn.grid(learning_rate=[0.1, 0.2, 0.3])
    whole = jn.sweep(tiny.experiment(), points, record=False, **HOW)
    jn.sweep(tiny.experiment(), points, run_dir=tmp_path / "sweep", **interrupted(2))
    rest = jn.sweep(tiny.experiment(), resume=tmp_path / "sweep", vmap_size=3, progress="none")
    assert tiny.read(tmp_path / "sweep", "sweep.json")["groups"][0]["vmap"]["size"] == 3
    np.testing.assert_allclose(rest.values("test_loss"), whole.values("test_loss"), rtol=1e-5)


def test_a_resumed_sweep_names_what_is_computed_otherwise_and_refuses_other_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plain = tmp_path / "sweep", tiny.splits()
    jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1]), run_dir=path, **interrupted(1))
    other = jn.data.arrays(train=tiny.points(37, 2), test=tiny.points(23, 1))
    with pytest.raises(jn.RecordError, match="the data are not those"):
        jn.sweep(tiny.experiment(data=other), resume=path, progress="none")
    task = jn.tasks.classification(tiny.MODEL)
    task = task._replace(derive_metrics=lambda means: {**means, "error": 1 - means["accuracy"]})
    moved = jn.data.with_augmentation(plain, lambda key, inputs: inputs + 1)
    jn.sweep(tiny.experiment(data=moved, task=lambda config: task), resume=path, progress="plain", writers=(Ending(1),))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "changed" in line]
    assert "augmentation" in said and "the evaluation" in said and "the program" not in said
    rest = jn.sweep(tiny.experiment(data=moved, task=lambda config: task), resume=path, progress="plain")
    assert "changed" not in capsys.readouterr().out and rest.status == "finished"
    assert len(tiny.read(path, "sweep.json")["groups"][0]["changed"]) == 2


# --- what is wrong with a sweep ---


def test_a_directory_of_another_sweep_is_refused(finished: jn.Sweep, tmp_path: Path) -> None:
    points = jn.grid(learning_rate=[0.01, 0.1, 0.2, 0.3], batch_size=[8, 16])
    member_dir = finished.run(0).dir
    before = {file: file.read_bytes() for file in finished.dir.rglob("*.json*")}  # type: ignore[union-attr]
    for other, theirs, sentence in (
        (tiny.experiment(num_steps=40), points, "has num_steps = 30, this experiment 40"),
        (tiny.experiment(num_steps=30), jn.grid(seed=[0]), "the points of the sweep in .* are not these"),
        (tiny.experiment(num_steps=30), jn.search.halving(points), "the halving of the sweep in .* are not these"),
    ):
        with pytest.raises(jn.ConfigError, match=sentence):
            jn.sweep(other, theirs, resume=finished.dir, progress="none")
    with pytest.raises(jn.RecordError, match="is not empty: choose another --run-dir"):
        jn.sweep(tiny.experiment(), points, run_dir=finished.dir, progress="none")
    with pytest.raises(jn.RecordError, match="holds a run, not a sweep"):
        jn.sweep(tiny.experiment(), points, resume=member_dir, progress="none")
    with pytest.raises(jn.RecordError, match="holds no sweep"):
        jn.sweep(tiny.experiment(), points, resume=tmp_path, progress="none")
    assert before == {file: file.read_bytes() for file in finished.dir.rglob("*.json*")}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("points", "options", "sentence"),
    [
        (jn.grid(learning_rat=[1.0]), {}, "no field 'learning_rat' to sweep: did you mean 'learning_rate'"),
        ([{"seed": 1}], {}, "a sweep needs points, not a list"),
        (jn.grid(seed=[0]), {"vmap_sise": 3}, "no run option 'vmap_sise': did you mean 'vmap_size'"),
        (jn.grid(seed=[0]), {"vmap_size": 0}, "vmap_size is 0"),
        (jn.grid(seed=[0, 1]), {"devices": 9}, "requested 9 devices, but only 4 CPU devices are available"),
        (jn.grid(seed=[0]), {"monitor": "acuracy"}, "monitor is 'acuracy', no metric of this task"),
        (jn.grid(seed=[0]), {"shard": "3/2"}, "shard is '3/2', and must be I/N"),
        (jn.grid(seed=[0]), {"order": "random"}, "order is 'random', and must be one of member, shared"),
        (jn.grid(batch_size=[64]), {}, "no member of the sweep can be run; the first, member 0 .batch_size 64.*larger"),
    ],
)
def test_mistakes_are_sentences_and_nothing_is_written(
    points: Any, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    options = {**HOW, "vmap_size": None, "devices": None, **options}
    with pytest.raises(jn.ConfigError, match=sentence):
        jn.sweep(tiny.experiment(), points, run_dir=tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


def unread(config: Any) -> Any:
    raise AssertionError("data were read")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, "device is 'gpu', which JAX cannot open here"),
        ({"devices": 9}, "requested 9 devices, but only 4 CPU devices are available"),
        ({"mesh": "members=2,data=4"}, "requested 8 devices, but only 4 CPU devices are available"),
        ({"mesh": "data=2", "devices": 4}, "mesh members=1,data=2 is of 2 devices, and this run is to use 4"),
        ({"strategy": "data", "devices": 2}, "batch_size is 9, which 2 devices cannot share evenly: .* are 8 and 10"),
        ({"mesh": "members=2,data=2"}, "batch_size is 9, which 2 devices cannot share evenly"),
        ({"mesh": "data=4"}, "batch_size is 6, which 4 devices cannot share evenly"),
        ({"device": "tpu", "plan_only": True}, "device is 'tpu', which JAX cannot open here"),
    ],
)
def test_what_devices_cannot_do_is_said_before_anything_is_built_or_said(
    options: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unbuilt = jn.Experiment(tiny.Config(), unread, unread, unread)
    # Sizes that are none are for their members to tell of.
    points = jn.grid(batch_size=[8, 6, 9, 0, "x"])
    with pytest.raises(jn.ConfigError, match=sentence):
        jn.sweep(unbuilt, points, run_dir=tmp_path / "sweep", **{"progress": "plain", **options})
    said = capsys.readouterr()
    assert said.out + said.err == "" and not list(tmp_path.iterdir())


def test_evaluations_that_devices_cannot_share_are_refused_first() -> None:
    unbuilt = jn.Experiment(tiny.Config(), unread, unread, unread)
    with pytest.raises(jn.ConfigError, match="eval_batch_size is 6, which 4 devices cannot share evenly: .* 4 and 8"):
        jn.sweep(unbuilt, jn.grid(seed=[0, 1]), record=False, mesh="data=4", eval_batch_size=6)


@pytest.mark.parametrize(("options", "num_devices"), [({"mesh": "members=2"}, 2), ({"devices": "all"}, 3)])
def test_how_many_devices_are_used_is_told(
    options: dict[str, Any], num_devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    how = {"plan_only": True, "vmap_size": 1, "steps_per_call": 1, "progress": "plain", **options}
    jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1, 2]), **how)
    assert f" {num_devices} of 4 devices" in capsys.readouterr().out


def test_members_are_computed_on_the_kind_of_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def noted(part: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def make(config: Any) -> Any:
            found.append(jax.config.jax_default_device)
            return part(config)

        return make

    own, cpu = tiny.experiment(), jax.devices("cpu")[0]
    watched = jn.Experiment(own.config, noted(own.data), noted(own.task), noted(own.optimizer))
    # A machine with another kind of device, on which JAX computes by default, and which is full.
    other = types.SimpleNamespace(platform="gpu", device_kind="other", process_index=0, id=0)
    other.memory_stats = lambda: {"bytes_limit": 1}
    real = jax.devices
    monkeypatch.setattr(jax, "devices", lambda kind=None: [other] if kind in (None, "gpu") else real(kind))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sweep = jn.sweep(watched, jn.grid(seed=[0, 1]), record=False, device="cpu", **HOW)
    assert sweep.status == "finished" and len(found) > 3 and set(found) == {cpu}
    assert jax.config.jax_default_device is None


def test_fields_that_a_config_checks_together_are_set_together() -> None:
    @dataclasses.dataclass(frozen=True)
    class Checked(tiny.Config):
        warmup: int = 5
        steps_per_warmup: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            assert self.warmup <= self.num_steps, "too warm"
            object.__setattr__(self, "steps_per_warmup", self.num_steps // self.warmup)

    own = tiny.experiment()
    checked = jn.Experiment(Checked(), own.data, own.task, lambda config: optax.sgd(0.1 / config.warmup))
    points = jn.search.zip(warmup=[5, 50, 60], num_steps=[10, 100, 50])
    plan = plan_sweep(checked, points, SweepOptions())
    assert {member.number: member.log.error for member in plan.members} == {
        0: None,
        1: None,
        2: "AssertionError: too warm",
    }


def test_an_interrupted_sweep_over_infinity_goes_on(tmp_path: Path) -> None:
    points = jn.grid(learning_rate=[0.1, float("inf")], seed=[0, 1])
    whole = jn.sweep(tiny.experiment(), points, record=False, **HOW)
    jn.sweep(tiny.experiment(), points, run_dir=tmp_path / "sweep", **interrupted(1))
    rest = jn.sweep(tiny.experiment(), resume=tmp_path / "sweep", progress="none")
    assert [member.status for member in rest.members] == ["finished"] * 2 + ["diverged"] * 2
    assert rest.values("test_loss")[0] == whole.values("test_loss")[0]


def test_an_optimizer_may_keep_a_key_of_its_own(tmp_path: Path) -> None:
    def optimizer(config: tiny.Config) -> optax.GradientTransformation:
        return optax.chain(optax.add_noise(config.learning_rate, 0.5, jax.random.key(3)), optax.sgd(0.1))

    noisy = tiny.experiment(optimizer=optimizer)
    sweep = jn.sweep(noisy, jn.grid(learning_rate=[0.1, 0.2, 0.3]), run_dir=tmp_path / "sweep", **HOW)
    alone = tiny.fit(noisy.replace(learning_rate=0.3))
    assert sweep.members[2].final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)
    assert sweep.run(2).final == sweep.members[2].final


def test_all_parts_of_a_sweep_share_one_order(tmp_path: Path) -> None:
    points, how = jn.grid(seed=[3, 4, 5, 6]), {**HOW, "order": "shared"}
    whole = jn.sweep(tiny.experiment(), points, record=False, **how)
    part = jn.sweep(tiny.experiment(), points, run_dir=tmp_path, shard="2/2", **how)
    assert list(part.values("test_loss")) == list(whole.values("test_loss"))[2:]


def test_labels_without_an_output_are_named(tmp_path: Path) -> None:
    narrow = tiny.experiment(model=jn.models.MLP((2,)))
    with pytest.raises(jn.TrainingError, match="label .* since the model has 2 outputs"):
        jn.sweep(narrow, jn.grid(seed=[0, 1]), run_dir=tmp_path / "sweep", **HOW)
    assert not (tmp_path / "sweep").exists()


def test_a_point_that_cannot_be_built_is_named_and_the_others_run(tmp_path: Path) -> None:
    def task(config: tiny.Config) -> jn.Task:
        if config.seed == 1:
            raise KeyError("no such seed")
        return tiny.experiment().task(config)

    def optimizer(config: tiny.Config) -> optax.GradientTransformation:
        return optax.sgd(jn.schedules.constant(config.learning_rate))

    points = jn.grid(learning_rate=[0.1, -1.0], seed=[0, 1], batch_size=[8, 64])
    sweep = jn.sweep(tiny.experiment(task=task, optimizer=optimizer), points, run_dir=tmp_path / "sweep", **HOW)
    assert [member.index for member in sweep.members if member.status == "finished"] == [0]
    errors = [sweep.members[index].error for index in (1, 2, 4)]
    assert errors[0] == "a batch of 64 is larger than the set of 37 examples: lower batch_size to at most 37."
    assert errors[1] == "KeyError: 'no such seed'"
    assert errors[2] == "learning_rate is -1.0, and must be at least 0."
    assert [member.status for member in jn.open_sweep(tmp_path / "sweep").members] == ["finished"] + ["failed"] * 7


def test_without_held_out_data_members_are_ranked_by_what_they_train_on(tmp_path: Path) -> None:
    bare = tiny.experiment(data=jn.data.arrays(train=tiny.points(37)))
    sweep = jn.sweep(
        bare, jn.search.halving(jn.grid(learning_rate=[0.001, 0.1, 0.2])), run_dir=tmp_path / "sweep", **HOW
    )
    assert sweep.monitor == "train_loss" and sorted(member.status for member in sweep.members)[0] == "finished"
    assert sweep.best().final["train_loss"] < 1 and sweep.members[0].status == "pruned"
    with pytest.raises(jn.ConfigError, match="patience needs"):
        jn.sweep(bare, jn.grid(seed=[0, 1]), record=False, patience=2, **HOW)


def test_members_of_short_steps_share_one_vmap(tmp_path: Path) -> None:
    how = {**tiny.HOW, "vmap_size": None, "devices": 1, "eval_every": 0}
    jn.sweep(tiny.experiment(num_steps=5), jn.grid(seed=range(6)), run_dir=tmp_path / "sweep", **how)
    (group,) = tiny.read(tmp_path / "sweep", "sweep.json")["groups"]
    assert [trial["size"] for trial in group["vmap"]["trials"]] == [6]
