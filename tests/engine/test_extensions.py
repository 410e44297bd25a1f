"""A user's own step, optimizers, parameters, strategy, metric writer and stopping rule, alone, swept and by name."""

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from tests import tiny


class Table:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.closed = 0

    def write(self, lines: Any) -> None:
        self.rows += lines

    def close(self) -> None:
        self.closed += 1


table = Table()
STRATEGY = "tests.parallel.test_distributed_training:zero1"


def rule(lines: Any) -> bool:
    return lines[-1]["step"] >= 10 and lines[-1]["test_loss"] < 100


HOW: dict[str, Any] = {**tiny.HOW, "eval_every": 5, "steps_per_call": 5}
SWEEP: dict[str, Any] = {**HOW, "vmap_size": 2, "devices": 1}
FLAGS = ("--steps-per-call", "5", "--report-every", "5", "--eval-every", "5", "--progress", "none")
OWN = ("--strategy", STRATEGY, "--writers", f"{__name__}:table", "--stop", f"{__name__}:rule", "--devices", "2")


@pytest.fixture
def parts() -> ModuleType:
    """This module, where its names are imported from, with an empty table."""
    module = importlib.import_module(__name__)
    module.table = Table()
    return module


ALONE = [(5, 0), (10, 0)]
BOTH = [(5, 0), (5, 1), (10, 0), (10, 1)]


def steps(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """The steps and members that reported."""
    return [(row["step"], row["member"]) for row in rows]


@pytest.mark.parametrize(
    ("words", "expected"), [([], ALONE), (["sweep", "--seed", "0", "1", "--vmap-size", "2"], BOTH)]
)
@pytest.mark.several_devices
def test_command_line_takes_all_three_by_name(parts, tmp_path, words, expected):
    jn.main(tiny.experiment(), [*words, *FLAGS, *OWN, "--run-dir", str(tmp_path / "record")])
    assert steps(parts.table.rows) == expected and parts.table.closed == 1
    assert parts.table.rows == tiny.lines(tmp_path / "record")
    options = tiny.read(tmp_path / "record")["options"]
    assert (options["strategy"], options["stop"]) == (STRATEGY, f"{__name__}:rule")


def test_resumed_run_takes_its_stopping_rule_from_the_caller(parts, tmp_path):
    for number, rule in enumerate((named := f"{__name__}:rule", parts.rule)):
        path = tmp_path / str(number)
        tiny.break_off(tiny.experiment(), path, 5, **HOW, stop=rule)
        with pytest.raises(jn.ConfigError, match=f"stopping rule '{rule if number == 0 else 'rule'}'.*give stop again"):
            tiny.fit(tiny.experiment(), resume=path)
    words = ["--resume", str(tmp_path / "0"), "--progress", "none"]
    assert jn.main(tiny.experiment(), words, options=jn.RunOptions(stop=named)).summary.step == 10
    assert tiny.fit(tiny.experiment(), resume=tmp_path / "1", stop=named).summary.step == 10
    assert [tiny.read(tmp_path / name)["resumed"][0]["changed"] for name in "01"] == [[], []]


def test_resumed_sweep_keeps_its_stopping_rule(parts, tmp_path):
    def fail(lines: Any) -> None:
        raise SystemExit("mine")

    parts.table.write = fail
    where = {"run_dir": tmp_path / "sweep", "writers": (parts.table,)}
    with pytest.raises(SystemExit, match="mine"):
        jn.sweep(tiny.experiment(), jn.grid(learning_rate=[0.1, 0.2]), stop=parts.rule, **SWEEP, **where)
    again = {"resume": tmp_path / "sweep", "progress": "none", "devices": 1, "writers": ()}
    with pytest.raises(jn.ConfigError, match="stopping rule 'rule'.*give stop again"):
        jn.sweep(tiny.experiment(), **again)
    sweep = jn.sweep(tiny.experiment(), stop=parts.rule, **again)
    assert [(member.step, member.status) for member in sweep.members] == [(10, "stopped early")] * 2
    # Loaded, not trained further, though the record cannot hold the rule.
    assert int(sweep.run(0).state.step) == 10 and sweep.run(1).summary.status == "stopped early"


def test_writer_gets_no_empty_reports(parts):
    # All members diverge in the first window, and the device is asked for its state at the end only.
    writes: list[int] = []
    parts.table.write = lambda lines: writes.append(len(lines))
    how = {**SWEEP, "eval_every": 0, "record": False, "writers": (parts.table,)}
    jn.sweep(tiny.experiment(), jn.grid(learning_rate=[1e38, 2e38]), **how)
    assert writes == [2]


def test_writers_and_rules_get_copies(parts):
    def clear(lines: list[dict[str, Any]]) -> None:
        lines[0].clear()
        lines.clear()

    writers = SimpleNamespace(write=clear), parts.table
    run = tiny.fit(tiny.experiment(num_steps=10), **HOW, writers=writers, stop=clear)
    assert run.metrics["step"].tolist() == [5, 10] and steps(parts.table.rows) == ALONE


@pytest.mark.parametrize(
    ("stop", "error", "words"),
    [
        (lambda lines: 1 / 0, ZeroDivisionError, "division"),
        (lambda lines: np.array([True, False]), jn.ConfigError, r"stop .*\(2,\).*True or False"),
    ],
)
def test_writer_is_closed_if_a_rule_fails(parts, stop, error, words):
    with pytest.raises(error, match=words):
        tiny.fit(tiny.experiment(), **HOW, writers=[parts.table], stop=stop)
    assert parts.table.closed == 1


TASK = jn.tasks.classification(jn.models.MLP((4, 3)))
BATCH = jn.Batch(np.ones((8, 3), np.float32), np.zeros(8, np.int32), np.ones(8, np.float32))
# Two calls of one length.
TWO_CALLS: dict[str, Any] = {"steps_per_call": 3, "report_every": 3, "eval_every": 6}
SWEPT: dict[str, Any] = {**tiny.MEMBERS, **TWO_CALLS}


def linear(**parts: Any) -> jn.Experiment[Any]:
    """Trains ``kernel`` and ``bias`` for six steps."""
    return tiny.experiment(num_steps=6, **parts)


def layered(**parts: Any) -> jn.Experiment[Any]:
    """Trains ``Dense_0`` and ``Dense_1``, each of a kernel and a bias, for six steps."""
    return linear(**{"task": lambda config: TASK} | parts)


def without_data(task: Any, optimizer: Any = None, step: Any = None) -> jn.Experiment[Any]:
    config = tiny.Config(num_steps=6)
    return jn.Experiment(config, None, task, optimizer or (lambda config: optax.sgd(0.25)), step)


def part_by_part(task: jn.Task, optimizer: Any) -> Any:
    """Updates one part with the gradient of another step: two optimizers, used in turn."""

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


@pytest.mark.several_devices
def test_an_own_step_trains_alone_swept_resumed_and_on_devices(tmp_path):
    def optimizer(config: Any) -> Any:
        return {"kernel": optax.adam(config.learning_rate), "bias": optax.sgd(0.1)}

    own = linear(step=part_by_part, optimizer=optimizer)
    whole = tiny.fit(own, tmp_path / "whole", **TWO_CALLS)
    tiny.break_off(own, tmp_path / "run", 3, **TWO_CALLS)
    resumed = jn.fit(own, resume=tmp_path / "run", progress="none")
    jax.tree.map(np.testing.assert_array_equal, tuple(whole.state)[1:4], tuple(resumed.state)[1:4])
    assert whole.state.step == 6 and whole.metrics["train_norm"][-1] > 0
    points = jn.grid(learning_rate=[own.config.learning_rate, 0.5])
    swept = jn.sweep(own, points, record=False, **{**SWEPT, "devices": 2, "mesh": "members=1,data=2"})
    for how in (swept.members[0], tiny.fit(own, strategy="pmap", **TWO_CALLS)):
        assert how.final["test_loss"] == pytest.approx(whole.final["test_loss"], rel=1e-5)


def test_a_step_gets_the_config_whose_floats_are_traced_in_a_sweep():
    def by_config(task: jn.Task, optimizer: Any, config: Any) -> Any:
        return jn.steps.make_train_step(task, optax.sgd(config.learning_rate))

    own = linear(step=by_config, optimizer=lambda config: optax.sgd(1.0))
    points = jn.grid(learning_rate=[0.1, 0.5])
    swept, usual = (
        jn.sweep(one, points, record=False, **SWEPT)
        for one in (own, linear(optimizer=lambda config: optax.sgd(config.learning_rate)))
    )
    np.testing.assert_array_equal(swept.values("test_loss"), usual.values("test_loss"))
    # Not one for each member: the rate is a tracer.
    assert swept.summary["num_compilations"] == usual.summary["num_compilations"]


def test_two_optimizers_update_their_parts_in_the_usual_step():
    optimizers = {"Dense_0": jn.optim.with_ema(optax.sgd(0.1), 1.0), "Dense_1": optax.set_to_zero()}
    state = tiny.fit(layered(optimizer=lambda config: optimizers), **TWO_CALLS).state
    start = jax.jit(lambda: jn.steps.init_train_state(TASK, optax.sgd(0.1), jax.random.key(0), BATCH).params)()
    used = jn.optim.evaluation_params(state.params, state.opt_state)
    initial, trained, averaged = (params["Dense_0"]["kernel"] for params in (start, state.params, used))
    assert not np.array_equal(initial, trained) and not np.array_equal(averaged, trained)
    for params in (state.params, used):
        np.testing.assert_array_equal(params["Dense_1"]["kernel"], start["Dense_1"]["kernel"])


def without_batch(config: Any) -> jn.Task:
    """Minimizes a square; counts in its state; needs no data."""

    def loss(params: Any, state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        return jnp.square(params["x"]).sum(), ({"count": state["count"] + batch.mask.sum()}, {})

    return jn.Task(init=lambda key, batch: ({"x": jnp.full(2, 3.0)}, {"count": jnp.zeros(())}), loss=loss)


def test_an_experiment_needs_no_data(capsys):
    alone = without_data(without_batch)
    run = tiny.fit(alone, **TWO_CALLS)
    # Each step halves x: the loss after six is 2 * 9 / 4**6, that before the last one four times as much.
    np.testing.assert_allclose(run.state.params["x"], 3 / 2**6, rtol=1e-6)
    assert run.state.model_state["count"] == 6 * 8
    # A member that is given nothing draws all; what a member is not given is reported, its model state too.
    given = dataclasses.replace(alone, params=lambda config: {"x": np.zeros(2)} if config.seed else None)
    with pytest.warns(UserWarning, match="reads 'seed', so each of its values is compiled separately"):
        swept = jn.sweep(given, jn.grid(seed=[0, 1]), record=False, **{**SWEPT, "progress": "plain"})
    assert [member.final["train_loss"] > 0 for member in swept.members] == [True, False]
    (reported,) = re.findall(r"starts from +1 arrays given .*", capsys.readouterr().out)
    assert reported.endswith("; 1 drawn: model_state/count")


def test_an_own_step_needs_no_function_of_the_task_but_init():
    def halve(task: jn.Task, optimizer: Any) -> Any:
        def step(state: jn.TrainState, batch: jn.Batch) -> Any:
            return state._replace(params=optax.tree.scale(0.5, state.params)), {"loss": state.params["x"].sum()}

        return step

    alone = without_data(lambda config: jn.Task(lambda key, batch: ({"x": jnp.full(2, 64.0)}, {})), step=halve)
    swept = jn.sweep(alone, jn.grid(seed=[0, 1]), record=False, monitor="loss", **SWEPT)
    np.testing.assert_allclose(swept.values("train_loss"), 2 * 64 * (1 / 8 + 1 / 16 + 1 / 32) / 3, rtol=1e-6)
    run = tiny.fit(alone, **TWO_CALLS)
    with pytest.raises(jn.ConfigError, match="the task has no predict, which a prediction needs"):
        run.predict(np.ones((1, 2)))
    with pytest.raises(jn.ConfigError, match="there is no split 'train' to evaluate: the data have none"):
        run.evaluate("train")


def test_parameters_start_from_given_ones(tmp_path):
    kernel = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = {"Dense_0": {"kernel": kernel}, "other": {"bias": np.zeros(2)}}
    still = layered(optimizer=lambda config: optax.sgd(0.0), params=lambda config: given)
    run = tiny.fit(still, tmp_path / "run", **TWO_CALLS)
    np.testing.assert_array_equal(run.state.params["Dense_0"]["kernel"], kernel)
    start = tiny.read(tmp_path / "run")["groups"][0]["start"]
    assert start["taken"] == ["params/Dense_0/kernel"] and start["unused"] == ["params/other/bias"]
    assert start["new"] == [f"params/Dense_{name}" for name in ("0/bias", "1/bias", "1/kernel")]
    assert start["fingerprint"]
    swept = jn.sweep(still, jn.grid(seed=[0, 1]), run_dir=tmp_path / "sweep", **SWEPT)
    assert swept.members[0].final["test_loss"] != swept.members[1].final["test_loss"]
    for member in (0, 1):
        np.testing.assert_array_equal(swept.run(member).state.params["Dense_0"]["kernel"], kernel)


@pytest.mark.slow
def test_frozen_parameters_stay_and_adapters_learn():
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(TASK.init, jax.random.key(0), BATCH)[0]
    trained = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)

    def fit(task: jn.Task, start: Any, **how: Any) -> jn.TrainState:
        rate = how.pop("rate", 0.1)
        parts = {"task": lambda config: task, "params": lambda config: start}
        return tiny.fit(layered(optimizer=lambda config: optax.sgd(rate), **parts), **TWO_CALLS, **how).state

    frozen = fit(jn.tasks.freeze(TASK, "Dense_0"), trained, strategy="fsdp")
    jax.tree.map(np.testing.assert_array_equal, frozen.model_state["frozen"]["Dense_0"], trained["Dense_0"])
    assert not np.array_equal(frozen.params["Dense_1"]["kernel"], trained["Dense_1"]["kernel"])
    thawed = fit(TASK, frozen, rate=0.0)
    jax.tree.map(np.testing.assert_array_equal, thawed.params["Dense_0"], trained["Dense_0"])
    jax.tree.map(np.testing.assert_array_equal, thawed.params["Dense_1"], frozen.params["Dense_1"])

    adapted = jn.tasks.lora(TASK, rank=2, alpha=4.0, train=("Dense_1/bias",))
    state = fit(adapted, trained)

    @jax.jit
    def outputs() -> dict[str, jax.Array]:
        merged = jn.tasks.merge_lora(state.params, state.model_state["frozen"], 2.0)
        key = jax.random.key(0)
        return {
            "merged": TASK.predict(merged, {}, BATCH.inputs),
            "adapted": adapted.predict(state.params, state.model_state, BATCH.inputs),
            "before": TASK.predict(trained, {}, BATCH.inputs),
            "fresh": adapted.predict(*adapted.init(key, BATCH), BATCH.inputs),
            "drawn": TASK.predict(*TASK.init(key, BATCH), BATCH.inputs),
        }

    found = jax.device_get(outputs())
    np.testing.assert_allclose(found["merged"], found["adapted"], rtol=1e-5)
    np.testing.assert_allclose(found["fresh"], found["drawn"])
    assert not np.allclose(found["adapted"], found["before"], rtol=1e-5)
