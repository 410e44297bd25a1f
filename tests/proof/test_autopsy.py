"""The first number that is not finite: its operation, line, examples and repro; and a loss that leaves its band."""

import json
import runpy
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.proof import first_fault
from jaxnn.types import TrainState
from tests import tiny

# Rows 2 and 5 are the only ones with zeros; row 6 is large.
ROWS = np.array([[1, 2], [3, 1], [0, 1], [2, 2], [1, 1], [1, 0], [90, 80], [2, 1]], np.float32)


def log(w: Any, x: Any) -> Any:
    return jnp.log(x * w)  # here: log


def masked_power(w: Any, x: Any) -> Any:
    return jnp.where(x * w > 0, (x * w) ** 0.3, 0)  # here: pow


def norm(w: Any, x: Any) -> Any:
    return jnp.linalg.norm(jnp.maximum(x * w - 99, 0), axis=1)  # here: sqrt


def scan(w: Any, x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return jnp.exp(carry) - 1 + row, carry  # here: exp

    return jax.lax.scan(body, jnp.zeros(2), x * w)[0]


def branch(w: Any, x: Any) -> Any:
    hot = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + 50), (0, jax.lax.stop_gradient(x)))[1]
    return w.sum() + jax.lax.cond(x[0, 0] > 0, lambda h: jnp.exp(h), lambda h: h, hot)  # here: exp


def masked_row(w: Any, x: Any) -> Any:
    scores = jnp.where(x > 1, x * w, -jnp.inf)
    return jax.nn.sigmoid(scores - jnp.max(scores, axis=1, keepdims=True))  # here: sub


def hidden(w: Any, x: Any) -> Any:
    logits = -jnp.exp(x * w)  # here: exp
    return jnp.log(jnp.exp(logits[6:7]).sum())


def masked_sum(w: Any, x: Any) -> Any:
    return jnp.where(x < 85, x, -jnp.inf) + jnp.exp(x * w)  # here: exp


def norms(w: Any, x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return carry + jnp.linalg.norm(jnp.maximum(row * w[0] - 99, 0)), None  # here: sqrt

    return jax.lax.scan(body, 0.0, x)[0]


LOSSES = {f.__name__: f for f in (norms, log, masked_power, norm, scan, branch, masked_row, hidden, masked_sum)}
WANTED = {
    "log": ("log of float32[8, 2]", "forward pass", (2, 0)),
    "masked_power": ("pow", "backward pass", (2, 0)),
    "norm": ("div", "backward pass", (0,)),
    "scan": ("exp of float32[2]", "forward pass", None),
    "branch": ("exp of float32[8, 2]", "forward pass", (0, 0)),
    "masked_row": ("sub of float32[8, 2]", "forward pass", (2, 0)),
    "norms": ("div", "backward pass", ()),
    "masked_sum": ("exp of float32[8, 2]", "forward pass", (6, 0)),
    "hidden": ("exp of float32[8, 2]", "forward pass", (6, 0)),
}


def found(loss: Any, w: Any = (1.0, 1.0), x: np.ndarray = ROWS) -> Any:
    """The fault of a step of gradient descent."""

    def step(state: TrainState, batch: jn.Batch) -> Any:
        value, gradient = jax.value_and_grad(lambda w: loss(w[None], batch.inputs).mean())(state.params)
        return state._replace(params=state.params - gradient), {"loss": value}

    state = TrainState(jnp.int32(0), jnp.asarray(w), {}, (), jax.random.key(0))
    return first_fault(step, state, jn.Batch(x, None, np.ones(8, np.float32)))


@pytest.mark.parametrize("name", LOSSES)
def test_the_first_fault_is_named_with_its_line(name: str):
    operation, direction, index = WANTED[name]
    fault = found(LOSSES[name])
    assert fault.operation.startswith(operation) and fault.direction == direction, fault
    assert "# here:" in fault.line.text and not fault.line.of_library, fault
    word = fault.line.text.split("# here: ")[1]
    assert word in fault.operation or word in str(fault.derivative_of), fault
    assert index in (None, fault.index), fault


def test_inputs_that_are_not_finite_are_named():
    assert found(lambda w, x: x * w) is None
    assert found(lambda w, x: jnp.where(x > 1, x * w, -jnp.inf).max(1)[:2]) is None, "a mask is no fault"
    weight, example = found(lambda w, x: x * w, (1.0, np.nan)), ROWS.copy()
    assert (weight.kind, weight.leaf, weight.index, weight.count) == ("input", "params", (1,), 1)
    example[4, 1] = np.inf
    assert found(lambda w, x: x * w, x=example).rows == (4,)


def test_a_number_that_a_loop_is_given_is_followed_out_of_it():
    assert found(lambda w, x: jax.lax.scan(lambda c, row: (c + row, c), w[0], jnp.exp(x * w))[0]).index == (6, 0)


def inputs() -> np.ndarray:
    return tiny.points(tiny.NUM_TRAIN)[0]


def overflowing() -> jn.Experiment[Any]:
    poisoned = inputs()
    poisoned[17] = 1e25
    points = jn.data.arrays(train=(poisoned, tiny.points(tiny.NUM_TRAIN)[1]))
    return tiny.experiment(data=points, model=(tiny.init, lambda p, x: tiny.apply(p, jnp.square(x))), num_steps=12)


experiment = overflowing()


def test_a_diverged_run_is_explained_and_shown_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(jn.TrainingError, match=r"or find the cause: jaxnn autopsy .*run --script \S+$"):
        tiny.fit(experiment, tmp_path / "run", eval_every=5)
    explained = jn.autopsy(tmp_path / "run", experiment)
    (example,), fault = explained.examples, explained.fault
    assert (explained.blame, fault.operation, example.row) == ("data", "square of float32[8, 3]", fault.index[0])
    assert example.first["inputs"] == pytest.approx([1e25] * 3) and "jnp.square(x)" in fault.line.text
    assert jn.replay(tmp_path / "run", experiment, explained.step).batch.inputs[example.row, 0] > 1e24
    assert json.dumps(explained.as_json()) and "square" in repr(explained)
    runpy.run_path(str(explained.repro))
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "loss nan" and len(shown) > 1
    explained.repro.write_text("mine")
    with pytest.raises(jn.ConfigError, match="repro.py is not an autopsy's: choose another folder"):
        jn.autopsy(tmp_path / "run", experiment)


def test_a_loss_that_leaves_its_band_is_explained(tmp_path):
    targets = inputs().sum(axis=1)
    targets[17] = 1e4
    model = tiny.init, lambda params, rows: tiny.apply(params, rows)[:, 0]
    task = lambda config: jn.tasks.regression(model)  # noqa: E731
    made = tiny.experiment(data=jn.data.arrays(train=(inputs(), targets)), task=task, num_steps=60, learning_rate=1e-6)
    run = tiny.fit(made, tmp_path / "run", steps_per_call=1, report_every=1, eval_every=60)
    explained = jn.autopsy(run)
    large = int(np.argmax(run.metrics["train_loss"] > 1e5)) + 1
    assert (explained.explosion.step, explained.blame) == (large, "data") and explained.fault is None
    assert [example.first["targets"] for example in explained.examples] == [[1e4]]
