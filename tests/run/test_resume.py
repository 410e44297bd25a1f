"""A run that was broken off and is resumed equals one that was not; changes are reported, mismatches are errors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as linen
import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.record import config_json, jsonable, read_metrics, write_json
from jaxnn.run import check_same_config
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

EVERY: dict[str, Any] = {"checkpoint_every": 5}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    """The tiny run without a break."""
    return tiny.fit(tiny.experiment(), tmp_path_factory.mktemp("whole") / "run", **EVERY)


@pytest.fixture(scope="module")
def kept_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half") / "run"
    for report in jn.iterate(tiny.experiment(), run_dir=path, **EVERY, **tiny.HOW):
        if report.step == 10:
            break
    return path


@pytest.fixture
def half(kept_half: Path, tmp_path: Path) -> Path:
    """A copy of a run that was left after step 10 of 20: it has the checkpoints of steps 5 and 10."""
    return shutil.copytree(kept_half, tmp_path / "run")


def untimed(path: Path) -> list[dict[str, Any]]:
    timings = ("seconds", "steps_per_second", "examples_per_second")
    return [{name: value for name, value in line.items() if name not in timings} for line in read_metrics(path)]


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


# --- equality ---


def test_every_part_of_a_state_is_restored_bitwise(tmp_path: Path) -> None:
    # Batch statistics, dropout, augmentation, a schedule, two moments and an average of the parameters.
    images = np.random.default_rng(0).integers(0, 256, (37, 6, 6, 1), np.uint8), tiny.points(37)[1]
    experiment = tiny.experiment(
        data=jn.data.with_augmentation(jn.data.arrays(images, images), jn.data.random_shift(1)),
        model=jn.models.CNN(3, blocks=((2,),), dense=(4,), dropout=0.25, batch_norm=True),
        optimizer=lambda config: jn.optim.with_ema(optax.adam(jn.schedules.cosine(1e-2, config.num_steps)), 0.9),
        num_steps=30,
    )
    expected = tiny.fit(experiment, tmp_path / "whole")
    assert "batch_stats" in expected.state.model_state
    path = tmp_path / "run"
    for step, options in ((10, {"run_dir": path, **tiny.HOW}), (20, {"resume": path})):
        for report in jn.iterate(experiment, **options):  # type: ignore[arg-type]
            if report.step == step:
                break
    found = tiny.fit(experiment, resume=path)
    assert found.summary.status == "finished" and found.final == expected.final
    assert untimed(path) == untimed(tmp_path / "whole")
    states = [run.state._replace(key=jax.random.key_data(run.state.key)) for run in (found, expected)]
    tiny.assert_bitwise_equal(*states)


def test_ended_runs_are_loaded_and_their_records_stay(whole: jn.Run, tmp_path: Path) -> None:
    before = contents(whole.dir)
    run = tiny.fit(tiny.experiment(), resume=whole.dir)
    assert run.summary.status == tiny.read(whole.dir)["status"] == "finished"
    assert int(run.state.step) == run.summary.step == 20
    tiny.assert_bitwise_equal(run.state.params, whole.state.params)
    assert contents(whole.dir) == before

    # The learning rate is 0: the third evaluation is the second without improvement.
    experiment = tiny.experiment(learning_rate=0.0, num_steps=60)
    stopped = tiny.fit(experiment, tmp_path / "run", eval_every=5, patience=2)
    assert stopped.metrics["step"].tolist() == [5, 10, 15] and stopped.summary.step == 15
    before = contents(stopped.dir)
    run = tiny.fit(experiment, resume=stopped.dir)
    assert run.summary.status == tiny.read(stopped.dir)["status"] == "stopped early" and int(run.state.step) == 15
    assert contents(stopped.dir) == before
    # Without patience it trains on.
    assert tiny.fit(experiment, resume=stopped.dir, patience=None).summary.status == "finished"


def test_lost_metrics_of_a_finished_run_do_not_train_it_again(whole: jn.Run, tmp_path: Path) -> None:
    path = shutil.copytree(whole.dir, tmp_path / "run")
    file = path / "metrics.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-1]))
    again = tiny.fit(tiny.experiment(), resume=path)
    assert again.summary.status == "finished" and int(again.state.step) == 20


# --- config and options ---


def test_record_gets_facts_of_the_resume(half: Path, whole: jn.Run) -> None:
    exported = {"member": 3, "sweep": {"vmap_size": 4}}  # of a member of a sweep
    write_json(half / "run.json", tiny.read(half) | exported)
    resumed = tiny.fit(tiny.experiment(), resume=half, checkpoint_every=0)
    tiny.assert_bitwise_equal(resumed.state.params, whole.state.params)
    (entry,) = tiny.read(half)["resumed"]
    assert (entry["step"], entry["changed"], entry["damaged"]) == (10, [], [])
    assert set(entry["before"]) == {"command", "git", "devices", "jax_flags"}
    assert tiny.read(half).items() >= exported.items()
    assert sorted(path.name for path in (half / "checkpoints").iterdir()) == ["10", "5"]


def test_another_number_of_steps_is_reported(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny.fit(tiny.experiment(num_steps=15), resume=half, progress="plain")
    assert run.summary.step == 15 and tiny.read(half)["resumed"][0]["changed"] == ["num_steps 20 → 15"]
    assert "after step 10; num_steps 20 → 15\n" in capsys.readouterr().out
    # A command line takes it from the record, unless a flag gives another.
    assert jn.main(tiny.experiment(), ["--resume", str(half), "--progress", "none"]).summary.step == 15
    run = jn.main(tiny.experiment(), ["--resume", str(half), "--num-steps", "25", "--progress", "none"])
    assert run.summary.step == 25 and tiny.read(half)["resumed"][-1]["changed"] == ["num_steps 15 → 25"]


RECORDED: dict[str, Any] = {"monitor": "accuracy", "keep_last": 3, "patience": 9, "checkpoint_every": 10}


def test_options_come_from_the_record_unless_given(tmp_path: Path) -> None:
    first = tiny.fit(tiny.experiment(num_steps=5), tmp_path / "run", **RECORDED)

    def options() -> dict[str, Any]:
        recorded = tiny.read(first.dir)["options"]
        return {name: recorded[name] for name in RECORDED}

    defaults = {"monitor": "loss", "keep_last": 2, "patience": None, "checkpoint_every": None}
    tiny.fit(tiny.experiment(num_steps=10), resume=first.dir)
    assert options() == RECORDED
    tiny.fit(tiny.experiment(num_steps=15), resume=first.dir, keep_last=2, patience=None)
    assert options() == RECORDED | {"keep_last": 2, "patience": None}
    flags = ["--resume", str(first.dir), "--num-steps", "20", "--monitor=loss", "--checkpoint_every", "None"]
    jn.main(tiny.experiment(), [*flags, "--progress", "none"])
    assert options() == defaults


class Lines(list[Any]):
    closed = 0

    def write(self, lines: Any) -> None:
        self.extend(lines)

    def close(self) -> None:
        self.closed += 1


WRITTEN = Lines()


def never(lines: Any) -> bool:
    return False


def test_writers_and_rules_come_from_the_record_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, named = tmp_path / "run", f"{__name__}:WRITTEN"
    module = __import__(__name__, fromlist=["WRITTEN"])  # where the name is imported from
    tiny.fit(tiny.experiment(num_steps=5), path, writers=(named,), stop=f"{__name__}:never")
    tiny.fit(tiny.experiment(num_steps=10), resume=path)
    assert [line["step"] for line in module.WRITTEN] == [5, 10] and module.WRITTEN.closed == 2
    assert tiny.read(path)["options"]["stop"] == f"{__name__}:never"
    tiny.fit(tiny.experiment(num_steps=15), resume=path, writers=(Lines(),))
    tiny.fit(tiny.experiment(num_steps=20), resume=path, stop=never)
    assert "used the metric writers Lines, without MODULE:NAME: give them again\n" in capsys.readouterr().err
    with pytest.raises(jn.ConfigError, match="stopping rule 'never'.*give stop again"):
        tiny.fit(tiny.experiment(num_steps=25), resume=path)
    assert capsys.readouterr().err == ""


def other_data() -> jn.Splits:
    inputs, labels = tiny.points(37)
    return jn.data.arrays((inputs + 1e-3, labels), tiny.points(23, 1))


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another value": ({"learning_rate": 0.5}, {}, r"has learning_rate = 0\.1, this experiment 0\.5"),
    "other data": ({"data": other_data()}, {}, "data are not those"),
    "another optimizer": ({"optimizer": lambda config: optax.adam(0.1)}, {}, "the model and optimizer it was saved"),
    "fewer steps": ({"num_steps": 10}, {}, "has done 20 steps already, more than num_steps = 10"),
    "no record": ({}, {"record": False}, "leave record at its default"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatches_are_errors_and_the_record_stays(whole: jn.Run, case: str) -> None:
    parts, options, words = MISMATCHES[case]
    before = contents(whole.dir)
    with pytest.raises((jn.ConfigError, jn.RecordError), match=words):
        tiny.fit(tiny.experiment(**parts), resume=whole.dir, **options)
    assert contents(whole.dir) == before


def test_config_with_nan_equals_its_record() -> None:
    config = tiny.experiment(learning_rate=float("nan")).config
    check_same_config(jsonable(config_json(config)), config, "run", Path("there"))


TASK = jn.tasks.classification(tiny.MODEL)


def counted(params: Any, state: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": batch.mask.sum() * 2.0, "accuracy": batch.mask.sum(), "count": batch.mask.sum()}


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "augmentation": ({"data": jn.data.with_augmentation(tiny.splits(), lambda key, x: x + 1)}, "augmentation"),
    "evaluation": ({"task": lambda config: TASK._replace(evaluate=counted)}, "the evaluation"),
    "metrics": ({"task": lambda _: TASK._replace(derive_metrics=lambda means: {**means, "z": 1.0})}, "evaluation"),
    "optimizer": ({"optimizer": lambda config: optax.sgd(0.2, momentum=0.9)}, "the program of a step"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_programs_are_reported(whole: jn.Run, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts, words = CHANGES[change]
    tiny.fit(tiny.experiment(**parts), resume=whole.dir, progress="plain")
    line = next(line for line in capsys.readouterr().out.splitlines() if "after step 20" in line)
    assert re.search(f"since these changed: [^;]*{words}[^;]*$" if words else "after step 20$", line)


# --- damage ---


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_checkpoint_is_moved_aside_and_the_one_before_used(
    whole: jn.Run, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(half / "checkpoints" / "10" / "default" / "manifest.ocdbt")
    with pytest.raises(jn.RecordError, match="has done 5 steps already, more than num_steps = 4"):
        tiny.fit(tiny.experiment(num_steps=4), resume=half)
    assert (half / "checkpoints" / "10").is_dir(), "an error changes nothing"
    resumed = tiny.fit(tiny.experiment(), resume=half, progress="plain")
    aside = half / "checkpoints" / "damaged" / "10"
    ((step, (damage,)),) = [(entry["step"], entry["damaged"]) for entry in tiny.read(half)["resumed"]]
    for words in ("checkpoint of step 10 is damaged", "default/manifest.ocdbt has other bytes", f"moved to {aside}"):
        assert words in damage
    assert step == 5 and f"resumed after step 5; {damage}" in " ".join(capsys.readouterr().out.split())
    assert (aside / "default" / "manifest.ocdbt").is_file()
    tiny.assert_bitwise_equal(resumed.state.params, whole.state.params)
    tiny.assert_bitwise_equal(resumed.state.opt_state, whole.state.opt_state)
    assert untimed(half) == untimed(whole.dir) and tiny.read(half)["status"] == "finished"


def test_finished_run_with_a_damaged_checkpoint_repeats_its_last_steps(whole: jn.Run, tmp_path: Path) -> None:
    path = shutil.copytree(whole.dir, tmp_path / "run")
    (path / "checkpoints" / "20" / "default" / "_METADATA").unlink()
    again = tiny.fit(tiny.experiment(), resume=path)
    assert tiny.read(path)["resumed"][0]["step"] == 15 and again.summary.status == "finished"
    tiny.assert_bitwise_equal(again.state.params, whole.state.params)
    assert untimed(path) == untimed(whole.dir)
    tiny.assert_bitwise_equal(tiny.fit(tiny.experiment(), resume=path).state.params, whole.state.params)


def test_run_without_an_undamaged_checkpoint_is_an_error(half: Path, tmp_path: Path) -> None:
    for step in ("5", "10"):
        flip(half / "checkpoints" / step / "SHA256SUMS")
    without = tiny.fit(tiny.experiment(), tmp_path / "without", checkpoint_every=0).dir
    for path, words in ((half, "every checkpoint in .* is damaged, that of step 10"), (without, "kept no checkpoints")):
        before = contents(path)
        with pytest.raises(jn.RecordError, match=words):
            tiny.fit(tiny.experiment(), resume=path)
        assert contents(path) == before


def test_sweep_resumes_from_the_checkpoint_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Killed(BaseException):
        pass

    class Killer:
        """A metric writer that ends the sweep in its last window, before the state is saved."""

        def write(self, lines: Any) -> None:
            if lines[0]["step"] == 20:
                raise Killed

    path, points = tmp_path / "sweep", jn.grid(learning_rate=[0.01, 0.1])
    how = {**tiny.HOW, "vmap_size": 2, "devices": 1}
    expected = jn.sweep(tiny.experiment(), points, record=False, **how)
    with pytest.raises(Killed):
        jn.sweep(tiny.experiment(), points, run_dir=path, writers=(Killer(),), **how, **EVERY)
    newest = max((path / "groups" / "0").iterdir(), key=lambda path: int(path.name))
    flip(newest / "default" / "_METADATA")
    rest = jn.sweep(tiny.experiment(), resume=path, progress="plain", devices=1, writers=())
    (damage,) = tiny.read(path, "sweep.json")["damaged"]
    assert damage.startswith(f"the checkpoint of step {newest.name} is damaged, its file default/_METADATA")
    assert damage in " ".join(capsys.readouterr().out.split())
    assert [member.final for member in rest.members] == [member.final for member in expected.members]


# --- other devices ---

GRID = "data=2,model=2"


class Sharded(linen.Module):
    """Two layers, the first sharded along the axis ``model`` of a mesh."""

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        init = jn.nn.partitioned(linen.initializers.lecun_normal(), (None, "model"))
        return jn.nn.Dense(3)(linen.tanh(jn.nn.Dense(8, kernel_init=init)(inputs)))


class Layout(BaseException):
    """Raised with the arguments of ``parallel.make_layout`` in its place."""


@pytest.fixture
def resumed_layout(whole: jn.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def make_layout(strategy: Any, devices: Any, mesh: Any, device: Any) -> Any:
        raise Layout({"devices": devices, "mesh": mesh, "strategy": strategy})

    def resume(recorded: dict[str, Any], **given: Any) -> dict[str, Any]:
        """The layout options, without defaults, of a run with ``recorded`` options that is resumed with ``given``."""
        facts = tiny.read(whole.dir)
        path = tmp_path / "there"
        path.mkdir(exist_ok=True)
        write_json(path / "run.json", facts | {"options": facts["options"] | recorded})
        with pytest.raises(Layout) as caught:
            tiny.fit(tiny.experiment(), resume=path, **given)
        return {name: value for name, value in caught.value.args[0].items() if value not in (None, "auto")}

    monkeypatch.setattr("jaxnn.parallel.make_layout", make_layout)
    return resume


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
def test_given_layout_options_replace_those_of_the_record(
    resumed_layout: Any, recorded: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert resumed_layout(recorded, **given) == expected


def test_missing_devices_of_the_record_are_named(resumed_layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for recorded, used in (({"devices": 8}, "devices=8"), ({"mesh": "data=8", "devices": 8}, "mesh data=8")):
        message = rf"there used {used}: give --devices 4 .* only 4 CPU devices are available"
        for given in ({}, {"strategy": "fsdp"}):
            with pytest.raises(jn.ConfigError, match=message):
                resumed_layout(recorded, **given)
        assert resumed_layout(recorded, devices=4) == {"devices": 4}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        jn.ConfigError, match="there used devices=2: give --devices 4 .* 2 processes of this run have 4"
    ):
        resumed_layout({"devices": 2})


def test_sharded_run_resumes_on_fewer_devices_and_reports_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    tiny.fit(tiny.experiment(model=Sharded(), num_steps=10), path, mesh=GRID)
    last = tiny.fit(tiny.experiment(model=Sharded(), num_steps=20), resume=path, devices=2)
    expected = tiny.fit(tiny.experiment(model=Sharded()))
    assert last.summary.metrics == pytest.approx(expected.summary.metrics, rel=1e-4)
    (entry,) = tiny.read(path)["resumed"]
    assert entry["changed"] == ["the layout data data=2,model=2 → data data=2", "num_steps 10 → 20"]


def test_another_kind_of_device_is_reported(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = tiny.read(half)
    gpu = {"backend": "gpu", "devices": [{"platform": "gpu", "kind": "NVIDIA H100"}]}
    elsewhere = facts | {"devices": facts["devices"] | gpu}
    write_json(half / "run.json", elsewhere | {"options": facts["options"] | {"device": "cpu"}})
    tiny.fit(tiny.experiment(num_steps=15), resume=half)
    assert tiny.read(half)["resumed"][-1]["changed"] == ["num_steps 20 → 15"], "it computed on the CPU"
    write_json(half / "run.json", elsewhere)
    tiny.fit(tiny.experiment(), resume=half, progress="plain")
    assert "not bit for bit, since these changed: the device NVIDIA H100 → cpu" in capsys.readouterr().out
    assert tiny.read(half)["resumed"][-1]["changed"] == ["the device NVIDIA H100 → cpu"]
