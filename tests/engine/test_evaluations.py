"""What is evaluated and how often: all outputs of a split, further splits, a part of them, sampled losses."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.engine import resolve_cadences
from tests import tiny

TASK = jn.tasks.classification(tiny.MODEL)
# As many as in the test split: one program evaluates both.
SHIFTED = (tiny.points(23, 2)[0] + 1, tiny.points(23, 2)[1])


def correlation(targets: np.ndarray, outputs: np.ndarray) -> float:
    """Not a mean over examples."""
    return float(np.corrcoef(targets, outputs[:, 0])[0, 1])


MEASURED = TASK._replace(metrics={"correlation": correlation, "size": lambda targets, outputs: len(targets)})


def experiment(task: jn.Task = MEASURED) -> Any:
    splits = jn.data.arrays(train=tiny.points(37), test=tiny.points(23, 1), others={"shifted": SHIFTED})
    return tiny.experiment(data=splits, task=lambda config: task, num_steps=5)


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
    task = TASK._replace(metrics={"size": lambda targets, outputs: seen.append(targets) or len(targets)})
    run = tiny.fit(experiment(task), eval_batches=2, eval_batch_size=4)
    assert run.final["test_size"] == run.final["shifted_size"] == 8 and run.evaluate("test")["size"] == 23
    # Evenly spaced, not the first ones.
    np.testing.assert_array_equal(seen[0], tiny.points(23, 1)[1][np.arange(8) * 23 // 8])


def test_a_direction_that_is_not_known_is_asked_for(tmp_path):
    gaining = TASK._replace(metrics={"gain": lambda targets, outputs: -float(np.abs(outputs).mean())})
    with pytest.raises(jn.ConfigError, match="whether less or more of 'gain' is better is not known: set monitor_mode"):
        tiny.fit(experiment(gaining), monitor="gain")
    run = tiny.fit(experiment(gaining._replace(directions={"gain": "max"})), tmp_path / "run", monitor="gain")
    opened = jn.open_run(tmp_path / "run")
    assert run.higher_is_better and opened.higher_is_better and opened.directions == {"gain": "max"}
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
    assert stated.best("test_gain").index == low.index


def test_metrics_that_fail_are_named_and_those_of_infinite_outputs_are_nan():
    def refuse(targets: Any, outputs: Any) -> float:
        raise ValueError("Only one class present\nin y_true")

    message = r"the task's metric 'auc' failed on targets \(23,\) and outputs \(23, 3\): ValueError: Only one class pre"
    with pytest.raises(jn.ConfigError, match=message):
        tiny.fit(experiment(TASK._replace(metrics={"auc": refuse})))
    far = TASK._replace(metrics={"auc": refuse}, predict=lambda params, state, inputs: inputs / 0)
    assert np.isnan(tiny.fit(experiment(far)).final["test_auc"])
    for names in ({"test": SHIFTED}, {"": SHIFTED}, {"probe": SHIFTED}):
        with pytest.raises(jn.DataError, match="others has the split"):
            jn.data.arrays(train=SHIFTED, test=SHIFTED, others=names)


def test_a_sampled_loss_has_a_key_for_each_batch_the_same_each_time():
    def evaluate(params: Any, state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        count, noise = batch.mask.sum(), jax.random.uniform(key)
        return {"loss": noise * count, "square": noise**2 * count, "count": count}

    def losses(**options: Any) -> np.ndarray:
        run = tiny.fit(experiment(TASK._replace(evaluate=evaluate)), eval_batch_size=4, eval_every=5, **options)
        return np.array([run.final["test_loss"], run.evaluate("test")["loss"], run.final["test_square"]])

    once, again, square = losses()
    assert once == again and losses(resident=False)[0] == pytest.approx(once, rel=1e-6)
    # One draw for all batches would have no variance.
    assert square - once**2 > 0.01


def test_large_splits_are_evaluated_less_often():
    def every(num_test: int, **options: Any) -> int | None:
        return resolve_cadences(jn.RunOptions(**options), tiny.Config(), (num_test,)).eval_every

    # Twenty steps of eight examples take as long as an evaluation of 480.
    assert (every(9), every(48), every(400)) == (2, 10, 20)
    assert every(400, eval_batches=1) == 4 and every(400, eval_every=2) == 2
    run = jn.fit(tiny.experiment(), record=False, progress="none", steps_per_call=5)
    assert every(23) == 5 and np.isfinite(run.metrics["test_loss"]).sum() == 4
