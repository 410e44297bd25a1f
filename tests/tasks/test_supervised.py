"""Models in any form as tasks: flags, statistics, sown losses, draws, mixed precision; models of other libraries."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxnn as jn
from jaxnn import tasks
from jaxnn.tasks import as_model
from jaxnn.types import Batch
from tests import elsewhere, test_docs, tiny
from tests.tasks.test_losses import KEY


def test_models_get_a_flag_for_training():
    for model in (  # each doubles its inputs in training
        (lambda key, x: {}, lambda params, x, deterministic=True: x if deterministic else 2 * x),
        (lambda key, x: {}, lambda params, x, use_running_average: x if use_running_average else 2 * x),
        (lambda key, x: {}, lambda params, x, is_training: 2 * x if is_training else x),
        (lambda key, x: {}, lambda params, x, *, training=True: 2 * x if training else x),
        (lambda key, x: {}, lambda params, x, train=False: 2 * x if train else x),
    ):
        init, apply = as_model(model)
        inputs = np.float32([[1.0, 2.0]])
        params, model_state = init(KEY, inputs)
        assert apply(params, model_state, inputs, KEY)[0].tolist() == [[2.0, 4.0]]
        assert apply(params, model_state, inputs, None)[0].tolist() == [[1.0, 2.0]]


def test_batch_statistics_change_in_training_alone():
    module, inputs = linen.BatchNorm(momentum=0.9), np.float32([[0.0], [4.0]])
    init, apply = as_model(module)
    params, before = init(KEY, inputs)
    outputs, after, _ = apply(params, before, inputs, KEY)
    variables, training = {"params": params, **before}, {"use_running_average": False, "mutable": ["batch_stats"]}
    chex.assert_trees_all_equal((outputs, after), module.apply(variables, inputs, **training))
    assert after["batch_stats"]["mean"] != before["batch_stats"]["mean"]
    outputs, still, _ = apply(params, after, inputs, None)
    expected = module.apply({"params": params, **after}, inputs, use_running_average=True)
    chex.assert_trees_all_equal((outputs, still), (expected, after))


class Sowing(linen.Module):
    """Of two inputs; its noise vanishes if its streams draw the same."""

    @linen.compact
    def __call__(self, x: jax.Array, scale: jax.Array, train: bool = False) -> jax.Array:
        self.sow("intermediates", "seen", x)
        self.sow("losses", "penalty", 2 * x)
        self.sow("losses", "other", jnp.float32(1.0))
        if train:
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
            x = x - jax.random.normal(self.make_rng("jitter"), x.shape)
        return linen.Dense(1)(x * scale)


@pytest.mark.parametrize("form", [tuple, lambda pair: dict(zip(("scale", "x"), reversed(pair), strict=True))])
def test_sown_losses_are_added_in_training_alone_and_inputs_may_be_several(form):
    # 2 * (1 + 2) + 2 * (3 + 4) + 1, whatever the targets, of which there are none.
    inputs = form((np.float32([[1.0, 2.0], [3.0, 4.0]]), np.float32([[1.0], [1.0]])))
    task = tasks.supervised(Sowing(), lambda outputs, targets: 0 * outputs[:, 0], {"loss": lambda y, _: 0 * y[:, 0]})
    batch = Batch(inputs, None, np.ones(2, np.float32))
    params, model_state = task.init(KEY, batch)
    loss, (after, metrics) = task.loss(params, model_state, batch, KEY)
    assert (float(loss), float(metrics["sown_loss"])) == (21.0, 21.0)
    assert (model_state, after) == ({}, {}) and params["Dense_0"]["kernel"].shape == (2, 1)
    assert float(task.evaluate(params, model_state, batch, KEY)["loss"]) == 0.0
    # Padding is zeros in every input: 2 * (1 + 2) + 1.
    spoiled = jax.tree.map(lambda rows: np.where([[True], [False]], rows, np.nan), inputs)
    padded = Batch(spoiled, None, np.float32([1.0, 0.0]))
    assert float(task.loss(params, model_state, padded, KEY)[0]) == 7.0
    _, apply = as_model(Sowing())
    keys = (KEY, KEY, jax.random.key(1), None, None)
    first, again, other, still, same = (apply(params, {}, inputs, key)[0] for key in keys)
    assert np.array_equal(first, again) and np.array_equal(still, same)
    assert not np.allclose(first, other) and not np.allclose(first, still)


def test_pairs_get_key_and_inputs():
    def apply(params: Any, inputs: jax.Array, key: jax.Array | None) -> jax.Array:
        return inputs if key is None else jax.random.normal(key, inputs.shape)

    init, applied = as_model((lambda key, inputs: {"w": jax.random.normal(key, inputs.shape)}, apply))
    params, model_state = init(KEY, np.zeros(3))
    drawn = jax.random.normal(KEY, (3,))
    assert np.array_equal(params["w"], drawn) and model_state == {}
    assert np.array_equal(applied(params, model_state, np.zeros(3), KEY)[0], drawn)
    assert np.array_equal(applied(params, model_state, np.zeros(3), None)[0], np.zeros(3))


class SowingTokens(linen.Module):
    """Logits of zero, and a penalty of 3."""

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.sow("losses", "penalty", jnp.float32(3.0))
        return linen.Dense(4, kernel_init=linen.initializers.zeros)(jax.nn.one_hot(tokens, 4))


def test_sown_losses_are_not_divided_by_tokens():
    batch = Batch(np.zeros((2, 5), np.int32), np.zeros((2, 5), np.int32), np.ones(2, np.float32))
    task = tasks.next_token(SowingTokens())
    loss, (_, metrics) = jax.jit(lambda: task.loss(*task.init(KEY, batch), batch, KEY))()
    found = [loss, metrics["sown_loss"], metrics["bits_per_token"]]
    np.testing.assert_allclose(found, [np.log(4) + 3, 3, 2], rtol=1e-6)


INPUTS = tiny.points(8)[0]
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


@pytest.mark.slow
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
    tiny.break_off(experiment, path, 10)
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
