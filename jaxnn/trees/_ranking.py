"""LambdaRank: an objective of whole queries, whose rows are ordered by their scores."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxnn.trees._objectives import Objective
from jaxnn.types import Array, check_int


def lambda_rank(
    *,
    truncation: int = 30,
    ndcg_at: int = 10,
    gain: Callable[[Array], Array] = lambda grade: jnp.exp2(grade) - 1.0,
) -> Objective:
    """LambdaRank: orders the rows of each query by relevance (Burges 2010, "From RankNet to LambdaRank to LambdaMART").

    Targets are grades of relevance, 0 or more, and the queries are given to `binned`. The gradient of a pair of rows is
    that of the logistic loss of the difference of their scores, times the change of the NDCG if both swapped places. As
    in LightGBM, one of the two must be among the first ``truncation``; gradients are not normalized by query.

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

    def ndcg(scores: Array, targets: Array, queries: Array, weights: Array) -> jax.Array:
        gains = gain(targets)
        found, best = (_dcg(one, gains, queries, weights, ndcg_at) for one in (scores, gains))
        return jnp.where(best > 0, found / jnp.where(best > 0, best, 1.0), 1.0)

    def derivatives(scores: Array, targets: Array, queries: Array, weights: Array) -> tuple[jax.Array, jax.Array]:
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

    return Objective(lambda *rows: 1 - ndcg(*rows), derivatives=derivatives, metrics={"ndcg": ndcg}, least_target=0.0)


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
