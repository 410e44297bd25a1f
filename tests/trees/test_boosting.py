"""Boosted trees: equal to scikit-learn's; swept, sharded and resumed as networks are; LambdaRank."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import ndcg_score

import jaxnn as jn
from jaxnn import trees
from tests import native, tiny

ROWS = 96
QUERIES = np.repeat(np.arange(4), [5, 1, 7, 11])
HOW: Any = {"steps_per_call": 2, "report_every": 2}
FOUR: Any = {"devices": 4, "strategy": "data"}


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 0.3
    row_fraction: float = 0.8
    batch_size: int = ROWS
    num_steps: int = 4
    seed: int = 0


def table(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Four columns with missing values, the last of categories, and a number that depends on all but the third."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, 4))
    inputs[:, 3] = rng.integers(0, 6, rows)
    targets = 2 * inputs[:, 0] + np.sin(3 * inputs[:, 1]) + np.isin(inputs[:, 3], (1, 4)) * 3.0
    inputs[:, :2][rng.random((rows, 2)) < 0.1] = np.nan
    return inputs, targets.astype(np.float32)


def experiment(objective: Any = None, data: Any = None, **settings: Any) -> jn.Experiment[Config]:
    """Trees of depth 2 on ``data``, by default a table with a category."""
    splits = data or jn.data.binned(table(), table(32, 1), categorical=(3,))

    def booster(config: Config) -> trees.Boosting:
        given = {"num_trees": config.num_steps, "max_depth": 2, "categorical": splits.train.bins.categorical}
        rates = {"learning_rate": config.learning_rate, "row_fraction": config.row_fraction}
        return trees.boosting(objective or trees.squared_error(), **(given | rates | settings))

    return trees.experiment(Config(batch_size=splits.train.num_examples), lambda config: splits, booster)


@pytest.fixture(scope="module")
def trained() -> jn.Run:
    return tiny.fit(experiment(), **HOW)


def same_trees(one: jn.Run, other: jn.Run) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, *(run.state.model_state["trees"] for run in (one, other))))


@pytest.mark.parametrize(("leaves", "least"), [(6, 5), pytest.param(None, 1, marks=pytest.mark.slow)])
def test_predictions_are_those_of_scikit_learn(leaves: int | None, least: int) -> None:
    inputs, targets = table(400)
    inputs = inputs.round(1)  # a bin for each value
    # Its least number of rows does not count their weights.
    weights = np.random.default_rng(2).integers(1, 4, 400) if least == 1 else None
    ours = trees.GradientBoostingRegressor(num_trees=6, num_leaves=leaves, max_depth=3, min_child_weight=least, l2=0.5)
    theirs = HistGradientBoostingRegressor(
        max_iter=6,
        max_leaf_nodes=leaves,
        max_depth=3,
        min_samples_leaf=least,
        l2_regularization=0.5,
        early_stopping=False,
    )
    found = ours.fit(inputs, targets, weights).predict(inputs)
    np.testing.assert_allclose(found, theirs.fit(inputs, targets, weights).predict(inputs), atol=1e-4)


def test_the_loss_falls_and_is_that_of_the_predictions(trained: jn.Run) -> None:
    first, last = trained.metrics["train_loss"]
    assert last < first
    inputs, targets = trained.experiment.data(trained.config).test.examples
    expected = ((trained.predict(inputs) - targets) ** 2 / 2).mean()
    np.testing.assert_allclose(trained.final["test_loss"], expected, rtol=1e-5)


@pytest.mark.slow
def test_a_member_of_a_sweep_grows_the_trees_of_its_run(trained: jn.Run, tmp_path: Path) -> None:
    points = jn.grid(learning_rate=[0.1, 0.3], seed=[0, 1])
    swept = jn.sweep(experiment(), points, run_dir=tmp_path / "sweep", steps_per_call=2, progress="none")
    (member,) = (one.index for one in swept.members if one.point == {"learning_rate": 0.3, "seed": 0})
    assert same_trees(swept.run(member), trained)


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "how"), [({"max_bins": ROWS, "categorical": {3: 6}}, {}), ({}, FOUR)])
def test_room_for_fewer_bins_and_devices_grow_the_same_trees(settings: Any, how: Any, trained: jn.Run) -> None:
    assert same_trees(tiny.fit(experiment(**settings), **HOW, **how), trained)


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [None, 4])
def test_implementations_grow_the_same_trees(leaves: int | None, trained: jn.Run) -> None:
    run = trained if leaves is None else tiny.fit(experiment(num_leaves=leaves), **HOW)
    with jn.nn.portable():  # those of other platforms
        assert same_trees(tiny.fit(experiment(num_leaves=leaves), **HOW), run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_depth": 5, "l1": 0.5, "min_child_weight": 3.0},
        {"max_depth": 4, "num_leaves": 9, "min_gain": 0.05, "l2": 0.0},
        {"max_depth": 3, "column_fraction": 0.5, "max_bins": 16},
        {"max_depth": 3, "objective": trees.cross_entropy(3)},
    ],
)
@native.needed
def test_the_native_kernel_grows_the_same_trees(settings: dict[str, Any], tmp_path: Path) -> None:
    inputs, targets = table(3000)  # several threads share the rows
    inputs = np.hstack([inputs, inputs[:, :2].round(), np.abs(inputs[:, :1])])
    inputs[:, 3] += np.random.default_rng(0).geometric(0.05, 3000)  # most categories have few rows
    if "objective" in settings:
        targets = np.digitize(targets, [0.0, 2.0])
    data = jn.data.binned((inputs, targets), categorical=(3,), max_bins=settings.get("max_bins", 255))
    native = tiny.fit(experiment(data=data, **settings), tmp_path / "native", **HOW)
    assert tiny.read(native.dir)["implementations"]["trees"] == ["native"]
    with jn.nn.portable():
        other = tiny.fit(experiment(data=data, **settings), **HOW)
    assert same_trees(native, other)


@pytest.mark.slow
def test_padded_rows_change_nothing() -> None:
    data = (jn.data.binned(table(93), table(32, 1), categorical=(3,), multiple_of=multiple) for multiple in (1, 8))
    runs = [tiny.fit(experiment(data=one), **HOW, **how) for one, how in zip(data, ({}, FOUR), strict=True)]
    assert runs[1].config.batch_size == 96 and same_trees(*runs)
    np.testing.assert_allclose(*(run.final["train_loss"] for run in runs), rtol=1e-6)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    objective = trees.Objective(lambda score, target: jax.numpy.log(-jax.numpy.abs(score - target) - 1))
    with pytest.raises(jn.TrainingError, match="no longer finite at step 1"):
        tiny.fit(experiment(objective))


@pytest.mark.slow
def test_a_resumed_run_grows_the_same_trees(trained: jn.Run, tmp_path: Path) -> None:
    for report in jn.iterate(experiment(), run_dir=tmp_path / "run", **tiny.HOW | HOW, checkpoint_every=2):
        if report.step == 2:
            break
    resumed = tiny.fit(experiment(), resume=tmp_path / "run")
    assert int(resumed.state.step) == 4 and same_trees(resumed, trained)


@pytest.mark.slow
def test_constrained_predictions_are_monotone() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.uniform(size=(300, 2))
    targets = np.sin(9 * inputs[:, 0]) - inputs[:, 1] + rng.normal(size=300)
    model = trees.GradientBoostingRegressor(num_trees=8, max_depth=3, monotone=(1, -1)).fit(inputs, targets)
    grid = np.linspace(0, 1, 30)
    found = model.predict(np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)).reshape(30, 30)
    assert (np.diff(found, axis=0) >= 0).all() and (np.diff(found, axis=1) <= 0).all()


@pytest.mark.slow
def test_quantiles_are_those_of_the_targets() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.uniform(size=(500, 1))
    targets = inputs[:, 0] * rng.exponential(size=500)
    model = trees.GradientBoostingRegressor(objective=trees.quantile_error(0.8), num_trees=20, max_depth=2)
    assert 0.77 < (targets <= model.fit(inputs, targets).predict(inputs)).mean() < 0.83


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"l2": -1.0}, "l2 must be a number >= 0"),
        ({"row_fraction": 80}, "row_fraction must be a number > 0 and <= 1"),
        ({"monotone": (1, 2, 0, 0)}, "monotone must be -1, 0 or 1"),
        ({"monotone": (1, 0)}, "monotone has 2 values, and the table 4"),
        ({"categorical": (9,)}, "no categorical column 9"),
        ({"categorical": (True,)}, "column of categorical must be an integer"),
        ({"objective": trees.absolute_error(), "monotone": (1, 0, 0, 0)}, "do not keep monotone constraints"),
        ({"objective": trees.cross_entropy(3)}, "the objective is not for numbers"),
        ({"num_trees": 0}, "num_trees must be an integer >= 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(jn.ConfigError, match=re.escape(message)):
        trees.GradientBoostingRegressor(**settings).fit(*table())


@pytest.mark.parametrize(
    ("objective", "targets", "message"),
    [
        (trees.cross_entropy(2), np.arange(ROWS) % 2 + 1, "labels must be 0 to 1"),
        (trees.poisson(), np.full(ROWS, -1.0), "a target is -1, below 0"),
        (trees.squared_error(), np.zeros((ROWS, 1)), "one target a row"),
    ],
)
def test_bad_targets_are_refused(objective: trees.Objective, targets: np.ndarray, message: str) -> None:
    with pytest.raises(jn.DataError, match=message):
        tiny.fit(experiment(objective, jn.data.binned((table()[0], targets))))


@pytest.mark.parametrize(
    ("settings", "changes", "how", "message"),
    [
        ({}, {"batch_size": 32}, {}, f"batch_size={ROWS}"),
        ({}, {}, {"devices": 4, "strategy": "pmap"}, "strategy='data'"),
        ({"num_trees": 2}, {}, {}, "num_trees=2, and the config num_steps=4"),
        ({"max_bins": 20}, {}, {}, "boosting max_bins=20: give it"),
        ({"categorical": {3: 2}}, {}, {}, "bins.num_categories"),
        ({"categorical": ()}, {}, {}, "categorical columns (3,), and boosting has ()"),
    ],
)
def test_experiments_that_do_not_fit_their_data_are_refused(
    settings: Any, changes: Any, how: Any, message: str
) -> None:
    with pytest.raises(jn.ConfigError, match=re.escape(message)):
        tiny.fit(experiment(**settings).replace(**changes), **how)


@pytest.mark.slow
def test_a_fitted_model_keeps_its_depth_and_the_place_of_its_targets(tmp_path: Path) -> None:
    inputs, targets = table()
    settings: dict[str, Any] = {"num_trees": 4, "max_depth": 3, "categorical": (3,)}
    model = trees.GradientBoostingRegressor(**settings).fit(inputs, targets.astype(np.float64) + 1e8)
    found = model.predict(inputs)
    plain = trees.GradientBoostingRegressor(**settings).fit(inputs, targets).predict(inputs)
    np.testing.assert_allclose(found - 1e8, plain, atol=1e-5)
    model.set_params(max_depth=1).save(tmp_path / "model.npz")
    np.testing.assert_array_equal(model.predict(inputs), found)
    np.testing.assert_array_equal(trees.GradientBoostingRegressor.load(tmp_path / "model.npz").predict(inputs), found)
    with pytest.raises(jn.RecordError, match="it holds a GradientBoostingRegressor"):
        trees.GradientBoostingClassifier.load(tmp_path / "model.npz")
    labels = np.array(["low", "middle", "high"])[np.digitize(targets, [0, 2])]
    classifier = trees.GradientBoostingClassifier(**settings).fit(inputs, labels)
    classifier.save(tmp_path / "model.npz")
    found = trees.GradientBoostingClassifier.load(tmp_path / "model.npz").predict(inputs)
    np.testing.assert_array_equal(found, classifier.predict(inputs))
    assert (found == labels).mean() > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("objective", [trees.absolute_error(), trees.huber(0.5), trees.poisson()])
def test_objectives_lower_their_loss(objective: trees.Objective) -> None:
    inputs, targets = table()
    run = tiny.fit(experiment(objective, jn.data.binned((inputs, np.abs(targets)), categorical=(3,))), **HOW)
    first, last = run.metrics["train_loss"]
    assert last < first


@pytest.mark.slow
@pytest.mark.parametrize("kind", [trees.GradientBoostingRegressor, trees.GradientBoostingClassifier])
def test_exported_predictions_of_numbers_are_those_of_the_model(kind: Any, trained: jn.Run, tmp_path: Path) -> None:
    inputs, targets = table()
    is_regressor = kind is trees.GradientBoostingRegressor
    model = kind(num_trees=4, max_depth=3, categorical=(3,)).fit(
        inputs, targets + 1000.3 if is_regressor else targets > 0
    )
    rows = np.float32(table(200, 1)[0])
    rows[:, 3] = np.arange(200) % 11 - 2  # categories that were not seen among them
    for column, edges in enumerate(model.bins_.edges[:3]):
        near = edges.astype(np.float32)[:60]
        for start, direction in zip((0, 60, 120), (-np.inf, 0, np.inf), strict=True):
            rows[start : start + len(near), column] = np.nextafter(near, np.float32(direction)) if direction else near
    content = model.export(tmp_path / "model.stablehlo").read_bytes()
    expected = (model.predict if is_regressor else model.predict_proba)(rows).astype(np.float32)
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(content)).call(rows), expected)
    splits, state = trained.experiment.data(trained.config), trained.state
    predict = trees.predictor(splits.train.bins, {**state.params, **state.model_state})
    bins = splits.train.bins.apply(rows)
    np.testing.assert_array_equal(jax.jit(predict)(rows), trained.predict(bins))
    content = trained.export(tmp_path / "run.stablehlo").read_bytes()
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(content)).call(bins), trained.predict(bins))


@pytest.mark.slow
def test_the_best_number_of_trees_predicts_after_an_early_stop(tmp_path: Path) -> None:
    settings: Any = {"num_trees": 50, "max_depth": 3, "learning_rate": 0.9}
    splits = jn.data.binned(table(), validation=table(32, 1))
    how: Any = {"steps_per_call": 1, "report_every": 1, "eval_every": 1, "patience": 3, "run_dir": tmp_path / "run"}
    run = tiny.fit(experiment(data=splits, row_fraction=1.0, **settings).replace(num_steps=50), **how)
    assert run.summary.status == "stopped early" and run.metrics["step"][-1] < 50
    inputs, targets = splits.validation.examples
    loss = ((run.predict(inputs, state=run.best_state()) - targets) ** 2 / 2).mean()
    np.testing.assert_allclose(loss, run.metrics["validation_loss"].min(), rtol=1e-5)
    model = trees.GradientBoostingRegressor(**settings, patience=3).fit(*table())
    grown = (model.state_["trees"]["weight"][:, 0, 0] > 0).sum()
    assert model.state_["num_trees"] == grown - 3
    splits = (model.state_["trees"]["column"][: grown - 3] >= 0).sum()
    assert trees.importances(model.state_, 4, "splits").sum() == splits  # of the trees that predict


@pytest.mark.slow
def test_plots_show_conditions_in_units_of_the_inputs() -> None:
    inputs, _ = table()
    targets = np.isin(inputs[:, 3], (1, 4)) * 2.0 + (inputs[:, 0] > 0.5)
    model = trees.GradientBoostingRegressor(num_trees=1, max_depth=2, categorical=(3,)).fit(inputs, targets)
    below = inputs[inputs[:, 0] <= 0.5, 0].max(), inputs[inputs[:, 0] > 0.5, 0].min()
    figure = trees.plot_tree(model.state_, model.bins_, names="abcd")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[-1] == "d in {1, 4}\nmissing right\nweight 96" and len(texts) == 7
    assert below[0] < float(texts[2].split("\n")[0].removeprefix("a ≤ ")) < below[1]
    bars = trees.plot_importances(model.state_, "abcd").axes[0]
    np.testing.assert_allclose([bar.get_width() for bar in bars.patches][-1], trees.importances(model.state_, 4)[3])


@pytest.mark.slow
def test_contributions_are_shapley_values() -> None:
    inputs, targets = table(80)
    model = trees.GradientBoostingRegressor(num_trees=2, max_depth=3, categorical=(3,)).fit(inputs, targets)
    bins = model.bins_.apply(inputs[:6])
    state = model.state_

    def expectation(tree: Any, row: np.ndarray, known: tuple[int, ...], node: int = 0) -> float:
        column, left = tree["column"][node], tree["left"][node]
        if column < 0:
            return float(tree["value"][node])
        if column in known:
            word = tree["left_bins"][node, row[column] >> 5]
            return expectation(tree, row, known, left + 1 - (int(word) >> (int(row[column]) & 31) & 1))
        shares = tree["weight"][left : left + 2] / tree["weight"][node]
        return sum(share * expectation(tree, row, known, left + side) for side, share in enumerate(shares))

    expected = np.zeros((6, 5))
    expected[:, 4] = state["start"]
    for number, row in itertools.product(range(2), range(6)):
        tree = {name: np.asarray(value)[number, 0] for name, value in state["trees"].items()}
        expected[row, 4] += expectation(tree, bins[row], ())
        for order in itertools.permutations(range(4)):
            for place, column in enumerate(order):
                with_it, without = order[: place + 1], order[:place]
                gain = expectation(tree, bins[row], with_it) - expectation(tree, bins[row], without)
                expected[row, column] += gain / 24
    found = trees.contributions(state, bins)[:, 0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), model.predict(inputs[:6]), atol=1e-5)


def ranked(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(seed).normal(size=(len(QUERIES), 2))
    return inputs, np.digitize(inputs[:, 0], [-0.5, 0.5, 1.5]), QUERIES


def fit_ranks(options: Any, **splits: Any) -> jn.Run:
    data = jn.data.binned(**({"train": ranked(), "test": ranked(1)} | splits))
    return tiny.fit(experiment(trees.lambda_rank(), data, min_child_weight=1e-6, row_fraction=1.0), **HOW | options)


def test_gradients_are_sums_over_pairs_and_the_metric_is_the_ndcg() -> None:
    scores, (_, grades, _) = np.random.default_rng(0).normal(size=len(QUERIES)).astype(np.float32), ranked()
    weights = np.ones(len(QUERIES), np.float32)
    weights[[2, 9]] = 0  # which are no rows
    rank = trees.lambda_rank(truncation=3, ndcg_at=4)
    gains, gradients, hessians = 2.0**grades - 1, np.zeros(len(QUERIES)), np.zeros(len(QUERIES))
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
    run = fit_ranks({})
    first, last = run.metrics["train_loss"]
    assert last < first < 0.3
    bins = run.experiment.data(Config()).test.examples.inputs["bins"]
    scores = run.predict({"bins": bins, "query": QUERIES})
    ndcg = trees.lambda_rank().metrics["ndcg"](scores, ranked(1)[1], QUERIES, np.ones(len(QUERIES)))
    np.testing.assert_allclose(run.final["test_ndcg"], np.asarray(ndcg)[[0, 5, 6, 13]].mean(), rtol=1e-5)


@pytest.mark.slow
def test_devices_rank_by_the_same_trees() -> None:
    assert same_trees(fit_ranks({}), fit_ranks(FOUR))


@pytest.mark.parametrize(
    ("splits", "options", "message"),
    [
        ({"train": ranked()[:2], "test": ranked()[:2]}, {}, "needs the query of each row"),
        ({"test": (*ranked()[:2], QUERIES % 2)}, {}, "test: the rows of query 0 are not side by side"),
        ({"test": (*ranked()[:2], QUERIES[:3])}, {}, "a number or text for each row"),
        ({"train": (ranked()[0], ranked()[1] - 1, QUERIES)}, {}, "train: a target is -1, below 0"),
        ({}, {"eval_batch_size": 20}, f"set eval_batch_size={len(QUERIES)}"),
    ],
)
def test_rows_without_whole_queries_are_refused(splits: Any, options: Any, message: str) -> None:
    with pytest.raises(jn.JaxnnError, match=message):
        fit_ranks(options, **splits)
