"""Runs that cannot start, break down, or are broken off: the record says how, and what was good is kept."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.record import config_json, is_locked, jsonable, read_metrics, write_json
from jaxnn.run import check_same_config
from jaxnn.types import ConfigError, DataError, TrainingError
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    """The run of the tiny experiment that nothing befell."""
    return tiny.fit(tiny.experiment(), tmp_path_factory.mktemp("finished") / "run")


# --- what cannot be run is said before anything is written ---


def bad(**fields: Any) -> dict[str, Any]:
    return {"experiment": tiny.experiment(**fields)}


IDS, LABELS = np.arange(36).reshape(9, 4) % 8, np.arange(9) % 3


class Reader(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return linen.Embed(6, 3, name="Table")(tokens.T).mean(axis=0)


CASES = {
    "an unknown option": ({"report_evry": 5}, "no run option 'report_evry': did you mean 'report_every'"),
    "an unknown monitor": ({"monitor": "acuracy"}, "monitor is 'acuracy', .* did you mean 'accuracy'"),
    "patience without an eval split": (
        {"patience": 2, **bad(data=jn.data.arrays(tiny.points(37)))},
        "patience needs",
    ),
    "a batch larger than the set": (bad(batch_size=38), "batch of 38 is larger than the set of 37"),
    "too few outputs": (
        bad(data=jn.data.arrays((tiny.points(37)[0], np.arange(37) % 4))),
        "label 3 of example 3 in train is out of range",
    ),
    "labels beyond the outputs in the eval split alone": (
        bad(data=jn.data.arrays(tiny.points(37), (tiny.points(23)[0], np.arange(23) % 5))),
        "label 3 of example 3 in test is out of range",
    ),
    "outputs of another shape": (
        bad(model=(tiny.init, lambda params, inputs: tiny.apply(params, inputs)[:, None])),
        r"logits \[batch, classes\], not \[8, 1, 3\]",
    ),
    "a model that is none": (bad(model=3), "a model must be a Flax Linen module or a pair"),
    "data that are a pair": (bad(data=tiny.points(37)), r"experiment's data gave a tuple: .* jn\.data\.arrays"),
    "a model for a task": (
        bad(task=lambda config: jn.models.MLP((3,))),
        r"experiment's task gave a MLP: .* jn\.tasks\.classification",
    ),
    "a number for an optimizer": (bad(optimizer=lambda config: 0.1), "experiment's optimizer gave a float: .* Optax"),
    "a loss that is no number an example": (
        bad(task=lambda config: jn.tasks.supervised(tiny.MODEL, lambda outputs, targets: outputs**2, {})),
        r"a number an example, \[8\], not \[8, 3\]: take its mean over every axis but the first",
    ),
    "a token beyond the vocabulary in the eval split alone": (
        bad(
            data=jn.data.arrays((IDS % 5, LABELS), (IDS, LABELS)),
            task=lambda config: jn.tasks.classification(jn.models.FastText(3, vocabulary_size=5, features=2)),
        ),
        r"token id 5 of example 1 in test .* 5 rows",
    ),
    "a token beyond a table of the user's own": (
        bad(
            data=jn.data.arrays((IDS, LABELS)),
            task=lambda config: jn.tasks.supervised(Reader(), lambda outputs, targets: outputs.mean(axis=1), {}),
        ),
        r"token id 6 of example 1 in train .* Table has 6 rows",
    ),
    "a token beyond a vocabulary without a table": (
        bad(
            data=jn.data.arrays((IDS, LABELS)),
            task=lambda config: jn.tasks.classification(
                jn.models.RecurrentClassifier(3, vocabulary_size=6, features=2, embedding_features=None)
            ),
        ),
        r"token id 6 of example 1 in train .* 6 rows",
    ),
    "binary labels from 1": (
        bad(
            data=jn.data.arrays((tiny.points(37)[0], np.arange(37) % 2 + 1)),
            task=lambda config: jn.tasks.binary_classification((tiny.init, lambda p, x: tiny.apply(p, x)[:, :1])),
        ),
        "label 2 of example 1 in train .* 0 to 1",
    ),
    "one-hot labels": (
        bad(data=jn.data.arrays((tiny.points(37)[0], np.eye(3)[np.arange(37) % 3]))),
        r"integers \[batch\], not float32 .* argmax",
    ),
    "a negative learning rate": (bad(learning_rate=-0.1), "learning_rate is -0.1"),
    "a label that stands for none, but not for what is ignored": (
        bad(
            data=jn.data.arrays((np.zeros((9, 4, 3), np.float32), np.full((9, 4), -2))),
            task=lambda config: jn.tasks.next_token((tiny.init, lambda params, x: x @ params["kernel"])),
        ),
        "label -2 of example 0 in train is out of range",
    ),
    "tokens beyond the outputs": (
        bad(
            data=jn.data.arrays((np.zeros((9, 4, 3), np.float32), np.full((9, 4), 7))),
            task=lambda config: jn.tasks.next_token((tiny.init, lambda params, x: x @ params["kernel"])),
        ),
        "label 7 of example 0 in train is out of range: labels must be 0 to 2",
    ),
}


@pytest.mark.parametrize(("options", "words"), CASES.values(), ids=CASES)
def test_what_cannot_be_run_is_named_and_nothing_is_written(tmp_path: Path, options: Any, words: str) -> None:
    options = dict(options)
    experiment = options.pop("experiment", tiny.experiment())
    with pytest.raises((ConfigError, DataError)) as caught:
        tiny.fit(experiment, tmp_path / "run", **options)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_two_lengths_of_training_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="both num_epochs and num_steps"):
        jn.train(tiny.MODEL, optax.sgd(0.1), tiny.points(37), num_epochs=1, num_steps=5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_epochs": float("nan")}, "num_epochs is nan"),
        ({"num_epochs": float("inf")}, "num_epochs is inf"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": 38}, "larger than the set of 37"),
    ],
)
def test_the_two_line_form_names_what_it_cannot_use(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        jn.train(tiny.MODEL, optax.sgd(0.1), tiny.points(37), record=False, progress="none", **given)


def test_one_hot_rows_are_no_regression_unless_it_is_asked_for() -> None:
    inputs, labels = tiny.points(37)
    rows = np.eye(3)[labels]
    with pytest.raises(ConfigError, match=r"one-hot .*argmax\(axis=-1\)"):
        jn.train(tiny.MODEL, optax.sgd(0.1), (inputs, rows), record=False, progress="none")
    with pytest.raises(DataError, match=r"targets of train are float32 .*argmax\(axis=-1\)"):
        jn.data.arrays((inputs, rows), class_names=("a", "b", "c"))
    task = jn.tasks.regression(tiny.MODEL)
    assert jn.train(task, optax.sgd(0.1), (inputs, rows), num_steps=1, record=False, progress="none", steps_per_call=1)


def test_integers_may_be_regressed() -> None:
    data = jn.data.arrays((tiny.points(37)[0], np.arange(37)))
    model = (tiny.init, lambda params, inputs: tiny.apply(params, inputs)[:, :1])
    run = tiny.fit(tiny.experiment(data=data, task=lambda config: jn.tasks.regression(model), learning_rate=0.01))
    assert run.metrics["train_loss"][-1] < run.metrics["train_loss"][0]


# --- a loss that is no longer finite ---


def exploding(bad_step: int) -> jn.Experiment[tiny.Config]:
    """SGD whose gradient at update ``bad_step`` is NaN, so that the loss of the step after it is the first bad one."""

    def poison() -> optax.GradientTransformation:
        def update(updates: Any, count: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
            factor = jnp.where(count + 1 == bad_step, jnp.nan, 1.0)
            return jax.tree.map(lambda leaf: leaf * factor, updates), count + 1

        return optax.GradientTransformation(lambda params: jnp.int32(0), update)

    return tiny.experiment(optimizer=lambda config: optax.chain(optax.sgd(0.1), poison()), num_steps=40)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match="loss is no longer finite at step 23 of 40.* checkpoint is that of step 20"
    ):
        tiny.fit(exploding(22), tmp_path / "run", checkpoint_every=10)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["10", "20"]
    facts = tiny.read(tmp_path / "run")
    assert facts["status"] == facts["summary"]["status"] == "diverged"
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25]
    assert np.isfinite([line["train_loss"] for line in lines]).tolist() == [True] * 4 + [False]
    assert '"train_loss": "nan"' in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert not is_locked(tmp_path / "run")


def test_parameters_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    # The update of step 20 is bad and its loss, computed before it, is not.
    with pytest.raises(TrainingError, match="parameters are no longer finite after step 20: .*that of step 10"):
        tiny.fit(exploding(20), tmp_path / "run", checkpoint_every=10)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["10"]
    assert tiny.read(tmp_path / "run")["status"] == "diverged"


def test_finite_parameters_of_a_run_that_diverged_are_not_saved_either(tmp_path: Path) -> None:
    task = jn.tasks.classification(tiny.MODEL)

    def init(key: jax.Array, batch: jn.Batch) -> Any:
        params, state = task.init(key, batch)
        return {**params, "clock": jnp.zeros(())}, state

    def loss(params: Any, *args: Any) -> Any:
        value, others = task.loss(params, *args)
        now = jax.lax.stop_gradient(params["clock"])  # a tenth more after each step, and out of time after twelve
        return value + now - params["clock"] + jnp.where(now > 1.15, jnp.inf, 0.0), others

    experiment = tiny.experiment(task=lambda _: task._replace(init=init, loss=loss), optimizer=lambda _: optax.sgd(0.1))
    with pytest.raises(TrainingError, match="at step 13 of 20: .* of step 10"):
        tiny.fit(experiment, tmp_path / "run", checkpoint_every=5)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["10", "5"]


def test_diverged_run_resumes_from_its_last_good_state(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="at step 23"):
        tiny.fit(exploding(22), tmp_path / "run", steps_per_call=1, checkpoint_every=10)
    with pytest.raises(TrainingError, match="at step 23"):
        tiny.fit(exploding(22), resume=tmp_path / "run")
    assert tiny.read(tmp_path / "run")["resumed"][0]["step"] == 20
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [5, 10, 15, 20, 25]


def test_a_loss_that_is_not_finite_ends_an_iteration_too(tmp_path: Path) -> None:
    steps = []
    with pytest.raises(TrainingError, match="at step 23"):
        for report in jn.iterate(exploding(22), run_dir=tmp_path / "run", **tiny.HOW):
            steps.append(report.step)
    assert steps == [5, 10, 15, 20]
    assert tiny.read(tmp_path / "run")["status"] == "diverged"


# --- errors and signals during training ---


class Breaking:
    """A split like another that raises, or does what it is told, when the batches of a step are asked for."""

    def __init__(self, source: Any, step: int, action: Any) -> None:
        self._source, self._step, self._action = source, step, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def order(self, seed: Any, steps: Any, batch_size: int) -> Any:
        if self._step in np.asarray(steps):
            self._action()
        return self._source.order(seed, steps, batch_size)


def breaking(step: int, action: Any) -> jn.Experiment[tiny.Config]:
    splits = tiny.splits()
    return tiny.experiment(data=splits._replace(train=Breaking(splits.train, step, action)))


def test_an_error_of_the_users_code_is_recorded_and_passed_on(finished: jn.Run, tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        tiny.fit(breaking(15, fail), tmp_path / "run", resident=False, checkpoint_every=5)
    facts = tiny.read(tmp_path / "run")
    assert facts["status"] == facts["summary"]["status"] == "failed"
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [5, 10, 15]
    assert not is_locked(tmp_path / "run")
    resumed = tiny.fit(tiny.experiment(), resume=tmp_path / "run", resident=False)
    assert tiny.read(tmp_path / "run")["status"] == "finished"
    tiny.assert_bitwise_equal(resumed.state.params, finished.state.params)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_window_saves_and_can_be_resumed(
    finished: jn.Run, tmp_path: Path, signum: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    interrupting = breaking(7, lambda: os.kill(os.getpid(), signum))
    run = tiny.fit(interrupting, tmp_path / "run", resident=False)
    assert "stopping after the current window" in capsys.readouterr().err
    assert run.summary.status == tiny.read(tmp_path / "run")["status"] == "interrupted"
    assert int(run.state.step) == run.summary.step == 10
    assert (tmp_path / "run" / "checkpoints" / "10").is_dir()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    resumed = tiny.fit(tiny.experiment(), resume=tmp_path / "run", resident=False)
    assert resumed.summary.status == "finished"
    assert resumed.metrics["step"].tolist() == [5, 10, 15, 20], "it did not resume where it was interrupted"
    tiny.assert_bitwise_equal(resumed.state.params, finished.state.params)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tiny.fit(breaking(15, twice), tmp_path / "run", resident=False)
    assert tiny.read(tmp_path / "run")["status"] == "interrupted"
    assert not is_locked(tmp_path / "run")


def test_an_error_in_the_callers_loop_completes_the_record_and_lets_it_go(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        for report in jn.iterate(tiny.experiment(), run_dir=tmp_path / "run", **tiny.HOW):
            if report.step == 10:
                raise ZeroDivisionError
    facts = tiny.read(tmp_path / "run")
    assert facts["status"] != "running" and facts["summary"]["step"] == 10
    assert not is_locked(tmp_path / "run")
    assert tiny.fit(tiny.experiment(), resume=tmp_path / "run").summary.status == "finished"


# --- resuming what cannot be resumed ---


def test_another_config_is_refused_by_the_name_of_the_field(finished: jn.Run) -> None:
    with pytest.raises(ConfigError, match=r"has learning_rate = 0\.1, this experiment 0\.5"):
        tiny.fit(tiny.experiment(learning_rate=0.5), resume=finished.dir)


def test_config_with_nan_equals_its_record() -> None:
    config = tiny.experiment(learning_rate=float("nan")).config
    check_same_config(jsonable(config_json(config)), config, "run", Path("there"))


def test_other_data_are_refused_and_the_record_stays_as_it_was(finished: jn.Run) -> None:
    before = (finished.dir / "run.json").read_text(), (finished.dir / "metrics.jsonl").read_text()
    inputs, labels = tiny.points(37)
    other = jn.data.arrays((inputs + 1e-3, labels), tiny.points(23, 1))
    with pytest.raises(jn.RecordError, match="data are not those"):
        tiny.fit(tiny.experiment(data=other), resume=finished.dir)
    assert ((finished.dir / "run.json").read_text(), (finished.dir / "metrics.jsonl").read_text()) == before


def test_another_model_is_refused(finished: jn.Run) -> None:
    with pytest.raises(jn.RecordError, match="the model and optimizer it was saved with"):
        tiny.fit(tiny.experiment(optimizer=lambda config: optax.adam(0.1)), resume=finished.dir)


def contents(run_dir: Path) -> dict[str, bytes]:
    """The files of a record but those of its checkpoints."""
    return {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}


def test_a_run_resumed_at_its_end_is_loaded_and_its_record_stays(finished: jn.Run) -> None:
    before = contents(finished.dir)
    run = tiny.fit(tiny.experiment(), resume=finished.dir)
    assert run.summary.status == tiny.read(finished.dir)["status"] == "finished"
    assert contents(finished.dir) == before
    assert int(run.state.step) == run.summary.step == 20
    tiny.assert_bitwise_equal(run.state.params, finished.state.params)


def test_a_finished_run_whose_last_metrics_are_lost_is_not_trained_again(tmp_path: Path) -> None:
    run = tiny.fit(tiny.experiment(), tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:-1]))
    again = tiny.fit(tiny.experiment(), resume=run.dir)
    assert again.summary.status == "finished" and int(again.state.step) == 20


def test_a_run_that_stopped_early_is_loaded_too(tmp_path: Path) -> None:
    experiment = tiny.experiment(learning_rate=0.0, num_steps=60)
    stopped = tiny.fit(experiment, tmp_path / "run", eval_every=5, patience=2)
    before = contents(stopped.dir)
    run = tiny.fit(experiment, resume=stopped.dir)
    assert run.summary.status == "stopped early" and int(run.state.step) == 15
    assert contents(stopped.dir) == before


def test_resumed_member_of_a_sweep_stays_one(tmp_path: Path) -> None:
    first = tiny.fit(tiny.experiment(num_steps=10), tmp_path / "run")
    exported = {"member": 3, "sweep": {"vmap_size": 4}}
    write_json(first.dir / "run.json", tiny.read(first.dir) | exported)
    tiny.fit(tiny.experiment(), resume=first.dir)
    assert tiny.read(first.dir).items() >= exported.items()


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": 0}], ids=["as before", "without more checkpoints"])
def test_run_resumes_from_its_newest_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    first = tiny.fit(tiny.experiment(num_steps=10), tmp_path / "run")
    run = tiny.fit(tiny.experiment(), resume=first.dir, **options)
    np.testing.assert_array_equal(run.metrics["step"], [5, 10, 15, 20])
    told = tiny.read(first.dir)["resumed"][0]
    assert told["step"] == 10 and set(told["before"]) == {"command", "git", "devices", "jax_flags"}


def test_run_without_checkpoints_cannot_be_resumed(tmp_path: Path) -> None:
    finished = tiny.fit(tiny.experiment(), tmp_path / "run", checkpoint_every=0)
    before = contents(finished.dir)
    with pytest.raises(jn.RecordError, match="kept no checkpoints, so it cannot be resumed"):
        tiny.fit(tiny.experiment(), resume=finished.dir)
    assert contents(finished.dir) == before


def test_a_run_cannot_be_resumed_to_fewer_steps_than_it_has_done(finished: jn.Run) -> None:
    before = contents(finished.dir)
    with pytest.raises(jn.RecordError, match="has done 20 steps already, more than num_steps = 10"):
        tiny.fit(tiny.experiment(num_steps=10), resume=finished.dir)
    assert contents(finished.dir) == before


def test_without_its_record_a_run_cannot_be_resumed(finished: jn.Run) -> None:
    with pytest.raises(ConfigError, match="leave record at its default"):
        tiny.fit(tiny.experiment(), resume=finished.dir, record=False)
