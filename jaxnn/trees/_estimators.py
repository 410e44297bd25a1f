"""Gradient boosting with the interface of scikit-learn."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from sklearn.base import RegressorMixin, is_classifier
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from jaxnn._disk import read_file, write_bytes
from jaxnn._fields import bounded, check_fields
from jaxnn._json import with_tuples
from jaxnn._text import first_line
from jaxnn.data import BinnedSource, Bins, check_resolution, learn_bins
from jaxnn.run import Estimator, LabelEstimator, export_function, fit, with_hints
from jaxnn.trees._boosting import Boosting, boosting, experiment, predict_scores, predictor, split_start
from jaxnn.trees._explanations import importances
from jaxnn.trees._model_files import check_arrays, check_bins, pack, unpack
from jaxnn.trees._objectives import Objective, cross_entropy, squared_error
from jaxnn.types import Batch, ConfigError, Examples, RecordError, Splits, Task, TrainingError, TrainState, check_int

_Config = dataclasses.make_dataclass("_Config", ["batch_size", "num_steps", "seed"], frozen=True)


@with_hints
@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class _GradientBoosting(Estimator):
    """What classifier and regressor share: parameters, training and scores."""

    objective: Objective | None = None
    num_trees: int = 100
    learning_rate: float = 0.1
    max_depth: int = 6
    num_leaves: int | None = None
    l1: float = 0.0
    l2: float = 1.0
    min_child_weight: float = 1e-3
    min_gain: float = 0.0
    row_fraction: float = 1.0
    column_fraction: float = 1.0
    max_bins: int = 255
    categorical: tuple[int, ...] = ()
    monotone: tuple[int, ...] = ()
    random_state: int | None = 0
    patience: int | None = bounded(None, least=1)
    validation_fraction: float = bounded(0.1, positive=True)

    @property
    def n_iter_(self) -> int:
        """The number of trees that predict for each output; fewer than ``num_trees`` after an early stop."""
        check_is_fitted(self)
        return int(self.state_["num_trees"])

    @property
    def feature_importances_(self) -> np.ndarray:
        """The share ``[columns]`` of each column in the gains of all splits; zeros without any."""
        check_is_fitted(self)
        gains = importances(self.state_, self.n_features_in_)
        return gains / (gains.sum() or 1.0)

    def _booster(self) -> Boosting:
        """Returns the boosting of these parameters for ``bins_``; ConfigError for parameters that it cannot take."""
        objective, num_classes = self._objective(self.objective), len(getattr(self, "classes_", ()))
        if not isinstance(objective, Objective):
            raise ConfigError(f"objective must be one as jn.trees.huber(), not {objective!r}.")
        if (objective.num_classes or 0) != num_classes:
            wanted = f"labels of {num_classes} classes" if num_classes else "numbers"
            raise ConfigError(f"the objective is not for {wanted}: see jn.trees.Objective.num_classes.")
        check_fields(self)
        settings = self.get_params() | {"objective": objective, "categorical": self.bins_.num_categories}
        return boosting(**{name: settings[name] for name in inspect.signature(boosting).parameters})

    def _train(self, inputs: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> Self:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rows, others = self._held_out(targets, weights, seed)
        self.bins_ = learn_bins(inputs[rows], max_bins=self.max_bins, categorical=self.categorical)
        table = BinnedSource(Examples({"bins": self.bins_.apply(inputs), "weight": weights}, targets), bins=self.bins_)
        train, validation = (dataclasses.replace(table, examples=table.read(part)) for part in (rows, others))
        data = Splits(train, validation=validation if len(others) else None)
        booster = self._booster()
        trees_per_call = 1 if len(others) else self.num_trees
        every: Any = dict.fromkeys(("steps_per_call", "report_every", "eval_every"), trees_per_call)
        made = experiment(_Config(len(rows), self.num_trees, seed), lambda _: data, lambda _: booster)
        with jax.enable_x64(False):  # trees are of float32, and so are their bits
            try:
                run = fit(made, record=False, progress="none", patience=self.patience, **every)
            except TrainingError as error:
                raise TrainingError(f"the loss is no longer finite: {_LIMIT}") from error
            if self.objective is not None:
                _check_loss(booster.task, run.state, train)
        self.state_ = jax.device_get({**run.state.params, **run.state.model_state})
        self.state_.pop("scores")  # of the training rows
        self.state_["start"] = self.state_["start"].astype(np.float64)
        if len(others):
            self.state_["num_trees"] = np.int32(1 + run.metrics["validation_loss"].argmin())
        # What predicts does not change with parameters that are set later.
        self.fitted_ = self.get_params()
        return self

    def save(self, path: str | Path) -> None:
        """Writes the fitted model as NumPy's ``.npz`` with a checksum, without pickle.

        A ``random_state`` that is a generator is saved as None, which draws other numbers at each fit.

        Raises:
            ConfigError: a class is an object that NumPy cannot write without pickle.
            RecordError: the file cannot be written.
        """
        check_is_fitted(self)
        edges = {f"{column:05}": one for column, one in enumerate(self.bins_.edges)}
        arrays = flatten_dict({**self.state_, "edges": edges}, sep=".")  # type: ignore[no-untyped-call]
        if hasattr(self, "classes_"):
            is_object = self.classes_.dtype == object  # which needs pickle
            arrays["classes"] = np.array(self.classes_.tolist()) if is_object else self.classes_
            if arrays["classes"].dtype == object:
                raise ConfigError(f"the classes are objects, such as {self.classes_[0]!r}: use texts or numbers.")
        if hasattr(self, "feature_names_in_"):
            arrays["names"] = np.array(self.feature_names_in_.tolist())
        settings = dict(self.fitted_)
        own = settings.pop("objective") is not None
        if not isinstance(settings["random_state"], numbers.Integral):
            settings["random_state"] = None
        facts = {"class": type(self).__name__, "own_objective": own, "settings": settings}
        write_bytes(Path(path), pack(arrays, facts))

    @classmethod
    def load(cls, path: str | Path, objective: Objective | None = None) -> Self:
        """Reads a model that `save` wrote; an ``objective`` that was given must be given again.

        RecordError if the file is missing or damaged, or holds what no `save` writes.
        """
        try:
            arrays, facts = unpack(read_file(path))
            if facts["class"] != cls.__name__:
                raise ValueError(f"it holds a {facts['class']!s:.60}")
            if facts["own_objective"] != (objective is not None):
                raise ValueError(f"it was trained {'with' if objective is None else 'without'} an objective of its own")
            given: Any = with_tuples(facts["settings"])
            model = cls(objective=objective, **given)
            model._restore(arrays)
        # Any exception: zipfile, NumPy, JSON and the checks of parameters have many for a file from elsewhere.
        except Exception as error:
            raise RecordError(
                f"{path} cannot be read ({first_line(error)}): give a file of {cls.__name__}.save."
            ) from error
        return model

    def _restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes what a fit makes from the ``arrays`` of a file; ValueError or ConfigError if none could make it."""
        count = sum(name.startswith("edges.") for name in arrays)
        edges = tuple(arrays.pop(f"edges.{column:05}") for column in range(count))
        for column in self.categorical:
            if check_int("a column of categorical", column, least=0) >= count:
                raise ConfigError(f"there is no categorical column {column}")
        self.bins_, self.n_features_in_ = Bins(edges, self.categorical), count
        names, classes = arrays.pop("names", None), arrays.pop("classes", None) if is_classifier(self) else None
        check_bins(self.bins_, names, classes)
        if names is not None:
            self.feature_names_in_ = names.astype(object)
        if classes is not None:
            self.classes_ = classes
        check_random_state(self.random_state)
        booster, bins = self._booster(), jnp.zeros((1, count), jnp.uint8)
        batch = Batch(bins, jnp.zeros(1, jnp.float32 if classes is None else jnp.int32), np.ones(1, np.float32))
        with jax.enable_x64(False):
            params, state = jax.eval_shape(booster.task.init, jax.random.key(0), batch)
        like = {name: one for name, one in (params | state).items() if name != "scores"}
        like["start"] = jax.ShapeDtypeStruct(like["start"].shape, np.float64)
        if classes is None:
            like["offset"] = jax.ShapeDtypeStruct((), np.float64)
        check_arrays(arrays, flatten_dict(like, sep="."), count, self.max_depth)  # type: ignore[no-untyped-call]
        self.state_ = unflatten_dict(arrays, sep=".")  # type: ignore[no-untyped-call]
        self.fitted_ = self.get_params()

    def export(self, path: str | Path, *, platforms: Sequence[str] | None = None) -> Path:
        """Writes predictions of numbers ``[rows, columns]`` float32 as a program that needs JAX alone.

        A classifier's are probabilities. Path, platforms and errors are as of `Run.export`.
        """
        check_is_fitted(self)
        objective = self._objective(self.fitted_["objective"])
        predict = predictor(self.bins_, self.state_, objective, max_depth=self.fitted_["max_depth"])
        like = jax.ShapeDtypeStruct((1, self.n_features_in_), np.float32)
        return export_function(Path(path), predict, like, "symbolic", platforms)

    def _outputs(self, inputs: Any) -> np.ndarray:
        check_is_fitted(self)
        values = self._validated(inputs, reset=False)
        trees, far = split_start(self.state_)
        with jax.enable_x64(False):
            near = np.asarray(_predict(trees, self.bins_.apply(values), self.fitted_["max_depth"]), np.float64)
            return np.asarray(self._objective(self.fitted_["objective"]).outputs(near + far))


_LIMIT = "lower learning_rate, or limit Newton's steps by objective._replace(largest_step=0.7)."


def _check_loss(task: Task, state: TrainState, train: BinnedSource) -> None:
    """Raises TrainingError if the training loss rose by more than its size, as an exponential loss may."""
    batch, scores = train.as_batch(train.examples), state.model_state["scores"]
    before, after = (
        float(task.loss(state.params, {"scores": at}, batch, state.key)[0])
        for at in (jnp.broadcast_to(state.params["start"], scores.shape), scores)
    )
    if not after <= before + abs(before):
        raise TrainingError(f"the training loss rose from {before:.3g} to {after:.3g}: {_LIMIT}")


_predict = jax.jit(predict_scores, static_argnums=2)


class GradientBoostingRegressor(RegressorMixin, _GradientBoosting):
    """Gradient-boosted trees for a number, with scikit-learn's interface; arguments as for `boosting`.

    ``objective`` is by default `squared_error`. With ``patience``, training stops after this many trees that do not
    lower the loss of a random ``validation_fraction`` of the rows, and the best number of trees predicts.

    >>> model = jn.trees.GradientBoostingRegressor(num_trees=5, max_depth=2)
    >>> inputs = np.linspace(0, 1, 50)[:, None]
    >>> model.fit(inputs, inputs[:, 0] ** 2).predict(inputs).shape
    (50,)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on inputs ``X [rows, columns]``, NaN for missing values, and targets ``y [rows]``."""
        inputs, targets = self._validated(X, y, y_numeric=True)
        weights = self._weights(inputs, sample_weight)
        counted = weights > 0
        with np.errstate(all="ignore"):  # what is too large for float32 is refused before training
            # float32 has room for the differences, wherever most targets are; it holds the center too.
            center = np.float64(np.float32(np.median(targets[counted]))) if self.objective is None else 0.0
            targets = np.where(counted, targets - center, 0.0)
            check_resolution("the targets", targets[counted])
            known = targets.astype(np.float32)
        self._train(inputs, known, weights)
        self.state_ |= {"start": self.state_["start"] + center, "offset": np.float64(center)}
        return self

    def _objective(self, given: Objective | None) -> Objective:
        return given or squared_error()

    def predict(self, inputs: Any) -> np.ndarray:
        """Returns the predictions ``[rows]``."""
        return self._outputs(inputs)


class GradientBoostingClassifier(LabelEstimator, _GradientBoosting):
    """Gradient-boosted trees for classes, with scikit-learn's interface; arguments as for `boosting`.

    ``objective`` is by default `cross_entropy`; ``patience`` is as of `GradientBoostingRegressor`.

    >>> model = jn.trees.GradientBoostingClassifier(num_trees=5, max_depth=2)
    >>> inputs = np.linspace(0, 1, 50)[:, None]
    >>> model.fit(inputs, np.where(inputs[:, 0] > 0.5, "high", "low")).predict([[0.1], [0.9]]).tolist()
    ['low', 'high']
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on inputs ``X [rows, columns]``, NaN for missing values, and labels ``y [rows]`` of any kind."""
        inputs, targets = self._validated(X, y)
        weights = self._weights(inputs, sample_weight)
        return self._train(inputs, self._labels(targets, weights), weights)

    def _objective(self, given: Objective | None) -> Objective:
        return given or cross_entropy(len(self.classes_))

    def predict_proba(self, inputs: Any) -> np.ndarray:
        """Returns the probability of each of ``classes_``: ``[rows, classes]``."""
        return self._outputs(inputs)
