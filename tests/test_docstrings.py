"""The examples in the docstrings of public functions and classes run."""

import doctest
import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from tests import tiny

MODULES = {
    name: importlib.import_module(name)
    for name in (
        *("jaxnn", "jaxnn.data", "jaxnn.models", "jaxnn.nn", "jaxnn.observe", "jaxnn.optim", "jaxnn.search"),
        *(
            "jaxnn.steps",
            "jaxnn.tasks",
            "jaxnn.testing",
            "jaxnn.trees",
            "jaxnn.bench",
            "jaxnn.parallel",
            "jaxnn.record",
            "jaxnn.sweeps",
        ),
    )
} | {"jaxnn.schedules": jn.schedules}
# Public functions and classes, each once, by their shortest name; exceptions are seen where they are raised.
PUBLIC: dict[str, Any] = {}
for module_name, module in MODULES.items():
    for name in module.__all__:
        value = getattr(module, name)
        is_ours = getattr(value, "__module__", "").startswith("jaxnn")
        is_error = inspect.isclass(value) and issubclass(value, Exception)
        if is_ours and (inspect.isclass(value) or inspect.isfunction(value)) and not is_error:
            if not any(value is other for other in PUBLIC.values()):
                PUBLIC[f"{module_name}.{name}"] = value


@functools.cache
def experiment() -> jn.Experiment[tiny.Config]:
    return jn.Experiment(
        tiny.Config(batch_size=32),
        data=lambda config: jn.data.digits(),
        task=lambda config: jn.tasks.classification(jn.models.MLP((8, 10))),
        optimizer=lambda config: optax.sgd(config.learning_rate),
    )


@functools.cache
def run() -> jn.Run:
    return jn.fit(experiment(), record=False, progress="none", steps_per_call=5)


@functools.cache
def swept() -> jn.Sweep:
    points = jn.grid(learning_rate=[0.1, 0.2], seed=[0, 1])
    return jn.sweep(experiment(), points, record=False, progress="none", steps_per_call=5, vmap_size=4, devices=1)


@functools.cache
def batch() -> jn.Batch:
    examples = jn.data.digits().train.examples
    assert examples is not None
    return jn.Batch(examples.inputs[:32], examples.targets[:32], np.ones(32, np.float32))


# Values that examples name.
SHARED: dict[str, Callable[[], Any]] = {"experiment": experiment, "run": run, "swept": swept, "batch": batch}
# Examples with these calls need the folder of a real data set.
SETS = ("mnist", "fashion_mnist", "cifar10", "cats_vs_dogs", "imdb", "ptb", "sms_spam")
REAL = {f"jn.data.{name}(": name for name in SETS} | {"jn.data.ag_news(": "ag_news_test"}
# Examples with these calls need an optional library.
OPTIONAL = {"run.export(": "flatbuffers", "_weights(": "safetensors"}
NAMES = {"jax": jax, "jnp": jnp, "np": np, "optax": optax, "linen": linen, "jn": jn, "Path": Path}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, tmp_path, monkeypatch, real_data):
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [found for found in finder.find(PUBLIC[name], name, globs={}) if found.examples]
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    report: list[str] = []
    for test in tests:
        source = "".join(example.source for example in test.examples)
        if needed := [folder for call, folder in REAL.items() if call in source]:
            if real_data is None or not all((real_data / folder).is_dir() for folder in needed):
                pytest.skip(f"no real data: {', '.join(needed)}")
            monkeypatch.setenv("JAXNN_DATA", str(real_data))
        for module in (module for call, module in OPTIONAL.items() if call in source):
            pytest.importorskip(module)
        test.globs = NAMES | {shared: make() for shared, make in SHARED.items() if shared in source}
        doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not report, "".join(report)
    assert tests, f"{name} has no example in its docstring"
