"""Models of other libraries: equal to their libraries', resumed, swept, defined again in a notebook."""

from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import jaxnn as jn
from jaxnn.tasks import as_model
from tests import elsewhere, test_docs, tiny

INPUTS, KEY = tiny.points(8)[0], jax.random.key(0)
MODELS = elsewhere.models(3)


as_instance_or_factory = pytest.mark.parametrize("as_instance", [pytest.param(True, marks=pytest.mark.slow), False])


@as_instance_or_factory
def test_nnx_equals_its_library(as_instance):
    module = elsewhere.NNXNet(3, rngs=nnx.Rngs(KEY))
    init, apply = as_model(module if as_instance else MODELS["a Flax NNX module"])
    params, state = init(KEY, INPUTS)
    module.eval()
    np.testing.assert_allclose(apply(params, state, INPUTS, None).outputs, module(INPUTS), rtol=1e-6)
    first, again, other = (apply(params, state, INPUTS, jax.random.key(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.outputs, again.outputs) and not np.array_equal(first.outputs, other.outputs)
    module.train()
    module(INPUTS)
    np.testing.assert_allclose(first.model_state["norm"]["mean"], module.norm.mean[...], rtol=1e-6)


@as_instance_or_factory
def test_equinox_equals_its_library(as_instance):
    eqx = pytest.importorskip("equinox")
    factory = elsewhere.equinox_net(3)
    module, before = factory(KEY)
    init, apply = as_model((module, before) if as_instance else factory)
    params, state = init(KEY, INPUTS)
    leaves, tree = jax.tree.flatten(before)

    def mapped(net: Any, inputs: Any, keys: Any) -> Any:
        def call(x: Any, key: Any) -> Any:
            return net(x, jax.tree.unflatten(tree, leaves), key=key)

        return jax.vmap(call, out_axes=(0, None), axis_name="batch")(inputs, keys)

    keys = jax.random.split(jax.random.key(1), len(INPUTS))
    outputs, after = mapped(module, INPUTS, keys)
    result = apply(params, state, INPUTS, jax.random.key(1))
    np.testing.assert_allclose(result.outputs, outputs, rtol=1e-5)
    chex.assert_trees_all_close(jax.tree.leaves(result.model_state), jax.tree.leaves(after))
    evaluated, _ = mapped(eqx.nn.inference_mode(module), INPUTS, keys)
    np.testing.assert_allclose(apply(params, state, INPUTS, None).outputs, evaluated, rtol=1e-5)


def test_an_array_that_is_not_floating_is_state():
    init, apply = as_model(elsewhere.Tree([np.ones((3, 2), np.float32), np.arange(4).reshape(2, 2)]))
    params, state = init(KEY, INPUTS)
    assert params["layers"].keys() == {"0"} and state["constants"]["layers"]["1"].tolist() == [[0, 1], [2, 3]]
    assert apply(params, state, INPUTS, None).outputs.shape == (8, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_runs_resume_exactly(name, tmp_path):
    experiment, path = tiny.experiment(model=MODELS[name]), tmp_path / "run"
    expected = tiny.fit(experiment)
    for report in jn.iterate(experiment, run_dir=path, **tiny.HOW):
        if report.step == 10:
            break
    found = tiny.fit(experiment, resume=path)
    assert found.final == expected.final
    chex.assert_trees_all_equal(found.state[:4], expected.state[:4])


@pytest.mark.slow
def test_a_swept_dropout_rate_of_equinox_is_not_trained():
    def task(config: tiny.Config) -> jn.Task:
        return jn.tasks.classification(lambda key: elsewhere.equinox_net(3, config.learning_rate)(key))

    experiment = tiny.experiment(task=task)
    points = jn.grid(learning_rate=[0.1, 0.4])
    members = jn.sweep(experiment, points, record=False, **tiny.MEMBERS).members
    for member, rate in zip(members, (0.1, 0.4), strict=True):
        # Traced, the rate is an array, as parameters are.
        assert member.final == pytest.approx(tiny.fit(experiment.replace(learning_rate=rate)).final, rel=1e-5)


SOURCE = """
from flax import nnx
class Net(nnx.Module):
    def __init__(this, rngs): this.layer = nnx.Linear(3, 3, rngs=rngs)
    def __call__(self, x): return self.layer(x) * FACTOR
"""


def test_a_class_may_be_defined_again():
    # As a notebook does that runs a cell again, or `%autoreload` after an edit; Equinox's is new in each factory call.
    notebook: dict[str, Any] = {"__name__": "notebook", "FACTOR": 1.0}
    exec(SOURCE, notebook)
    instance = notebook["Net"](nnx.Rngs(KEY))
    (init, apply), (_, apply_instance) = as_model(lambda rngs: notebook["Net"](rngs)), as_model(instance)
    params, state = init(KEY, INPUTS)
    first = apply(params, state, INPUTS, KEY).outputs
    notebook["FACTOR"] = 2.0
    exec(SOURCE, notebook)
    instance.__class__ = notebook["Net"]  # as autoreload does
    for again in (apply, apply_instance, as_model(notebook["Net"])[1]):
        np.testing.assert_allclose(again(params, state, INPUTS, KEY).outputs, 2 * first, rtol=1e-6)


@pytest.mark.slow
def test_equinox_examples_of_the_documentation_run(tmp_path, monkeypatch):
    pytest.importorskip("equinox")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    for code in test_docs.blocks(test_docs.ROOT / "docs/howto/models_from_elsewhere.md", "py"):
        if "hk." not in code:
            exec(compile(code, "page", "exec", dont_inherit=True), names)
