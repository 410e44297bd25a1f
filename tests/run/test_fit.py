"""``fit``, ``train`` and ``iterate`` compute the same numbers as a loop written by hand, for every way to run."""

import contextlib
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.record import is_locked
from tests import tiny


def by_hand(experiment: jn.Experiment[Any]) -> tuple[jn.TrainState, dict[str, np.ndarray]]:
    """The final state, and the metrics of every step, of a plain loop over the same batches."""
    config, train = experiment.config, experiment.data(experiment.config).train
    task, optimizer = experiment.task(config), experiment.optimizer(config)
    step = jax.jit(jn.steps.make_train_step(task, optimizer))
    first = train.gather(train.examples, np.arange(config.batch_size))
    state = jax.jit(lambda key: jn.steps.init_train_state(task, optimizer, key, first))(jax.random.key(config.seed))
    history = []
    for indices in train.order(config.seed, np.arange(config.num_steps), config.batch_size):
        state, metrics = step(state, train.gather(train.examples, indices))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, {name: np.array([metrics[name] for metrics in history]) for name in history[0]}


class Dropped(linen.Module):
    """Softmax regression on inputs of which half are dropped in training."""

    @linen.compact
    def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
        return jn.nn.Dense(3, kernel_init=linen.initializers.ones)(jn.nn.Dropout(0.5)(inputs, train=train))


def test_fit_equals_a_loop_by_hand_with_its_dropout_and_evaluates_averaged_parameters():
    averaging = lambda config: jn.optim.with_ema(optax.sgd(0.5), 0.9)  # noqa: E731
    experiment = tiny.experiment(model=Dropped(), optimizer=averaging)
    run, (state, metrics) = tiny.fit(experiment), by_hand(experiment)
    np.testing.assert_array_equal(run.metrics["step"], [5, 10, 15, 20])
    for name in ("loss", "accuracy"):
        means = metrics[name].reshape(4, 5).mean(axis=1)
        np.testing.assert_allclose(run.metrics[f"train_{name}"], means, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run.state.params, state.params)
    assert int(run.state.step) == 20
    np.testing.assert_array_equal(np.isnan(run.metrics["test_loss"]), [True, False, True, False])
    assert set(run.final) == {"train_loss", "train_accuracy", "test_loss", "test_accuracy"}

    inputs, labels = tiny.points(23, 1)
    average = jax.device_get(jax.jit(jn.optim.evaluation_params)(run.state.params, run.state.opt_state))["Dense_0"]
    np.testing.assert_allclose(run.predict(inputs), inputs @ average["kernel"] + average["bias"], rtol=1e-4, atol=1e-5)
    assert np.abs(average["kernel"] - run.state.params["Dense_0"]["kernel"]).max() > 1e-3
    assert run.final["test_loss"] == pytest.approx(measured(run, inputs, labels)["loss"], rel=1e-6)


def measured(run: jn.Run, inputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Loss and accuracy by NumPy, from the run's predictions for every example of a split."""
    logits = run.predict(inputs).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    loss = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]
    return {"loss": float(loss.mean()), "accuracy": float((logits.argmax(axis=1) == labels).mean())}


def test_evaluation_is_exact_and_how_a_run_is_computed_changes_no_bit(whole):
    # 23 test examples: batches of 7 leave a tail of 2.
    batched = tiny.fit(tiny.experiment(), eval_batch_size=7, steps_per_call=1)
    for split, points in (("test", tiny.points(23, 1)), ("train", tiny.points(37))):
        assert batched.evaluate(split) == pytest.approx(measured(batched, *points), rel=1e-6)
    assert batched.final["test_loss"] == pytest.approx(batched.evaluate()["loss"], rel=1e-12)
    # Streamed in batches of 1: one block of 16, and one of 7 that is padded to 16 and masked.
    streamed = tiny.fit(tiny.experiment(), resident=False, eval_batch_size=1)
    assert streamed.evaluate() == pytest.approx(measured(streamed, *tiny.points(23, 1)), rel=1e-6)
    np.testing.assert_array_equal(streamed.metrics["train_loss"], whole.metrics["train_loss"])
    for other in (batched, streamed):
        chex.assert_trees_all_equal(other.state._replace(key=None), whole.state._replace(key=None))


def test_validation_split_replaces_test_during_training():
    data = jn.data.arrays(tiny.points(37), test=tiny.points(23, 1), validation=tiny.points(23, 2))
    run = tiny.fit(tiny.experiment(data=data, num_steps=5))
    assert "validation_loss" in run.metrics and "test_loss" not in run.metrics
    assert run.evaluate("test")["loss"] != run.evaluate("validation")["loss"]


def test_augmentation_differs_by_step_and_repeats_by_run():
    def noisy(key: jax.Array, batch: jn.Batch) -> jn.Batch:
        return batch._replace(inputs=batch.inputs + jax.random.uniform(key, batch.inputs.shape[1:])[None])

    data = jn.data.with_augmentation(tiny.splits(), noisy)
    # The learning rate is 0 and every batch is the full set, shifted by one draw: only the noise differs by step.
    experiment = tiny.experiment(data=data, learning_rate=0.0, batch_size=37, num_steps=4)
    first = tiny.fit(experiment, report_every=1, steps_per_call=2).metrics["train_loss"]
    assert np.diff(np.sort(first)).min() > 1e-3
    np.testing.assert_array_equal(tiny.fit(experiment, report_every=1, steps_per_call=1).metrics["train_loss"], first)


def test_leaks_and_a_rate_of_zero_are_said_before_training(capsys):
    inputs, labels = tiny.points(37)
    for name, test in (
        ("all", (inputs, labels)),
        ("the last", (inputs[30:], labels[30:])),
        ("none", tiny.points(37, 1)),
    ):
        data = jn.data.arrays((inputs, labels), test=test)
        tiny.fit(tiny.experiment(data=data, num_steps=5, learning_rate=0.1 * (name == "none")), progress="plain")
        said = capsys.readouterr().out
        assert ("the rows of test are among those of train" in said) == (name != "none")
        assert ("it is 0: the parameters stay as they are" in said) == (name != "none")


def test_accumulated_gradients_that_no_update_used_are_said():
    def accumulating(num_steps: int) -> jn.Run:
        optimizer = jn.optim.with_accumulation(optax.sgd(0.1), 4)
        return tiny.fit(tiny.experiment(optimizer=lambda config: optimizer, num_steps=num_steps), steps_per_call=1)

    with pytest.raises(jn.ConfigError, match="no parameter was updated: num_steps=3 is less than one accumulation"):
        accumulating(3)
    with pytest.warns(UserWarning, match="the gradients of the last 2 of 6 steps were accumulated and not applied"):
        accumulating(6)


def test_nothing_is_compiled_after_the_first_window_and_the_ledger_has_the_causes(tmp_path):
    events: list[Any] = []

    def on_duration(name: str, seconds: float, **_: Any) -> None:
        if "/compile/" in name:
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    spy = SimpleNamespace(write=lambda lines: events.extend(line["step"] for line in lines))
    try:
        # Windows of 5 and of 3 in calls of 3, streamed and evaluated: every kind of program there is.
        options = {"steps_per_call": 3, "resident": False, "checkpoint_every": 0}
        run = tiny.fit(tiny.experiment(num_steps=23), tmp_path / "run", writers=(spy,), **options)
    finally:
        jax.monitoring.unregister_event_duration_listener(on_duration)
    shown = [index for index, event in enumerate(events) if isinstance(event, int)]
    assert any(isinstance(event, str) for event in events[: shown[0]]), "the listener received no compilation"
    assert events[shown[0] : shown[-1] + 1] == [5, 10, 15, 20, 23]

    ledger = tiny.read(run.dir, "compiles.json")
    names = ("initialise", "train 3 steps", "train 2 steps", "evaluate test")
    assert [(one["name"], one["cause"]) for one in ledger["compilations"]] == [(name, "start") for name in names]
    stages = ("trace_seconds", "lower_seconds", "compile_seconds")
    seconds = sum(one[stage] for one in ledger["compilations"] for stage in stages)
    assert ledger["totals"]["num_compilations"] == 4 and ledger["totals"]["seconds"] == pytest.approx(seconds)
    assert not (run.dir / "checkpoints").exists()
    with pytest.raises(jn.RecordError, match="kept no checkpoints"):
        run.best_state()


# For steps that are surely short, a single one need not be measured.
@pytest.mark.parametrize("resident", [True, False])
def test_steps_per_call_are_chosen_by_measuring(whole, resident, tmp_path):
    chosen = tiny.fit(tiny.experiment(), tmp_path / "run", steps_per_call=None, report_every=10, resident=resident)
    facts = tiny.read(chosen.dir)
    measured = {int(steps): seconds for steps, seconds in facts["seconds_per_step_measured"].items()}
    assert list(measured) == [10] if resident else (1 in measured and len(measured) >= 2)
    assert all(seconds > 0 for seconds in measured.values())
    assert facts["steps_per_call"] == min(measured, key=lambda steps: measured[steps])
    chex.assert_trees_all_equal(chosen.state.params, whole.state.params)  # measuring trained nothing


def test_train_classifies_labels():
    how = {**tiny.HOW, "record": False, "batch_size": 8, "num_epochs": 2.5}
    run = jn.train(tiny.MODEL, optax.sgd(0.1, momentum=0.9), tiny.points(37), **how)
    # 37 // 8 = 4 steps an epoch, 2.5 epochs: 10 steps.
    assert int(run.state.step) == 10
    assert set(run.final) == {"train_loss", "train_accuracy"}
    assert run.evaluate("train")["accuracy"] > 0.5


def test_train_regresses_floats():
    inputs, _ = tiny.points(40)
    targets = inputs @ np.array([[1.0], [-2.0], [0.5]], np.float32) + 3.0
    model = (lambda key, inputs: {"w": jnp.zeros((3, 1)), "b": jnp.zeros((1, 1))}, lambda p, x: x @ p["w"] + p["b"])
    options = {**tiny.HOW, "record": False, "steps_per_call": 50, "report_every": 100, "eval_every": 0}
    run = jn.train(model, optax.sgd(0.1), (inputs, targets[:, 0]), num_steps=300, batch_size=40, **options)
    np.testing.assert_allclose(run.state.params["w"][:, 0], [1.0, -2.0, 0.5], atol=1e-3)
    np.testing.assert_allclose(run.state.params["b"], [[3.0]], atol=1e-3)
    assert run.evaluate("train")["mean_absolute_error"] < 1e-3


def test_reports_states_and_parameters_equal_those_of_fit(whole):
    iteration = jn.iterate(whole.experiment, record=False, **tiny.HOW)
    reports, states = [], []
    for report in iteration:
        reports.append(report)
        states.append(iteration.state)
        assert int(iteration.run.state.step) == report.step
        assert ("test_loss" in report.metrics) == (report.step % 10 == 0)
        assert iteration.run.predict(tiny.points(2)[0]).shape == (2, 3)
    assert [report.step for report in reports] == [5, 10, 15, 20]
    np.testing.assert_array_equal([report.metrics["train_loss"] for report in reports], whole.metrics["train_loss"])
    chex.assert_trees_all_equal(iteration.state.params, whole.state.params)
    assert iteration.run.summary.status == "finished"
    # Each state is a copy: training reuses the memory of the original.
    assert [int(state.step) for state in states] == [5, 10, 15, 20]
    half = tiny.fit(whole.experiment.replace(num_steps=10), eval_every=0)
    chex.assert_trees_all_equal(jax.device_get(states[1]).params, half.state.params)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_leaving_the_loop_saves_and_can_be_resumed(whole, tmp_path, error):
    path = tmp_path / "run"
    iteration = jn.iterate(whole.experiment, run_dir=path, **tiny.HOW, checkpoint_every=10)
    with pytest.raises(error) if error else contextlib.nullcontext():
        for report in iteration:
            if report.step == 15:
                if error is not None:
                    raise error
                break
    facts = tiny.read(path)
    assert facts["status"] == facts["summary"]["status"] == iteration.run.summary.status == "interrupted"
    assert int(iteration.run.state.step) == facts["summary"]["step"] == 15
    assert sorted(folder.name for folder in (path / "checkpoints").iterdir()) == ["10", "15"]
    assert int(iteration.run.best_state().step) == 10, "a state is ranked by the metrics of its step"
    assert not is_locked(path)
    resumed = tiny.fit(whole.experiment, resume=path)
    chex.assert_trees_all_equal(resumed.state.params, whole.state.params)
    np.testing.assert_array_equal(resumed.metrics["train_loss"], whole.metrics["train_loss"])


def test_leaving_the_loop_after_its_last_window_is_finished(tmp_path):
    iteration = jn.iterate(tiny.experiment(num_steps=5), run_dir=tmp_path / "run", **tiny.HOW)
    for _ in iteration:
        break
    assert iteration.run.summary.status == tiny.read(tmp_path / "run")["status"] == "finished"
