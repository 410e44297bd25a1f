"""Objectives of gradient boosting: a loss of one example, differentiated by JAX, or of the rows of a query.

Their functions stand at the top of the module, with arguments bound by `functools.partial`: pickle finds no others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logit

from jaxnn._fields import check_range
from jaxnn.trees._growth import fixed_point, fixed_sum, traced_once
from jaxnn.types import Array, ConfigError, check_int


def _identity(scores: Array) -> Array:
    return scores


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
        metrics: further ``(score, target) -> []`` by name, averaged in evaluations; ``loss`` is reported in the place
            of the loss that is descended.
        num_classes: of targets that are labels; None: targets are numbers.
        least_target: of the targets, which must not be below it.
        derivatives: ``(scores, targets, queries, weights) -> (gradients, Hessians)``, ``[rows]`` each, of an objective
            that compares the rows of a query, such as `lambda_rank`. ``loss`` and ``metrics`` then take the same, and
            return for each row the value of its query. A row of weight 0 does not count. None: those of the loss.
        largest_step: the largest absolute value of a leaf, before the learning rate; XGBoost's ``max_delta_step``. A
            loss that is exponential in the score needs one: Newton's step to a rare large target would overflow.

    >>> cubic = jn.trees.Objective(lambda score, target: jnp.abs(score - target) ** 3)
    """

    loss: Callable[..., Array]
    num_outputs: int = 1
    start: Callable[[Any, Array], Array] | None = None
    hessian: Callable[[Array, Any], Array] | None = None
    leaf_quantile: float | None = None
    outputs: Callable[[Array], Array] = _identity
    metrics: Mapping[str, Callable[..., Array]] = {}
    num_classes: int | None = None
    least_target: float = -math.inf
    derivatives: Callable[[Array, Any, Array, Array], tuple[Array, Array]] | None = None
    largest_step: Any = math.inf


def derivatives(objective: Objective, scores: Any, targets: Any, queries: Any, weights: Any) -> Any:
    """Reported losses ``[rows]``, gradients, Hessians ``[rows, outputs]`` at ``scores``; 0 where the weight is."""
    at = scores[:, 0] if objective.num_outputs == 1 else scores
    if objective.derivatives is not None:
        losses = objective.loss(at, targets, queries, weights)
        found = objective.derivatives(at, targets, queries, weights)
    else:
        losses, *found = _by_row(objective.loss, objective.hessian, at, targets)
        if (reported := objective.metrics.get("loss")) is not None:
            losses = jax.vmap(reported)(at, targets)
    # Not as a product: what does not count may be infinite.
    counted = [
        jnp.where(jnp.reshape(weights > 0, (-1, *[1] * (each.ndim - 1))), each, 0.0) for each in (losses, *found)
    ]
    return counted[0], *(jnp.reshape(each, scores.shape) for each in counted[1:])


@functools.partial(traced_once, static_argnums=(0, 1))
def _by_row(loss: Callable[..., Array], hessian: Callable[..., Array] | None, scores: Any, targets: Any) -> Any:
    second = jax.hessian(loss)
    hessian = hessian or (lambda score, target: jnp.diag(jnp.atleast_2d(second(score, target))))
    losses, gradients = jax.vmap(jax.value_and_grad(loss))(scores, targets)
    return losses, gradients, jax.vmap(hessian)(scores, targets)


def weighted_mean(values: Array, weights: Array) -> jax.Array:
    """The mean of ``values [rows]``, weighted by ``weights [rows]``; the same on any number of devices."""
    return fixed_sum(jnp.where(weights > 0, values, 0) * weights) / fixed_sum(weights)


def leaf_quantiles(leaf: Array, values: Array, weights: Array, quantile: float, num_nodes: int) -> jax.Array:
    """The smallest value that at least this share of the weights ``[rows]`` in each leaf does not exceed: ``[nodes]``.

    It is 0 where there are none.
    """
    order = jnp.lexsort((values, leaf))
    with jax.enable_x64(True):  # integers: a running sum of floats over all leaves would be too coarse for a small one
        rounded, _ = fixed_point(weights)
        total = jnp.zeros(num_nodes, jnp.int64).at[leaf].add(rounded)
        below = jnp.ceil(quantile * total.astype(jnp.float64)).astype(jnp.int64)
        at = jnp.searchsorted(jnp.cumsum(rounded[order]), jnp.cumsum(total) - total + below)
        at = jnp.minimum(at, len(values) - 1).astype(jnp.int32)
        return jnp.where(total > 0, values[order[at]], jnp.float32(0))


def squared_error() -> Objective:
    """The squared error, for the mean of the targets; its half is descended, so that Hessians are 1, as elsewhere.

    >>> float(jn.trees.squared_error().loss(3.0, 1.0))
    2.0
    >>> float(jn.trees.squared_error().metrics["loss"](3.0, 1.0))  # as it is reported, and as networks report it
    4.0
    """
    return Objective(_half_squared_error, start=weighted_mean, hessian=_one, metrics={"loss": _squared_error})


def _squared_error(score: Array, target: Array) -> Any:
    return (score - target) ** 2


def _half_squared_error(score: Array, target: Array) -> Any:
    return _squared_error(score, target) / 2


def _one(*_: Array) -> jax.Array:
    """A Hessian as a constant, which the members of a sweep share."""
    return jnp.ones(())


def absolute_error() -> Objective:
    """The absolute error, for the median of the targets.

    >>> float(jn.trees.absolute_error().loss(3.0, 1.0))
    2.0
    """
    return quantile_error(0.5)._replace(loss=_absolute_error)


def _absolute_error(score: Array, target: Array) -> jax.Array:
    return jnp.abs(score - target)


def quantile_error(quantile: float) -> Objective:
    """The pinball loss, for a quantile of the targets (Koenker & Bassett 1978); ConfigError outside 0…1.

    >>> float(jn.trees.quantile_error(0.9).loss(3.0, 1.0))  # too high costs less than too low
    0.2...
    """
    if not 0 < quantile < 1:
        raise ConfigError(f"quantile_error: the quantile must be between 0 and 1, not {quantile!r}.")
    start = functools.partial(_quantile_of_targets, quantile)
    return Objective(functools.partial(_pinball, quantile), start=start, hessian=_one, leaf_quantile=quantile)


def _pinball(quantile: float, score: Array, target: Array) -> Array:
    return jnp.maximum(quantile * (target - score), (quantile - 1) * (target - score))


def _quantile_of_targets(quantile: float, targets: Array, weights: Array) -> jax.Array:
    return leaf_quantiles(jnp.zeros(len(targets), int), targets, weights, quantile, 1)[0]


def huber(delta: float = 1.0) -> Objective:
    """Huber's loss: the squared error up to ``delta``, the absolute error beyond (Huber 1964); ConfigError unless > 0.

    >>> float(jn.trees.huber(1.0).loss(3.0, 1.0))
    1.5
    """
    check_range("huber", "delta", delta, 1e38, positive=True)  # times 0, more than float32 holds would be NaN
    absolute = absolute_error()  # with Hessians of 1: those of the loss are 0 for large errors, which may fill a leaf
    return absolute._replace(loss=functools.partial(optax.huber_loss, delta=delta), leaf_quantile=None)


def poisson() -> Objective:
    """The negative log likelihood of counts; the score is the logarithm of their mean.

    >>> float(jn.trees.poisson().loss(0.0, 2.0))
    1.0
    """
    # The largest step is XGBoost's.
    return Objective(_poisson_loss, start=_log_of_mean, outputs=_exp, least_target=0.0, largest_step=0.7)


def _poisson_loss(score: Array, target: Array) -> jax.Array:
    return jnp.exp(score) - target * score


def _log_of_mean(targets: Array, weights: Array) -> jax.Array:
    return jnp.log(jnp.maximum(weighted_mean(targets, weights), 1e-30))


def _exp(scores: Array) -> jax.Array:  # pickle takes no jnp.exp
    return jnp.exp(scores)


def cross_entropy(num_classes: int = 2) -> Objective:
    """The cross-entropy of labels ``0 … num_classes - 1``: one score for two classes, else one for each.

    Outputs are probabilities ``[rows, num_classes]``.

    >>> round(float(jn.trees.cross_entropy(2).loss(0.0, 1)), 3)
    0.693
    >>> jn.trees.cross_entropy(3).outputs(jnp.zeros((4, 3))).shape
    (4, 3)
    """
    check_int("cross_entropy: num_classes", num_classes, least=2)
    metrics: dict[str, Any] = {"accuracy": _sign_is_right if num_classes == 2 else _largest_is_right}
    if num_classes == 2:
        return Objective(_logistic_loss, 1, _log_odds, _logistic_hessian, None, _both, metrics, num_classes)
    start, hessian = (functools.partial(each, num_classes) for each in (_log_shares, _softmax_hessian))
    return Objective(_softmax_loss, num_classes, start, hessian, None, _softmax, metrics, num_classes)


def _logistic_loss(score: Array, target: Array) -> jax.Array:
    return jax.nn.softplus(score) - target * score


def _logistic_hessian(score: Array, _: Array) -> jax.Array:
    return jax.nn.sigmoid(score) * jax.nn.sigmoid(-score)


def _log_odds(targets: Array, weights: Array) -> jax.Array:
    return logit(jnp.clip(weighted_mean(targets, weights), 1e-6, 1 - 1e-6))


def _both(scores: Array) -> jax.Array:
    return jnp.stack([jax.nn.sigmoid(-scores), jax.nn.sigmoid(scores)], axis=-1)


def _sign_is_right(score: Array, target: Array) -> Any:
    return (score > 0) == (target > 0)


def _largest_is_right(scores: Array, target: Array) -> Any:
    return jnp.argmax(scores) == target


def _log_shares(num_classes: int, targets: Array, weights: Array) -> jax.Array:
    def weight_of(label: Array) -> jax.Array:
        return fixed_sum(jnp.where(targets == label, weights, 0.0))

    shares = jax.lax.map(weight_of, jnp.arange(num_classes)) / fixed_sum(weights)
    return jnp.log(jnp.maximum(shares, 1e-6))


def _softmax_hessian(num_classes: int, scores: Array, _: Array) -> jax.Array:
    shares = _softmax(scores)
    # As in LightGBM: the scores have one degree of freedom less than classes (Friedman 2001).
    return shares * (1 - shares) * num_classes / (num_classes - 1)


def _softmax(scores: Array) -> jax.Array:
    """Probabilities ``[..., classes]``.

    Up to ten classes are computed one by one: XLA rounds these the same alone, in a sweep and in parts of the rows, but
    not a softmax over an axis.
    """
    number = scores.shape[-1]
    if number > 10:  # compiled and run too slowly one by one
        return jax.nn.softmax(scores)
    each = [scores[..., index] for index in range(number)]
    largest = functools.reduce(jnp.maximum, each)
    powers = [jnp.exp(one - largest) for one in each]
    total = functools.reduce(jnp.add, powers)
    shares: jax.Array = jax.lax.optimization_barrier(jnp.stack([power / total for power in powers], axis=-1))
    return shares


@jax.custom_jvp
def _softmax_cross_entropy(scores: Array, target: Array) -> jax.Array:
    loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(scores, target)
    return loss


@_softmax_cross_entropy.defjvp
def _(primals: Any, tangents: Any) -> Any:
    scores, target = primals
    gradient = _softmax(scores) - jax.nn.one_hot(target, len(scores), dtype=scores.dtype)
    return _softmax_cross_entropy(scores, target), (gradient * tangents[0]).sum()


def _softmax_loss(scores: Array, target: Array) -> jax.Array:  # pickle takes no function with a rule of its own
    return _softmax_cross_entropy(scores, target)


def _exponential_gain(grade: Array) -> Array:
    return jnp.exp2(grade) - 1.0


def lambda_rank(
    *,
    truncation: int = 30,
    ndcg_at: int = 10,
    gain: Callable[[Array], Array] = _exponential_gain,
) -> Objective:
    """LambdaRank: orders the rows of each query by relevance (Burges 2010, "From RankNet to LambdaRank to LambdaMART").

    Targets are grades of relevance, 0 or more, and the queries are given to `jaxnn.data.binned`. The gradient of a pair
    of rows is that of the logistic loss of the difference of their scores, times the change of the NDCG if both swapped
    places. As in LightGBM, one of the two must be among the first ``truncation``; gradients are not normalized by
    query.

    The metric is the NDCG (Järvelin & Kekäläinen 2002) of the first ``ndcg_at`` rows, averaged over queries, and 1 for
    a query without relevant rows; the loss is 1 minus it. Equal scores rank in the order of the rows.

    Args:
        truncation: ranks that count in training; the time grows with it.
        ndcg_at: ranks that count in loss and metric.
        gain: from grades ``[rows]`` to the gains that are discounted, at least 0.

    >>> rank = jn.trees.lambda_rank()
    >>> scores, grades, queries = jnp.array([0.3, 0.1, 0.2]), jnp.array([0, 2, 1]), jnp.zeros(3, int)
    >>> float(rank.metrics["ndcg"](scores, grades, queries, jnp.ones(3))[0])  # of the query of each row
    0.58...
    """
    check_int("lambda_rank: truncation", truncation)
    check_int("lambda_rank: ndcg_at", ndcg_at)

    loss, ndcg = (functools.partial(each, gain, ndcg_at) for each in (_ndcg_loss, _ndcg))
    pairs = functools.partial(_pair_derivatives, gain, truncation)
    return Objective(loss, derivatives=pairs, metrics={"ndcg": ndcg}, least_target=0.0)


def _ndcg(
    gain: Callable[[Array], Array], ndcg_at: int, scores: Array, targets: Array, queries: Array, weights: Array
) -> jax.Array:
    gains = gain(targets)
    found, best = (_dcg(one, gains, queries, weights, ndcg_at) for one in (scores, gains))
    return jnp.where(best > 0, found / jnp.where(best > 0, best, 1.0), 1.0)


def _ndcg_loss(*arguments: Any) -> jax.Array:
    return 1 - _ndcg(*arguments)


def _pair_derivatives(
    gain: Callable[[Array], Array], truncation: int, scores: Array, targets: Array, queries: Array, weights: Array
) -> tuple[jax.Array, jax.Array]:
    best = _dcg(gain(targets), gain(targets), queries, weights, truncation)
    order, first, rank = _ranked(scores, queries, weights)
    values, gains, scale = jnp.stack([scores, gain(targets), 1 / jnp.where(best > 0, best, 1.0)])[:, order]
    is_row, discount = weights[order] > 0, 1 / jnp.log2(rank + 2.0)

    def pairs_with(top_rank: Array, sums: jax.Array) -> jax.Array:
        """Adds gradients and Hessians of each row, paired with the one of its query that has ``top_rank``."""
        top = jnp.minimum(first + top_rank, len(order) - 1)
        sign = jnp.sign(gains - gains[top])
        swapped = jnp.abs(gains - gains[top]) * jnp.abs(discount - 1 / jnp.log2(top_rank + 2.0)) * scale
        wrong = jax.nn.sigmoid(-sign * (values - values[top]))  # the probability of the wrong order
        weight = jnp.where((rank > top_rank) & is_row, swapped * wrong, 0.0)
        gradient, hessian = -sign * weight, weight * (1 - wrong)
        sums = sums + jnp.stack([gradient, hessian], axis=1)
        return sums.at[top].add(jnp.stack([-gradient, hessian], axis=1))

    zeros = jnp.zeros((len(order), 2))
    sums = jax.lax.fori_loop(0, min(truncation, len(order)), pairs_with, zeros)
    gradients, hessians = zeros.at[order].set(sums).T
    return gradients, hessians


def _ranked(scores: Array, queries: Array, weights: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows in the order of queries and falling scores; of each place, the first one of its query, and its rank.

    Rows of weight 0 are the last of their query.
    """
    order = jnp.lexsort((jnp.where(weights > 0, -scores, jnp.inf), queries))
    place = jnp.arange(len(order))
    first = jax.lax.cummax(jnp.where(jnp.diff(queries[order], prepend=-1) != 0, place, 0))
    return order, first, place - first


def _dcg(scores: Array, gains: Array, queries: Array, weights: Array, truncation: int) -> jax.Array:
    """The discounted cumulative gain ``[rows]`` of the query of each row, in the order of the scores."""
    order, first, rank = _ranked(scores, queries, weights)
    counts = (rank < truncation) & (weights[order] > 0)
    sums = jnp.zeros(len(order)).at[first].add(jnp.where(counts, gains[order] / jnp.log2(rank + 2.0), 0.0))
    return jnp.zeros(len(order)).at[order].set(sums[first])
