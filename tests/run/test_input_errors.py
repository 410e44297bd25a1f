"""Bad input gives one line that names it and the fix, from Python and from the shell, before anything is written."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn._fields import check_config
from jaxnn.engine import programs_of
from jaxnn.tasks import freeze, lora
from tests import tiny

INPUTS, LABELS = tiny.points(37)
IDS, CLASSES = np.arange(36).reshape(9, 4) % 8, np.arange(9) % 3
SEQUENCES = np.zeros((9, 4, 3), np.float32)
NEXT_TOKEN = jn.tasks.next_token((tiny.init, lambda params, x: x @ params["kernel"]))
FOLDED = jn.models.RecurrentClassifier(3, vocabulary_size=6, features=2, embedding_features=None)


class Reader(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return linen.Embed(6, 3, name="Table")(tokens.T).mean(axis=0)


def on(*split: Any, task: Any = None, test: Any = None) -> dict[str, Any]:
    """The parts of an experiment on these arrays, as they are when its data are loaded."""
    parts = {} if task is None else {"task": lambda config: task}
    return parts | {"data": lambda: jn.data.arrays(split, test)}


NARROW = (tiny.init, lambda params, inputs: tiny.apply(params, inputs)[:, :1])
FAST_TEXT = jn.tasks.classification(jn.models.FastText(3, vocabulary_size=5, features=2))
EMBEDDING = jn.tasks.supervised(Reader(), lambda outputs, targets: outputs.mean(axis=1), {})
UNREDUCED = jn.tasks.supervised(tiny.MODEL, lambda outputs, targets: outputs**2, {})

LAYERS = jn.tasks.classification(jn.models.MLP((4, 3)))
EMPTY = jn.data.generated(lambda key, step: jn.Batch((), None, np.ones(8, np.float32)))

# What the message must say, and the parts of the experiment.
EXPERIMENTS: list[tuple[str, dict[str, Any]]] = [
    ("learning_rate is -0.1", {"learning_rate": -0.1}),
    ("label 3 of example 3 in train .* model has 3 outputs", on(INPUTS, np.arange(37) % 4)),
    ("label 3 of example 3 in test is out of range", on(INPUTS, LABELS, test=(INPUTS, np.arange(37) % 5))),
    (r"experiment's data gave a tuple: .* jn\.data\.arrays", {"data": (INPUTS, LABELS)}),
    (r"experiment's task gave a MLP: .* jn\.tasks\.classification", {"task": lambda config: jn.models.MLP((3,))}),
    ("experiment's optimizer gave a float: .* Optax", {"optimizer": lambda config: 0.1}),
    ("optimizer, for 'bias', gave a float", {"optimizer": lambda config: {"kernel": optax.sgd(0.1), "bias": 0.1}}),
    ("the label 2 .*renumber the labels", {"task": lambda config: jn.tasks.binary_classification(NARROW)}),
    ("the model failed without inputs", {"data": lambda: EMPTY}),
    ("model takes no dict, .*TableMLP", on({"numbers": INPUTS}, LABELS, task=LAYERS)),
    (r"targets in a pair, arrays\(\(inputs, targets\)\)", {"data": lambda: jn.data.arrays(INPUTS, LABELS)}),
    (r"a number an example, \[8\], not \[8, 3\]: take its mean over every", {"task": lambda config: UNREDUCED}),
    (r"token id -1 of example 0 .* enlarge its vocabulary to 5 or", on(IDS % 5 - 1, CLASSES, task=FAST_TEXT)),
    (r"token id 5 of example 1 in test .* 5 rows", on(IDS % 5, CLASSES, test=(IDS, CLASSES), task=FAST_TEXT)),
    (r"token id 6 of example 1 in train .* Table has 6 rows", on(IDS, CLASSES, task=EMBEDDING)),
    # A vocabulary without a table.
    (r"token id 6 of example 1 in train .* 6 rows", on(IDS, CLASSES, task=jn.tasks.classification(FOLDED))),
    ("label -2 of example 0 in train is out of range", on(SEQUENCES, np.full((9, 4), -2), task=NEXT_TOKEN)),
    ("label 7 of example 0 in train .* labels must be 0 to 2", on(SEQUENCES, np.full((9, 4), 7), task=NEXT_TOKEN)),
]


@pytest.mark.parametrize(("words", "parts"), EXPERIMENTS)
def test_bad_experiments_from_python_and_the_shell(words, parts, tmp_path, capsys):
    experiment = tiny.experiment(**parts)
    if callable(make := parts.get("data")):
        experiment = dataclasses.replace(experiment, data=lambda config: make())
    with pytest.raises((jn.ConfigError, jn.DataError)) as caught:
        tiny.fit(experiment, tmp_path / "run")
    assert re.search(words, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)
    assert not getattr(caught.value, "__notes__", [])  # JAX adds one to errors of traced functions
    with pytest.raises(SystemExit) as left:
        jn.main(experiment, ["--run-dir", str(tmp_path / "run"), "--progress", "none"])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and line.startswith("error: ") and re.search(words, line), line
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Typed(tiny.Config):
    rate: float = 0.1
    name: str = "a"
    widths: tuple[int, ...] = (4,)
    limit: float | None = None
    verbose: bool = False


TYPED = dataclasses.replace(tiny.experiment(), config=Typed())


def fit(experiment: Any = TYPED, **options: Any) -> Any:
    return jn.fit(experiment, **options)


def train(data: Any = (INPUTS, LABELS), model: Any = tiny.MODEL, **given: Any) -> jn.Run:
    return jn.train(model, optax.sgd(0.1), data, record=False, progress="none", **given)


def layered(**parts: Any) -> jn.Run:
    """Trains ``Dense_0`` and ``Dense_1``, each of a kernel and a bias, or other parts."""
    return tiny.fit(tiny.experiment(**{"task": lambda config: LAYERS} | parts))


def under(setting: Callable[..., Any], *values: Any) -> jn.Run:
    """Trains by Adam, which promotes dtypes, under a setting of JAX."""
    with setting(*values):
        return tiny.fit(tiny.experiment(optimizer=lambda config: optax.adam(0.1)))


def stepping(result: Callable[[jn.TrainState], Any]) -> jn.Run:
    """Trains by a step that returns the ``result`` of its state."""
    return layered(step=lambda task, optimizer: lambda state, batch: result(state))


def initialized(make: Callable[[], jn.Task]) -> Any:
    return jax.eval_shape(make().init, jax.random.key(0), jn.Batch(INPUTS, LABELS, np.ones(37, np.float32)))


start = lambda params: layered(params=lambda config: params)  # noqa: E731
measured = lambda metrics: layered(task=lambda config: LAYERS._replace(metrics=metrics))  # noqa: E731
replace = lambda **fields: fit(TYPED.replace(**fields), record=False)  # noqa: E731
sweep = lambda **options: jn.sweep(TYPED, jn.grid(seed=[0, 1]), **options)  # noqa: E731
CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (replace, {"batch_size": 0}, "batch_size must be an integer >= 1, not 0"),
    (replace, {"num_steps": -1}, "num_steps must be an integer >= 1, not -1"),
    (replace, {"seed": -1}, "seed must be an integer >= 0, not -1"),
    (replace, {"seed": 2**32}, r"below 2\*\*32"),
    (replace, {"sed": 1}, "did you mean 'seed'"),
    (replace, {"epochs": 1}, "did you mean 'num_steps'"),
    (replace, {"num_steps": 2**31}, r"num_steps is 2147483648, and must be below 2\*\*31"),
    (replace, {"batch_size": "4"}, "batch_size is '4', of type str"),
    (replace, {"rate": True}, "rate is True, of type bool"),
    (replace, {"name": 3}, "name is 3, of type int"),
    (replace, {"verbose": 1}, "verbose is 1, of type int"),
    (fit, {"epochs": 3}, r"'num_steps' is a field of the config.*experiment\.replace.*in updates, not epochs"),
    (fit, {"out_dir": "x"}, "did you mean 'run_dir'"),
    (sweep, {"rate": 3}, "^'rate' is a field of the config, not a run option"),
    (fit, {"monitor": "acuracy"}, "monitor is 'acuracy', .* did you mean 'accuracy'"),
    (fit, {"run_dir": True}, "run_dir is True, and must be a path"),
    (fit, {"options": {"record": False}}, r"options is \{'record': False\}.*RunOptions"),
    *((fit, {"stall_after": bad}, "stall_after is .* 0 or more") for bad in (-1.0, float("nan"), "5", None, True)),
    (fit, {"experiment": tiny.experiment(data=jn.data.arrays((INPUTS, LABELS))), "patience": 2}, "patience needs"),
    (fit, {"experiment": Typed()}, r"Typed.* is no experiment: give jn\.Experiment"),
    (jn.iterate, {"experiment": None}, "None is no experiment"),
    (fit, {"probes": {"../mine": len}}, r"'\.\./mine'.*different names"),
    (fit, {"probes": (len, len)}, "different names"),
    (fit, {"probes": len}, "tuple of functions"),
    (fit, {"probes": ("rule",)}, "MODULE:NAME"),
    (fit, {"writers": ("tensorbord",)}, "no writer 'tensorbord'.*did you mean 'tensorboard'"),
    (jn.SweepOptions, {"probes": (len,)}, "probes watch one run"),
    (jn.Experiment, {"config": {}, "data": len, "task": len, "optimizer": len}, "must be an instance of a dataclass"),
    (lambda: jn.iterate(TYPED).run, {}, "iterate first"),
    (train, {"num_epochs": 1, "num_steps": 5}, "both num_epochs and num_steps"),
    (train, {"num_epochs": float("inf")}, "num_epochs is inf"),
    (train, {"num_epochs": 0}, "num_epochs is 0"),
    (train, {"batch_size": "8"}, "batch_size is '8'"),
    (train, {"batch_size": 38}, "larger than the set of 37"),
    (train, {"epochs": 3}, "no argument 'epochs': did you mean 'num_epochs'"),
    (train, {"monitr": "loss"}, "did you mean 'monitor'"),
    (train, {"data": (INPUTS, np.eye(3)[LABELS])}, r"one-hot .*argmax\(axis=-1\)"),
    (train, {"data": {"x": INPUTS}}, "the targets are not one array, so the task is unknown"),
    (train, {"data": jn.data.generated(lambda key, step: INPUTS)}, "the training data have no end, .* give num_steps"),
    (train, {"data": (INPUTS, np.zeros((37, 2), int))}, r"\[37, 2\] are no labels \[examples\]"),
    (jn.RunOptions, {"steps_per_call": 0}, "steps_per_call must be an integer >= 1, not 0"),
    (jn.RunOptions, {"report_every": 2.5}, "report_every must be an integer >= .*, not 2.5"),
    (jn.RunOptions, {"eval_every": -1}, "eval_every must be an integer >= 0, not -1"),
    (jn.RunOptions, {"name": "a/b"}, "name is 'a/b', and must be a text of 1 to 100 characters, without slashes"),
    (jn.RunOptions, {"keep_last": True}, "keep_last must be an integer >= .*, not True"),
    (jn.RunOptions, {"monitor_mode": "up"}, "monitor_mode is 'up', .* auto, min, max"),
    (jn.RunOptions, {"progress": "loud"}, "progress is 'loud', .* auto, bar, plain, none"),
    (jn.RunOptions, {"resume": "a", "run_dir": "b"}, "both resume and run_dir"),
    (jn.RunOptions, {"writers": "math:pi"}, "writers is 'math:pi'"),
    (jn.RunOptions, {"writers": ("tests.engine.test_extensions:Table",)}, "Table.*object"),
    (jn.RunOptions, {"writers": ("math:missing",)}, "missing.*imported"),
    (jn.RunOptions, {"writers": (print,)}, "write"),
    (jn.RunOptions, {"stop": 0.9}, "stop is 0.9"),
    (jn.RunOptions, {"stop": "rule"}, "MODULE:NAME"),
    (jn.RunOptions, {"stop": "math:missing"}, "missing.*imported"),
    (layered, {"step": lambda task: None}, "must be a function of .task, optimizer.* not <lambda>"),
    (layered, {"step": lambda state, batch: (state, {"loss": 0.0})}, "<lambda> is that function itself"),
    (layered, {"step": lambda task, optimizer, config: None}, "and it returned a NoneType"),
    (layered, {"step": 5}, "not 5"),
    (stepping, {"result": lambda state: state}, "must return .state, metrics., a TrainState and a dict"),
    (stepping, {"result": lambda state: (state, {"accuracy": 0.0})}, "with a 'loss'"),
    (stepping, {"result": lambda state: (state, {"loss": jnp.zeros(2)})}, "metric 'loss' of the step .*one number"),
    (stepping, {"result": lambda state: (state._replace(params={}), {"loss": 0.0})}, "return a params like the one"),
    (layered, {"optimizer": lambda config: {"net": optax.sgd(0.1)}}, "are of net, .* of Dense_0, Dense_1"),
    (start, {"params": {"Dense_0": {"kernel": np.zeros((4, 3))}}}, r"have params/Dense_0/kernel \[4, 3\], .* \[3, 4\]"),
    (start, {"params": {"layer": np.zeros(3)}}, "no array of the experiment's params .*: it has params/Dense_0/bias"),
    (start, {"params": SimpleNamespace(state=None)}, "params returned a run: return run.state"),
    (start, {"params": {"adapters": {"a": np.zeros(3)}}}, "adapters of lora: merge them first"),
    (initialized, {"make": lambda: freeze(freeze(LAYERS, "Dense_0"), "Dense_1")}, "none that is frozen already"),
    (initialized, {"make": lambda: freeze(LAYERS, "Conv")}, "no parameter starts with 'Conv': there are Dense_0"),
    (initialized, {"make": lambda: freeze(LAYERS, "Dense_.")}, "match all parameters"),
    (initialized, {"make": lambda: lora(LAYERS, 2, match="Conv")}, "frozen parameters of two axes: .*'Conv'"),
    (measured, {"metrics": {"auc": 3}}, "the task's metric auc is 3, and must be a function"),
    (measured, {"metrics": {"loss": len}}, "two metrics 'loss'"),
    (partial(under, jax.disable_jit), {}, "jax_disable_jit is on, .* turn it off"),
    (partial(under, jax.transfer_guard, "disallow"), {}, "jax_transfer_guard_host_to_device disallows"),
    (partial(under, jax.numpy_dtype_promotion, "strict"), {}, "jax_numpy_dtype_promotion is strict, .* mixes dtypes"),
]


@pytest.mark.parametrize(("call", "given", "words"), CALLS, ids=[words for *_, words in CALLS])
def test_bad_calls(call, given, words):
    with pytest.raises((jn.ConfigError, jn.DataError)) as caught:
        call(**given)
    assert re.search(words, str(caught.value)) and "\n" not in str(caught.value), str(caught.value)


def test_convertible_config_values_are_accepted():
    given: list[dict[str, Any]] = [{"rate": 1}, {"rate": np.float32(0.5)}, {"limit": 3}, {"widths": [4, 5]}]
    for fields in (*given, {"batch_size": np.int64(4)}, {"seed": 2**32 - 1}):
        check_config(Typed(**fields))


def test_one_hot_and_integer_targets_are_regressed_if_asked():
    task = jn.tasks.regression(tiny.MODEL)
    run = train((INPUTS, np.eye(3)[LABELS]), task, num_steps=2, steps_per_call=1, report_every=1)
    assert run.metrics["train_loss"][-1] < run.metrics["train_loss"][0]
    splits = jn.data.arrays((INPUTS, np.arange(37)))
    programs = programs_of(tiny.experiment(data=splits, task=lambda config: jn.tasks.regression(NARROW)), splits)
    programs.task.check(programs.shapes.params, programs.shapes.model_state, programs.batch, splits)
    assert "mean_absolute_error" in programs.metrics
