"""Mistakes in options, configs, steps and tasks: each is named before anything is compiled."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.engine import RunOptions, check_config
from jaxnn.tasks import freeze, lora
from jaxnn.types import ConfigError
from tests import tiny

LAYERS = jn.tasks.classification(jn.models.MLP((4, 3)))
LINEAR = jn.tasks.classification(tiny.MODEL)
BATCH = jn.Batch(np.ones((8, 3), np.float32), np.zeros(8, np.int32), np.ones(8, np.float32))


def training(**parts: Any) -> Callable[[], object]:
    """Trains with the given parts."""
    return lambda: tiny.fit(tiny.experiment(**{"task": lambda config: LAYERS} | parts))


def returned(result: Callable[[Any], Any]) -> Callable[[], object]:
    """Trains by a step that returns the ``result`` of its state."""
    return training(step=lambda task, optimizer: lambda state, batch: result(state))


def initialized(make: Callable[[], jn.Task]) -> Callable[[], object]:
    return lambda: jax.eval_shape(make().init, jax.random.key(0), BATCH)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "steps_per_call": (lambda: RunOptions(steps_per_call=0), "steps_per_call must be an integer >= 1, not 0"),
    "report_every": (lambda: RunOptions(report_every=2.5), "report_every must be an integer >= .*, not 2.5"),
    "eval_every": (lambda: RunOptions(eval_every=-1), "eval_every must be an integer >= 0, not -1"),
    "keep_last": (lambda: RunOptions(keep_last=True), "keep_last must be an integer >= .*, not True"),
    "monitor_mode": (lambda: RunOptions(monitor_mode="up"), "monitor_mode is 'up', .* auto, min, max"),
    "progress": (lambda: RunOptions(progress="loud"), "progress is 'loud', .* auto, bar, plain, none"),
    "two records": (lambda: RunOptions(resume="a", run_dir="b"), "both resume and run_dir"),
    "writers of text": (lambda: RunOptions(writers="math:pi"), "writers is 'math:pi'"),
    "writer class": (lambda: RunOptions(writers=("tests.engine.test_extensions:Table",)), "Table.*object"),
    "unknown writer": (lambda: RunOptions(writers=("math:missing",)), "missing.*imported"),
    "writer function": (lambda: RunOptions(writers=(print,)), "write"),
    "stop number": (lambda: RunOptions(stop=0.9), "stop is 0.9"),
    "stop text": (lambda: RunOptions(stop="rule"), "MODULE:NAME"),
    "unknown stop": (lambda: RunOptions(stop="math:missing"), "missing.*imported"),
    "seed": (lambda: check_config(tiny.Config(seed=-1)), "seed must be an integer >= 0, not -1"),
    "step of a task": (training(step=lambda task: None), "must be a function of .task, optimizer.* not <lambda>"),
    "step itself": (training(step=lambda state, batch: (state, {"loss": 0.0})), "<lambda> is that function itself"),
    "no step": (training(step=lambda task, optimizer, config: None), "and it returned a NoneType"),
    "step number": (training(step=5), "not 5"),
    "state alone": (returned(lambda state: state), "must return .state, metrics., a TrainState and a dict"),
    "no loss": (returned(lambda state: (state, {"accuracy": 0.0})), "with a 'loss'"),
    "losses": (returned(lambda state: (state, {"loss": jnp.zeros(2)})), "metric 'loss' of the step .*one number"),
    "no params": (returned(lambda state: (state._replace(params={}), {"loss": 0.0})), "return a params like the one"),
    "optimizers": (training(optimizer=lambda config: {"net": optax.sgd(0.1)}), "are of net, .* of Dense_0, Dense_1"),
    "shape": (
        training(params=lambda config: {"Dense_0": {"kernel": np.zeros((4, 3))}}),
        r"have params/Dense_0/kernel \[4, 3\], .* \[3, 4\]",
    ),
    "names": (
        training(params=lambda config: {"layer": np.zeros(3)}),
        "no array of the experiment's params .*: it has params/Dense_0/bias",
    ),
    "run": (training(params=lambda config: SimpleNamespace(state=None)), "params returned a run: return run.state"),
    "adapters": (
        training(params=lambda config: {"adapters": {"a": np.zeros(3)}}),
        "adapters of lora: merge them first",
    ),
    "frozen": (initialized(lambda: freeze(freeze(LAYERS, "Dense_0"), "Dense_1")), "none that is frozen already"),
    "freeze none": (initialized(lambda: freeze(LAYERS, "Conv")), "no parameter starts with 'Conv': there are Dense_0"),
    "freeze all": (initialized(lambda: freeze(LAYERS, "Dense_.")), "match all parameters"),
    "adapt none": (initialized(lambda: lora(LAYERS, 2, match="Conv")), "no frozen parameter of two axes .*'Conv'"),
    "metric number": (
        training(task=lambda config: LINEAR._replace(metrics={"auc": 3})),
        "the task's metric auc is 3, and must be a function",
    ),
    "metric twice": (training(task=lambda config: LINEAR._replace(metrics={"loss": len})), "two metrics 'loss'"),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_mistake_is_named(mistake):
    call, words = ERRORS[mistake]
    with pytest.raises(ConfigError, match=words):
        call()
