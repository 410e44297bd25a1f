"""A run that was broken off and is resumed equals one that was not; changes are reported, mismatches are errors."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn._disk import write_json
from jaxnn._fields import with_changes
from jaxnn._fingerprints import changed_parts
from jaxnn._json import check_same_config, config_json, jsonable
from jaxnn.engine import programs_of
from jaxnn.run import continued_options
from tests import tiny
from tests.engine.test_extensions import Table
from tests.record.files import contents, flip, untimed


@pytest.fixture
def half(whole: jn.Run, tmp_path: Path) -> Path:
    """A copy of the run without its last checkpoints: it has those of steps 5 and 10 of 20."""
    path = shutil.copytree(whole.dir, tmp_path / "run")
    for step in ("15", "20"):
        shutil.rmtree(path / "checkpoints" / step)
    return path


def test_optimizer_and_augmentation_continue_bitwise(tmp_path):
    # A schedule, two moments and an average of the parameters.
    def augment(key: jax.Array, batch: jn.Batch) -> jn.Batch:
        return batch._replace(inputs=batch.inputs * jax.random.bernoulli(key, 0.5, batch.inputs.shape))

    experiment = tiny.experiment(
        data=jn.data.with_augmentation(tiny.splits(), augment),
        optimizer=lambda config: jn.optim.with_ema(optax.adam(jn.schedules.cosine(1e-2, config.num_steps)), 0.9),
    )
    expected, path = tiny.fit(experiment, tmp_path / "whole"), tmp_path / "run"
    tiny.break_off(experiment, path, 10)
    found = tiny.fit(experiment, resume=path)
    assert found.summary.status == "finished" and found.final == expected.final
    assert untimed(path) == untimed(tmp_path / "whole")
    states = [run.state._replace(key=jax.random.key_data(run.state.key)) for run in (found, expected)]
    chex.assert_trees_all_equal(*states)


def test_finished_run_is_loaded_also_without_its_last_metrics(whole, tmp_path):
    shorter, before = shutil.copytree(whole.dir, tmp_path / "run"), contents(whole.dir)
    (shorter / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in tiny.lines(shorter)[:-1]))
    for path in (shorter, whole.dir):
        run = tiny.fit(tiny.experiment(), resume=path)
        assert run.summary.status == tiny.read(path)["status"] == "finished"
        assert int(run.state.step) == 20
        chex.assert_trees_all_equal(run.state.params, whole.state.params)
    assert run.summary.step == 20 and contents(whole.dir) == before


def test_run_killed_after_its_last_step_is_completed(whole, tmp_path):
    path = shutil.copytree(whole.dir, tmp_path / "run")
    facts = tiny.read(path)
    groups = [facts["groups"][0] | {"checkpoints": []}]
    write_json(path / "record.json", facts | {"status": "running", "summary": None, "groups": groups})
    tiny.fit(tiny.experiment(), resume=path)
    assert tiny.read(path).items() >= {name: facts[name] for name in ("status", "groups")}.items()
    assert tiny.read(path)["summary"]["metrics"] == facts["summary"]["metrics"] and untimed(path) == untimed(whole.dir)


def test_patience_saves_the_best_state_and_a_run_that_stopped_early_is_loaded(tmp_path):
    # The loss falls to the end; the accuracy stops rising before.
    experiment, options = tiny.experiment(num_steps=60), {"eval_every": 5, "patience": 2}
    assert tiny.fit(experiment, **options).summary.status == "finished"
    stopped = tiny.fit(experiment, tmp_path / "run", monitor="accuracy", **options)
    values, steps = stopped.metrics["test_accuracy"], stopped.metrics["step"].tolist()
    assert stopped.summary.status == "stopped early" and np.argmax(values) == len(values) - 3
    # All within the minute between two saves.
    assert int(stopped.best_state().step) == steps[-3] and steps[-1] < 60
    before = contents(stopped.dir)
    run = tiny.fit(experiment, resume=stopped.dir)
    assert run.summary.status == tiny.read(stopped.dir)["status"] == "stopped early"
    assert int(run.state.step) == stopped.summary.step == steps[-1]
    assert contents(stopped.dir) == before
    # Without patience it trains on.
    assert tiny.fit(experiment, resume=stopped.dir, patience=None).summary.status == "finished"


def test_record_gets_facts_of_the_resume(half, whole):
    exported = {"origin": {"member": 3, "num_steps": 20}}  # of a member of a sweep
    write_json(half / "record.json", tiny.read(half) | exported)
    resumed = tiny.fit(tiny.experiment(), resume=half, checkpoint_every=0)
    chex.assert_trees_all_equal(resumed.state.params, whole.state.params)
    assert (np.diff(resumed.metrics["elapsed"]) > 0).all()
    (entry,) = tiny.read(half)["resumed"]
    assert (entry["step"], entry["changed"], entry["damaged"]) == (10, [], [])
    assert set(entry["before"]) == {"code", "command", "git", "devices", "jax_flags"}
    assert tiny.read(half).items() >= exported.items()
    assert sorted(path.name for path in (half / "checkpoints").iterdir()) == ["10", "5"]


WRITTEN = Table()
RECORDED: dict[str, Any] = {"monitor": "accuracy", "keep_last": 3, "patience": 9, "checkpoint_every": 10}
RECORDED |= {"deterministic": True, "eval_batches": 1}


@pytest.mark.needs_cpu
def test_options_come_from_the_record_unless_given(tmp_path, capsys):
    path = tmp_path / "run"
    written = importlib.import_module(__name__).WRITTEN  # where the name is imported from

    def options() -> dict[str, Any]:
        recorded = tiny.read(path)["options"]
        return {name: recorded[name] for name in RECORDED}

    tiny.fit(tiny.experiment(num_steps=5), path, writers=(f"{__name__}:WRITTEN",), **RECORDED)
    with pytest.raises(jn.ConfigError, match=f"metric writers '{__name__}:WRITTEN'.*give writers again"):
        tiny.fit(tiny.experiment(num_steps=10), resume=path)
    tiny.fit(tiny.experiment(num_steps=10), resume=path, progress="plain", writers=(f"{__name__}:WRITTEN",))
    assert options() == RECORDED
    printed = capsys.readouterr().out
    assert "after step 5; num_steps 5 → 10\n" in printed and "it changes nothing on a CPU" in printed
    with pytest.raises(jn.ConfigError, match="deterministic=True, which decides"):
        tiny.fit(tiny.experiment(num_steps=15), resume=path, deterministic=False)
    assert [line["step"] for line in written.rows] == [5, 10] and written.closed == 2
    # A command line takes the number of steps from the record, unless a flag gives another.
    assert jn.main(tiny.experiment(), ["--resume", str(path), "--progress", "none"]).summary.step == 10
    tiny.fit(tiny.experiment(num_steps=15), resume=path, writers=(Table(),), keep_last=2, patience=None)
    assert options() == RECORDED | {"keep_last": 2, "patience": None}
    flags = ["--num-steps", "20", "--writers", "--monitor=loss", "--checkpoint_every", "None", "--progress", "none"]
    assert jn.main(tiny.experiment(), ["--resume", str(path), *flags]).summary.step == 20
    assert options() == RECORDED | {"monitor": "loss", "keep_last": 2, "patience": None, "checkpoint_every": None}
    assert tiny.read(path)["resumed"][-1]["changed"] == ["num_steps 15 → 20"]
    assert len(written.rows) == 2


MISMATCHES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"learning_rate": 0.5}, {}, r"has learning_rate = 0\.1, this experiment 0\.5"),
    ({"data": jn.data.arrays(tiny.points(37, 2), tiny.points(23, 1))}, {}, "data are not those"),
    ({"optimizer": lambda config: optax.sgd(0.1)}, {}, "the model and optimizer it was saved"),
    ({"num_steps": 10}, {}, "has done 20 steps already, more than num_steps = 10"),
    ({}, {"record": False}, "leave record at its default"),
]


def test_mismatches_are_errors_and_the_record_stays(whole):
    before = contents(whole.dir)
    for parts, options, words in MISMATCHES:
        with pytest.raises((jn.ConfigError, jn.RecordError), match=words):
            tiny.fit(tiny.experiment(**parts), resume=whole.dir, **options)
        assert contents(whole.dir) == before


def test_config_with_nan_equals_its_record():
    config = tiny.experiment(learning_rate=float("nan")).config
    check_same_config(jsonable(config_json(config)), config, "run", Path("there"))


COUNTED = tiny.TASK._replace(evaluate=lambda *given: dict.fromkeys(("loss", "accuracy", "count"), given[2].mask.sum()))
SHIFTED = jn.data.with_augmentation(tiny.splits(), lambda key, batch: batch._replace(inputs=batch.inputs + 1))
DERIVED = tiny.TASK._replace(derive_metrics=lambda means: {**means, "z": 1.0})
CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "augmentation": ({"data": SHIFTED}, ["the order or augmentation of the data"]),
    "evaluation": ({"task": lambda config: COUNTED}, ["the evaluation"]),
    "metrics": ({"task": lambda config: DERIVED}, ["the evaluation"]),
    "learning rate": ({"learning_rate": 0.2}, ["the program of a step"]),
    "optimizer": ({"optimizer": lambda config: optax.sgd(0.2, momentum=0.9)}, ["the program of a step"]),
}


def test_fingerprints_show_which_programs_changed(whole):
    for change, (parts, expected) in CHANGES.items():
        experiment = tiny.experiment(**parts)
        fingerprint = programs_of(experiment, experiment.data(experiment.config)).fingerprint()
        assert changed_parts(tiny.read(whole.dir)["groups"][0]["fingerprint"], fingerprint) == expected, change


def test_run_without_an_undamaged_checkpoint_is_an_error(half, tmp_path):
    for step in ("5", "10"):
        flip(half / "checkpoints" / step / "SHA256SUMS")
    without = tiny.fit(tiny.experiment(), tmp_path / "without", checkpoint_every=0).dir
    for path, words in ((half, "every checkpoint in .* is damaged, that of step 10"), (without, "kept no checkpoints")):
        before = contents(path)
        with pytest.raises(jn.RecordError, match=words):
            tiny.fit(tiny.experiment(), resume=path)
        assert contents(path) == before


GRID = "data=2,model=2"


def resumed_layout(recorded: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The layout options, without defaults, of a run with ``recorded`` options that is resumed with ``given``."""
    options = with_changes(jn.RunOptions(), given)
    new = continued_options(options, jn.RunOptions().recorded() | recorded, Path("there"), "run", trains=True, fixed=())
    return {name: value for name, value in new.explicit().items() if value not in (None, "auto")}


@pytest.mark.parametrize(
    ("recorded", "given", "expected"),
    [
        # Nothing is given: all is kept.
        ({"devices": 4, "strategy": "fsdp"}, {}, {"devices": 4, "strategy": "fsdp"}),
        # A mesh needs no number beside it: `all` may be another one here.
        ({"mesh": "data=2", "devices": "all"}, {}, {"mesh": "data=2"}),
        # A number of devices replaces a mesh of another number.
        ({"mesh": GRID, "devices": 4, "strategy": "fsdp"}, {"devices": 2}, {"devices": 2, "strategy": "fsdp"}),
        ({"mesh": GRID}, {"devices": 4}, {"mesh": GRID, "devices": 4}),
        ({"mesh": GRID}, {"devices": "all"}, {"mesh": GRID, "devices": "all"}),
        ({"mesh": "data=2"}, {"devices": "all"}, {"devices": "all"}),
        # A mesh replaces the number of devices, and pmap, which knows the axis data alone.
        ({"mesh": GRID, "devices": "all"}, {"mesh": "data=2"}, {"mesh": "data=2"}),
        ({"devices": 4, "strategy": "pmap"}, {"mesh": GRID}, {"mesh": GRID}),
        ({"devices": 4, "strategy": "pmap"}, {"mesh": "data=2"}, {"mesh": "data=2", "strategy": "pmap"}),
        # A strategy keeps the number of devices.
        ({"mesh": GRID}, {"strategy": "pmap"}, {"devices": 4, "strategy": "pmap"}),
        ({"mesh": "data=2"}, {"strategy": "pmap"}, {"mesh": "data=2", "strategy": "pmap"}),
        ({"mesh": GRID}, {"strategy": "fsdp"}, {"mesh": GRID, "strategy": "fsdp"}),
        # Defaults that are given replace too.
        ({"devices": 2, "strategy": "fsdp"}, {"strategy": "auto"}, {"devices": 2}),
        ({"mesh": GRID, "strategy": "fsdp"}, {"mesh": None}, {"strategy": "fsdp"}),
        ({"devices": 8}, {"devices": None}, {}),
    ],
)
@pytest.mark.several_devices
def test_given_layout_options_replace_those_of_the_record(recorded, given, expected):
    assert resumed_layout(recorded, given) == expected


@pytest.mark.several_devices
def test_missing_devices_of_the_record_are_named(monkeypatch):
    for recorded, used in (({"devices": 8}, "devices=8"), ({"mesh": "data=8", "devices": 8}, "mesh data=8")):
        message = rf"the run in there used {used}: give --devices 4 .* only 4 CPU devices are available"
        for given in ({}, {"strategy": "fsdp"}):
            with pytest.raises(jn.ConfigError, match=message):
                resumed_layout(recorded, given)
        assert resumed_layout(recorded, {"devices": 4}) == {"devices": 4}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(jn.ConfigError, match="used devices=2: give --devices 4 .* 2 processes of this run have 4"):
        resumed_layout({"devices": 2}, {})


@pytest.mark.needs_cpu
def test_other_devices_are_reported(half, whole, capsys):
    facts = tiny.read(half)
    gpu = {"backend": "gpu", "devices": [{"platform": "gpu", "kind": "NVIDIA H100"}]}
    elsewhere = facts | {"devices": facts["devices"] | gpu}
    write_json(half / "record.json", elsewhere | {"options": facts["options"] | {"device": "cpu"}})
    tiny.fit(tiny.experiment(num_steps=15), resume=half)
    assert tiny.read(half)["resumed"][-1]["changed"] == ["num_steps 20 → 15"], "it computed on the CPU"
    (group,), layout = facts["groups"], {"strategy": "data", "mesh": {"data": 2}}
    two = {"groups": [group | {"layout": layout}], "options": facts["options"] | {"devices": 2}}
    write_json(half / "record.json", elsewhere | two)
    experiment = tiny.experiment(task=lambda config: DERIVED)
    last = tiny.fit(experiment, resume=half, devices=1, progress="plain")
    assert last.summary.metrics == pytest.approx(whole.summary.metrics | {"test_z": 1.0})
    changed = ["the layout data data=2 → single", "the device NVIDIA H100 → cpu", "the evaluation"]
    assert f"not bit for bit, since these changed: {'; '.join(changed)}" in " ".join(capsys.readouterr().out.split())
    assert tiny.read(half)["resumed"][-1]["changed"] == changed
