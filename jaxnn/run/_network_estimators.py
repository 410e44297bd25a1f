"""Networks with the interface of scikit-learn, and what trees share of it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.special import softmax  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, validate_data

from jaxnn import data, tasks
from jaxnn.engine import near_divisor
from jaxnn.models import MLP, TableMLP
from jaxnn.nn import cross_entropy
from jaxnn.observe import Lowered
from jaxnn.optim import schedules
from jaxnn.run._confusion_matrix import ConfusionMatrix
from jaxnn.run._fit import TrainConfig, iterate
from jaxnn.types import ConfigError, DataError, Examples, Experiment, Splits, Task, check_int, suggest

LEAST_STEPS, LEAST_EPOCHS = 1_000, 20  # of a training whose length is not given: the longer one
LEAST_WINDOW = 20  # steps between evaluations
STEPS_PER_CALL = 100  # about
LARGE_BATCH = 8  # times the batch size, for predictions of many rows
WIDTHS = {2_000: 64, 20_000: 128, math.inf: 256}  # of the default model, by what the number of rows is below
_TEXTS = (
    "Texts in the inputs: encode them as integers and name their columns in categorical=, or use jn.data.table and "
    "binned; as the target: a classifier."
)


def with_hints[Estimator: type[Any]](kind: Estimator) -> Estimator:
    """Returns the class with names of parameters checked: the error of its own constructor would name a private one."""
    init = kind.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        if args:
            name, field = type(self).__name__, dataclasses.fields(self)[1]
            example = f"{field.name}={field.default}"
            raise ConfigError(f"{name} takes parameters by name, such as {example}, not {args[0]!r:.60}.")
        self._check_names(given)
        init(self, **given)

    kind.__init__ = checked
    return kind


class Estimator(BaseEstimator):
    """What classifiers and regressors share; a subclass is a dataclass of its parameters."""

    patience: int | None
    validation_fraction: float

    @classmethod
    def _check_names(cls, given: Iterable[str]) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no parameter {name!r}: {suggest(name, known)}.")

    def set_params(self, **params: Any) -> Self:
        """Sets parameters by name, and returns the estimator; ConfigError for other names."""
        self._check_names(params)
        super().set_params(**params)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _validated(self, inputs: Any, *targets: Any, **how: Any) -> Any:
        """Returns inputs, and targets if given, checked by scikit-learn, which would take dates for numbers."""
        of_frame = [dtype for dtype in np.ravel(getattr(inputs, "dtypes", ())) if hasattr(dtype, "kind")]
        for dtype in of_frame or [np.asarray(inputs).dtype]:
            if dtype.kind in "mM":
                raise DataError(f"the inputs must be numbers, not {dtype}: give times as seconds since one of them.")
        try:
            found = validate_data(self, inputs, *targets, dtype=np.float64, ensure_all_finite="allow-nan", **how)
        except ValueError as error:  # scikit-learn's own checks ask for its type
            if "could not convert string" in str(error):
                error.add_note(_TEXTS)
            raise
        if "y_numeric" in how and found[1].dtype.kind not in "iufb":
            raise DataError(f"the targets are texts, such as {str(found[1].flat[0])!r}: a regressor needs numbers.")
        return found

    def _weights(self, inputs: np.ndarray, sample_weight: Any) -> np.ndarray:
        """The weight of each row; one of weight 0 must count for nothing, neither in training nor in a check."""
        if sample_weight is None:
            return np.ones(len(inputs), np.float32)
        given = [sample_weight] * len(inputs) if isinstance(sample_weight, int | float) else sample_weight
        weights: np.ndarray = check_array(given, ensure_2d=False, dtype=np.float32, ensure_non_negative=True)
        check_consistent_length(inputs, weights)
        if weights.ndim != 1 or not weights.any():
            raise DataError("sample_weight must be a number for each row, [rows], and one weight not zero.")
        if not 1e-12 < (mean := float(weights[weights > 0].mean(dtype=np.float64))) < 1e12:
            raise DataError(f"float32 cannot hold gains of splits for a mean sample_weight of {mean:.3g}: scale them.")
        return weights

    def _held_out(self, targets: np.ndarray, weights: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows to train on, and with ``patience`` a random part of them for validation."""
        rows, others = np.flatnonzero(weights), np.empty(0, int)
        if self.patience is not None:
            alone = np.zeros(len(rows), bool)
            if is_classifier(self):  # a class of one row cannot be divided: it is trained on
                alone = (np.bincount(targets[rows]) == 1)[targets[rows]]
            kept, rows = rows[alone], rows[~alone]
            how = {"stratify": targets[rows] if is_classifier(self) else None, "random_state": seed}
            try:
                rows, others = train_test_split(rows, test_size=self.validation_fraction, **how)
            except ValueError as error:
                raise DataError(f"the rows cannot be divided for patience ({error}): set patience=None.") from error
            rows = np.concatenate([kept, rows])
        return rows, others


class LabelEstimator(ClassifierMixin, Estimator):
    """What classifiers share; a subclass has ``predict_proba``."""

    def _labels(self, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Learns ``classes_`` from rows that count; returns labels int32 ``[rows]``, which mean nothing for others."""
        check_classification_targets(targets)
        self.classes_ = np.unique(targets[weights > 0])
        if len(self.classes_) < 2:
            one = self.classes_.tolist()[0]
            raise DataError(f"the targets have one class, {one!r}: classification needs two or more.")
        labels: np.ndarray = np.searchsorted(self.classes_, targets).astype(np.int32)
        return labels

    def predict(self, inputs: Any) -> np.ndarray:
        """Returns the most probable class of each row: ``[rows]``."""
        best = self.predict_proba(inputs).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def confusion_matrix(self, X: Any, y: Any) -> ConfusionMatrix:
        """Returns how often rows of each of ``classes_`` are predicted as each; its ``plot()`` is a picture."""
        predicted = self.predict(X)
        if (unknown := ~np.isin(y, self.classes_)).any():
            raise DataError(f"{np.asarray(y)[unknown].tolist()[0]!r} is no class that the model was trained on.")
        counts = confusion_matrix(y, predicted, labels=self.classes_)
        return ConfusionMatrix(counts, tuple(map(str, self.classes_)), type(self).__name__)


@with_hints
@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class _NetworkEstimator(Estimator):
    """What classifier and regressor share: parameters, training and outputs."""

    model: Any = None
    learning_rate: float = 3e-3
    optimizer: Any = None
    num_steps: int | None = None
    batch_size: int = 128
    random_state: Any = 0
    patience: int | None = None
    validation_fraction: float = 0.1
    run_dir: str | Path | None = None

    @property
    def _is_own(self) -> bool:
        """Whether the model is the user's, and not a perceptron of some widths."""
        return not isinstance(self.model, tuple | list | None)

    def _encoded(self, inputs: Any, *targets: Any, **how: Any) -> tuple[Any, ...]:
        """Returns inputs that are ready for the model, and targets if given: then it learns how to make them ready."""
        frame = {name: inputs[name] for name in getattr(inputs, "columns", ())}
        has_texts = any(np.asarray(column).dtype.kind not in "iufbmM" for column in frame.values())
        if has_texts if targets else hasattr(self, "columns_"):
            if targets:
                rows = np.zeros(len(inputs))
                _, *targets = self._validated(rows[:, None], *targets, **how)
                source: Any = data.standardize(data.table({**frame, "": rows}, target="")).train
                self.columns_ = source.columns
            validate_data(self, inputs, skip_check_array=True, reset=bool(targets))
            return self.columns_.apply(frame or inputs), *targets
        if targets:
            inputs, *targets = self._validated(inputs, *targets, allow_nd=self._is_own, **how)
            self.__dict__.pop("columns_", None)
            self.scaling_ = data.learn_scaling(inputs)
        else:
            inputs = self._validated(inputs, reset=False, allow_nd=self._is_own)
        if inputs.ndim > 2 and np.isnan(inputs).any():
            raise DataError("the inputs have NaN, which is a missing value in a table [rows, columns] alone.")
        return data.apply_scaling(inputs, *self.scaling_), *targets

    def _module(self, model: Any, num_outputs: int, num_rows: int) -> Any:
        """Returns the model: the given one, what a function makes, or a perceptron of the given widths."""
        if not isinstance(model, tuple | list | None):
            makes = isinstance(model, type | types.FunctionType | functools.partial)
            # Metaclasses of libraries hide the signature of a class.
            called: Any = vars(model).get("__init__", model) if isinstance(model, type) else model
            is_factory = makes and {"rngs", "key"} & {*inspect.signature(called).parameters}
            return model(num_outputs) if makes and not is_factory else model
        width = next(width for rows, width in WIDTHS.items() if num_rows < rows)
        widths = (*((width, width) if model is None else model), num_outputs)
        columns = getattr(self, "columns_", None)
        return MLP(widths) if columns is None else TableMLP(widths, num_categories=columns.num_categories)

    def _optimizer(self, num_steps: int) -> optax.GradientTransformation:
        rate, made = self.learning_rate, self.optimizer or optax.adam
        if not isinstance(rate, int | float | np.number) or not 0 < rate < np.inf:
            raise ConfigError(f"learning_rate must be a number above 0, not {rate!r}.")
        found: optax.GradientTransformation = made(schedules.cosine(rate, num_steps)) if callable(made) else made
        return found

    def _train(self, inputs: Any, targets: np.ndarray, weights: np.ndarray, num_outputs: int) -> Self:
        """Trains on ``targets [rows]`` of labels or ``[rows, outputs]`` of numbers."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rows, others = self._held_out(targets, weights, seed)
        rows = np.random.default_rng(seed).permutation(rows)
        weights = (weights / weights[rows].mean()).astype(np.float32)
        whole = data.ArraySource(Examples(inputs, {"target": targets, "weight": weights}))
        train, validation = (data.ArraySource(whole.read(part)) for part in (rows, others))
        splits = Splits(train, validation=validation if len(others) else None)
        batch_size = min(check_int("batch_size", self.batch_size), len(rows))
        epoch = data.steps_per_epoch(len(rows), batch_size)
        num_steps = max(LEAST_STEPS, LEAST_EPOCHS * epoch) if self.num_steps is None else self.num_steps
        window = near_divisor(check_int("num_steps", num_steps), max(epoch, LEAST_WINDOW))
        fitted = self.model, num_outputs, len(rows)
        task = self._task(self._module(*fitted), num_outputs, seed)
        # With one seed and other initial parameters and rows, the program that trains is compiled once for all.
        config, optimizer = TrainConfig(batch_size, num_steps, seed=0), self._optimizer(num_steps)
        experiment = Experiment(config, lambda _: splits, lambda _: task, lambda _: optimizer)
        how: Any = {"report_every": window, "eval_every": window, "patience": self.patience, "run_dir": self.run_dir}
        if not self._is_own:  # nothing to measure
            how["steps_per_call"] = near_divisor(window, STEPS_PER_CALL)
        best, state = math.inf, None
        with jax.enable_x64(False):
            iteration = iterate(experiment, record=self.run_dir is not None, progress="none", **how)
            for report in iteration:
                loss = report.metrics.get("validation_loss", -report.step)
                if state is None or loss < best:
                    best, state, self.n_iter_ = loss, iteration.state, report.step
        assert state is not None  # a run has a report
        self.fitted_, self.state_ = fitted, jax.device_get((state.params, state.model_state))
        self.history_, self.batch_size_ = dict(iteration.run.metrics), batch_size
        return self

    def _task(self, module: Any, num_outputs: int, seed: int) -> Task:
        """The mean of the weighted losses."""

        def loss(outputs: Any, targets: Any) -> jax.Array:
            if jnp.shape(outputs)[1:] != (num_outputs,):
                shape = list(jnp.shape(outputs))
                raise ConfigError(
                    f"the model's outputs are {shape}, and must be [batch, {num_outputs}]: change its end."
                )
            losses: jax.Array = targets["weight"] * self._losses(outputs, targets["target"])
            return losses

        task = tasks.supervised(module, loss, {"loss": loss})
        return task._replace(init=lambda key, batch: task.init(jax.random.fold_in(key, seed), batch))

    def _outputs(self, inputs: Any) -> np.ndarray:
        """Returns the model's outputs ``[rows, outputs]`` float64, in batches of one size or, of many rows, another."""
        check_is_fitted(self)
        source = data.ArraySource(Examples(self._encoded(inputs)[0], None))
        apply: Any = tasks.as_model(self._module(*self.fitted_))[1]
        count, size = source.num_examples, self.batch_size_
        size = LARGE_BATCH * size if count > LARGE_BATCH * size else size
        parts = [source.read(rows).inputs for rows in data.padded_indices(count, size)[0]]

        def forward(state: Any, inputs: Any) -> Any:
            return apply(*state, inputs, None).outputs

        with jax.enable_x64(False):
            program, _ = Lowered.of(forward, "predict", "predictions", self.state_, parts[0]).compile()
            found = [np.asarray(program(self.state_, part), np.float64) for part in parts]
        return np.concatenate(found)[:count]


class NetworkRegressor(RegressorMixin, _NetworkEstimator):
    """A network for numbers, with scikit-learn's interface; arguments as of `NetworkClassifier`.

    Targets are standardized inside, and may be several for a row. The loss is the squared error.

    >>> inputs = np.linspace(0, 1, 50)[:, None]
    >>> from jaxnn.estimators import NetworkRegressor
    >>> model = NetworkRegressor(num_steps=200).fit(inputs, inputs[:, 0] ** 2)
    >>> model.predict(inputs).shape, model.score(inputs, inputs[:, 0] ** 2) > 0.9
    ((50,), True)
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on inputs ``X [rows, columns]`` and targets ``y [rows]`` or ``[rows, outputs]``."""
        inputs, targets = self._encoded(X, y, y_numeric=True, multi_output=True)
        weights = self._weights(targets, sample_weight)
        self.center_, deviation = targets[weights > 0].mean(axis=0), targets[weights > 0].std(axis=0)
        self.scale_ = np.where(deviation > 0, deviation, 1.0)
        scaled = ((targets - self.center_) / self.scale_).astype(np.float32)
        columns = scaled.reshape(len(scaled), -1)
        return self._train(inputs, columns, weights, columns.shape[1])

    @staticmethod
    def _losses(outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.square(outputs - targets).mean(axis=1)

    def predict(self, inputs: Any) -> np.ndarray:
        """Returns the predictions ``[rows]`` or ``[rows, outputs]``."""
        found = self._outputs(inputs)
        found = found.reshape(len(found), *np.shape(self.scale_))
        return np.asarray(found * self.scale_ + self.center_)


class NetworkClassifier(LabelEstimator, _NetworkEstimator):
    """A network for classes, with scikit-learn's interface: pipelines, searches, cross-validation.

    Columns are standardized inside. A missing value is NaN; a data frame may have columns of texts, which are embedded.
    A second fit to data of the same shape compiles nothing.

    >>> inputs = np.linspace(0, 1, 50)[:, None]
    >>> from jaxnn.estimators import NetworkClassifier
    >>> model = NetworkClassifier(model=(16,), num_steps=200)
    >>> model.fit(inputs, np.where(inputs[:, 0] > 0.5, "high", "low")).predict([[0.1], [0.9]]).tolist()
    ['low', 'high']

    Args:
        model: widths of the hidden layers of a perceptron, such as ``(256, 128)``, None: two, wider for more rows; a
            function of the number of outputs that returns a model, ``lambda outputs: jn.models.CNN(outputs)``; or a
            model as of `tasks.as_model`, for inputs of any shape.
        learning_rate: the peak of a cosine schedule.
        optimizer: a function of the schedule, such as ``optax.adamw``, or an optimizer of its own rate; None: Adam.
        num_steps: number of updates; None: 1,000, or 20 passes over the rows if these are more.
        batch_size: rows of an update; fewer if there are not as many.
        random_state: decides initial parameters, the order of the rows and those held out.
        patience: training stops after this many evaluations, one an epoch or so, that do not lower the loss of a random
            ``validation_fraction`` of the rows; the best state predicts. None: no early stop.
        validation_fraction: see ``patience``.
        run_dir: the directory of a record of the fit, which must not exist; None: no record.

    Attributes:
        classes_: the classes, sorted.
        history_: arrays by name, as ``Run.metrics``.
        n_iter_: updates of the state that predicts.
        state_: parameters and state of the model, as NumPy arrays.
    """

    _losses = staticmethod(cross_entropy)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains on inputs ``X [rows, columns]`` and labels ``y [rows]`` of any kind."""
        inputs, targets = self._encoded(X, y)
        weights = self._weights(targets, sample_weight)
        labels = self._labels(targets, weights)
        return self._train(inputs, labels, weights, len(self.classes_))

    def predict_proba(self, inputs: Any) -> np.ndarray:
        """Returns the probability of each of ``classes_``: ``[rows, classes]``."""
        return np.asarray(softmax(self._outputs(inputs), axis=1))
