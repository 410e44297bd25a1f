"""LambdaRank: its gradients are sums over pairs, its metric is scikit-learn's NDCG."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.metrics import ndcg_score

import jaxnn as jn
from jaxnn import trees
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")
QUERIES = np.repeat(np.arange(4), [5, 1, 7, 11])
ROWS = len(QUERIES)


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = ROWS
    num_steps: int = 4
    seed: int = 0


def table(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(seed).normal(size=(ROWS, 2))
    return inputs, np.digitize(inputs[:, 0], [-0.5, 0.5, 1.5]), QUERIES


def trained(options: Any, **splits: Any) -> jn.Run:
    data = trees.binned(**({"train": table(), "test": table(1)} | splits))
    booster = trees.boosting(trees.lambda_rank(), num_trees=4, max_depth=2, min_child_weight=1e-6)
    experiment = trees.experiment(Config(), lambda _: data, lambda _: booster)
    return tiny.fit(experiment, **({"steps_per_call": 2, "report_every": 2} | options))


def test_gradients_are_sums_over_pairs_and_the_metric_is_the_ndcg() -> None:
    scores, (_, grades, _) = np.random.default_rng(0).normal(size=ROWS).astype(np.float32), table()
    weights = np.ones(ROWS, np.float32)
    weights[[2, 9]] = 0  # which are no rows
    rank = trees.lambda_rank(truncation=3, ndcg_at=4)
    gains, gradients, hessians = 2.0**grades - 1, np.zeros(ROWS), np.zeros(ROWS)
    ndcg = np.asarray(rank.metrics["ndcg"](scores, grades, QUERIES, weights))
    for query in range(4):
        rows = sorted(np.flatnonzero((QUERIES == query) & (weights > 0)), key=lambda row: -scores[row])
        discount = 1 / np.log2(np.arange(len(rows)) + 2)
        ideal = (np.sort(gains[rows])[::-1] * discount)[:3].sum()
        for (high, a), (low, b) in itertools.permutations(enumerate(rows), 2):
            if gains[a] > gains[b] and min(high, low) < 3:
                swapped = (gains[a] - gains[b]) * abs(discount[high] - discount[low]) / ideal
                wrong = 1 / (1 + np.exp(scores[a] - scores[b]))
                gradients[[a, b]] += np.array([-1, 1]) * swapped * wrong
                hessians[[a, b]] += swapped * wrong * (1 - wrong)
        expected = ndcg_score([gains[rows]], [scores[rows]], k=4) if len(rows) > 1 else 1.0
        np.testing.assert_allclose(ndcg[QUERIES == query], expected, rtol=1e-5)
    assert rank.derivatives is not None
    found = rank.derivatives(scores, grades, QUERIES, weights)
    np.testing.assert_allclose(found, [gradients, hessians], atol=1e-6)


def test_training_lowers_the_loss_which_is_averaged_over_queries() -> None:
    run = trained({})
    first, last = run.metrics["train_loss"]
    assert last < first < 0.3
    bins = run.experiment.data(Config()).test.examples.inputs["bins"]
    scores = run.predict({"bins": bins, "query": QUERIES})
    ndcg = trees.lambda_rank().metrics["ndcg"](scores, table(1)[1], QUERIES, np.ones(ROWS))
    np.testing.assert_allclose(run.final["test_ndcg"], np.asarray(ndcg)[[0, 5, 6, 13]].mean(), rtol=1e-5)


@pytest.mark.slow
def test_devices_grow_the_same_trees() -> None:
    one, four = (trained(how).state.model_state["trees"] for how in ({}, {"devices": 4, "strategy": "data"}))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, four))


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ({"train": table()[:2], "test": table()[:2]}, {}, "needs the query of each row"),
        ({"test": (*table()[:2], QUERIES % 2)}, {}, "test: the rows of query 0 are not side by side"),
        ({"test": (*table()[:2], QUERIES[:3])}, {}, "a number or text for each row"),
        ({"train": (table()[0], table()[1] - 1, QUERIES)}, {}, "train: a target is -1, below 0"),
        ({}, {"eval_batch_size": 20}, f"set eval_batch_size={ROWS}"),
    ],
)
def test_rows_without_whole_queries_are_refused(splits: Any, options: Any, message: str) -> None:
    with pytest.raises(jn.JaxnnError, match=message):
        trained(options, **splits)
