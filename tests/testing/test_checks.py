"""`jaxnn.testing` finds what is wrong with a user's task, step or layer, and nothing where nothing is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import jaxnn as jn
from jaxnn.testing import ConformanceError, check_layer, check_step, check_task
from tests import draws, tiny
from tests.tiny import nats

BATCH = jn.Batch(*tiny.points(8), np.ones(8, np.float32))
SGD = optax.sgd(0.1)


def evaluating(value: Callable[[jax.Array, jax.Array], Any]) -> jn.Task:
    """The linear classifier with ``value(nats [batch], mask [batch])`` as the loss of its evaluation."""
    return tiny.TASK._replace(
        evaluate=lambda params, state, batch, key: {
            "loss": value(nats(params, batch), batch.mask),
            "count": batch.mask.sum(),
        }
    )


def losing(value: Callable[..., jax.Array]) -> jn.Task:
    """The linear classifier that minimises ``value(params, batch)``."""
    return tiny.TASK._replace(loss=lambda params, state, batch, key: (value(params, batch), (state, {})))


@jax.custom_batching.custom_vmap
def twice(x: jax.Array) -> jax.Array:
    return 2 * x


@twice.def_vmap
def _(size: int, is_batched: Any, x: jax.Array) -> Any:
    return 2 * jnp.broadcast_to(x[:1], x.shape), True  # the first member's for all


calls = iter(range(1_000_000))
TASKS = {
    "a mean over the mask": (evaluating(lambda each, mask: (each * mask).sum() / mask.sum()), "sums"),
    "a mean of masked values": (evaluating(lambda each, mask: (each * mask).mean()), "sums"),
    "a sum of padding too": (evaluating(lambda each, mask: each.sum()), "padding"),
    "an unused parameter": (losing(lambda params, batch: jnp.square(params["kernel"]).sum()), "parameters"),
    "a loss of a batch": (losing(lambda params, batch: nats(params, batch).sum() / nats(params, batch).max()), "pmap"),
    "a loss that ignores the mask": (losing(lambda params, batch: nats(params, batch).mean()), "padded step"),
    "an overflow": (losing(lambda params, batch: jnp.exp(100 * (1 + nats(params, batch).mean()))), "parameters"),
    "a number made in a trace": (losing(lambda params, batch: nats(params, batch).mean() * (2 + next(calls))), "jit"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("made" in name)) for name in TASKS])
@pytest.mark.several_devices
def test_the_check_of_what_a_task_does_wrong_fails(name):
    task, check = TASKS[name]
    with pytest.raises(ConformanceError, match=f"check_task: 1 of 1 checks failed.\n{check}: "):
        check_task(task, BATCH, optimizer=SGD, checks=(check,))


@pytest.mark.slow
def test_right_tasks_pass_every_check():
    every = (*jn.testing.TASK_CHECKS, "padded step")
    assert check_task(tiny.TASK, BATCH, checks=every) == dict.fromkeys(every, "passed")


def step(state: Any, batch: jn.Batch) -> Any:
    return jn.steps.make_train_step(tiny.TASK, SGD)(state, batch)


def widened(state: Any, batch: jn.Batch) -> Any:
    """A step that returns another dtype than it gets."""
    state, metrics = step(state, batch)
    return state._replace(params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.params)), metrics


def of_the_first(state: Any, batch: jn.Batch) -> Any:
    """A step with a wrong rule for `jax.vmap`."""
    after, metrics = step(state, batch)
    return after._replace(params=jax.tree.map(twice, after.params)), metrics


@pytest.mark.parametrize(("wrong", "check"), [(widened, "trace"), (of_the_first, "vmap")])
def test_the_check_of_what_a_step_does_wrong_fails(wrong, check):
    state = jn.steps.init_train_state(tiny.TASK, SGD, jax.random.key(0), BATCH)
    assert check_step(step, state, BATCH, checks=(check,)) == {check: "passed"}
    with pytest.raises(ConformanceError, match=f"\n{check}: "):
        check_step(wrong, state, BATCH, checks=(check,))


def sine_with(derivative: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A sine with a derivative of its own in reverse mode, and none in forward mode."""
    sine = jax.custom_vjp(lambda x: jnp.sin(x))
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, gradient: (derivative(x) * gradient,))
    return sine


KERNEL = {"kernel": draws.normal(0, 3, 2)}
LAYERS = {
    "a wrong rule for vmap": (lambda params, x: twice(x) @ params["kernel"], "vmap"),
    "coupled rows": (lambda params, x: (x - x.mean(0)[None]) @ params["kernel"], "rows"),
    "rows coupled on devices": (lambda params, x: (x - x.mean(0)[None]) @ params["kernel"], "devices"),
    "an unused parameter": (lambda params, x: x + 0 * params["kernel"].sum(), "gradient"),
    "a gradient without forward mode": (lambda params, x: sine_with(jnp.sin)(x @ params["kernel"]), "gradient"),
    "a dtype of its own": (lambda params, x: jnp.float32(x @ params["kernel"]), "bfloat16"),
    "a value of an array": (lambda params, x: x @ params["kernel"] if x[0, 0] > 9 else x, "jit"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.several_devices
def test_the_check_of_what_a_layer_does_wrong_fails(name):
    layer, check = LAYERS[name]
    with pytest.raises(ConformanceError, match=f"check_layer: 1 of 1 checks failed.\n{check}: "):
        check_layer(layer, BATCH.inputs, KERNEL, checks=(check,))


@pytest.mark.several_devices
def test_right_layers_pass_every_check():
    every = dict.fromkeys(jn.testing.LAYER_CHECKS, "passed")
    assert check_layer(lambda params, x: jnp.tanh(x @ params["kernel"]), BATCH.inputs, KERNEL) == every
    assert check_layer(linen.Embed(5, 2), np.arange(8) % 5) == every


@pytest.mark.slow
def test_keys_of_any_kind_and_place_are_kept():
    keyed = tiny.TASK._replace(
        init=lambda key, batch: (tiny.init(key, batch.inputs), {"own": jax.random.key(1, impl="rbg")}),
        evaluate=jn.Task(tiny.TASK.init).evaluate,
    )
    results = check_task(keyed, BATCH, checks=("vmap", "trace", "padding", "sums"))
    assert [results[check] for check in ("vmap", "trace")] == ["passed"] * 2
    assert all("no evaluate" in results[check] for check in ("padding", "sums"))

    def split(state, batch):
        after, metrics = step(state._replace(key=jax.random.key(0)), batch)
        return after._replace(key=jax.random.split(state.key)[0]), metrics

    for key in (jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        state = jn.steps.init_train_state(tiny.TASK, SGD, jax.random.key(0), BATCH)._replace(key=key)
        assert set(check_step(split, state, BATCH, checks=("trace", "vmap")).values()) == {"passed"}


@pytest.mark.several_devices
def test_layers_without_forward_mode_with_odd_batches_and_integer_outputs_pass():
    def layer(params, x):
        outputs = sine_with(jnp.cos)(x @ params["kernel"])
        return {"outputs": outputs, "label": outputs.argmax(1)}

    results = check_layer(layer, BATCH.inputs[:5], KERNEL, checks=("gradient", "devices", "bfloat16"))
    assert set(results.values()) == {"passed"}


# A call, and two words that tell the mistake.
MISUSED = {
    "a model as a task": (lambda: check_task(tiny.MODEL, BATCH), "needs a Task"),
    "a tuple as a batch": (lambda: check_task(tiny.TASK, (BATCH.inputs, BATCH.targets)), "jn.Batch"),
    "a batch as a state": (lambda: check_step(step, BATCH, BATCH), "needs a state"),
    "a missing argument": (lambda: check_layer(linen.BatchNorm(), BATCH.inputs), "initialised .* layer.apply"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_one_line(name):
    call, words = MISUSED[name]
    with pytest.raises(jn.ConfigError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_all_failures_are_listed_and_unknown_checks_and_small_batches_refused(monkeypatch):
    with pytest.raises(ConformanceError) as caught:
        check_task(evaluating(lambda each, mask: each.sum()), BATCH, checks=("padding", "trace", "sums"))
    first, *lines = str(caught.value).splitlines()
    assert "2 of 3" in first and [line.partition(":")[0] for line in lines] == ["padding", "sums"]
    with pytest.raises(jn.ConfigError, match="no check 'vmaps'.*'vmap'"):
        check_task(tiny.TASK, BATCH, checks=("vmaps",))
    with pytest.raises(jn.ConfigError, match="at least 4 examples, not 2"):
        check_task(tiny.TASK, jax.tree.map(lambda rows: rows[:2], BATCH))
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert "JAX_NUM_CPU_DEVICES=2" in check_task(tiny.TASK, BATCH, checks=("devices",))["devices"]
