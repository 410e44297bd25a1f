"""The step at which the loss or a norm of a run left its band."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxnn.proof._replay import Replay
from jaxnn.types import is_key

_WIDTH = 8.0  # of the band, in robust standard deviations of the logarithm
_LEAST = 0.1  # the least such deviation, as in a run that hardly moves
_FEWEST = 5  # values that make a band
_EARLY = 100.0  # times the largest before it, a value leaves before there is a band
_STEPS = 64  # before the window, that make the band of its steps


@dataclasses.dataclass(frozen=True)
class Explosion:
    """How a run's numbers left their band.

    Attributes:
        step: at which one did first.
        name: ``loss``, ``gradient norm`` or ``parameter norm``.
        value: at that step.
        usual: the median over the steps before it.
        window: the steps that were replayed one by one; empty: no window of the record leaves its band.
    """

    step: int
    name: str
    value: float
    usual: float
    window: tuple[int, int] | tuple[()]

    @property
    def advice(self) -> str:
        """What to do."""
        if not self.window:
            return "nothing: all losses are finite and within their band."
        cause = {"loss": "look at the batch of this step", "gradient norm": "clip gradients (jn.optim.with_clipping)"}
        said = cause.get(self.name, "lower the learning rate, or the schedule's at this step")
        return f"{said}: the {self.name} is the first to leave its band."

    def rows(self) -> list[tuple[str, str]]:
        """What is printed, as (name, value)."""
        if not self.window:
            return [("explosion", "none: the loss stays finite and in its band; this is its largest window")]
        times = f", {self.value / self.usual:.3g} times as large" if self.usual > 0 else ""
        return [("explosion", f"the {self.name} leaves its band: {self.value:.6g} after {self.usual:.6g}{times}")]


def is_bad(value: Any, before: Any) -> Any:
    """Whether an array has numbers that are not finite where the one before, if any, has finite ones."""
    if is_key(value) or not jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.bool_(False)
    bad = ~jnp.isfinite(value)
    return jnp.any(bad if before is None else bad & jnp.isfinite(before))


def leaves_band(values: Sequence[float]) -> int | None:
    """The place of the first value far above those before it, by median and median deviation of their logarithms."""
    sizes = np.log(np.maximum(np.abs(np.asarray(values, np.float64)), 1e-30))
    for at in range(1, len(sizes)):
        before = sizes[max(0, at - _STEPS) : at]
        if at < _FEWEST:
            if not sizes[at] <= before.max() + np.log(_EARLY):
                return at
            continue
        middle = np.median(before)
        deviation = max(1.4826 * float(np.median(np.abs(before - middle))), _LEAST)
        if not sizes[at] <= middle + _WIDTH * deviation:
            return at
    return None


def find_explosion(first: Replay, measure: Callable[..., dict[str, Any]]) -> Explosion:
    """Looks for the window whose loss leaves its band, then for the step in it, or before, by replay."""
    lines = first.reports
    losses, steps = [line["train_loss"] for line in lines], [line["step"] for line in lines]
    at = leaves_band(losses)
    if len(losses) > 1 and not losses[0] <= _EARLY * float(np.median(losses[1:])):  # within the first window
        at = 0
    if at is None:
        at = int(np.argmax(losses))
        return Explosion(steps[at], "loss", losses[at], float(np.median(losses)), ())
    begin, end = steps[at - 1] if at else 0, steps[at]
    start = max(1, begin - _STEPS)
    measured = [(step, measure((one := first.at(step)).state, one.batch)) for step in range(start, end + 1)]
    found = []
    for name in ("gradient norm", "loss", "parameter norm"):
        values = [float(numbers[name]) for _, numbers in measured if name in numbers]
        if (place := leaves_band(values)) is not None:
            usual = float(np.median(values[max(0, place - _STEPS) : place]))
            # The parameters are those before a step: the one before it made them so.
            step = measured[place][0] - (name == "parameter norm")
            found.append((step, name, values[place], usual))
    if not found:  # it grew steadily
        value = float(measured[-1][1]["loss"])
        return Explosion(end, "loss", value, float(np.median(losses[: at or None])), (start, end))
    step, name, value, usual = min(found, key=lambda one: one[0])
    return Explosion(step, name, value, usual, (start, end))
