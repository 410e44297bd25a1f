"""Gradient boosting as an experiment: the task, the training step, which adds trees, and predictions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxnn._fields import check_fields, check_range
from jaxnn._text import format_bytes
from jaxnn.data import Bins, check_labels
from jaxnn.observe import available_bytes
from jaxnn.trees._growth import Tree, empty_tree, find_leaves, fixed_sum, grow, num_histograms, num_nodes
from jaxnn.trees._objectives import Objective, derivatives, leaf_quantiles, weighted_mean
from jaxnn.trees._splits import MAX_DEPTH, Growth
from jaxnn.types import (
    Array,
    Batch,
    ConfigError,
    DataError,
    Experiment,
    Metrics,
    Params,
    Splits,
    Task,
    TrainState,
    TrainStep,
    check_int,
)


class Boosting(NamedTuple):
    """A task, and the training step that grows its trees: what `boosting` returns.

    >>> sorted(jn.trees.boosting(jn.trees.squared_error(), num_trees=10)._fields)
    ['num_trees', 'step', 'task']
    """

    task: Task
    step: TrainStep
    num_trees: int


def boosting(
    objective: Objective,
    *,
    num_trees: int,
    learning_rate: Any = 0.1,
    max_depth: int = 6,
    num_leaves: int | None = None,
    l1: Any = 0.0,
    l2: Any = 1.0,
    min_child_weight: Any = 1e-3,
    min_gain: Any = 0.0,
    row_fraction: Any = 1.0,
    column_fraction: Any = 1.0,
    max_bins: int = 255,
    categorical: Sequence[int] | Mapping[int, int] = (),
    monotone: Sequence[int] = (),
) -> Boosting:
    """Returns a gradient boosting of decision trees (Friedman 2001; Chen & Guestrin 2016, arXiv:1603.02754).

    The inputs are bins of `jaxnn.data.binned`, or a dict of ``bins`` and the rows' ``weight`` or ``query``, ``[rows]``.
    Numbers may be tracers, and differ from member to member of a sweep.

    Args:
        objective: what is trained for.
        num_trees: the most rounds, ``config.num_steps``; each adds a tree for each output.
        learning_rate: factor of each tree.
        max_depth: of a tree, at most 10.
        num_leaves: grows the leaf with the largest gain until a tree has this many, as LightGBM does (Ke et al. 2017);
            None: all nodes of a level, as XGBoost does.
        l1: penalty of the absolute values of leaves.
        l2: penalty of the squared values of leaves.
        min_child_weight: the least sum of Hessians in a child, which is the number of rows for the squared error. A
            tree on less predicts 0. If this and ``l2`` are 0, Newton's steps of nearly certain classes may be huge.
        min_gain: the least decrease of the loss by a split.
        row_fraction: rows that a tree is grown on, 0…1, drawn for each tree.
        column_fraction: columns that a tree may use, 0…1, at least one.
        max_bins: that of `jaxnn.data.binned`; trees grow faster from fewer bins.
        categorical: columns whose bins are categories; `Bins.num_categories` has their numbers, which saves time.
        monotone: for each column 1 if predictions must not fall with its value, -1 if they must not rise, else 0; not
            for three or more classes.

    >>> booster = lambda config: jn.trees.boosting(
    ...     jn.trees.cross_entropy(3), num_trees=config.num_steps, learning_rate=config.learning_rate, max_depth=4
    ... )
    """
    check_int("boosting: num_trees", num_trees)
    sampling = {"row_fraction": row_fraction, "column_fraction": column_fraction}
    for name, value in sampling.items():
        check_range("boosting", name, value, 1.0, positive=True)
    counts = categorical.values() if isinstance(categorical, Mapping) else [max_bins]
    growth = Growth(
        max_depth, num_leaves, max_bins, tuple(categorical), max([0, *counts]), tuple(monotone),
        learning_rate, l1, l2, min_child_weight, min_gain, objective.largest_step,
    )  # fmt: skip
    check_fields(growth, "boosting")
    if not {*growth.monotone} <= {-1, 0, 1}:
        raise ConfigError(f"boosting: monotone must be -1, 0 or 1 for each column, not {growth.monotone!r}.")
    if any(growth.monotone[column] for column in growth.categorical if column < len(growth.monotone)):
        raise ConfigError("boosting: categories have no order that predictions could follow: their monotone must be 0.")
    if growth.monotone and objective.leaf_quantile is not None:
        raise ConfigError("boosting: quantiles in leaves do not keep monotone constraints: use another objective.")
    if any(growth.monotone) and objective.num_classes is not None and objective.num_outputs > 1:
        kept = "probabilities of three or more classes do not keep monotone constraints of their scores"
        raise ConfigError(f"boosting: {kept}: leave monotone out, or use two classes.")
    return Boosting(_make_task(objective, growth, num_trees), _make_step(objective, growth, **sampling), num_trees)


def _make_task(objective: Objective, growth: Growth, num_trees: int) -> Task:
    outputs = objective.num_outputs
    is_regression = outputs == 1 and objective.num_classes is None and objective.derivatives is None
    is_regression &= "mean_squared_error" not in objective.metrics  # reported as the objective has it
    errors: dict[str, Callable[..., Any]] = {}
    if is_regression:
        errors["mean_absolute_error"] = lambda score, target: jnp.abs(objective.outputs(score) - target)
        errors["mean_squared_error"] = lambda score, target: (objective.outputs(score) - target) ** 2

    def init(key: jax.Array, batch: Batch) -> tuple[Params, Any]:
        bins, ((targets, _, weights), _) = _bins(batch.inputs), _rows(objective, batch)
        if bins.dtype != jnp.uint8 or jnp.ndim(targets) != 1:
            raise DataError("boosted trees need bins and one target a row: make the data by jn.data.binned.")
        if objective.num_classes is not None and not jnp.issubdtype(targets.dtype, jnp.integer):
            raise DataError(f"the targets are {targets.dtype}, but classification needs integer labels: convert them.")
        if growth.monotone and len(growth.monotone) != bins.shape[1]:
            raise ConfigError(f"monotone has {len(growth.monotone)} values, and the table {bins.shape[1]} columns.")
        start = jnp.zeros(outputs) if objective.start is None else objective.start(targets, weights)
        start = jnp.reshape(start, outputs)
        trees = empty_tree(num_trees, outputs, num_nodes(growth))._asdict()
        scores = jnp.broadcast_to(start, (len(batch.mask), outputs))
        return {"start": start}, {"trees": trees, "num_trees": jnp.int32(0), "scores": scores}

    def predict(params: Params, model_state: Any, inputs: Array) -> jax.Array:
        return predict_scores({**model_state, **params}, _bins(inputs), growth.max_depth)

    def loss(params: Params, model_state: Any, batch: Batch, key: jax.Array) -> Any:
        if len(batch.mask) != len(model_state["scores"]):
            raise ConfigError("boosted trees keep a score for each row: use strategy='data' on several devices.")
        rows, counts = _rows(objective, batch)
        losses, *_ = derivatives(objective, model_state["scores"], *rows)
        return weighted_mean(losses, counts), (model_state, {})

    def evaluate_again(
        params: Params, model_state: Any, batch: Batch, key: jax.Array, kept: Any
    ) -> tuple[Metrics, dict[str, Array]]:
        model, (rows, counts) = {**model_state, **params}, _rows(objective, batch)
        by_output = _add_trees(model, _bins(batch.inputs), growth.max_depth, kept)
        scores = by_output[:, 0] if outputs == 1 else by_output

        def total(of: Callable[..., Any]) -> jax.Array:
            by_row = jax.vmap(of)(scores, batch.targets) if objective.derivatives is None else of(scores, *rows)
            return fixed_sum(jnp.where(counts > 0, by_row, 0) * counts)

        values = {"loss": objective.loss, **errors, **objective.metrics}
        sums = {name: total(of) for name, of in values.items()} | {"count": fixed_sum(counts)}
        return sums, {"scores": by_output, "num_trees": model_state["num_trees"]}

    def evaluate(params: Params, model_state: Any, batch: Batch, key: jax.Array) -> Metrics:
        return evaluate_again(params, model_state, batch, key, None)[0]

    check = functools.partial(_check_data, objective, growth)
    task = Task(init, loss, evaluate, predict, check=check, evaluate_again=evaluate_again)
    return task._replace(derive_metrics=_with_root) if is_regression else task


def _with_root(means: dict[str, Any]) -> dict[str, Any]:
    """``means`` with the root of the squared error in its place, as `tasks.regression` reports it."""
    squared = means["mean_squared_error"]
    rest = {name: mean for name, mean in means.items() if name != "mean_squared_error"}
    return {**rest, "root_mean_squared_error": np.sqrt(squared)}


def _check_data(objective: Objective, growth: Growth, params: Any, state: Any, batch: Batch, splits: Splits) -> None:
    """Raises DataError or ConfigError for data that the objective and the settings are not for."""
    if objective.num_classes is not None:
        check_labels(splits, objective.num_classes)
    for split, source in splits.named().items():
        if not (least := np.min(_counted_targets(source))) >= objective.least_target:
            raise DataError(f"{split}: a target is {least:g}, below {objective.least_target:g}, the least.")
    if objective.num_classes is None:
        targets = _counted_targets(splits.train)
        with np.errstate(all="ignore"):
            varies, deviation = np.ptp(targets) != 0, np.std(targets, dtype=np.float64)
        if varies and not 1e-12 < deviation < 1e12:
            raise DataError(f"float32 cannot hold the targets, whose deviation is {deviation:.3g}: standardize them.")
    needed = 16 * growth.num_bins * _bins(batch.inputs).shape[1] * sum(num_histograms(growth))
    free = available_bytes(jax.local_devices()[0])
    if free is not None and needed > free:
        wrong = f"the histograms of a tree take {format_bytes(needed)}, and {format_bytes(free)} are free"
        raise ConfigError(f"{wrong}: lower max_depth, num_leaves or max_bins.")
    bins = getattr(splits.train, "bins", None)
    if bins is None:
        return
    if {*bins.categorical} != {*growth.categorical}:
        wrong = f"the bins have categorical columns {bins.categorical}, and boosting has {growth.categorical}"
        raise ConfigError(f"{wrong}: give boosting categorical=splits.train.bins.num_categories.")
    most = max(len(edges) + (column not in bins.categorical) for column, edges in enumerate(bins.edges))
    if most >= growth.num_bins:
        raise ConfigError(f"a column has {most} bins, and boosting max_bins={growth.max_bins}: give it {most}.")
    if max(bins.num_categories.values(), default=0) > growth.num_categories:
        raise ConfigError("boosting has fewer categories than the bins: give it bins.num_categories.")


def _counted_targets(source: Any) -> np.ndarray:
    """The targets of a split's rows whose weight is not 0."""
    targets, inputs = np.asarray(source.targets), getattr(source.examples, "inputs", None)
    return targets[np.asarray(inputs["weight"]) > 0] if isinstance(inputs, dict) and "weight" in inputs else targets


def _make_step(objective: Objective, growth: Growth, row_fraction: Any, column_fraction: Any) -> TrainStep:
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scores, bins, (rows, counts) = state.model_state["scores"], _bins(batch.inputs).T, _rows(objective, batch)
        losses, gradients, hessians = derivatives(objective, scores, *rows)
        chosen, columns = rows[2], jnp.ones(bins.shape[0], bool)
        # A tracer may be any number.
        by_row, by_column = (isinstance(one, jax.Array) or one < 1 for one in (row_fraction, column_fraction))
        if by_row or by_column:
            row_key, column_key = jax.random.split(jax.random.fold_in(state.key, state.step))
        if by_row:
            chosen = chosen * (jax.random.uniform(row_key, losses.shape) < row_fraction)
        if by_column:
            number = jnp.maximum(jnp.round(column_fraction * bins.shape[0]), 1)
            columns = jax.random.permutation(column_key, bins.shape[0]) < number

        def tree_of(gradient: jax.Array, hessian: jax.Array, scores: jax.Array) -> tuple[Tree, jax.Array]:
            tree, leaf = grow(bins, gradient * chosen, hessian * chosen, columns, growth)
            if objective.leaf_quantile is not None:
                values = leaf_quantiles(leaf, batch.targets - scores, chosen, objective.leaf_quantile, len(tree.value))
                values = jnp.clip(values, -growth.largest_step, growth.largest_step)
                tree = tree._replace(value=growth.learning_rate * values)
            # Rounded before it is added, in every program: XLA must not fuse the learning rate's product with the sum.
            tree = jax.lax.optimization_barrier(tree)
            return tree, scores + tree.value[leaf]

        if objective.num_outputs == 1:
            tree, after = tree_of(gradients[:, 0], hessians[:, 0], scores[:, 0])
            trees, scores = jax.tree.map(lambda leaf: leaf[None], tree), after[:, None]
        else:
            trees, scores = jax.vmap(tree_of, in_axes=1, out_axes=(0, 1))(gradients, hessians, scores)
        known = state.model_state["trees"]
        place = {"index": state.step, "axis": 0, "allow_negative_indices": False}
        known = {
            name: jax.lax.dynamic_update_index_in_dim(known[name], new, **place)
            for name, new in trees._asdict().items()
        }
        metrics = {
            # As a product, for which XLA makes no array of the weights of every member.
            "loss": jnp.dot(losses, counts, precision="highest") / counts.sum(),
            "splits": (trees.column >= 0).sum(axis=1).astype(jnp.float32).mean(),
        }
        return state._replace(model_state={"trees": known, "num_trees": state.step + 1, "scores": scores}), metrics

    return step


def _bins(inputs: Any) -> Any:
    bins = inputs.get("bins") if isinstance(inputs, dict) else inputs
    if bins is None or not jnp.issubdtype(bins.dtype, jnp.integer):
        raise DataError("trees need the columns as bins: return jn.data.binned(splits) from the experiment's data.")
    return bins


def _rows(objective: Objective, batch: Batch) -> tuple[tuple[Any, Any, Any], Any]:
    """Targets, queries or None, and weights ``[rows]``; and how much each row counts in means ``[rows]``.

    A query counts as its first row whose weight is not 0.
    """
    named = batch.inputs if isinstance(batch.inputs, dict) else {}
    queries, weights = named.get("query"), jnp.asarray(batch.mask) * named.get("weight", 1.0)
    counts = weights
    if objective.derivatives is not None:
        if queries is None:
            raise DataError("the objective needs the query of each row: jn.data.binned((inputs, targets, queries)).")
        known = jax.lax.cummax(jnp.where(weights > 0, queries, -1))  # the last query with a row that counts
        counts = weights * (jnp.diff(known, prepend=-1) != 0)
    return (batch.targets, queries, weights), counts


def predict_scores(model: Mapping[str, Any], inputs: Any, max_depth: int) -> jax.Array:
    """The scores ``[rows]``, or ``[rows, outputs]`` if several, of bins ``[rows, columns]``, by all grown trees.

    ``model`` has parameters and model state together: ``start``, ``trees`` and ``num_trees``.
    """
    scores = _add_trees(model, inputs, max_depth)
    return scores[:, 0] if scores.shape[1] == 1 else scores


def _add_trees(model: Mapping[str, Any], inputs: Any, max_depth: int, kept: Any = None) -> jax.Array:
    """The scores ``[rows, outputs]`` by all grown trees; those of the first ``num_trees`` may be ``kept``."""
    model = jax.tree.map(jnp.asarray, model)  # NumPy's cannot be indexed by tracers
    bins, trees, start = inputs.T, Tree(**model["trees"]), model["start"]

    def add(index: Array, scores: jax.Array) -> Any:
        grown = jax.tree.map(lambda leaf: leaf[index], trees)
        return scores + jax.vmap(lambda tree: tree.value[find_leaves(tree, bins, max_depth)], out_axes=1)(grown)

    before, first = jnp.broadcast_to(start, (inputs.shape[0], start.shape[0])), 0
    if kept is not None:
        before, first = jnp.where(kept["num_trees"] > 0, kept["scores"], before), kept["num_trees"]
    return jax.lax.fori_loop(first, model["num_trees"], add, before)  # type: ignore[no-any-return]


def split_start(model: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns a model for `predict_scores`, in float32, and what is added to its scores.

    An estimator trains on targets without their ``offset``, which may be far from 0, and adds it at the end.
    """
    far = np.float32(model.get("offset", 0.0))
    known = {name: value for name, value in model.items() if name != "offset"}
    return {**known, "start": (np.asarray(model["start"]) - far).astype(np.float32)}, far


def experiment[Config](
    config: Config, data: Callable[[Config], Splits], booster: Callable[[Config], Boosting]
) -> Experiment[Config]:
    """The experiment that trains ``booster(config)``: ``num_steps`` are its trees, and a batch is all rows.

    >>> def booster(config):
    ...     return jn.trees.boosting(jn.trees.squared_error(), num_trees=config.num_steps)
    >>> table = np.eye(8), np.arange(8.0)
    >>> trees = jn.trees.experiment(experiment.config, lambda config: jn.data.binned(table), booster)
    """

    def checked(config: Any) -> Boosting:
        if jax.config.jax_enable_x64:
            raise ConfigError("boosted trees are of float32: turn jax_enable_x64 off, as their estimators do.")
        made = booster(config)
        if made.num_trees < config.num_steps:
            raise ConfigError(f"boosting has num_trees={made.num_trees}, and the config num_steps={config.num_steps}.")
        return made

    return Experiment(
        config,
        data,
        task=lambda config: checked(config).task,
        optimizer=lambda config: optax.identity(),
        step=lambda task, optimizer, config: checked(config).step,
    )


def predictor(
    bins: Bins, model: Mapping[str, Any], objective: Objective | None = None, *, max_depth: int = MAX_DEPTH
) -> Callable[[Array], Array]:
    """Returns a pure function from numbers ``[rows, columns]`` float32, NaN for missing ones, to predictions.

    Its scores are those of `Run.predict` from the bins of `Bins.apply`, bit for bit in float32, and its outputs those
    of an estimator; but outputs of more than ten classes, or of an objective of your own, only to rounding. ``bins``
    are ``splits.train.bins``, and ``model`` is the model state of a run with its parameter ``start``; or ``bins_`` and
    ``state_`` of an estimator. With an ``objective`` its ``outputs`` are predicted, else scores ``[rows]``, or ``[rows,
    outputs]`` if several. A ``max_depth`` below the most, that of the trees, saves time.

    >>> inputs = np.array([[0.5, 1], [1.5, np.nan], [2.5, 3]])
    >>> model = jn.trees.GradientBoostingRegressor(num_trees=3, max_depth=1).fit(inputs, [1.0, 2.0, 4.0])
    >>> predict = jax.jit(jn.trees.predictor(model.bins_, model.state_))
    >>> bool((predict(inputs) == model.predict(inputs).astype(np.float32)).all())
    True
    """
    edges = np.full((len(bins.edges), 1 + max(map(len, bins.edges))), np.inf)
    for column, one in enumerate(bins.edges):
        edges[column, : len(one)] = one
    nearest = edges.astype(np.float32)
    # Rounded down: no float32 is between an edge and its bound, so that all of them stay in their bins.
    bounds = np.where(nearest > edges, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    known = np.where((nearest == edges) & np.isfinite(edges), nearest, np.nan)
    is_category = np.isin(np.arange(len(bins.edges)), bins.categorical)
    trees, far = split_start(model)

    def apply(values: Array, bounds: Array, known: Array, is_category: Array) -> jax.Array:
        at = jnp.searchsorted(bounds, values)
        is_missing = jnp.isnan(values) | (is_category & (known[at] != values))
        return jnp.where(is_missing, bins.missing, at).astype(jnp.uint8)

    def predict(inputs: Array) -> Array:
        columns = jax.vmap(apply, (1, 0, 0, 0), 1)
        found = columns(jnp.asarray(inputs, jnp.float32), bounds, known, is_category)
        scores = predict_scores(trees, found, max_depth)
        scores = jax.lax.optimization_barrier(scores + far)  # as `outputs` alone computes with them
        return scores if objective is None else objective.outputs(scores)

    return predict
