"""The average of the parameters: hand-computed numbers, found wherever it lies in a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxnn import optim
from jaxnn.types import ConfigError

# SGD at rate 1 with these gradients leads from 10 to 8, 4 and 5.
GRADIENTS = (2.0, 4.0, -1.0)
START = 10.0


def trained(optimizer: optax.GradientTransformation, start: Any = START) -> tuple[Any, Any]:
    """The parameter ``w`` and the state after an update for each of the gradients."""
    params = {"w": jnp.asarray(start, jnp.float32)}
    state = optimizer.init(params)
    for gradient in GRADIENTS:
        gradients = {"w": jnp.full_like(params["w"], gradient)}
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def average(optimizer: optax.GradientTransformation) -> float:
    return float(optim.evaluation_params(*trained(optimizer))["w"])


def test_averages_by_hand() -> None:
    # 8, 4, 5 weigh 1/4, 1/2, 1, over 7/4: (2 + 2 + 5) / 1.75; from 10: (10 + 8)/2 = 9, (9 + 4)/2 = 6.5, 11.5/2.
    assert average(optim.with_ema(optax.sgd(1.0), 0.5)) == pytest.approx(9 / 1.75, rel=1e-6)
    assert average(optim.with_ema(optax.sgd(1.0), 0.5, debias=False)) == pytest.approx(5.75, rel=1e-6)
    # 0 keeps the last; 1 is the plain mean (8 + 4 + 5)/3, or without debiasing the start.
    assert average(optim.with_ema(optax.sgd(1.0), 0.0)) == pytest.approx(5.0)
    assert average(optim.with_ema(optax.sgd(1.0), 1.0)) == pytest.approx(17 / 3, rel=1e-6)
    assert average(optim.with_ema(optax.sgd(1.0), 1.0, debias=False)) == pytest.approx(10.0)


def test_before_the_first_update_the_average_is_the_start() -> None:
    params = {"w": jnp.array([1.0, 2.0])}
    state = optim.with_ema(optax.adam(0.1), 0.9).init(params)
    assert np.array_equal(optim.evaluation_params(params, state)["w"], [1.0, 2.0])


def test_parameters_and_state_may_be_donated_together() -> None:
    params = {"w": jnp.ones(3)}
    optimizer = optim.with_ema(optax.sgd(1.0), 0.5)
    step = jax.jit(lambda params, state: optimizer.update(params, state, params), donate_argnums=(0, 1))
    updates, _ = step(params, optimizer.init(params))
    assert np.array_equal(updates["w"], [-1.0, -1.0, -1.0])


# Where the average may lie: each of these keeps the average of 8, 4, 5 with weights 1/4, 1/2, 1.
PLACES: dict[str, Callable] = {
    "itself": lambda averaged: averaged,
    "a chain": lambda averaged: optax.chain(optax.identity(), averaged),
    "MultiSteps": lambda averaged: optax.MultiSteps(averaged, 1).gradient_transformation(),
    "injected": lambda averaged: optax.inject_hyperparams(lambda unused: averaged)(unused=0.0),
    "apply_if_finite": lambda averaged: optax.apply_if_finite(averaged, 3),
    "a chain in a chain": lambda averaged: optax.chain(optax.clip(1e9), optax.chain(averaged, optax.identity())),
    "another average": lambda averaged: optim.with_ema(optim.with_ema(optax.sgd(1.0), 0.0), 0.5),
    "masked": lambda averaged: optax.masked(averaged, {"w": True}),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_average_is_found(place: str) -> None:
    optimizer = PLACES[place](optim.with_ema(optax.sgd(1.0), 0.5))
    assert average(optimizer) == pytest.approx(9 / 1.75, rel=1e-6)


def test_without_an_average_the_parameters_themselves() -> None:
    params, state = trained(optax.chain(optax.clip(1.0), optax.adam(0.1)))
    assert optim.evaluation_params(params, state) is params


def test_within_accumulation_it_moves_at_updates_only() -> None:
    # SGD on the mean of each two gradients: from 0 to -1 (of 1, 1), to -4 (of 2, 4).
    params, gradients = jnp.float32(0.0), (1.0, 1.0, 2.0, 4.0)
    within = optim.with_accumulation(optim.with_ema(optax.sgd(1.0), 0.5), 2)
    around = optim.with_ema(optim.with_accumulation(optax.sgd(1.0), 2), 0.5)
    averages = []
    for optimizer in (within, around):
        point, state = params, optimizer.init(params)
        for gradient in gradients:
            update, state = optimizer.update(jnp.float32(gradient), state, point)
            point += update
        averages.append(float(optim.evaluation_params(point, state)))
    # Within: (-1/2 - 4)/1.5. Around, of 0, -1, -1, -4 at 1/8, 1/4, 1/2, 1: (-1/4 - 1/2 - 4)/1.875.
    np.testing.assert_allclose(averages, [-4.5 / 1.5, -4.75 / 1.875], rtol=1e-6)


def test_each_part_of_a_partition_gives_its_average() -> None:
    optimizer = optax.partition(
        {
            "fast": optim.with_ema(optax.sgd(1.0), 0.5),
            "slow": optim.with_ema(optax.sgd(0.5), 0.0),
            "plain": optax.sgd(1.0),
        },
        {"a": "fast", "b": "slow", "c": "plain"},
    )
    params = {name: jnp.float32(START) for name in "abc"}
    state = optimizer.init(params)
    for gradient in GRADIENTS:
        gradients = dict.fromkeys("abc", jnp.float32(gradient))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    got = optim.evaluation_params(params, state)
    # a: as above; b: at half the rate, 10 - 5/2 last; c: the parameter itself.
    np.testing.assert_allclose([got[name] for name in "abc"], [9 / 1.75, 7.5, 5.0], rtol=1e-6)


def test_a_traced_decay_equals_the_plain_one() -> None:
    def run(decay: jax.Array) -> jax.Array:
        return optim.evaluation_params(*trained(optim.with_ema(optax.sgd(1.0), decay)))["w"]

    got = jax.jit(jax.vmap(run))(jnp.array([0.0, 0.5, 0.9, 1.0]))
    expected = [average(optim.with_ema(optax.sgd(1.0), decay)) for decay in (0.0, 0.5, 0.9, 1.0)]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_bfloat16_parameters_are_averaged_in_float32() -> None:
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    optimizer = optim.with_ema(optax.sgd(1.0), 0.999)
    updates, state = optimizer.update({"w": jnp.ones(2, jnp.bfloat16)}, optimizer.init(params), params)
    assert state.average["w"].dtype == jnp.float32
    assert optim.evaluation_params(params, state)["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_keeps_its_types_so_nothing_recompiles(dtype: str) -> None:
    optimizer = optim.with_ema(optax.adam(0.1), 0.9)
    params = {"w": jnp.ones(2, dtype)}
    before = optimizer.init(params)
    _, after = optimizer.update(params, before, params)
    typeof = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)  # noqa: E731
    assert typeof(before) == typeof(after)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_named(decay: float) -> None:
    with pytest.raises(ConfigError, match="averaged: decay must be a number in 0…1"):
        optim.with_ema(optax.sgd(1.0), decay)


def test_missing_parameters_are_named() -> None:
    optimizer = optim.with_ema(optax.sgd(1.0), 0.9)
    with pytest.raises(ConfigError, match="needs the parameters"):
        optimizer.update(jnp.float32(1.0), optimizer.init(jnp.float32(0.0)))
