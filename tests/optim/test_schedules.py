"""Schedules: Optax's numbers for a plain peak, and the same numbers for a traced one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxnn.optim import schedules

STEPS = np.arange(26)  # two shapes of 20 steps, and some beyond

# name -> (ours, Optax's), each of a peak
SHAPES: dict[str, tuple[Callable, Callable]] = {
    "linear": (lambda peak: schedules.linear(peak, 20), lambda peak: optax.linear_schedule(peak, 0.0, 20)),
    "linear warm-up": (
        lambda peak: schedules.linear(peak, 20, warmup_steps=5, final_fraction=0.1),
        lambda peak: optax.join_schedules(
            [optax.linear_schedule(0.0, peak, 5), optax.linear_schedule(peak, peak * 0.1, 15)], [5]
        ),
    ),
    "cosine": (
        lambda peak: schedules.cosine(peak, 20, final_fraction=0.2),
        lambda peak: optax.cosine_decay_schedule(peak, 20, alpha=0.2),
    ),
    "cosine warm-up": (
        lambda peak: schedules.cosine(peak, 20, warmup_steps=4, final_fraction=0.2),
        lambda peak: optax.warmup_cosine_decay_schedule(0.0, peak, 4, 20, end_value=peak * 0.2),
    ),
    "one-cycle": (lambda peak: schedules.one_cycle(peak, 20), lambda peak: optax.cosine_onecycle_schedule(20, peak)),
    "one-cycle, all given": (
        lambda peak: schedules.one_cycle(peak, 20, warmup_fraction=0.5, initial_divisor=4.0, final_divisor=10.0),
        lambda peak: optax.cosine_onecycle_schedule(20, peak, 0.5, 4.0, 10.0),
    ),
}
OURS = {name: ours for name, (ours, _) in SHAPES.items()} | {
    "inverse-sqrt": lambda peak: schedules.inverse_sqrt(peak, warmup_steps=4),
    "inverse-time": lambda peak: schedules.inverse_time(peak, 0.1),
}


def values(schedule: optax.Schedule) -> jax.Array:
    return jax.vmap(schedule)(STEPS)


def test_plain_and_traced_peaks_give_the_numbers_of_optax():
    @jax.jit
    def run(peaks: jax.Array) -> Any:
        traced = jax.vmap(lambda peak: {name: values(make(peak)) for name, make in OURS.items()})(peaks)
        plain = {name: values(make(0.3)) for name, make in OURS.items()}
        return traced, plain, {name: values(optaxs(0.3)) for name, (_, optaxs) in SHAPES.items()}

    traced, plain, expected = run(np.float32([0.0, 0.3]))
    for name in OURS:
        near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7, err_msg=name)
        near(plain[name], expected.get(name, plain[name]))
        near(traced[name], [np.zeros(len(STEPS)), plain[name]])


def test_fractions_and_divisors_may_be_traced():
    def at_a_step(fraction: Any, divisor: Any) -> list[Any]:
        divisors = {"initial_divisor": divisor, "final_divisor": divisor}
        return [
            schedules.linear(1.0, 20, final_fraction=fraction)(15),
            schedules.cosine(1.0, 20, warmup_steps=2, final_fraction=fraction)(15),
            schedules.one_cycle(1.0, 20, warmup_fraction=fraction, **divisors)(3),
            schedules.inverse_time(1.0, fraction)(15),
        ]

    traced, plain = jax.jit(lambda *given: (at_a_step(*given), at_a_step(0.29, 7.0)))(np.float32(0.29), np.float32(7.0))
    np.testing.assert_allclose(traced, plain, rtol=1e-5)


# Vaswani et al.: d^-0.5 * min(step^-0.5, step * warmup^-1.5), with d = 64 and warmup = 16, peaks at step 16.
VASWANI = {step: 64**-0.5 * min(step**-0.5, step * 16**-1.5) for step in (1, 5, 16, 17, 64, 1000)}
# Keras: learning_rate * (1 / (1 + decay * iterations)), from the first update on; at 1 / rate half the peak.
KERAS = {0: 0.3, 1: 0.24, 2: 0.2, 4: 0.15, 16: 0.06, 10**6: 0.3 / 250_001}
ALL_WARMUP = {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 5: 0.0}
BY_HAND: list[tuple[optax.Schedule, dict[int, float]]] = [
    (schedules.inverse_sqrt(1 / 32, warmup_steps=16), {0: 0.0, **VASWANI}),
    (schedules.inverse_time(0.3, 0.25), KERAS),
    (schedules.inverse_time(0.3, 0), {1000: 0.3}),
    (schedules.linear(1.0, 4, warmup_steps=4), ALL_WARMUP),
    (schedules.cosine(1.0, 4, warmup_steps=4), ALL_WARMUP),
    (schedules.linear(1.0, 2, warmup_steps=1), {0: 0.0, 1: 1.0, 2: 0.0}),
    (schedules.one_cycle(1.0, 1, warmup_fraction=0.0), {0: 1.0, 1: 1 / 25e4}),  # it only falls
    # Halfway up from 1/4: the mean of 1/4 and 1.
    (schedules.one_cycle(1.0, 4, warmup_fraction=1.0, initial_divisor=4.0), {0: 0.25, 2: 0.625, 4: 1.0}),
]


def test_numbers_by_hand():
    run = jax.jit(lambda steps: [jax.vmap(make)(of_one) for (make, _), of_one in zip(BY_HAND, steps, strict=True)])
    found = run([np.array([*expected]) for _, expected in BY_HAND])
    for row, (got, (_, expected)) in enumerate(zip(found, BY_HAND, strict=True)):
        np.testing.assert_allclose(got, [*expected.values()], rtol=1e-5, atol=2e-7, err_msg=str(row))
