"""Objectives of gradient boosting: a loss of one example, of which JAX takes gradient and Hessian."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxnn.trees._growth import fixed_point
from jaxnn.types import Array, ConfigError, DataError, check_int


class Objective(NamedTuple):
    """What the scores of the trees are trained for.

    Attributes:
        loss: ``(score, target) -> []`` of one example, in JAX; the score is ``[]``, or ``[num_outputs]`` if several.
        num_outputs: scores of an example; each round grows a tree for each.
        start: ``(targets [rows], weights [rows]) -> []`` or ``[num_outputs]``, the scores before the first tree; None:
            zeros.
        hessian: ``(score, target) -> []`` or ``[num_outputs]``, second derivatives by each score; None: those of the
            loss. Where these are zero, as of the absolute error, 1 makes gradient descent of Newton's method.
        leaf_quantile: the leaves predict this quantile of what is missing to the targets; None: Newton's step.
        outputs: ``scores [rows, ...] -> outputs [rows, ...]``, such as probabilities.
        metrics: further ``(score, target) -> []`` by name, averaged in evaluations.
        num_classes: of targets that are labels; None: targets are numbers.
        least_target: of the targets, which must not be below it.
        derivatives: ``(scores, targets, queries, weights) -> (gradients, Hessians)``, ``[rows]`` each, of an objective
            that compares the rows of a query, such as `lambda_rank`. ``loss`` and ``metrics`` then take the same, and
            return for each row the value of its query. A row of weight 0 does not count. None: those of the loss.

    >>> cubic = jn.trees.Objective(lambda score, target: jnp.abs(score - target) ** 3)
    """

    loss: Callable[..., Array]
    num_outputs: int = 1
    start: Callable[[Any, Array], Array] | None = None
    hessian: Callable[[Array, Any], Array] | None = None
    leaf_quantile: float | None = None
    outputs: Callable[[Array], Array] = lambda scores: scores
    metrics: Mapping[str, Callable[..., Array]] = {}
    num_classes: int | None = None
    least_target: float = -math.inf
    derivatives: Callable[[Array, Any, Array, Array], tuple[Array, Array]] | None = None


def check_targets(objective: Objective, split: str, targets: Any) -> None:
    """Raises DataError for ``targets`` that the objective is not for."""
    values = np.asarray(targets)
    if objective.num_classes is None:
        if values.ndim == 1 and not values.min() >= objective.least_target:
            raise DataError(f"{split}: a target is {values.min():g}, below {objective.least_target:g}, the least.")
    elif values.ndim != 1 or values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= objective.num_classes:
        raise DataError(f"{split}: the targets must be labels 0 … {objective.num_classes - 1}, integers [rows].")


def derivatives(objective: Objective, scores: Any, targets: Any, queries: Any, weights: Any) -> Any:
    """Losses ``[rows]``, gradients and Hessians ``[rows, outputs]`` at ``scores [rows, outputs]``."""
    one_output = objective.num_outputs == 1
    if objective.derivatives is not None:
        rows = scores[:, 0] if one_output else scores, targets, queries, weights
        return objective.loss(*rows), *(jnp.reshape(each, scores.shape) for each in objective.derivatives(*rows))

    def of_row(score: jax.Array, target: Any) -> Any:
        def loss(score: Array) -> Array:
            return objective.loss(score[0] if one_output else score, target)

        value, gradient = jax.value_and_grad(loss)(score)
        if objective.hessian is None:
            return value, gradient, jnp.diag(jax.hessian(loss)(score))
        return value, gradient, jnp.reshape(objective.hessian(score[0] if one_output else score, target), score.shape)

    return jax.vmap(of_row)(jnp.asarray(scores), targets)


def weighted_mean(values: Array, weights: Array) -> jax.Array:
    """The mean of ``values [rows]``, weighted by ``weights [rows]``; the same on any number of devices."""
    pairs, unit = fixed_point(jnp.asarray(values * weights), jnp.asarray(weights))
    total, weight = pairs.sum(axis=0) * unit
    return total / weight


def leaf_quantiles(leaf: Array, values: Array, weights: Array, quantile: float, num_nodes: int) -> jax.Array:
    """The smallest value that at least this share of the weights ``[rows]`` in each leaf does not exceed: ``[nodes]``.

    It is 0 where there are none.
    """
    order = jnp.lexsort((values, leaf))
    values, weights = values[order], weights[order]
    reached = jnp.cumsum(weights)
    total = jnp.zeros(num_nodes).at[leaf].add(weights[jnp.argsort(order)])
    before = jnp.cumsum(total) - total
    at = jnp.searchsorted(reached, before + quantile * total)
    return jnp.where(total > 0, values[jnp.minimum(at, len(values) - 1)], 0.0)


def _quantile(values: Array, weights: Array, quantile: float) -> jax.Array:
    return leaf_quantiles(jnp.zeros(len(values), int), values, weights, quantile, 1)[0]


def squared_error() -> Objective:
    """Half of the squared error, for the mean of the targets.

    >>> float(jn.trees.squared_error().loss(3.0, 1.0))
    2.0
    """
    return Objective(lambda score, target: (score - target) ** 2 / 2, start=weighted_mean)


def absolute_error() -> Objective:
    """The absolute error, for the median of the targets.

    >>> float(jn.trees.absolute_error().loss(3.0, 1.0))
    2.0
    """
    return quantile_error(0.5)._replace(loss=lambda score, target: jnp.abs(score - target))


def quantile_error(quantile: float) -> Objective:
    """The pinball loss, for a quantile of the targets (Koenker & Bassett 1978); ConfigError outside 0…1.

    >>> float(jn.trees.quantile_error(0.9).loss(3.0, 1.0))  # too high costs less than too low
    0.2...
    """
    if not 0 < quantile < 1:
        raise ConfigError(f"quantile_error: the quantile must be between 0 and 1, not {quantile!r}.")

    def loss(score: Array, target: Array) -> Array:
        return jnp.maximum(quantile * (target - score), (quantile - 1) * (target - score))

    return Objective(
        loss,
        start=lambda targets, weights: _quantile(targets, weights, quantile),
        hessian=lambda *_: jnp.ones(()),
        leaf_quantile=quantile,
    )


def huber(delta: float = 1.0) -> Objective:
    """Huber's loss: the squared error up to ``delta``, the absolute error beyond (Huber 1964).

    >>> float(jn.trees.huber(1.0).loss(3.0, 1.0))
    1.5
    """
    # Its second derivative is 0 for large errors, of which a leaf may be full.
    return Objective(
        lambda score, target: optax.huber_loss(score, target, delta=delta),
        start=lambda targets, weights: _quantile(targets, weights, 0.5),
        hessian=lambda *_: jnp.ones(()),
    )


def poisson() -> Objective:
    """The negative log likelihood of counts; the score is the logarithm of their mean.

    >>> float(jn.trees.poisson().loss(0.0, 2.0))
    1.0
    """
    return Objective(
        lambda score, target: jnp.exp(score) - target * score,
        start=lambda targets, weights: jnp.log(jnp.maximum(weighted_mean(targets, weights), 1e-30)),
        outputs=jnp.exp,
        least_target=0.0,
    )


def cross_entropy(num_classes: int = 2) -> Objective:
    """The cross-entropy of labels ``0 … num_classes - 1``: one score for two classes, else one for each.

    Outputs are probabilities ``[rows, num_classes]``.

    >>> round(float(jn.trees.cross_entropy(2).loss(0.0, 1)), 3)
    0.693
    >>> jn.trees.cross_entropy(3).outputs(jnp.zeros((4, 3))).shape
    (4, 3)
    """
    check_int("cross_entropy: num_classes", num_classes, least=2)
    if num_classes == 2:

        def start(targets: Array, weights: Array) -> jax.Array:
            share = jnp.clip(weighted_mean(targets, weights), 1e-6, 1 - 1e-6)
            return jnp.log(share / (1 - share))

        return Objective(
            lambda score, target: jax.nn.softplus(score) - target * score,
            start=start,
            hessian=lambda score, _: jax.nn.sigmoid(score) * jax.nn.sigmoid(-score),
            outputs=lambda scores: jnp.stack([jax.nn.sigmoid(-scores), jax.nn.sigmoid(scores)], axis=-1),
            metrics={"accuracy": lambda score, target: (score > 0) == (target > 0)},
            num_classes=2,
        )

    def priors(targets: Array, weights: Array) -> jax.Array:
        counts = jnp.zeros(num_classes).at[targets].add(weights)
        return jnp.log(jnp.maximum(counts / counts.sum(), 1e-6))

    def hessian(scores: Array, _: Array) -> jax.Array:
        shares = jax.nn.softmax(scores)
        # As in LightGBM: the scores have one degree of freedom less than classes (Friedman 2001).
        return shares * (1 - shares) * num_classes / (num_classes - 1)

    return Objective(
        lambda scores, target: optax.softmax_cross_entropy_with_integer_labels(scores, target),
        num_outputs=num_classes,
        start=priors,
        hessian=hessian,
        outputs=jax.nn.softmax,
        metrics={"accuracy": lambda scores, target: jnp.argmax(scores) == target},
        num_classes=num_classes,
    )
