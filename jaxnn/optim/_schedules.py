"""Schedules whose peak may be a tracer: Optax's shapes at unit height, times the peak.

Each function returns an Optax schedule ``step -> value``; ``step`` is a Python integer or an integer array, traced or
not, and counts optimizer updates from 0. Optax branches on the value of the peak in Python; at unit height it has none.

``peak`` is the largest value, at least 0, and ``num_steps`` the updates until the final value; a warm-up rises from 0
to the peak in the first ``warmup_steps`` of them. Peaks, rates, fractions (0…1) and divisors are numbers ``[]``, maybe
tracers; steps are integers. A value out of its range raises `ConfigError`.
"""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxnn._fields import check_range
from jaxnn.types import ConfigError, check_int

__all__ = ["cosine", "inverse_sqrt", "inverse_time", "linear", "one_cycle"]


def linear(
    peak: ArrayLike, num_steps: int, *, warmup_steps: int = 0, final_fraction: ArrayLike = 0.0
) -> optax.Schedule:
    """A linear warm-up, then a straight line from ``peak`` to ``final_fraction * peak``, held.

    Without a warm-up, which may not be longer than ``num_steps``, it starts at the peak.

    >>> schedule = jn.schedules.linear(0.1, num_steps=100, warmup_steps=10)
    >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.05, 0.1, 0.05, 0.0]
    """
    return _decay("linear", peak, num_steps, warmup_steps, final_fraction)


def cosine(
    peak: ArrayLike, num_steps: int, *, warmup_steps: int = 0, final_fraction: ArrayLike = 0.0
) -> optax.Schedule:
    """A linear warm-up, then half a cosine from ``peak`` to ``final_fraction * peak``, held.

    The half cosine is one cycle of Loshchilov & Hutter, SGDR, 2017 (arXiv:1608.03983).

    >>> optimizer = optax.adam(jn.schedules.cosine(1e-3, num_steps=1000, warmup_steps=100))
    """
    return _decay("cosine", peak, num_steps, warmup_steps, final_fraction)


def one_cycle(
    peak: ArrayLike,
    num_steps: int,
    *,
    warmup_fraction: ArrayLike = 0.3,
    initial_divisor: ArrayLike = 25.0,
    final_divisor: ArrayLike = 1e4,
) -> optax.Schedule:
    """Half a cosine up to ``peak``, then half a cosine down to far below the first value, held.

    Smith & Topin, Super-Convergence, 2018 (arXiv:1708.07120), in the cosine form of
    ``optax.cosine_onecycle_schedule``. That rounds the peak down to a step; here it may be between two steps, because
    a traced fraction would round differently from a plain one.

    The part ``warmup_fraction`` of ``num_steps`` goes up; ``initial_divisor`` is the peak over the first value, and
    ``final_divisor`` the first value over the last.

    >>> optimizer = optax.sgd(jn.schedules.one_cycle(0.1, num_steps=1000), momentum=0.9)
    """
    check_int("one_cycle: num_steps", num_steps)
    check_range("one_cycle", "peak", peak)
    check_range("one_cycle", "warmup_fraction", warmup_fraction, 1.0)
    check_range("one_cycle", "initial_divisor", initial_divisor, positive=True)
    check_range("one_cycle", "final_divisor", final_divisor, positive=True)
    rise_steps = warmup_fraction * num_steps
    fall_steps = num_steps - rise_steps
    first = 1.0 / initial_divisor
    last = first / final_divisor

    def unit(step: ArrayLike) -> ArrayLike:
        rise = 1.0 - (1.0 - first) * _half_cosine(step / jnp.maximum(rise_steps, 1.0))
        fall = last + (1.0 - last) * _half_cosine((step - rise_steps) / jnp.maximum(fall_steps, 1.0))
        return jnp.where(jnp.less(step, rise_steps), rise, fall)

    return _scaled(peak, unit)


def inverse_sqrt(peak: ArrayLike, *, warmup_steps: int) -> optax.Schedule:
    """A linear warm-up to ``peak``, then ``peak * sqrt(warmup_steps / step)``, without an end.

    Vaswani et al., Attention Is All You Need, 2017 (arXiv:1706.03762), equation 3, written with the value at its peak.
    The warm-up takes at least 1 step.

    >>> [round(float(jn.schedules.inverse_sqrt(1.0, warmup_steps=4)(step)), 2) for step in (2, 4, 16)]
    [0.5, 1.0, 0.5]
    """
    check_int("inverse_sqrt: warmup_steps", warmup_steps)
    check_range("inverse_sqrt", "peak", peak)

    def unit(step: ArrayLike) -> ArrayLike:
        rise = step / warmup_steps
        fall = jnp.sqrt(warmup_steps / jnp.maximum(step, warmup_steps))
        return jnp.minimum(rise, fall)

    return _scaled(peak, unit)


def inverse_time(peak: ArrayLike, rate: ArrayLike) -> optax.Schedule:
    """``peak / (1 + rate * step)``, without an end: the ``decay`` of Keras's first optimizers.

    After ``1 / rate`` updates, a rate of at least 0, it is half the peak.

    >>> round(jn.schedules.inverse_time(0.1, rate=0.01)(100), 3)
    0.05
    """
    check_range("inverse_time", "peak", peak)
    check_range("inverse_time", "rate", rate)
    return _scaled(peak, lambda step: 1.0 / (1.0 + rate * step))


def _decay(where: str, peak: ArrayLike, num_steps: int, warmup_steps: int, final_fraction: ArrayLike) -> optax.Schedule:
    """The warm-up of `linear` or `cosine`, then their decay."""
    check_int(f"{where}: num_steps", num_steps)
    check_int(f"{where}: warmup_steps", warmup_steps, 0)
    check_range(where, "peak", peak)
    check_range(where, "final_fraction", final_fraction, 1.0)
    if warmup_steps > num_steps:
        raise ConfigError(
            f"{where}: warmup_steps={warmup_steps} is more than num_steps={num_steps}, which "
            "includes it: shorten the warm-up or train for longer."
        )
    decay_steps = max(num_steps - warmup_steps, 1)
    if where == "linear":
        decay = optax.linear_schedule(1.0, final_fraction, decay_steps)
    else:
        decay = optax.cosine_decay_schedule(1.0, decay_steps, alpha=final_fraction)
    if warmup_steps > 0:
        decay = optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup_steps), decay], [warmup_steps])
    return _scaled(peak, decay)


def _scaled(peak: ArrayLike, unit: optax.Schedule) -> optax.Schedule:
    return lambda step: peak * unit(step)


def _half_cosine(share: ArrayLike) -> ArrayLike:
    return 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(share, 0.0, 1.0)))
