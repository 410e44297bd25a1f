"""Boosted trees: equal to scikit-learn's; swept, sharded, resumed as networks; ranking; estimators, of networks too."""

import contextlib
import dataclasses
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import ndcg_score
from sklearn.utils.estimator_checks import estimator_checks_generator

import jaxnn as jn
from jaxnn import kernels, trees
from jaxnn.estimators import NetworkClassifier, NetworkRegressor
from jaxnn.trees import _model_files, _objectives
from jaxnn.types import Examples
from tests import native, tiny

ROWS = 96
QUERIES = np.repeat(np.arange(4), [5, 1, 7, 11])
HOW: Any = {"steps_per_call": 2, "report_every": 2}
FOUR: Any = {"devices": 4, "strategy": "data"}
FITTED: Any = {"num_trees": 4, "max_depth": 3, "categorical": (3,)}


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


@pytest.fixture(scope="module")
def regressor() -> Any:
    """A model of the table, whose targets are moved away from 0."""
    inputs, targets = table()
    return trees.GradientBoostingRegressor(**FITTED).fit(inputs, targets.astype(np.float64) + 1000.3)


def same_trees(one: jn.Run, other: jn.Run) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, *(run.state.model_state["trees"] for run in (one, other))))


@pytest.mark.parametrize(("leaves", "least"), [(6, 5), pytest.param(None, 1, marks=pytest.mark.slow)])
def test_predictions_are_those_of_scikit_learn(leaves, least):
    inputs, targets = table(400)
    inputs = inputs.round(1)  # a bin for each value
    # Its least number of rows does not count their weights.
    weights = np.random.default_rng(2).integers(1, 4, 400) if least == 1 else None
    ours = trees.GradientBoostingRegressor(num_trees=6, num_leaves=leaves, max_depth=3, min_child_weight=least, l2=0.5)
    how = {"max_leaf_nodes": leaves, "min_samples_leaf": least, "l2_regularization": 0.5, "early_stopping": False}
    theirs = HistGradientBoostingRegressor(max_iter=6, max_depth=3, **how)
    found = ours.fit(inputs, targets, weights).predict(inputs)
    np.testing.assert_allclose(found, theirs.fit(inputs, targets, weights).predict(inputs), atol=1e-4)


@pytest.mark.slow
def test_a_member_of_a_sweep_grows_the_trees_of_its_run(trained, tmp_path):
    points = jn.search.zip(learning_rate=[0.1, 0.3], seed=[1, 0])
    how: Any = {"steps_per_call": 2, "vmap_size": 2, "devices": 1, "progress": "none"}
    swept = jn.sweep(experiment(), points, run_dir=tmp_path / "sweep", **how)
    assert same_trees(swept.run(1), trained)
    inputs, targets = table(700)
    three = experiment(trees.cross_entropy(3), jn.data.binned((inputs, np.digitize(targets, [0.0, 2.0]))))
    swept = jn.sweep(three, points, run_dir=tmp_path / "classes", **how)
    assert same_trees(swept.run(1), tiny.fit(three, **HOW))


def test_searched_trees_equal_their_solo_runs_in_lanes_that_others_had():
    space = {"learning_rate": jn.search.log_uniform(0.02, 1.0), "row_fraction": jn.search.uniform(0.4, 1.0)}
    longer = experiment().replace(num_steps=9)
    how: Any = {"lanes": 2, "devices": 2, "vmap_size": 1, "progress": "none", "record": False}
    found = jn.sweep(longer, jn.search.asha(space, num=9), **how)
    assert sum(member.step == 3 for member in found.members) >= 1
    for member in (member for member in found.members if member.step > 1):
        alone = tiny.fit(longer.replace(**member.point), report_every=1, eval_every=1)
        assert member.final["test_loss"] == pytest.approx(alone.metrics["test_loss"][member.step - 1], rel=1e-6)


def test_an_evaluation_continues_from_the_scores_of_the_last(trained):
    run = tiny.fit(experiment(), steps_per_call=1, report_every=1, eval_every=1)
    assert run.final["test_loss"] == trained.evaluate("test")["loss"] == run.evaluate("test")["loss"]
    assert run.final["test_root_mean_squared_error"] == pytest.approx(run.final["test_loss"] ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_depth": 5, "l1": 0.5, "min_child_weight": 3.0},
        {"max_depth": 4, "num_leaves": 9, "min_gain": 0.05, "l2": 0.0},
        {"max_depth": 4, "learning_rate": 1.0, "objective": trees.poisson()},
        {"max_depth": 3, "column_fraction": 0.5, "max_bins": 16, "objective": trees.cross_entropy(3)},
    ],
)
@native.needed
def test_the_native_kernel_grows_the_same_trees(settings, tmp_path):
    inputs, targets = table(3000)  # several threads share the rows
    inputs = np.hstack([inputs, inputs[:, :2].round(), np.abs(inputs[:, :1])])
    inputs[:, 3] += np.random.default_rng(0).geometric(0.05, 3000)  # most categories have few rows
    if "objective" in settings:
        targets = np.digitize(targets, [0.0, 2.0])
    data = jn.data.binned((inputs, targets), categorical=(3,), max_bins=settings.get("max_bins", 255))
    native = tiny.fit(experiment(data=data, **settings), tmp_path / "native", **HOW)
    assert tiny.read(native.dir)["groups"][0]["implementations"]["trees"] == ["native"]
    with kernels.portable():
        other = tiny.fit(experiment(data=data, **settings), **HOW)
    assert same_trees(native, other)


@pytest.mark.slow
def test_four_devices_and_padded_rows_grow_the_same_trees():
    data = (jn.data.binned(table(2403), table(32, 1), categorical=(3,), multiple_of=multiple) for multiple in (1, 8))
    runs = [tiny.fit(experiment(data=one), **HOW, **how) for one, how in zip(data, ({}, FOUR), strict=True)]
    assert runs[1].config.batch_size == 2408 and same_trees(*runs)
    np.testing.assert_allclose(*(run.final["train_loss"] for run in runs), rtol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_grows_the_same_trees(trained, tmp_path):
    tiny.break_off(experiment(), tmp_path / "run", 2, **HOW, checkpoint_every=2)
    resumed = tiny.fit(experiment(), resume=tmp_path / "run")
    assert int(resumed.state.step) == 4 and same_trees(resumed, trained)


@pytest.mark.slow
def test_constrained_predictions_are_monotone():
    rng = np.random.default_rng(0)
    inputs = rng.uniform(size=(300, 2))
    targets = np.sin(9 * inputs[:, 0]) - inputs[:, 1] + rng.normal(size=300)
    model = trees.GradientBoostingRegressor(num_trees=8, max_depth=3, monotone=(1, -1)).fit(inputs, targets)
    grid = np.linspace(0, 1, 30)
    found = model.predict(np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)).reshape(30, 30)
    assert (np.diff(found, axis=0) >= 0).all() and (np.diff(found, axis=1) <= 0).all()


@pytest.mark.parametrize("portable", [False, True])
def test_a_leaf_is_the_mean_of_its_rows_beside_an_outlier(portable):
    group = np.arange(1000) % 5
    group[4] = 5
    means = np.array([1.0, 1.3, 2.0, 3.0, 0.0, 1e11])
    model = trees.GradientBoostingRegressor(num_trees=300, max_depth=3, l2=0.0)
    with kernels.portable() if portable else contextlib.nullcontext():
        model.fit(group[:, None], means[group])
    np.testing.assert_allclose(model.predict(np.arange(6)[:, None]), means, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("portable", [False, True])
def test_gains_are_right_at_any_scale_and_beside_a_large_difference(portable):
    step, wave = np.arange(1000) % 2, np.sin(np.arange(1000) // 2 % 10)
    inputs = np.stack([step, wave], 1)
    settings: dict[str, Any] = {"num_trees": 1, "max_depth": 2, "l2": 0.0, "min_child_weight": 0.0}
    # Within a child the best split of the wave lowers half the sum of squares of its 500 rows.
    half = wave[step == 0]
    sides = (half <= level for level in np.unique(wave)[:-1])
    means = ((left.mean(), half[left].mean(), half[~left].mean()) for left in sides)
    gain = max(250 * share * (1 - share) * (low - high) ** 2 for share, low, high in means)
    model = trees.GradientBoostingRegressor(**settings)
    with kernels.portable() if portable else contextlib.nullcontext():
        for scale, weight, height in ((1.0, 1.0, 1e5), (1e8, 1e10, 1e3), (1e-8, 1e-11, 1e3)):
            model.fit(inputs, scale * (height * step + wave), np.full(1000, weight))
            np.testing.assert_allclose(model.state_["trees"]["gain"][0, 0, 1:3], gain * scale**2 * weight, rtol=1e-2)


@pytest.mark.slow
def test_sums_hold_millions_of_rows_and_small_parts():
    rows = 20_000_000
    values, weights = jnp.full(rows, 0.001), jnp.ones(rows)
    np.testing.assert_allclose(_objectives.weighted_mean(values, weights), 0.001, rtol=1e-6)
    labels = jnp.zeros(rows, int).at[: rows // 100].set(2)
    shares = np.exp(trees.cross_entropy(3).start(labels, weights))
    np.testing.assert_allclose(shares, [0.99, 1e-6, 0.01], rtol=1e-5)
    small = jnp.zeros(rows, int).at[-101:].set(1)
    found = _objectives.leaf_quantiles(small, (jnp.arange(rows) % 8_000_000) * 1.0, weights, 0.5, 2)
    assert found[1] == (rows - 51) % 8_000_000


@pytest.mark.slow
def test_steps_of_an_exponential_loss_are_bounded_or_refused():
    inputs = np.random.default_rng(0).uniform(size=(500, 3))
    counts = np.where(inputs[:, 0] > 0.99, 700.0, 0.5)
    for monotone in ((), (1, 0, 0)):
        model = trees.GradientBoostingRegressor(objective=trees.poisson(), num_trees=120, l2=0.0, monotone=monotone)
        model.fit(inputs, counts)
        assert 0.5 < model.predict(inputs).mean() / counts.mean() < 2
        assert np.abs(model.state_["trees"]["value"]).max() <= np.float32(0.1 * 0.7)
    own = trees.Objective(lambda score, target: jnp.exp(score) - target * score)
    with pytest.raises(jn.TrainingError, match="the training loss rose from 1 to .*largest_step"):
        trees.GradientBoostingRegressor(objective=own, l2=0.0).fit(inputs, counts)


@pytest.mark.slow
def test_a_row_of_weight_zero_counts_for_nothing():
    inputs, targets = table()
    weights = np.ones(ROWS)
    weights[0], others = 0, []
    for target in (0.0, 1e12):
        targets[0] = target
        others.append(trees.GradientBoostingRegressor(**FITTED).fit(inputs, targets, weights).predict(inputs))
    np.testing.assert_array_equal(*others)
    classifier = trees.GradientBoostingClassifier(num_trees=2).fit(inputs, np.arange(ROWS).clip(0, 2), weights)
    assert classifier.classes_.tolist() == [1, 2]
    splits, targets = jn.data.binned((inputs, targets)), np.abs(targets)
    targets[0], given = -np.inf, {"bins": splits.train.examples.inputs, "weight": np.float32(weights)}
    train = dataclasses.replace(splits.train, examples=Examples(given, targets))
    run = tiny.fit(experiment(trees.poisson(), splits._replace(train=train, test=None)), **HOW)
    assert np.isfinite(run.metrics["train_loss"]).all() and np.isfinite(run.state.model_state["trees"]["value"]).all()


@pytest.mark.slow
def test_quantiles_are_those_of_the_targets():
    rng = np.random.default_rng(0)
    inputs = rng.uniform(size=(500, 1))
    targets = inputs[:, 0] * rng.exponential(size=500)
    model = trees.GradientBoostingRegressor(objective=trees.quantile_error(0.8), max_depth=2).fit(inputs, targets)
    assert 0.77 < (targets <= model.predict(inputs)).mean() < 0.83


@pytest.mark.slow
def test_a_fitted_model_keeps_its_depth_and_the_place_of_its_targets(regressor, tmp_path):
    inputs, targets = table()
    arrays: Any = {"categorical": np.array([3]), "random_state": np.random.RandomState(3)}
    with jax.enable_x64(True):  # whatever it is, trees are of float32
        model = trees.GradientBoostingRegressor(**FITTED | arrays).fit(inputs, targets.astype(np.float64) + 1e8)
        found = model.predict(inputs)
        with pytest.raises(jn.ConfigError, match="boosted trees are of float32: turn jax_enable_x64 off"):
            tiny.fit(experiment())
    np.testing.assert_allclose(found - 1e8, regressor.predict(inputs) - 1000.3, atol=1e-5)
    model.set_params(max_depth=1).save(tmp_path / "model.npz")
    np.testing.assert_array_equal(model.predict(inputs), found)
    np.testing.assert_array_equal(trees.GradientBoostingRegressor.load(tmp_path / "model.npz").predict(inputs), found)
    with pytest.raises(jn.RecordError, match="it holds a GradientBoostingRegressor"):
        trees.GradientBoostingClassifier.load(tmp_path / "model.npz")
    labels = np.array(["low", "middle", "high"])[np.digitize(targets, [0, 2])]
    classifier = trees.GradientBoostingClassifier(**FITTED).fit(inputs, labels)
    classifier.save(tmp_path / "model.npz")
    found = trees.GradientBoostingClassifier.load(tmp_path / "model.npz").predict(inputs)
    np.testing.assert_array_equal(found, classifier.predict(inputs))
    assert (found == labels).mean() > 0.8


@pytest.mark.parametrize(("own", "other"), [(None, trees.poisson()), (trees.poisson(), None)])
def test_a_fitted_model_keeps_its_objective_and_names(own, other, tmp_path):
    frame = pytest.importorskip("pandas").DataFrame(table()[0], columns=[*"abcd"])
    model = trees.GradientBoostingRegressor(objective=own, num_trees=2).fit(frame, np.abs(table()[1]))
    found = model.predict(frame)
    assert pickle.loads(pickle.dumps([trees.huber(), *map(trees.cross_entropy, (2, 3)), trees.lambda_rank()]))
    model.set_params(objective=other).save(tmp_path / "model")
    for one in (
        model,
        pickle.loads(pickle.dumps(model)),
        trees.GradientBoostingRegressor.load(tmp_path / "model", own),
    ):
        np.testing.assert_array_equal(one.set_params(objective=other).predict(frame), found)
        content = one.export(tmp_path / "model.stablehlo").read_bytes()
        exported = jax.export.deserialize(bytearray(content)).call(np.float32(frame))
        np.testing.assert_allclose(exported, found, rtol=1e-6)
        with pytest.raises(ValueError, match="feature names should match"):
            one.predict(frame[[*"dcba"]])


WRONG_FILES: dict[str, Callable[[Any, Any], Any]] = {
    "'start' is missing": lambda arrays, settings: arrays.pop("start"),
    "trees.value has numbers that are not finite": lambda arrays, settings: arrays["trees.value"].fill(np.nan),
    "its trees are none": lambda arrays, settings: arrays["trees.left"].fill(0),
    "edges of column 0 do not": lambda arrays, settings: arrays["edges.00000"].fill(0.0),
    "instead of int32 [2147483647, 1, 15]": lambda arrays, settings: settings.update(num_trees=2**31 - 1),
    "max_depth must be an integer in 1…10": lambda arrays, settings: settings.update(max_depth=10**9),
    "l2 must be a number": lambda arrays, settings: settings.update(l2="1"),
}


def test_a_file_of_what_no_fit_makes_is_refused(regressor, tmp_path):
    regressor.save(path := tmp_path / "model.npz")
    whole, inputs, load = path.read_bytes(), table()[0], trees.GradientBoostingRegressor.load
    for words, change in WRONG_FILES.items():
        arrays, facts = _model_files.unpack(whole)
        change(arrays, facts["settings"])
        path.write_bytes(_model_files.pack(arrays, facts))
        with pytest.raises(jn.RecordError, match=re.escape(words)):
            load(path)
    for at in range(1, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with contextlib.suppress(jn.RecordError):  # a bit of a date in the archive means nothing
            np.testing.assert_array_equal(load(path).predict(inputs), regressor.predict(inputs))


@pytest.mark.parametrize("classes", [np.array([3, 2**62 + 1]).astype(kind) for kind in ("M8[ns]", "M8[D]", "u8")])
def test_a_saved_classifier_has_its_classes(classes, tmp_path):
    model = trees.GradientBoostingClassifier(num_trees=2, max_depth=2).fit(INPUTS, classes[GRADES.clip(0, 1)])
    model.save(tmp_path / "model")
    found = trees.GradientBoostingClassifier.load(tmp_path / "model").predict(INPUTS)
    assert found.dtype == classes.dtype and (found == model.predict(INPUTS)).all()


@pytest.mark.slow
def test_exported_predictions_of_numbers_are_those_of_the_model(regressor, trained, tmp_path):
    inputs, targets = table()
    two, three = (
        trees.GradientBoostingClassifier(**FITTED).fit(inputs, np.digitize(targets, ends)) for ends in ((0,), (-1, 1))
    )
    rows = np.float32(table(3000, 1)[0])
    rows[:, 3] = np.arange(3000) % 11 - 2  # categories that were not seen among them
    for column, edges in enumerate(regressor.bins_.edges[:3]):
        near = edges.astype(np.float32)[:60]
        for start, direction in zip((0, 60, 120), (-np.inf, 0, np.inf), strict=True):
            rows[start : start + len(near), column] = np.nextafter(near, np.float32(direction)) if direction else near
    for model, predict in ((regressor, regressor.predict), (two, two.predict_proba), (three, three.predict_proba)):
        content = model.export(tmp_path / "model.stablehlo").read_bytes()
        found = jax.export.deserialize(bytearray(content)).call(rows)
        np.testing.assert_array_equal(found, predict(rows).astype(np.float32))
    splits, state = trained.experiment.data(trained.config), trained.state
    predict = trees.predictor(splits.train.bins, {**state.params, **state.model_state})
    bins = splits.train.bins.apply(rows)
    np.testing.assert_array_equal(jax.jit(predict)(rows), trained.predict(bins))
    content = trained.export(tmp_path / "run.stablehlo").read_bytes()
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(content)).call(bins), trained.predict(bins))


@pytest.mark.slow
def test_the_best_number_of_trees_predicts_after_an_early_stop(tmp_path):
    settings: Any = {"num_trees": 50, "max_depth": 3, "learning_rate": 0.9}
    splits = jn.data.binned(table(), validation=table(32, 1))
    how: Any = {"steps_per_call": 1, "report_every": 1, "eval_every": 1, "patience": 3, "run_dir": tmp_path / "run"}
    run = tiny.fit(experiment(data=splits, row_fraction=1.0, **settings).replace(num_steps=50), **how)
    assert run.summary.status == "stopped early" and run.metrics["step"][-1] < 50
    inputs, targets = splits.validation.examples
    loss = ((run.predict(inputs, state=run.best_state()) - targets) ** 2).mean()
    np.testing.assert_allclose(loss, run.metrics["validation_loss"].min(), rtol=1e-5)
    model = trees.GradientBoostingRegressor(**settings, patience=3).fit(*table())
    grown = (model.state_["trees"]["weight"][:, 0, 0] > 0).sum()
    assert model.state_["num_trees"] == model.n_iter_ == grown - 3
    splits = (model.state_["trees"]["column"][: grown - 3] >= 0).sum()
    assert trees.importances(model.state_, 4, "splits").sum() == splits  # of the trees that predict


@pytest.mark.slow
def test_plots_show_conditions_in_units_of_the_inputs_and_names_of_a_table():
    inputs, _ = table()
    targets = np.isin(inputs[:, 3], (1, 4)) * 2.0 + (inputs[:, 0] > 0.5)
    model = trees.GradientBoostingRegressor(**FITTED).fit(inputs, targets)
    below = inputs[inputs[:, 0] <= 0.5, 0].max(), inputs[inputs[:, 0] > 0.5, 0].min()
    figure = trees.plot_tree(model.state_, model.bins_, names="abcd")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[-1] == "d in {1, 4}\nmissing right\nweight 96" and len(texts) == 7
    assert below[0] < float(texts[2].split("\n")[0].removeprefix("a ≤ ")) < below[1]
    bars = trees.plot_importances(model, "abcd").axes[0]
    widths = [bar.get_width() for bar in bars.patches]
    np.testing.assert_allclose([widths[-1], sum(widths)], [100 * model.feature_importances_[3], 100])
    group, amount = np.divmod(np.arange(ROWS), 16)
    columns = {"amount": np.where(amount > 14, np.nan, amount), "job": np.where(group % 2, "nurse", "cook")}
    columns["kind"] = np.where(group % 2 & (amount > 2), "b", "a")
    data = jn.data.binned(jn.data.standardize(jn.data.table(columns, target="kind")))
    run = tiny.fit(experiment(trees.cross_entropy(2), data), **HOW)
    names = [text.get_text() for text in trees.plot_importances(run).axes[0].get_yticklabels()]
    axes = trees.plot_tree(run, max_depth=1).axes[0]
    texts = [text.get_text().split("\n")[0] for text in axes.texts]
    assert [*names, axes.get_title()] == ["amount is missing", "amount", "job", "tree 0, score of b"]
    assert (texts[0], texts[-1]) == ("… 2 leaves", "job in {nurse}")


@pytest.mark.slow
def test_contributions_are_shapley_values(regressor):
    inputs, state = table(6)[0], regressor.state_
    bins = regressor.bins_.apply(inputs)

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
    for number, row in itertools.product(range(4), range(6)):
        tree = {name: np.asarray(value)[number, 0] for name, value in state["trees"].items()}
        expected[row, 4] += expectation(tree, bins[row], ())
        for order in itertools.permutations(range(4)):
            for place, column in enumerate(order):
                with_it, without = order[: place + 1], order[:place]
                gain = expectation(tree, bins[row], with_it) - expectation(tree, bins[row], without)
                expected[row, column] += gain / 24
    found = trees.contributions(state, bins)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), regressor.predict(inputs), rtol=0, atol=1e-5)


def ranked(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(seed).normal(size=(len(QUERIES), 2))
    return inputs, np.digitize(inputs[:, 0], [-0.5, 0.5, 1.5]), QUERIES


def fit_ranks(options: Any, **splits: Any) -> jn.Run:
    data = jn.data.binned(**({"train": ranked(), "test": ranked(1)} | splits))
    return tiny.fit(experiment(trees.lambda_rank(), data, min_child_weight=1e-6, row_fraction=1.0), **HOW | options)


@pytest.fixture(scope="module")
def ranks() -> jn.Run:
    return fit_ranks({})


def test_gradients_are_sums_over_pairs_and_the_metric_is_the_ndcg():
    scores, (_, grades, _) = np.random.default_rng(0).normal(size=len(QUERIES)).astype(np.float32), ranked()
    weights = np.ones(len(QUERIES), np.float32)
    weights[[2, 9]] = 0  # which are no rows
    rank = trees.lambda_rank(truncation=3, ndcg_at=4)
    gains, gradients, hessians = 2.0**grades - 1, np.zeros(len(QUERIES)), np.zeros(len(QUERIES))
    of_rows = jax.jit(lambda *rows: (rank.metrics["ndcg"](*rows), rank.derivatives(*rows)))
    ndcg, found = jax.device_get(of_rows(scores, grades, QUERIES, weights))
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
    np.testing.assert_allclose(found, [gradients, hessians], atol=1e-6)


def test_training_lowers_the_loss_which_is_averaged_over_queries(ranks):
    first, last = ranks.metrics["train_loss"]
    assert last < first < 0.3
    bins = ranks.experiment.data(Config()).test.examples.inputs["bins"]
    scores = ranks.predict({"bins": bins, "query": QUERIES})
    ndcg = jax.jit(trees.lambda_rank().metrics["ndcg"])(scores, ranked(1)[1], QUERIES, np.ones(len(QUERIES)))
    np.testing.assert_allclose(ranks.final["test_ndcg"], np.asarray(ndcg)[[0, 5, 6, 13]].mean(), rtol=1e-5)


@pytest.mark.slow
def test_devices_rank_by_the_same_trees(ranks):
    assert same_trees(ranks, fit_ranks(FOUR))


def fit_table(**settings: Any) -> Any:
    return trees.GradientBoostingRegressor(**settings).fit(*table())


def fit_targets(objective: trees.Objective, targets: np.ndarray, **settings: Any) -> jn.Run:
    return tiny.fit(experiment(objective, jn.data.binned((table(len(targets))[0], targets)), **settings))


INPUTS, GRADES, _ = ranked()
LABELLED, IMAGES, FEW = (INPUTS, GRADES), np.ones((4, 2, 2)), {"num_steps": 1}
HUBER: Any = {"objective": trees.huber()}
TIMES, LATE = GRADES[:, None].astype("M8[s]"), np.append(1.7e9 + np.arange(len(GRADES) - 1), 0.0)  # one is missing
ERRORS: dict[type[jn.JaxnnError], dict[str, Callable[[], Any]]] = {
    jn.ConfigError: {
        "Regressor has no parameter 'n_estimators': did you mean 'num_trees'": lambda: fit_table(n_estimators=3),
        "row_fraction must be a number > 0 and <= 1": lambda: fit_table(row_fraction=80),
        "l2 must be a number >= 0, not array([0, 1])": lambda: fit_table(l2=np.arange(2)),
        "monotone must be -1, 0 or 1": lambda: fit_table(monotone=(1, 2, 0, 0)),
        "monotone has 2 values, and the table 4": lambda: fit_table(monotone=(1, 0)),
        "no categorical column 9": lambda: fit_table(categorical=(9,)),
        "column of categorical must be an integer": lambda: fit_table(categorical=(True,)),
        "do not keep monotone": lambda: fit_table(objective=trees.absolute_error(), monotone=(1, 0, 0, 0)),
        "5], and must be [batch, 2]": lambda: NetworkClassifier(model=jn.models.MLP((5,))).fit(IMAGES, [0, 1] * 2),
        "the objective is not for numbers": lambda: fit_table(objective=trees.cross_entropy(3)),
        "three or more classes do not keep": lambda: fit_targets(trees.cross_entropy(3), GRADES, monotone=(1, 0)),
        "huber: delta must be a number > 0 and <= 1e+38, not inf": lambda: trees.huber(np.inf),
        f"batch_size={ROWS}": lambda: tiny.fit(experiment().replace(batch_size=32)),
        "strategy='data'": lambda: tiny.fit(experiment(), devices=4, strategy="pmap"),
        "num_trees=2, and the config num_steps=4": lambda: tiny.fit(experiment(num_trees=2)),
        "boosting max_bins=20: give it": lambda: tiny.fit(experiment(max_bins=20)),
        "bins.num_categories": lambda: tiny.fit(experiment(categorical={3: 2})),
        "boosting has (): give boosting categorical=splits": lambda: tiny.fit(experiment(categorical=())),
        f"set eval_batch_size={len(QUERIES)}": lambda: fit_ranks({"eval_batch_size": 20}),
    },
    jn.DataError: {
        "the targets are texts, such as 'b': a regressor needs numbers": lambda: trees.GradientBoostingRegressor().fit(
            table()[0], ["b", "a"] * (ROWS // 2)
        ),
        "is no class that": lambda: NetworkClassifier(**FEW).fit(*LABELLED).confusion_matrix(INPUTS, GRADES + 9),
        "the inputs must be numbers, not datetime64[s]": lambda: trees.GradientBoostingRegressor().fit(TIMES, GRADES),
        "cannot tell the targets apart": lambda: trees.GradientBoostingRegressor(**HUBER).fit(INPUTS, LATE),
        "targets, whose deviation is 2.77e-19": lambda: fit_targets(trees.squared_error(), np.arange(ROWS) * 1e-20),
        "targets, whose deviation is nan": lambda: trees.GradientBoostingRegressor().fit(INPUTS, LATE * 1e200),
        "float32, but classification needs": lambda: fit_targets(trees.cross_entropy(3), np.arange(ROWS) % 3 * 1.0),
        "train: a target is -1, below 0": lambda: fit_targets(trees.poisson(), np.full(ROWS, -1.0)),
        "trees need the columns as bins": lambda: tiny.fit(
            dataclasses.replace(experiment(), data=lambda config: jn.data.arrays((np.ones((ROWS, 4)), np.ones(ROWS))))
        ),
        "one target a row": lambda: fit_targets(trees.squared_error(), np.zeros((ROWS, 1))),
        "needs the query of each row": lambda: fit_ranks({}, train=(INPUTS, GRADES), test=(INPUTS, GRADES)),
        "test: the rows of query 0 are not side": lambda: fit_ranks({}, test=(INPUTS, GRADES, QUERIES % 2)),
        "a number or text for each row": lambda: fit_ranks({}, test=(INPUTS, GRADES, QUERIES[:3])),
    },
}


@pytest.mark.parametrize(("error", "words"), [(error, words) for error, rows in ERRORS.items() for words in rows])
@pytest.mark.several_devices
def test_settings_and_data_that_cannot_be_used_are_refused(error, words):
    with pytest.raises(error, match=re.escape(words)):
        ERRORS[error][words]()


# Each shape of inputs is a program, so the models are small.
TREES: dict[str, Any] = {"num_trees": 5, "max_depth": 2, "learning_rate": 0.5}
NETWORK: dict[str, Any] = {"model": (8,), "num_steps": 60, "learning_rate": 0.05}
KINDS: dict[Any, Any] = {trees.GradientBoostingClassifier: TREES, trees.GradientBoostingRegressor: TREES}
KINDS |= {NetworkClassifier: NETWORK, NetworkRegressor: NETWORK}
# What these check is code that all share. Nor are weights repetitions to its 1e-7, for networks of other batches.
SHARED = re.compile("sample_weight|n_features_in|positive_only|f_contiguous|subset_invariance|idempotent|is_fitted")
CHECKS = [
    pytest.param(estimator, check, id=f"{type(estimator).__name__}-{check.func.__name__}")
    for kind, settings in KINDS.items()
    for estimator, check in estimator_checks_generator(kind(**settings))
    if kind is trees.GradientBoostingClassifier or not SHARED.search(check.func.__name__)
]


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_a_network_takes_texts_and_missing_values_and_keeps_what_it_learned():
    jobs, ages = np.array(["cook", "nurse", None] * 20, object), np.array([20.0, 60.0, np.nan, 40.0] * 15)
    frame = pytest.importorskip("pandas").DataFrame({"job": jobs, "age": ages})
    labels = np.where((jobs == "nurse") | np.isnan(ages), "yes", "no")
    labels[7] = "odd"  # one row, which is trained on
    model = NetworkClassifier(**NETWORK, patience=3).fit(frame, labels)
    found, matrix = model.predict(frame), model.confusion_matrix(frame, labels)
    assert matrix.class_names == ("no", "odd", "yes") and matrix.accuracy == (found == labels).mean() > 0.95
    other = pickle.loads(pickle.dumps(model)).set_params(model=(2,), batch_size=3)
    np.testing.assert_array_equal(other.predict(frame), found)


def test_a_network_is_compiled_once_and_leaves_out_rows_of_weight_zero():
    (inputs, targets), weights, found, counts = table(), np.ones(ROWS), [], []
    columns, compiled = np.stack([targets, -targets], 1), []
    listener = lambda event, *_, **__: compiled.append("backend_compile" in event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    weights[0] = 0
    for target, seed in ((0.0, 3), (1e12, 3), (0.0, 4)):
        columns[0] = target
        model = NetworkRegressor(**NETWORK, random_state=seed).fit(inputs, columns, weights)
        found.append(model.predict(inputs))
        counts.append(sum(compiled))
    jax.monitoring.unregister_event_duration_listener(listener)
    np.testing.assert_array_equal(*found[:2])
    assert found[0].shape == (ROWS, 2) and (found[0] != found[2]).any()
    assert 0 < counts[0] == counts[1] == counts[2] - 1, "another seed compiles initial states again"
