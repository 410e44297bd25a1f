"""Adam in one pass: Optax's states and updates, alone, clipped, scheduled, masked, mapped and differentiated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import optim
from jaxnn.observe import Traced
from tests import draws, native, tiny
from tests.draws import assert_close

# Two parameters that the package updates, one of them on two threads, and two that XLA does. One element is infinite.
PARAMS = {
    "a": draws.normal(0, 130, 127).at[0, 0].set(-jnp.inf),
    "b": draws.normal(1, 70_001),
    "c": {"d": draws.normal(2, 7), "e": jnp.float32(1.0)},
}
SLOW = optax.cosine_decay_schedule(1e-2, 8)
CASES: dict[str, Any] = {
    "adam": lambda module: module.adam(1e-2),
    "schedule": lambda module: module.adam(SLOW, b1=0.8, b2=0.99, eps=1e-4, eps_root=1e-6),
    "adamw": lambda module: module.adamw(1e-2, weight_decay=0.3, mask=optim.is_decayed),
    "prefix": lambda module: module.adamw(SLOW, weight_decay=0.3, mask={"a": False, "b": True, "c": np.bool_(True)}),
    "decay": lambda module: module.adamw(1e-2, weight_decay=SLOW),
    "nesterov": lambda module: module.adam(1e-2, nesterov=True),
    "clipped": lambda module: optim.with_clipping(module.adam(1e-2), 5.0),
}


def loss(params: Any, state: Any, batch: Any, key: Any) -> Any:
    """Gradients are the cosines of what is finite."""
    finite = jax.tree.leaves(jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0), params))
    return sum(jnp.sum(jnp.sin(leaf) * batch.inputs[0]) for leaf in finite), (state, {})


TASK = jn.Task(lambda key, batch: (PARAMS, {}), loss)
BATCH = jn.Batch(jnp.full(1, 1.5), jnp.zeros(1), jnp.ones(1))


def train(optimizer: Any, params: Any, num_steps: int = 3) -> Any:
    """The state after some steps from ``params``, which a caller traces: XLA would compute with constants itself."""
    task = TASK._replace(init=lambda key, batch: (params, {}))
    step = jn.steps.make_train_step(task, optimizer)
    state = jn.steps.init_train_state(task, optimizer, jax.random.key(0), BATCH)
    return jax.lax.scan(lambda state, _: (step(state, BATCH)[0], None), state, None, length=num_steps)[0]


class Doubling:
    """Its own update takes twice the step, so that it can be seen."""

    def __init__(self, optimizer: Any) -> None:
        self.init, self.update = optimizer

    def update_params(self, gradient: Any, state: Any, params: Any, **extra: Any) -> Any:
        assert extra.keys() == {"value", "grad", "value_fn"}
        return jax.tree.map(lambda param, slope: param - 0.2 * slope, params, gradient), state


def test_an_optimizer_of_ones_own_may_update_the_parameters_itself():
    optimizer = Doubling(optax.sgd(0.1))
    params = {"a": jnp.arange(3.0)}
    own, plain = (train(each, params, 1).params["a"] for each in (optimizer, optax.sgd(0.2)))
    assert_close(own, plain)
    clipped = (train(optim.with_clipping(each, 0.1), params, 1).params["a"] for each in (optimizer, optax.sgd(0.2)))
    assert_close(*clipped)
    # XLA partitions the program: Optax's update is taken.
    sharded = (
        tiny.fit(tiny.experiment(optimizer=lambda config, one=one: one, num_steps=1), strategy="fsdp").state.params
        for one in (optimizer, optax.sgd(0.1))
    )
    assert_close(*sharded)


def test_states_are_those_of_optax():
    run = jax.jit(lambda params: [[train(make(by), params) for make in CASES.values()] for by in (optim, optax)])
    ours, theirs = run(PARAMS)
    for one, other in zip(ours, theirs, strict=True):
        assert_close((one.params, one.opt_state), (other.params, other.opt_state))
    assert not np.allclose(ours[0].params["b"], PARAMS["b"], atol=1e-2) and np.isneginf(ours[0].params["a"][0, 0])
    for name in ("adam", "prefix", "clipped"):
        found = Traced(functools.partial(train, CASES[name](optim)), PARAMS).implementations
        assert found.get("adam", []) == ["native"] * native.USED
    averaged = functools.partial(train, optim.with_ema(optim.adam(1e-2), 0.9))  # any combinator takes it
    assert Traced(averaged, PARAMS).implementations == {}


def test_a_gradient_in_the_place_of_its_parameter_and_a_state_that_is_kept():
    """The kernel writes to its operands, of which XLA then makes copies."""
    task = TASK._replace(
        loss=lambda params, state, batch, key: (
            sum(jnp.vdot(leaf, jax.lax.stop_gradient(leaf)) for leaf in jax.tree.leaves(params)),
            (state, {}),
        ),
        init=lambda key, batch: ({"b": PARAMS["b"]}, {}),
    )
    results = []
    for module in (optim, optax):
        before = jn.steps.init_train_state(task, module.adam(1e-2), jax.random.key(0), BATCH)
        step = jax.jit(jn.steps.make_train_step(task, module.adam(1e-2)))
        results.append([step(before, BATCH)[0].params, step(before, BATCH)[0].opt_state, before.params])
    assert_close(*results)


def test_a_replaced_update_is_used():
    replaced = optim.adam(1e-2)._replace(update=lambda updates, state, params=None, **extra: (updates, state))
    state = jn.steps.init_train_state(TASK, replaced, jax.random.key(0), BATCH)
    after = jax.jit(jn.steps.make_train_step(TASK, replaced))(state, BATCH)[0]
    np.testing.assert_allclose(after.params["b"], PARAMS["b"] + 1.5 * np.cos(PARAMS["b"]), atol=1e-5)


def test_members_of_vmap_have_their_own_rates():
    rates = np.float32([1e-2, 1e-3])

    def run(rate: Any, params: Any) -> Any:
        params = jax.tree.map(lambda leaf: leaf * rate * 100, params)
        return train(optim.adamw(rate, weight_decay=0.1), params).params

    both = jax.jit(lambda *given: (jax.vmap(run, (0, None))(*given), [run(rate, given[1]) for rate in given[0]]))
    mapped, alone = both(rates, PARAMS)
    for member, expected in enumerate(alone):
        assert_close(jax.tree.map(lambda leaf, member=member: leaf[member], mapped), expected, 1e-6)


def test_a_step_is_differentiable_by_the_rate():
    def last(module: Any, rate: Any, params: Any) -> Any:
        return loss(train(module.adam(rate), params, 2).params, {}, BATCH, None)[0]

    run = jax.jit(lambda *given: [jax.value_and_grad(last, 1)(module, *given) for module in (optim, optax)])
    ours, theirs = run(np.float32(1e-2), {"b": PARAMS["b"]})
    assert_close(ours, theirs, 1e-4)


def fitted(module: Any, **options: Any) -> Any:
    make = lambda config: module.adam(config.learning_rate)  # noqa: E731
    experiment = tiny.experiment(model=jn.models.MLP((8_200, 3)), optimizer=make, num_steps=4)
    state = tiny.fit(experiment, steps_per_call=2, **options).state
    return state.params, state.opt_state


@pytest.fixture(scope="module")
def by_optax() -> Any:
    return fitted(optax, devices=1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one", "pmap", "data", "fsdp"])
def test_a_run_is_that_of_optax(strategy, by_optax):
    options: Any = {"devices": 1} if strategy == "one" else {"devices": 2, "strategy": strategy}
    ours = fitted(optim, **options)
    assert_close(ours, by_optax, 1e-4)
    if strategy in ("data", "fsdp"):  # which XLA partitions: the same program
        jax.tree.map(np.testing.assert_array_equal, ours, fitted(optax, **options))
