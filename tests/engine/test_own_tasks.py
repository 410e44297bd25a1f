"""Tasks of a user's own: what they may return, how often and on what they are evaluated, and errors."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn._batch_context import is_full
from tests import tiny
from tests.tiny import nats

FIRST = tiny.points(tiny.NUM_TEST, 1)[0][0, 0]
SIZES = np.arange(7.0, dtype=np.float32)


def loss(params: Any, model_state: Any, batch: jn.Batch, key: jax.Array) -> Any:
    assert is_full(batch.mask), "while tracing it is known that nothing is padding"
    return nats(params, batch).mean(), (model_state, {"half": 0.5})


def evaluate(params: Any, model_state: Any, batch: jn.Batch, key: Any) -> dict[str, Any]:
    return {"loss": (nats(params, batch) * batch.mask).sum(), "count": batch.mask.sum()}


BARE = jn.Task(lambda key, batch: (tiny.init(key, batch.inputs), {}))
OWN = BARE._replace(loss=loss, evaluate=evaluate)


def own(**parts: Any) -> jn.Experiment[tiny.Config]:
    return tiny.experiment(task=lambda config: OWN._replace(**parts))


def sums(**others: Any) -> Any:
    """An evaluation with more in it: functions of a batch."""
    return lambda params, model_state, batch, key: (
        evaluate(params, model_state, batch, key) | {name: other(batch) for name, other in others.items()}
    )


def sweep(experiment: jn.Experiment[Any], points: jn.search.Points | None = None, **options: Any) -> jn.Sweep:
    points = points or jn.grid(learning_rate=[0.1, 0.2, 0.3])
    return jn.sweep(experiment, points, **{**tiny.MEMBERS, "record": False, **options})


def test_own_tasks_may_have_any_arrays_targets_and_predictions_in_fit_and_sweep():
    def with_classes(batch: jn.Batch) -> jn.Batch:
        return batch._replace(targets=batch.targets % 3)

    def evaluate_arrays(params: Any, model_state: Any, batch: jn.Batch, key: Any) -> dict[str, Any]:
        sizes = (batch.mask[:, None] * SIZES[None]).sum(0)
        return {**evaluate(params, model_state, with_classes(batch), key), "sizes": sizes}

    def derive(means: dict[str, Any]) -> dict[str, Any]:
        assert means["sizes"].shape == (7,) and np.ndim(means["loss"]) == 0
        return {"loss": means["loss"], "largest": means["sizes"].max(), "all": sum(means["sizes"])}

    def decode(params: Any, model_state: Any, codes: Any) -> Any:
        if codes.shape[1:] != (2,):
            raise TypeError("codes [batch, 2]")
        return codes @ params["kernel"][:2]

    task = BARE._replace(
        loss=lambda params, state, batch, key: loss(params, state, with_classes(batch), key),
        evaluate=evaluate_arrays,
        predict=decode,
        derive_metrics=derive,
    )
    nine = jn.data.arrays((tiny.points(37)[0], np.arange(37) % 9), (tiny.points(23)[0], np.arange(23) % 9))
    experiment = tiny.experiment(data=nine, task=lambda config: task)
    alone = tiny.fit(experiment, eval_batch_size=4)
    assert alone.final["test_largest"] == 6.0 and alone.final["test_all"] == 21.0
    assert alone.predict(np.ones((5, 2))).shape == (5, 3)
    members = sweep(experiment, eval_batch_size=4).members
    assert [member.final["test_all"] for member in members] == [21.0] * 3
    assert members[0].final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)


def test_an_evaluation_gets_what_the_last_one_in_the_training_kept():
    def again(params: Any, state: Any, batch: jn.Batch, key: Any, kept: Any) -> Any:
        kept = jnp.zeros(len(batch.mask)) if kept is None else kept
        others = {"times": (kept + 1) @ batch.mask, "size": len(batch.mask) * batch.mask.sum()}
        return evaluate(params, state, batch, key) | others, kept + 1

    experiment = own(evaluate_again=again)
    for size, how in ((23, {}), (23, {"resident": False}), (24, {"devices": 2, "strategy": "data"})):
        run = tiny.fit(experiment, eval_every=5, eval_batch_size=48, **how)
        assert run.metrics["test_times"].tolist() == [1, 2, 3, 4] and run.evaluate("test")["size"] == size
    assert [member.final["test_times"] for member in sweep(experiment, eval_every=5, devices=2).members] == [4.0] * 3


def losing(made: Callable[[Any, jax.Array], Any]) -> dict[str, Any]:
    """A task whose loss returns what ``made(state, nats [batch])`` does."""
    return {"loss": lambda params, state, batch, key: made(state, nats(params, batch))}


def evaluating(made: Callable[[jax.Array, jn.Batch], Any]) -> dict[str, Any]:
    """A task whose evaluation returns ``made(nats [batch], batch)`` as the loss, beside the right count."""
    return {"evaluate": lambda p, s, batch, key: {"loss": made(nats(p, batch), batch), "count": batch.mask.sum()}}


# What is wrong, and the words that name it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arrays that derive_metrics leaves": (
        {"evaluate": sums(sizes=lambda batch: (batch.mask[:, None] * SIZES[None]).sum(0))},
        r"sizes.* of shape \(7,\).* derive_metrics",
    ),
    "words as metrics": ({"derive_metrics": lambda means: {"loss": "low"}}, r"'loss'.* 'low'.* derive_metrics"),
    "derive_metrics fails": ({"derive_metrics": lambda means: {"loss": means["los"]}}, "derive_metrics.*KeyError.*los"),
    "derive_metrics returns None": ({"derive_metrics": lambda means: None}, "derive_metrics.*NoneType"),
    "no loss": ({"loss": BARE.loss}, "the task has no loss, which a training step that is not"),
    "no evaluate": ({"evaluate": BARE.evaluate}, "the task has no evaluate, which an evaluation"),
    "no count": ({"evaluate": lambda *_: {"loss": jnp.float32(1)}}, "evaluate.* count"),
    "a count for each example": ({"evaluate": sums(count=lambda batch: batch.mask)}, r"count.* shape \(8,\)"),
    "sums that are no dict": ({"evaluate": lambda *_: jnp.float32(1)}, "evaluate.* dict"),
    "no metrics beside the loss": (losing(lambda state, each: each.mean()), r"loss.* \(loss, \("),
    "metrics that are None": (losing(lambda state, each: (each.mean(), (state, None))), "dict"),
    "a loss for each example": (losing(lambda state, each: (each, (state, {}))), r"loss.* shape \(8,\).* mean"),
    "a metric named loss": (losing(lambda state, each: (each.mean(), (state, {"loss": 0.5}))), "named 'loss'"),
    "another model state": (losing(lambda state, each: (each.mean(), ({"half": 0.5}, {}))), "model_state.* half"),
    "no model state": (losing(lambda state, each: (each.mean(), (None, {}))), "model_state.* NoneType"),
    "a name that is no string": (losing(lambda state, each: (each.mean(), (state, {1: 0.5}))), "strings"),
    "an integer loss": (losing(lambda state, each: (jnp.int32(1), (state, {}))), "int32"),
    "a metric for each example": (losing(lambda state, each: (each.mean(), (state, {"e": each}))), r"'e'.* \(8,\)"),
    "means over the mask": (
        # One of them is 0.
        {"evaluate": sums(late=lambda batch: ((batch.inputs[:, 0] != FIRST) * batch.mask).sum() / batch.mask.sum())},
        "late.* sum",
    ),
    "weighted means": (evaluating(lambda each, batch: jnp.average(each, weights=batch.mask)), "loss.* sum"),
    "means of those that count": (evaluating(lambda each, batch: each.mean(where=batch.mask > 0)), "loss.* sum"),
    "means of masked values": (evaluating(lambda each, batch: (each * batch.mask).mean()), "loss.* sum"),
    "sums of padding too": (evaluating(lambda each, batch: each.sum()), "loss.* sum"),
    "a count of padding too": ({"evaluate": sums(count=lambda batch: len(batch.mask))}, "count.* mask"),
    "a sum of ones": ({"evaluate": sums(count=lambda batch: jnp.ones_like(batch.mask).sum())}, "count.* mask"),
    "parameters alone": ({"init": lambda key, batch: tiny.init(key, batch.inputs)}, r"init .*model_state\).* a dict"),
    "an integer parameter": (
        {"init": lambda key, batch: ({"layer": {"rows": jnp.arange(3)}, **tiny.init(key, batch.inputs)}, {})},
        "parameter 'layer/rows' .* int32.* model_state",
    ),
    "no function": ({"init": 1}, "task's init is 1, .* function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_tasks_are_named_before_training(case, tmp_path):
    parts, words = REFUSED[case]
    with pytest.raises(jn.ConfigError, match=words) as caught:
        tiny.fit(own(**parts), tmp_path / "run")
    assert "\n" not in str(caught.value) and "task" in str(caught.value) and not list(tmp_path.iterdir())


# Results of an evaluation besides loss and count: whether they are sums is seen, or named as not seen.
SUMS: dict[str, tuple[Any, bool]] = {
    "where the mask is positive": (lambda batch: jnp.sum(batch.inputs[:, 0], where=batch.mask > 0), True),
    "a confusion matrix": (lambda batch: jnp.zeros((3, 3)).at[batch.targets, batch.targets].add(batch.mask), True),
    "a product": (lambda batch: batch.mask @ batch.inputs, True),
    "a mean times the size": (lambda batch: (batch.mask * batch.inputs[:, 0]).mean() * len(batch.mask), True),
    "of two by two": (lambda batch: (batch.mask * jax.lax.top_k(batch.inputs, 2)[0].sum(1)).sum(), True),
    "zeros": (lambda batch: jnp.zeros(3), True),
    "sorted": (lambda batch: (batch.mask[:, None] * jnp.sort(batch.inputs, axis=1)).sum(), True),
    "scanned": (
        lambda batch: (batch.mask * jax.lax.scan(lambda c, x: (c + x, x), 0 * batch.mask, batch.inputs.T)[0]).sum(),
        True,
    ),
    "of two means": (lambda batch: jnp.full(2, batch.mask.mean()) * np.full(2, len(batch.mask)), True),
    "chosen": (
        lambda batch: jax.lax.cond(
            batch.inputs.sum() > 0, lambda v: v * len(batch.mask), lambda v: 2 * v * len(batch.mask), batch.mask.mean()
        ),
        False,
    ),
    "reduced": (lambda batch: jax.lax.reduce(batch.mask, np.float32(0), lambda a, b: a + b, (0,)), False),
    "pairs": (lambda batch: jnp.outer(batch.mask, batch.mask).sum(), False),
    "looped": (lambda batch: jax.lax.fori_loop(0, len(batch.mask), lambda i, c: c + 1.0, 0.0), False),
    "infinite": (lambda batch: jnp.where(batch.mask > 0, jnp.inf, 0.0).sum(), True),
    "coupled": (lambda batch: batch.mask.sum() * jnp.log(jnp.maximum(batch.mask.sum(), 1.0)), False),
    # Of a batch of three there are no five.
    "ranked": (lambda batch: jax.lax.top_k(batch.mask, 5)[0].min() * batch.mask.sum(), False),
}


def test_sums_train_and_what_a_trace_does_not_show_is_named(capsys):
    others = {name: value for name, (value, _) in SUMS.items()}
    derive = {"derive_metrics": lambda means: {"loss": means["loss"], "coupled": means["coupled"]}}
    run = tiny.fit(own(evaluate=sums(**others), **derive), eval_batch_size=5, progress="plain")
    counts = np.array([5] * (23 // 5) + [23 % 5])
    assert run.final["test_coupled"] == pytest.approx((counts * np.log(np.maximum(counts, 1))).sum() / 23, rel=1e-6)
    assert run.final["train_half"] == 0.5
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not checked" in line]
    assert "jaxnn.testing.check_task" in line
    assert {name for name in SUMS if name in line} == {name for name, (_, is_seen) in SUMS.items() if not is_seen}


@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    decay: float = 0.1
    depth: int = 1


@dataclasses.dataclass(frozen=True)
class Derived(Config):
    rate: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", 2 * self.decay)


def test_swept_fields_that_nothing_reads_are_named(tmp_path):
    experiment = dataclasses.replace(tiny.experiment(), config=Config(num_steps=5))
    # The warning comes before the error of a sweep that cannot start.
    with pytest.warns(UserWarning, match="nothing reads.* 'depth'"), pytest.raises(jn.ConfigError, match="monitor"):
        sweep(experiment, jn.grid(depth=[1, 2], seed=[0, 1]), monitor="none")
    with pytest.warns(UserWarning, match="nothing reads.* 'decay'") as caught:
        sweep(experiment, jn.grid(decay=[0.1, 0.2]), record=True, run_dir=tmp_path / "sweep")
    assert [one.filename for one in caught] == [__file__], "once, and at the caller"
    assert tiny.read(tmp_path / "sweep")["unread"] == ["decay"]


def test_swept_fields_from_which_the_config_derives_others_are_read():
    experiment = tiny.experiment(optimizer=lambda config: optax.sgd(config.rate))
    experiment = dataclasses.replace(experiment, config=Derived(num_steps=5))
    sweep(experiment, jn.grid(decay=[0.1, 0.2]), plan_only=True)  # a warning would be an error


# As many as in the test split: one program evaluates both.
SHIFTED = (tiny.points(23, 2)[0] + 1, tiny.points(23, 2)[1])


def correlation(targets: np.ndarray, outputs: np.ndarray) -> float:
    """Not a mean over examples."""
    return float(np.corrcoef(targets, outputs[:, 0])[0, 1])


MEASURED = tiny.TASK._replace(metrics={"correlation": correlation, "size": lambda targets, outputs: len(targets)})


def experiment(task: jn.Task = MEASURED) -> Any:
    splits = jn.data.arrays(train=tiny.points(37), test=tiny.points(23, 1), others={"shifted": SHIFTED})
    return tiny.experiment(data=splits, task=lambda config: task, num_steps=5)


@pytest.mark.slow
def test_metrics_of_all_outputs_and_of_other_splits_are_equal_however_a_run_is_distributed():
    run = tiny.fit(experiment(), monitor="correlation")
    for split, (inputs, targets) in {"test": tiny.points(23, 1), "shifted": SHIFTED}.items():
        expected = correlation(targets, run.predict(inputs))
        assert run.final[f"{split}_correlation"] == pytest.approx(expected, abs=1e-6)
        assert run.evaluate(split)["correlation"] == run.final[f"{split}_correlation"]
        assert run.final[f"{split}_size"] == len(targets)
    for how in ({"strategy": "pmap", "devices": 2}, {"strategy": "data", "devices": 2, "resident": False}):
        assert tiny.fit(experiment(), eval_batch_size=4, **how).final == pytest.approx(run.final, abs=1e-5)
    how = {**tiny.MEMBERS, "record": False}
    swept = jn.sweep(experiment(), jn.grid(learning_rate=[0.1, 0.2]), **how)
    assert swept.members[0].final == pytest.approx(run.final, abs=1e-5)
    assert swept.members[1].final["test_correlation"] != swept.members[0].final["test_correlation"]


def test_a_part_is_evaluated_in_training_and_all_afterwards():
    seen: list[np.ndarray] = []
    task = tiny.TASK._replace(metrics={"size": lambda targets, outputs: seen.append(targets) or len(targets)})
    run = tiny.fit(experiment(task), eval_batches=2, eval_batch_size=4)
    assert run.final["test_size"] == run.final["shifted_size"] == 8 and run.evaluate("test")["size"] == 23
    # Evenly spaced, not the first ones.
    np.testing.assert_array_equal(seen[0], tiny.points(23, 1)[1][np.arange(8) * 23 // 8])


def test_a_direction_that_is_not_known_is_asked_for(tmp_path):
    gaining = tiny.TASK._replace(metrics={"gain": lambda targets, outputs: -float(np.abs(outputs).mean())})
    with pytest.raises(
        jn.ConfigError, match="whether less or more of 'test_gain' is better is not known: set monitor_mode"
    ):
        tiny.fit(experiment(gaining), monitor="gain")
    for name in ("gain", "test_gain"):
        run = tiny.fit(experiment(gaining._replace(directions={name: "max"})), tmp_path / name, monitor="gain")
        opened = jn.open_run(tmp_path / name)
        assert run.higher_is_better and opened.higher_is_better and opened.directions == {name: "max"}
    points = jn.grid(learning_rate=[0.1, 1.0])
    swept = jn.sweep(experiment(gaining), points, run_dir=tmp_path / "sweep", **tiny.MEMBERS)
    low, high = sorted(swept.members, key=lambda member: member.final["test_gain"])
    assert swept.best("test_gain", "max") == high and swept.group().best("test_gain", "min").members == (low.index,)
    for rank in (swept.best, swept.group().best):
        with pytest.raises(jn.ConfigError, match=r"'test_gain' is better is not known: set direction .*'gain': 'max'"):
            rank("test_gain")
    with pytest.raises(jn.ConfigError, match="'test_gain' is better is 'up': set direction to 'min' or 'max'"):
        swept.best("test_gain", "up")  # type: ignore[arg-type]
    assert [row[0] for row in swept.table("test_gain").rows] == ["0", "1"] and swept.plot("test_gain")
    stated = jn.sweep(experiment(gaining._replace(directions={"gain": "min"})), points, record=False, **tiny.MEMBERS)
    assert stated.best("test_gain").index == stated.best("shifted_gain").index == low.index
    least = min(stated.members, key=lambda member: member.final["shifted_loss"])
    assert stated.best("shifted_loss") == least and stated.group().best("shifted_loss").members == (least.index,)


def test_metrics_that_fail_are_named_and_those_of_infinite_outputs_are_nan():
    def refuse(targets: Any, outputs: Any) -> float:
        raise ValueError("Only one class present\nin y_true")

    message = r"the task's metric 'auc' failed on targets \(23,\) and outputs \(23, 3\): ValueError: Only one class pre"
    with pytest.raises(jn.ConfigError, match=message):
        tiny.fit(experiment(tiny.TASK._replace(metrics={"auc": refuse})))
    far = tiny.TASK._replace(metrics={"auc": refuse}, predict=lambda params, state, inputs: inputs / 0)
    assert np.isnan(tiny.fit(experiment(far)).final["test_auc"])
    for names in ({"test": SHIFTED}, {"": SHIFTED}, {"probe": SHIFTED}):
        with pytest.raises(jn.DataError, match="others has the split"):
            jn.data.arrays(train=SHIFTED, test=SHIFTED, others=names)


def test_a_sampled_loss_has_a_key_for_each_batch_the_same_each_time():
    def evaluate(params: Any, state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        count, noise = batch.mask.sum(), jax.random.uniform(key)
        return {"loss": noise * count, "square": noise**2 * count, "count": count}

    def losses(**options: Any) -> np.ndarray:
        run = tiny.fit(experiment(tiny.TASK._replace(evaluate=evaluate)), eval_batch_size=4, eval_every=5, **options)
        return np.array([run.final["test_loss"], run.evaluate("test")["loss"], run.final["test_square"]])

    once, again, square = losses()
    assert once == again and losses(resident=False)[0] == pytest.approx(once, rel=1e-6)
    # One draw for all batches would have no variance.
    assert square - once**2 > 0.01


def test_large_splits_are_evaluated_less_often():
    def every(num_test: int, **options: Any) -> int | None:
        return jn.RunOptions(**options).with_cadences(tiny.Config(), (num_test,)).eval_every

    # Twenty steps of eight examples take as long as an evaluation of 480.
    assert (every(9), every(48), every(400)) == (2, 10, 20)
    assert every(400, eval_batches=1) == 4 and every(400, eval_every=2) == 2
    run = jn.fit(tiny.experiment(), record=False, progress="none", steps_per_call=5)
    assert every(23) == 5 and np.isfinite(run.metrics["test_loss"]).sum() == 4
