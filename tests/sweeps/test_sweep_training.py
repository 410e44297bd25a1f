"""Sweeps while they train: divergence, early stopping, halving, interruptions, records, and wrong options."""

import contextlib
import dataclasses
import json
import signal
import time
import types
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.cli import command
from jaxnn.sweeps import SweepOptions, plan_sweep
from tests import tiny
from tests.record.files import TIMINGS, contents, flip
from tests.swept import EXPERIMENT as LONG  # most tests share its programs
from tests.swept import POINTS as EIGHT

HOW: dict[str, Any] = tiny.MEMBERS
RATES = [0.01, 0.1, 0.2, 0.3]
FOUR = jn.grid(learning_rate=RATES)


@dataclasses.dataclass(frozen=True)
class Breaking(tiny.Config):
    bad_step: float = 0.0  # The update from which on the gradient is NaN; 0: never


def breaking() -> jn.Experiment[Breaking]:
    """SGD with noise from an own key, whose gradient becomes NaN at a step that each member sets."""

    def optimizer(config: Breaking) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            bad = (config.bad_step > 0) & (state + 1 >= config.bad_step)
            return {name: jnp.where(bad, jnp.nan, value) for name, value in updates.items()}, state + 1

        spoil = optax.GradientTransformation(lambda params: jnp.int32(0), update)
        sgd = optax.sgd(config.learning_rate, momentum=0.9 if config.num_steps <= 20 else None)
        return optax.chain(spoil, optax.add_noise(0.01, 0.5, jax.random.key(3)), sgd)

    return dataclasses.replace(tiny.experiment(optimizer=optimizer), config=Breaking())


def reports(sweep: jn.Sweep) -> list[str]:
    """The reports without speeds and in an order independent of groups."""
    lines = ({name: value for name, value in line.items() if name not in TIMINGS} for line in sweep.lines)
    return sorted(json.dumps(line, sort_keys=True) for line in lines)


def outcome(sweep: jn.Sweep) -> list[tuple[Any, ...]]:
    return [(m.index, m.status, m.step, dict(m.final), dict(m.best)) for m in sweep.members]


def statuses(sweep: jn.Sweep) -> list[str]:
    return [member.status for member in sweep.members]


def resume(path: Path | None, experiment: jn.Experiment[Any] = LONG, points: Any = None, **options: Any) -> jn.Sweep:
    return jn.sweep(experiment, points, resume=path, **{"progress": "none", "writers": (), **options})


def test_diverged_members_keep_their_state_and_leave_the_others_alone(tmp_path):
    # The second member sees a NaN gradient at update 7, so that the loss of step 8 is not finite; the last at once.
    points = jn.search.zip(learning_rate=[0.1, 0.2, 0.1, 0.4], bad_step=[0.0, 7.0, 70.0, 1.0])
    how = {**HOW, "monitor": "accuracy"}
    sweep = jn.sweep(breaking(), points, run_dir=tmp_path / "sweep", **how)
    member = sweep.members[1]
    assert statuses(sweep) == ["finished", "diverged", "finished", "diverged"] and sweep.status == "finished"
    # The window from 5 to 10 reports it; the state is that before its call.
    assert (member.step, sweep.members[3].step) == (10, 5) and np.isnan(member.final["train_loss"])
    assert [line["step"] for line in sweep.lines if line["member"] == 1] == [5, 10]
    # Two equal members, whose partners diverge at different steps, stay equal.
    assert sweep.members[0].final == sweep.members[2].final
    before = tiny.fit(breaking().replace(learning_rate=0.2, bad_step=7.0, num_steps=5)).state
    kept = jn.open_run(tmp_path / "sweep", breaking(), member=1).state
    assert int(kept.step) == 5
    for name, value in before.params.items():
        np.testing.assert_allclose(kept.params[name], value, rtol=1e-5)
    with pytest.raises(jn.ConfigError, match="member 1 is diverged, .* resume='.*, member=1"):
        sweep.run(1)
    # The optimizer and its key are those of the recorded config, not of the experiment that is given now.
    run = jn.open_sweep(tmp_path / "sweep", breaking().replace(num_steps=99)).run(2)
    assert run.final == sweep.members[2].final and int(run.state.step) == 20 and run.monitor == "test_accuracy"


def test_members_stop_early_as_alone_and_free_their_chunk():
    rates, long = [0.5, 0.01, 3.0, 0.02], tiny.experiment(num_steps=60)
    sweep = jn.sweep(long, jn.grid(learning_rate=rates), record=False, patience=2, **HOW)
    alone, member = tiny.fit(long.replace(learning_rate=3.0), patience=2), sweep.members[2]
    assert (member.status, member.step) == (alone.summary.status, alone.summary.step)
    assert member.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-4)
    assert {*statuses(sweep)} == {"finished", "stopped early"}
    # Those that are left move together in the program that exists.
    assert sweep.summary["num_compilations"] == 3


def test_searched_members_report_at_the_ends_of_windows():
    points = jn.search.halving(jn.grid(learning_rate=np.logspace(-2, 0, 27)))
    windows = [SweepOptions(eval_every=every) for every in (None, 1, 30)]
    with pytest.warns(UserWarning, match="asks for reports after 3 steps, and the first evaluation is after 30"):
        plans = [plan_sweep(tiny.experiment(num_steps=90), points, options) for options in windows]
    ends = [[plan.share_end(plan.groups[0], share) for share in points.shares] for plan in plans]
    # 90/27 and so on; in windows of 30 steps the first two rungs are the third.
    assert ends == [[3, 9, 30, 90], [3, 10, 30, 90], [30, 30, 30, 90]]


def test_halving_trains_the_best_of_each_rung_on(tmp_path):
    long, path = tiny.experiment(num_steps=80), tmp_path / "sweep"
    sweep = jn.sweep(long, jn.search.halving(EIGHT, 2), run_dir=path, **HOW)
    steps = [member.step for member in sweep.members]
    # Of eight members in two groups half of all continue after each rung, whichever group they are in.
    assert sorted(steps) == [10] * 4 + [20] * 2 + [40, 80]
    for rung, after in ((10, 20), (20, 40), (40, 80)):
        at = {line["member"]: line["test_loss"] for line in sweep.lines if line["step"] == rung and "test_loss" in line}
        kept = [member for member in at if steps[member] >= after]
        assert max(at[member] for member in kept) <= min(at[member] for member in at if member not in kept)
    assert sweep.best().status == "finished"
    # A pruned member can be continued alone, to where its own run would have been.
    pruned = next(member for member in sweep.members if member.step == 20)
    before, to = contents(path), tmp_path / "alone"
    rest = jn.fit(long, resume=path, member=pruned.index, run_dir=to, progress="none")
    alone = tiny.fit(long.replace(**pruned.point))
    assert rest.summary.step == 80 and rest.final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-4)
    assert rest.config == alone.config and rest.metrics["step"].tolist() == alone.metrics["step"].tolist()
    assert "the program of a step" in tiny.read(to)["resumed"][0]["changed"] and contents(path) == before


def test_finished_sweep_is_loaded_without_training(finished, capsys):
    before = contents(finished.dir)
    for points in (EIGHT, None):
        again = resume(finished.dir, points=points)
        assert outcome(again) == outcome(finished) and again.summary == finished.summary
    assert finished.dir is not None and before == contents(finished.dir)
    reopened = jn.open_sweep(finished.dir, LONG)
    assert outcome(reopened) == outcome(finished) and reports(reopened) == reports(finished)
    assert reopened.axes == finished.axes and reopened.monitor == "test_loss"
    # The points of a script are not those of the sweep that its command line resumes.
    words = ["--resume", str(finished.dir), "--num-steps", "30", "--progress", "none"]
    loaded = jn.main(LONG, words, points=jn.grid(seed=[5, 6]))
    assert isinstance(loaded, jn.Sweep) and outcome(loaded) == outcome(finished)
    command(["show", str(finished.dir)])
    assert "num_steps 30" in capsys.readouterr().out


def test_member_is_opened_as_a_run_and_continued_by_scripts(finished, tmp_path, capsys):
    path, member = finished.dir, finished.members[3]
    before = contents(path)
    # The values of the record count, not those of the experiment that is given now.
    run = jn.open_sweep(path, tiny.experiment(num_steps=99, batch_size=5, seed=7)).run(3)
    assert run.final == member.final and (run.dir, run.member, run.summary.status) == (path, 3, "finished")
    assert run.experiment.config == tiny.Config(num_steps=30, **member.point)
    assert run.evaluate()["loss"] == pytest.approx(member.final["test_loss"], rel=1e-5)
    alone = jn.open_run(path, member=3)
    chex.assert_trees_all_equal(dict(alone.state.params), jax.device_get(run.state.params))
    assert alone.metrics["step"].tolist() == sorted({line["step"] for line in finished.lines})
    doubled = tiny.init, lambda params, inputs: 2 * tiny.apply(params, inputs)
    changed = jn.open_sweep(str(path), tiny.experiment(model=doubled)).run(3)
    with pytest.warns(UserWarning, match="evaluates another function") as caught:
        changed.evaluate()
        changed.predict(tiny.points(4)[0])
    assert [one.filename for one in caught] == [__file__], "once, and at the caller"
    command(["show", str(path), "--member", "3"])
    assert f"final           train_loss {run.final['train_loss']:.4g}" in capsys.readouterr().out
    words = f"--resume {path} --member 3 --run-dir {tmp_path / 'on'} --num-steps 35 --progress none".split()
    longer = jn.main(LONG, words)
    assert isinstance(longer, jn.Run) and longer.config == tiny.Config(num_steps=35, **member.point)
    assert longer.metrics["test_loss"][:6].tolist() == pytest.approx(run.metrics["test_loss"].tolist(), nan_ok=True)
    assert contents(path) == before, "it is only read"
    for number, words in ((8, "has no member 8"), (None, "holds a sweep, not a run: .* name a member")):
        with pytest.raises(jn.RecordError, match=words):
            jn.open_run(path, LONG, member=number)


class Ending:
    """A metric writer that ends a sweep after some windows, by a signal or by an exception."""

    def __init__(self, num_windows: int, error: BaseException | None = None) -> None:
        self.left, self.error = num_windows, error

    def write(self, lines: Any) -> None:
        self.left -= 1
        if self.left == 0:
            if self.error is not None:
                raise self.error
            signal.raise_signal(signal.SIGINT)


def interrupted(num_windows: int) -> dict[str, Any]:
    """Options of a sweep that gets SIGINT in a window."""
    return {**HOW, "writers": (Ending(num_windows),)}


class Killed(BaseException):
    pass


# A killed sweep resumes from its newest checkpoint, that of step 20 of the first group and a report later, or from the
# one before a damaged one.
@pytest.mark.parametrize("ending", [Ending(2), pytest.param(Ending(6, Killed()), marks=pytest.mark.slow)])
def test_interrupted_sweep_resumes_bit_for_bit(ending, finished, tmp_path, capsys):
    path, how = tmp_path / "sweep", {**HOW, "checkpoint_every": 10, "writers": (ending,)}
    with contextlib.suppress(Killed):
        first = jn.sweep(LONG, EIGHT, run_dir=path, **how)
        # In the first chunk of the first group.
        assert first.status == "interrupted" and {"interrupted", "waiting"} <= {*statuses(first)}
    second = resume(path, points=EIGHT, writers=(Ending(5),))
    assert second.status == "interrupted" and statuses(second).count("finished") >= 4
    newest = max((path / "groups" / "1").iterdir(), key=lambda folder: int(folder.name))
    flip(newest / "default" / "_METADATA")
    rest = resume(path, progress="plain")
    (damage,) = tiny.read(path)["resumed"][-1]["damaged"]
    assert damage.startswith(f"the checkpoint of step {newest.name} is damaged, its file default/_METADATA")
    assert damage in " ".join(capsys.readouterr().out.split())
    assert rest.status == "finished"
    assert outcome(rest) == outcome(finished) and reports(jn.open_sweep(path)) == reports(finished)
    assert {int(rest.run(index).state.step) for index in (0, 1, 4)} == {30}


def test_interruption_in_the_last_window_leaves_a_finished_sweep(tmp_path):
    sweep = jn.sweep(tiny.experiment(), FOUR, run_dir=tmp_path / "sweep", **interrupted(4))
    assert sweep.status == "finished" and sweep.run(1).final == sweep.members[1].final


@pytest.mark.slow
def test_resumed_sweep_keeps_its_devices_and_reports_changes(tmp_path, capsys):
    path, layout, two = tmp_path / "sweep", {"devices": 2, "strategy": "data"}, tiny.experiment()
    jn.sweep(two, jn.grid(seed=[0, 1]), run_dir=path, **{**interrupted(1), **layout})
    other = jn.data.arrays(train=tiny.points(37, 2), test=tiny.points(23, 1))
    with pytest.raises(jn.RecordError, match="the data are not those"):
        resume(path, tiny.experiment(data=other))
    task = tiny.TASK._replace(derive_metrics=lambda means: {**means, "error": 1 - means["accuracy"]})
    changed = tiny.experiment(task=lambda config: task)
    resume(path, changed, progress="plain", writers=(Ending(1),))
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "changed" in line]
    assert "the evaluation" in line and "the program" not in line and "2 of 4 devices" in printed
    rest = resume(path, changed, progress="plain")
    assert "changed" not in capsys.readouterr().out and rest.status == "finished"
    facts = tiny.read(path)
    assert [len(one["changed"]) for one in facts["resumed"]] == [0, 1] and facts["options"].items() >= layout.items()


@pytest.mark.several_devices
def test_resumed_sweep_may_change_its_vmap_size_and_sweep_infinity(finished, tmp_path):
    points, path = jn.grid(learning_rate=[*RATES[:3], float("inf")]), tmp_path / "sweep"
    jn.sweep(LONG, points, run_dir=path, **interrupted(2))
    rest = resume(path, vmap_size=4)
    assert tiny.read(path)["groups"][0]["vmap"]["size"] == 4
    assert statuses(rest) == ["finished"] * 3 + ["diverged"]
    expected = finished.select(batch_size=8).values("test_loss")
    np.testing.assert_allclose(rest.values("test_loss")[:3], expected[:3], rtol=1e-5)


def test_resuming_another_sweep_is_refused(finished, tmp_path):
    before, another = contents(finished.dir), jn.grid(learning_rate=[0.2], batch_size=[8])
    backwards = jn.search.zip(**{name: [point[name] for point in EIGHT][::-1] for name in EIGHT.scales})
    refused: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "has num_steps = 30, this experiment 40": (tiny.experiment(num_steps=40), EIGHT, {}),
        "the points of the sweep in .* are not these": (LONG, jn.grid(seed=[0]), {}),
        "the searcher of the sweep in .* is not this one": (LONG, jn.search.halving(EIGHT), {}),
        "has monitor='loss', .*start a new sweep": (LONG, None, {"monitor": "accuracy"}),
        "has monitor_mode='auto'": (LONG, None, {"monitor_mode": "max"}),
        "has order='member'": (LONG, None, {"order": "shared"}),
        r"another order\): --resume .* without points continues": (LONG, backwards, {}),
        "member 0 is learning_rate 0.01, batch_size 8 there, learning_rate 0.2, ba": (LONG, another, {}),
    }
    for words, (experiment, points, options) in refused.items():
        with pytest.raises(jn.ConfigError, match=words):
            resume(finished.dir, experiment, points, **options)
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(jn.RecordError, match="lacks 'format'.*damaged"):
        resume(tmp_path, points=EIGHT)
    assert before == contents(finished.dir)


UNBUILT = jn.Experiment(tiny.Config(), *[pytest.fail] * 3)
BARE = tiny.experiment(data=jn.data.arrays(train=tiny.points(37)))
UNITLESS = tiny.experiment(model=linen.Sequential([linen.Dense(0), linen.Dense(3)]))
ONE, DEVICES, QUIET = jn.grid(seed=[0]), jn.grid(batch_size=[8, 6, 9, 0, "x"]), {"progress": "none"}
# Wrong options are refused before anything is built.
WRONG: list[tuple[jn.Experiment[Any], Any, dict[str, Any], str]] = [
    (UNBUILT, jn.grid(learning_rat=[1.0]), QUIET, "no field 'learning_rat' to sweep: did you mean 'learning_rate'"),
    (UNBUILT, [{"seed": 1}], {}, "a sweep needs points, not a list"),
    (UNBUILT, ONE, {"vmap_sise": 3}, "no run option 'vmap_sise': did you mean 'vmap_size'"),
    (UNBUILT, ONE, {"vmap_size": 0}, "vmap_size must be an integer >= 1, not 0"),
    (UNBUILT, ONE, {"shard": "3/2"}, "shard is '3/2', and must be I/N"),
    (UNBUILT, ONE, {"order": "random"}, "order is 'random', and must be one of member, shared"),
    (UNBUILT, DEVICES, {"devices": 9}, "requested 9 devices, but only 4 CPU devices are available"),
    (UNBUILT, DEVICES, {"mesh": "members=2,data=4"}, "requested 8 devices, but only 4 CPU devices are available"),
    (UNBUILT, DEVICES, {"mesh": "data=2", "devices": 4}, "members=1,data=2 is of 2 devices, and this run is to use 4"),
    (UNBUILT, DEVICES, {"strategy": "data", "devices": 2}, "batch_size is 9, which 2 devices cannot share evenly"),
    (UNBUILT, DEVICES, {"mesh": "members=2,data=2"}, "batch_size is 9, which 2 devices cannot share evenly"),
    (UNBUILT, ONE, {"mesh": "data=4", "eval_batch_size": 6}, "eval_batch_size is 6, which 4 devices cannot share"),
    (UNBUILT, jn.search.halving(DEVICES), {"shard": "1/2"}, "a searcher compares all members"),
    (tiny.experiment(), jn.grid(batch_size=[64]), QUIET, "no member .* can be run; .*member 0 .batch_size 64.*larger"),
    (tiny.experiment(), ONE, QUIET | {"monitor": "acuracy"}, "monitor is 'acuracy', no metric of this task"),
    (UNITLESS, ONE, QUIET, r"parameter layers_0/bias is empty, \[0\]"),
    (tiny.experiment(model=jn.models.MLP((2,))), ONE, QUIET, "label .* since the model has 2 outputs"),
    (BARE, ONE, QUIET | {"patience": 2}, "patience needs"),
    (tiny.experiment(), jn.grid(seed=[0, 1]), QUIET | {"resident": False}, "choose order='shared'"),
]


@pytest.mark.parametrize(("experiment", "points", "options", "words"), WRONG)
@pytest.mark.several_devices
def test_sweep_that_cannot_train_prints_and_writes_nothing(experiment, points, options, words, tmp_path, capsys):
    with pytest.raises(jn.JaxnnError, match=words):
        jn.sweep(experiment, points, run_dir=tmp_path / "sweep", **{"progress": "plain", **options})
    printed = capsys.readouterr()
    assert printed.out + printed.err == "" and not list(tmp_path.iterdir())


def test_points_that_cannot_be_built_fail_and_the_others_run(tmp_path):
    def task(config: tiny.Config) -> jn.Task:
        if config.seed == 1:
            raise KeyError("no such seed")
        return tiny.experiment().task(config)

    def optimizer(config: tiny.Config) -> optax.GradientTransformation:
        jn.schedules.cosine(config.learning_rate, 10)  # which refuses negative rates
        return optax.sgd(config.learning_rate, momentum=0.9)

    # The first group's others are found to fail one by one, since its least or its greatest rate does.
    rates, seeds, sizes = [*RATES, -1.0, 0.1, 0.1], [0] * 5 + [1, 0], [8] * 6 + [64]
    points = jn.search.zip(learning_rate=rates, seed=seeds, batch_size=sizes)
    sweep = jn.sweep(tiny.experiment(task=task, optimizer=optimizer), points, run_dir=tmp_path / "sweep", **HOW)
    assert statuses(sweep) == ["finished"] * 4 + ["failed"] * 3
    assert [member.error for member in sweep.members[4:]] == [
        "learning_rate is -1.0, and must be at least 0.",
        "KeyError: 'no such seed'",
        "a batch of 64 is larger than the set of 37 examples: lower batch_size to at most 37.",
    ]
    assert statuses(jn.open_sweep(tmp_path / "sweep")) == statuses(sweep)


def test_group_that_fails_while_it_trains_leaves_the_others(tmp_path):
    raised: list[ValueError] = []

    def stop(lines: Any) -> bool:  # is first called for the first group
        if not raised:
            raised.append(ValueError("cannot reshape"))
            raise raised[0]
        return False

    sweep = jn.sweep(LONG, EIGHT, run_dir=tmp_path / "sweep", **HOW, stop=stop)
    assert statuses(sweep) == ["failed", "finished"] * 4 and sweep.members[2].error == "ValueError: cannot reshape"
    assert statuses(jn.open_sweep(tmp_path / "sweep")) == statuses(sweep)
    # A sweep that is resumed tries them again.
    assert statuses(resume(tmp_path / "sweep", stop=stop)) == ["finished"] * 8


def test_seconds_are_the_elapsed_time_and_parts_add_up(capsys):
    validated = tiny.experiment(data=jn.data.arrays(train=tiny.points(37), validation=tiny.points(23, 1)))
    started = time.perf_counter()
    summary = jn.sweep(validated, FOUR, record=False, **HOW | {"progress": "plain"}).summary
    assert 0.8 * (time.perf_counter() - started) < sum(summary["seconds"].values()) <= time.perf_counter() - started
    assert "; lowest validation loss now " in capsys.readouterr().out
    started = time.perf_counter()
    run = tiny.fit(validated)
    total, *parts = run.summary.first_step_seconds.values()
    assert sum(parts) == pytest.approx(total) and total < sum(run.summary.seconds.values())
    assert sum(run.summary.seconds.values()) <= time.perf_counter() - started


@pytest.mark.several_devices
def test_report_shows_how_many_devices_are_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for options, num_devices in (({"mesh": "members=2"}, 2), ({"devices": "all"}, 3)):
        how = {"plan_only": True, "vmap_size": 1, "steps_per_call": 1, "progress": "plain", **options}
        assert jn.sweep(tiny.experiment(), jn.grid(seed=[0, 1, 2]), **how).dir is None
        assert f" {num_devices} of 4 devices" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_members_are_computed_on_the_device_and_in_the_precision_that_is_asked_for(monkeypatch):
    found = set()

    def optimizer(config: tiny.Config) -> optax.GradientTransformation:
        # Like a Python float, a traced one takes the precision of what it meets.
        found.add((jax.config.jax_default_device, (config.learning_rate * jnp.bfloat16(1)).dtype.name))
        return optax.sgd(config.learning_rate, momentum=0.9)

    # A machine with another kind of device, on which JAX computes by default, and which is full.
    other = types.SimpleNamespace(platform="gpu", device_kind="other", process_index=0, id=0)
    other.memory_stats = lambda: {"bytes_limit": 1}
    cpu = jax.devices("cpu")[0]

    def with_other(real: Any) -> Any:
        return lambda backend=None: [other] if backend in (None, "gpu") else real(backend=backend)

    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, with_other(getattr(jax, name)))
    sweep = jn.sweep(tiny.experiment(optimizer=optimizer), FOUR, record=False, device="cpu", **HOW)
    assert sweep.status == "finished" and found == {(cpu, "bfloat16")} and jax.config.jax_default_device is None


def test_fields_that_a_config_checks_together_are_set_together():
    @dataclasses.dataclass(frozen=True)
    class Checked(tiny.Config):
        warmup: int = 5
        steps_per_warmup: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            assert self.warmup <= self.num_steps, "too warm"
            object.__setattr__(self, "steps_per_warmup", self.num_steps // self.warmup)

    checked = dataclasses.replace(
        tiny.experiment(optimizer=lambda config: optax.sgd(0.1 / config.warmup)), config=Checked()
    )
    points = jn.search.zip(warmup=[5, 50, 60], num_steps=[10, 100, 50])
    errors = [member.error for member in plan_sweep(checked, points, SweepOptions()).members]
    assert errors == [None, None, "AssertionError: too warm"]


def test_without_an_eval_split_members_are_ranked_by_training_metrics(tmp_path):
    design = jn.search.halving(jn.grid(learning_rate=[0.001, 0.1, 0.2]))
    with jax.debug_key_reuse(True):  # none is used twice
        sweep = jn.sweep(BARE, design, run_dir=tmp_path / "sweep", **HOW)
    assert sweep.monitor == "train_loss" and sorted(statuses(sweep)) == ["finished", "pruned", "pruned"]
    assert sweep.best().final["train_loss"] < 1 and sweep.members[0].status == "pruned"


def test_members_of_short_steps_share_one_vmap():
    plan = plan_sweep(LONG, FOUR, SweepOptions(**{**HOW, "vmap_size": None}))
    chosen = plan.trainer(plan.groups[0]).vmapped
    assert chosen is not None and chosen.size == 4 and not chosen.trials, "one size to choose needs no measuring"
