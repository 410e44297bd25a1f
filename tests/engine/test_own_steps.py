"""Experiments with a step, several optimizers, no data or parameters of their own."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from tests import tiny

TASK = jn.tasks.classification(jn.models.MLP((4, 3)))


def experiment(**parts: Any) -> jn.Experiment[Any]:
    parts = {"task": lambda config: TASK, "data": tiny.splits(), "num_steps": 6, "batch_size": 8} | parts
    return tiny.experiment(**parts)


def layer_by_layer(task: jn.Task, optimizer: Any) -> Any:
    """Updates one layer with the gradient of another step: two optimizers, used in turn."""

    def step(state: jn.TrainState, batch: jn.Batch) -> Any:
        params, opt_state = dict(state.params), dict(state.opt_state)
        for name, one in optimizer.items():
            key = jax.random.fold_in(state.key, state.step)
            (loss, (model_state, metrics)), gradient = jax.value_and_grad(task.loss, has_aux=True)(
                params, state.model_state, batch, key
            )
            updates, opt_state[name] = one.update(gradient[name], opt_state[name], params[name])
            params[name] = optax.apply_updates(params[name], updates)
        # The step's number and its key are the engine's.
        state = state._replace(step=state.step + 7, params=params, model_state=model_state, opt_state=opt_state)
        return state, {"loss": loss, **metrics, "norm": optax.tree.norm(params)}

    return step


def test_an_own_step_trains_alone_swept_resumed_and_on_devices(tmp_path: Path) -> None:
    def optimizer(config: Any) -> Any:
        return {"Dense_0": optax.adam(config.learning_rate), "Dense_1": optax.sgd(0.1)}

    own = experiment(step=layer_by_layer, optimizer=optimizer)
    whole = tiny.fit(own, tmp_path / "whole")
    for report in jn.iterate(own, run_dir=tmp_path / "run", **tiny.HOW):
        if report.step == 3:
            break
    resumed = jn.fit(own, resume=tmp_path / "run", progress="none")
    jax.tree.map(np.testing.assert_array_equal, tuple(whole.state)[1:4], tuple(resumed.state)[1:4])
    assert whole.state.step == 6 and whole.metrics["train_norm"][-1] > 0
    points = jn.grid(learning_rate=[own.config.learning_rate, 0.5])
    swept = jn.sweep(own, points, record=False, progress="none", **STEPS)
    for how in (swept.members[0], tiny.fit(own, strategy="pmap"), tiny.fit(own, strategy="data")):
        assert how.final["test_loss"] == pytest.approx(whole.final["test_loss"], rel=1e-5)


def test_a_step_gets_the_config_whose_floats_are_traced_in_a_sweep() -> None:
    def by_config(task: jn.Task, optimizer: Any, config: Any) -> Any:
        return jn.steps.make_train_step(task, optax.sgd(config.learning_rate))

    own = experiment(step=by_config, optimizer=lambda config: optax.sgd(1.0))
    points = jn.grid(learning_rate=[0.1, 0.5])
    swept, usual = (
        jn.sweep(one, points, record=False, progress="none", **STEPS)
        for one in (own, experiment(optimizer=lambda config: optax.sgd(config.learning_rate)))
    )
    np.testing.assert_array_equal(swept.values("test_loss"), usual.values("test_loss"))
    # Not one for each member: the rate is a tracer.
    assert swept.summary["num_compilations"] == usual.summary["num_compilations"]


STEPS = {"steps_per_call": 6, "vmap_size": 2}


def test_two_optimizers_update_their_parts_in_the_usual_step() -> None:
    both = experiment(optimizer=lambda config: {"Dense_0": optax.set_to_zero(), "Dense_1": optax.sgd(0.1)})
    start = jn.steps.init_train_state(TASK, optax.sgd(0.1), jax.random.key(both.config.seed), BATCH)
    end = tiny.fit(both)
    averaged = {"Dense_0": jn.optim.with_ema(optax.sgd(0.1), 1.0), "Dense_1": optax.sgd(0.1)}
    state = tiny.fit(experiment(optimizer=lambda config: averaged)).state
    used = jn.optim.evaluation_params(state.params, state.opt_state)
    np.testing.assert_array_equal(used["Dense_1"]["kernel"], state.params["Dense_1"]["kernel"])
    assert not np.array_equal(used["Dense_0"]["kernel"], state.params["Dense_0"]["kernel"])
    np.testing.assert_array_equal(end.state.params["Dense_0"]["kernel"], start.params["Dense_0"]["kernel"])
    assert not np.array_equal(end.state.params["Dense_1"]["kernel"], start.params["Dense_1"]["kernel"])


BATCH = jn.Batch(np.ones((8, 3), np.float32), np.zeros(8, np.int32), np.ones(8, np.float32))


def without_batch(config: Any) -> jn.Task:
    """Minimizes a square; counts in its state; needs no data."""

    def loss(params: Any, state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        return jnp.square(params["x"]).sum(), ({"count": state["count"] + batch.mask.sum()}, {})

    return jn.Task(
        init=lambda key, batch: ({"x": jnp.full(2, 3.0)}, {"count": jnp.zeros(())}),
        loss=loss,
    )


def test_an_experiment_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    alone = experiment(data=tiny.splits(), task=without_batch, optimizer=lambda config: optax.sgd(0.25))
    alone = jn.Experiment(alone.config, None, alone.task, alone.optimizer)
    run = tiny.fit(alone)
    # Each step halves x: the loss after six is 2 * 9 / 4**6, that before the last one four times as much.
    np.testing.assert_allclose(run.state.params["x"], 3 / 2**6, rtol=1e-6)
    assert run.state.model_state["count"] == 6 * 8
    # A member that is given nothing draws all; what a member is not given is reported, its model state too.
    given = dataclasses.replace(alone, params=lambda config: {"x": np.zeros(2)} if config.seed else None)
    with pytest.warns(UserWarning, match="reads 'seed'"):
        swept = jn.sweep(given, jn.grid(seed=[0, 1]), record=False, progress="plain", steps_per_call=6)
    assert [member.final["train_loss"] > 0 for member in swept.members] == [True, False]
    (reported,) = re.findall(r"starts from +1 arrays given .*", capsys.readouterr().out)
    assert reported.endswith("; 1 drawn: model_state/count")


def test_an_own_step_needs_no_function_of_the_task_but_init() -> None:
    def halve(task: jn.Task, optimizer: Any) -> Any:
        def step(state: jn.TrainState, batch: jn.Batch) -> Any:
            return state._replace(params=optax.tree.scale(0.5, state.params)), {"loss": state.params["x"].sum()}

        return step

    alone = experiment(task=lambda config: jn.Task(lambda key, batch: ({"x": jnp.full(2, 64.0)}, {})), step=halve)
    alone = jn.Experiment(alone.config, None, alone.task, alone.optimizer, alone.step)
    swept = jn.sweep(alone, jn.grid(seed=[0, 1]), record=False, progress="none", monitor="loss", **STEPS)
    np.testing.assert_array_equal(swept.values("train_loss"), 2 * 64 / 2**5)  # of the last step
    run = tiny.fit(alone, steps_per_call=6)
    with pytest.raises(jn.ConfigError, match="the task has no predict, which a prediction needs"):
        run.predict(np.ones((1, 2)))
    with pytest.raises(jn.ConfigError, match="there is no split 'train' to evaluate: the data have none"):
        run.evaluate("train")


def test_parameters_start_from_given_ones(tmp_path: Path) -> None:
    kernel = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = {"Dense_0": {"kernel": kernel}, "other": {"bias": np.zeros(2)}}
    still = experiment(optimizer=lambda config: optax.sgd(0.0), params=lambda config: given)
    run = tiny.fit(still, tmp_path / "run")
    np.testing.assert_array_equal(run.state.params["Dense_0"]["kernel"], kernel)
    start = tiny.read(tmp_path / "run")["start"]
    assert start["taken"] == ["params/Dense_0/kernel"] and start["unused"] == ["params/other/bias"]
    assert (
        start["new"] == [f"params/Dense_{name}" for name in ("0/bias", "1/bias", "1/kernel")] and start["fingerprint"]
    )
    by_seed = experiment(
        optimizer=still.optimizer, params=lambda config: {"Dense_1": {"bias": np.full(3, config.seed)}}
    )
    with pytest.warns(UserWarning, match="reads 'seed', so each of its values is compiled separately"):
        found = jn.sweep(by_seed, jn.grid(seed=[1, 2]), run_dir=tmp_path / "sweep", progress="none", **STEPS)
    assert [float(found.run(n).state.params["Dense_1"]["bias"][0]) for n in (0, 1)] == [1.0, 2.0]
    swept = jn.sweep(still, jn.grid(seed=[0, 1]), record=False, progress="none", **STEPS)
    assert swept.members[0].final["test_loss"] != swept.members[1].final["test_loss"]
    for params, message in (
        ({"Dense_0": {"kernel": kernel.T}}, r"have params/Dense_0/kernel \[4, 3\], and the task \[3, 4\]"),
        ({"layer": kernel}, "no array of the experiment's params is in the task's: it has params/Dense_0/bias"),
    ):
        with pytest.raises(jn.ConfigError, match=message):
            tiny.fit(experiment(params=lambda config, params=params: params))


def test_frozen_parameters_stay_and_adapters_learn() -> None:
    trained = tiny.fit(experiment()).state
    frozen = tiny.fit(
        experiment(task=lambda config: jn.tasks.freeze(TASK, "Dense_0"), params=lambda config: trained), strategy="fsdp"
    ).state
    np.testing.assert_array_equal(
        frozen.model_state["frozen"]["Dense_0"]["kernel"], trained.params["Dense_0"]["kernel"]
    )
    assert not np.array_equal(frozen.params["Dense_1"]["kernel"], trained.params["Dense_1"]["kernel"])

    thawed = tiny.fit(experiment(params=lambda config: frozen, optimizer=lambda config: optax.sgd(0.0))).state
    np.testing.assert_array_equal(thawed.params["Dense_0"]["kernel"], trained.params["Dense_0"]["kernel"])

    adapted = jn.tasks.lora(TASK, rank=2, alpha=4.0, train=("Dense_1/bias",))
    run = tiny.fit(experiment(task=lambda config: adapted, params=lambda config: trained))
    params, state = run.state.params, run.state.model_state
    merged = jn.tasks.merge_lora(params, state["frozen"], 2.0)
    outputs = TASK.predict(merged, {}, BATCH.inputs)
    np.testing.assert_allclose(outputs, adapted.predict(params, state, BATCH.inputs), rtol=1e-5)
    assert not np.allclose(outputs, TASK.predict(trained.params, {}, BATCH.inputs), rtol=1e-5)
    fresh = adapted.init(jax.random.key(0), BATCH)
    np.testing.assert_allclose(
        adapted.predict(*fresh, BATCH.inputs), TASK.predict(TASK.init(jax.random.key(0), BATCH)[0], {}, BATCH.inputs)
    )
    with pytest.raises(jn.ConfigError, match="hold adapters of lora: merge them first"):
        tiny.fit(experiment(params=lambda config: run.state))
    for task, message in (
        (jn.tasks.freeze(jn.tasks.freeze(TASK, "Dense_0"), "Dense_1"), "none that is frozen already"),
        (jn.tasks.freeze(TASK, "Conv"), "no parameter starts with 'Conv': there are Dense_0/bias"),
        (jn.tasks.freeze(TASK, "Dense_."), "match all parameters"),
        (jn.tasks.lora(TASK, 2, match="Conv"), "no frozen parameter of two axes matches 'Conv'"),
    ):
        with pytest.raises(jn.ConfigError, match=message):
            task.init(jax.random.key(0), BATCH)


def returns(result: Any) -> Any:
    return lambda task, optimizer: lambda state, batch: result(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda task: None, r"an experiment's step must be a function of .task, optimizer.* not <lambda>.task.\."),
        (lambda state, batch: (state, {"loss": 0.0}), "<lambda> is that function itself"),
        (lambda task, optimizer, config: None, "and it returned a NoneType"),
        (5, "not 5"),
        (
            returns(lambda state: state),
            "must return .state, metrics., a TrainState and a dict of numbers with a 'loss'",
        ),
        (returns(lambda state: (state, {"accuracy": 0.0})), "with a 'loss'"),
        (returns(lambda state: (state, {"loss": jnp.zeros(2)})), "metric 'loss' of the step is .*: return one number"),
        (returns(lambda state: (state._replace(params={}), {"loss": 0.0})), "step must return a params like the one"),
    ],
)
def test_wrong_steps_are_named_before_training(make: Any, message: str) -> None:
    with pytest.raises(jn.ConfigError, match=message):
        tiny.fit(experiment(step=make))


def test_optimizers_of_other_parts_are_refused() -> None:
    with pytest.raises(jn.ConfigError, match="the optimizers are of generator, and the parameters of Dense_0, Dense_1"):
        tiny.fit(experiment(optimizer=lambda config: {"generator": optax.sgd(0.1)}))
