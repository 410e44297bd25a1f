"""Clipping, accumulation and averages: numbers by hand, any nesting, and averages found in any state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxnn import optim
from jaxnn.types import ConfigError

SGD = optax.sgd(1.0)
WRAPPERS: dict[str, Callable] = {
    "clipping": lambda inner: optim.with_clipping(inner, 1.0),
    "accumulation": lambda inner: optim.with_accumulation(inner, 2),
    "ema": lambda inner: optim.with_ema(inner, 0.5),
}


def train(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> tuple[Any, Any]:
    """The parameters and the state after an update for each of the stacked gradients."""

    def step(carry: Any, gradient: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[0]


def run(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> Any:
    """The trained parameters and those to evaluate with."""

    def compute() -> Any:
        trained, state = train(optimizer, params, gradients)
        return trained, optim.evaluation_params(trained, state)

    return jax.device_get(jax.jit(compute)())


# Clipping.


def test_clipping_by_hand() -> None:
    # The norm over all leaves, of (3, 0) and 4, is 5: each is divided by it, then subtracted.
    gradient = {"a": np.float32([[3.0, 0.0]]), "b": np.float32([4.0])}
    got, _ = run(WRAPPERS["clipping"](SGD), {"a": np.zeros(2, np.float32), "b": np.float32(0)}, gradient)
    np.testing.assert_allclose(got["a"], [-0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(got["b"], -0.8, rtol=1e-6)


@pytest.mark.parametrize("max_norm", [1.0, 5.0, np.inf])
def test_gradients_within_the_norm_are_unchanged(max_norm: float) -> None:
    for gradient in ([0.3, -0.1234567], [0.0, 0.0]):
        got, _ = run(optim.with_clipping(SGD, max_norm), np.zeros(2, np.float32), np.float32([gradient]))
        assert np.array_equal(got, -np.float32(gradient))
    got, _ = run(optim.with_clipping(SGD, max_norm), np.zeros(2, np.float32), np.float32([[np.nan, 1.0]]))
    assert np.isnan(got[0]), "a NaN is not hidden"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_may_be_traced(dtype: str) -> None:
    def step(max_norm: jax.Array) -> jax.Array:
        optimizer, params = optim.with_clipping(SGD, max_norm), jnp.zeros(2, dtype)
        return optimizer.update(jnp.array([3.0, 4.0], dtype), optimizer.init(params), params)[0]

    got = jax.jit(jax.vmap(step))(np.float32([2.5, 10.0]))
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), [[-1.5, -2.0], [-3.0, -4.0]])


# Accumulation.


@pytest.mark.parametrize("make", [optax.sgd, optax.adamw])
def test_four_micro_batches_equal_one_batch(make: Callable) -> None:
    draws = np.random.default_rng(1)
    inputs, targets = (draws.normal(size=shape).astype(np.float32) for shape in ((2, 32, 5), (2, 32)))
    params = {"w": draws.normal(size=5).astype(np.float32), "b": np.float32(0)}

    def gradient(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jax.grad(lambda params: jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2))(params)

    @jax.jit
    def both() -> Any:
        def trained(optimizer: Any, batch_size: int) -> Any:
            def step(carry: Any, batch: Any) -> Any:
                params, state = carry
                updates, state = optimizer.update(gradient(params, *batch), state, params)
                return (optax.apply_updates(params, updates), state), None

            batches = [array.reshape(-1, batch_size, *array.shape[2:]) for array in (inputs, targets)]
            return jax.lax.scan(step, (params, optimizer.init(params)), tuple(batches))[0][0]

        return trained(optim.with_accumulation(make(0.1), 4), 8), trained(make(0.1), 32)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *both())


def test_accumulation_updates_once_in_num_steps_calls() -> None:
    optimizer, state, got = optim.with_accumulation(SGD, 3), None, []
    update = jax.jit(optimizer.update)
    state = optimizer.init(jnp.float32(0.0))
    for gradient in (1.0, 2.0, 6.0, 5.0, 5.0, 5.0):
        step, state = update(jnp.float32(gradient), state, jnp.float32(0.0))
        got.append(float(step))
    # The means of 1, 2, 6 and of 5, 5, 5, at the third call of each.
    np.testing.assert_allclose(got, [0, 0, -3, 0, 0, -5], rtol=1e-6)
    assert optim.with_accumulation(SGD, 1) is SGD


def test_schedule_within_accumulation_counts_updates() -> None:
    rates = optax.piecewise_constant_schedule(1.0, {1: 10.0})  # 1 at update 0, 10 at update 1
    got, _ = run(optim.with_accumulation(optax.sgd(rates), 2), jnp.float32(0.0), -np.ones(4, np.float32))
    assert float(got) == 11.0


# Averages. SGD at rate 1 with these gradients leads from 10 to 8, 4 and 5.

GRADIENTS = np.float32([2.0, 4.0, -1.0])


def average(optimizer: optax.GradientTransformation, gradients: np.ndarray = GRADIENTS, start: float = 10.0) -> float:
    return float(run(optimizer, {"w": jnp.float32(start)}, {"w": gradients})[1]["w"])


@pytest.mark.parametrize(
    ("decay", "debias", "expected"),
    [
        # 8, 4, 5 weigh 1/4, 1/2, 1, over 7/4: (2 + 2 + 5) / 1.75; from 10: (10 + 8)/2 = 9, (9 + 4)/2 = 6.5, 11.5/2.
        (0.5, True, 9 / 1.75),
        (0.5, False, 5.75),
        # 0 keeps the last; 1 is the plain mean (8 + 4 + 5)/3, or without debiasing the start.
        (0.0, True, 5.0),
        (1.0, True, 17 / 3),
        (1.0, False, 10.0),
    ],
)
def test_averages_by_hand(decay: float, debias: bool, expected: float) -> None:
    assert average(optim.with_ema(SGD, decay, debias=debias)) == pytest.approx(expected, rel=1e-6)


def test_traced_decay_equals_the_plain_one() -> None:
    def traced(decay: jax.Array) -> jax.Array:
        return optim.evaluation_params(*train(optim.with_ema(SGD, decay), jnp.float32(10.0), GRADIENTS))

    got = jax.jit(jax.vmap(traced))(np.float32([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(got, [5.0, 9 / 1.75, 17 / 3], rtol=1e-6)


def test_state_of_an_average() -> None:
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    optimizer = optim.with_ema(optax.adam(0.1), 0.999)
    before = optimizer.init(params)
    # Before the first update the average is the start.
    assert np.array_equal(optim.evaluation_params(params, before)["w"], [1.0, 1.0])
    updates, after = optimizer.update(params, before, params)
    # Averaged in float32, with types that do not change: nothing recompiles.
    assert after.average["w"].dtype == jnp.float32
    assert optim.evaluation_params(params, after)["w"].dtype == jnp.bfloat16
    typeof = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)  # noqa: E731
    assert typeof(before) == typeof(after)


def test_parameters_and_state_may_be_donated_together() -> None:
    params, optimizer = {"w": jnp.ones(3)}, optim.with_ema(SGD, 0.5)
    step = jax.jit(lambda params, state: optimizer.update(params, state, params), donate_argnums=(0, 1))
    updates, _ = step(params, optimizer.init(params))
    assert np.array_equal(updates["w"], [-1.0, -1.0, -1.0])


# Each of these keeps the average of 8, 4, 5 with weights 1/4, 1/2, 1.
PLACES: dict[str, Callable] = {
    "MultiSteps": lambda averaged: optax.MultiSteps(averaged, 1).gradient_transformation(),
    "injected": lambda averaged: optax.inject_hyperparams(lambda unused: averaged)(unused=0.0),
    "apply_if_finite": lambda averaged: optax.apply_if_finite(averaged, 3),
    "a chain in a chain": lambda averaged: optax.chain(optax.clip(1e9), optax.chain(averaged, optax.identity())),
    "another average": lambda averaged: optim.with_ema(optim.with_ema(SGD, 0.0), 0.5),
    "masked": lambda averaged: optax.masked(averaged, {"w": True}),
}


@pytest.mark.parametrize("place", PLACES)
def test_average_is_found_in_any_state(place: str) -> None:
    assert average(PLACES[place](optim.with_ema(SGD, 0.5))) == pytest.approx(9 / 1.75, rel=1e-6)


def test_without_an_average_the_parameters_are_evaluated() -> None:
    params = {"w": jnp.float32(1.0)}
    state = optax.chain(optax.clip(1.0), optax.adam(0.1)).init(params)
    assert optim.evaluation_params(params, state) is params


def test_averages_within_and_around_accumulation() -> None:
    # SGD on the mean of each two gradients: from 0 to -1 (of 1, 1), to -4 (of 2, 4).
    gradients = np.float32([1.0, 1.0, 2.0, 4.0])
    within = average(optim.with_accumulation(optim.with_ema(SGD, 0.5), 2), gradients, 0.0)
    around = average(optim.with_ema(optim.with_accumulation(SGD, 2), 0.5), gradients, 0.0)
    # Within: (-1/2 - 4)/1.5. Around, of 0, -1, -1, -4 at 1/8, 1/4, 1/2, 1: (-1/4 - 1/2 - 4)/1.875.
    np.testing.assert_allclose([within, around], [-4.5 / 1.5, -4.75 / 1.875], rtol=1e-6)


def test_each_part_of_a_partition_has_its_average() -> None:
    parts = {"a": optim.with_ema(SGD, 0.5), "b": optim.with_ema(optax.sgd(0.5), 0.0), "c": SGD}
    optimizer = optax.partition(parts, {name: name for name in "abc"})
    _, got = run(optimizer, dict.fromkeys("abc", jnp.float32(10.0)), dict.fromkeys("abc", GRADIENTS))
    # a: as above; b: at half the rate, 10 - 5/2 last; c: the parameter itself.
    np.testing.assert_allclose([got[name] for name in "abc"], [9 / 1.75, 7.5, 5.0], rtol=1e-6)


# All of them.


@pytest.mark.parametrize("order", [*itertools.permutations(WRAPPERS)])
def test_any_order_gives_the_same_from_a_loop_and_a_vmapped_scan(order: tuple[str, ...]) -> None:
    draws = np.random.default_rng(2)
    gradients, start = (draws.normal(size=shape).astype(np.float32) for shape in ((6, 3), (3,)))

    def nested(rate: Any) -> optax.GradientTransformation:
        optimizer = optax.adam(rate)
        for name in order:
            optimizer = WRAPPERS[name](optimizer)
        return optimizer

    def scanned(rate: jax.Array) -> Any:
        carry = train(nested(rate), start, gradients)
        return carry[0], optim.evaluation_params(*carry)

    params, averages = jax.jit(jax.vmap(scanned))(np.float32([0.1, 0.3]))
    optimizer = nested(0.1)
    expected, state, update = start, optimizer.init(start), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, expected)
        expected = np.asarray(expected) + np.asarray(updates)
    np.testing.assert_allclose(params[0], expected, rtol=1e-5)
    # The average lags behind.
    assert not np.allclose(params, averages, rtol=1e-3)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_extra_arguments_reach_an_optimizer_that_takes_them(wrap: str) -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), updates), state

    takes_value = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    # Through a chain too, which asks whether its links take extra arguments.
    for inner, expected in ((takes_value, 7.0), (optax.scale(-1.0), -0.5)):
        optimizer, got = optax.chain(WRAPPERS[wrap](inner)), 0.0
        state = optimizer.init(jnp.float32(0.0))
        for _ in range(2):
            got, state = optimizer.update(jnp.float32(0.5), state, jnp.float32(0.0), value=7.0)
        assert float(got) == expected


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optim.with_clipping(SGD, 0.0), "with_clipping: max_norm must be a number > 0"),
        (lambda: optim.with_clipping(SGD, float("nan")), "max_norm must be a number > 0"),
        (lambda: optim.with_accumulation(SGD, 0), "num_steps must be an integer >= 1, not 0"),
        (lambda: optim.with_accumulation(SGD, 2.0), "num_steps must be an integer >= 1"),
        (lambda: optim.with_ema(SGD, -0.1), "with_ema: decay must be a number in 0…1"),
        (lambda: optim.with_ema(SGD, 1.1), "decay must be"),
        (lambda: optim.with_ema(SGD, float("nan")), "decay must be"),
        (lambda: optim.with_ema(SGD, 0.9).update(0.0, None), "needs the parameters"),
    ],
)
def test_wrong_arguments_are_named(make: Callable, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
