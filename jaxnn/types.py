"""Types shared by all packages: batch, state, task, data set, experiment; the errors.

A ``NamedTuple`` of arrays is a pytree and may cross ``jit``. A ``NamedTuple`` of functions is an interface and is
closed over. A frozen dataclass is a value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import numbers
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
import optax

type Array = jax.Array | np.ndarray
type PyTree = Any
type Params = Mapping[str, Any]
type ModelState = Mapping[str, Any]
type Metrics = dict[str, jax.Array]


# Names of fields and options in other libraries. A run's length is in updates, so epochs are among them.
USUAL_NAMES = {
    "learning_rate": ("lr", "eta", "step_size"),
    "num_steps": ("epochs", "num_epochs", "n_epochs", "max_epochs", "steps", "max_steps", "iterations", "num_iters"),
    "batch_size": ("bs", "batch", "minibatch_size"),
    "seed": ("random_state", "random_seed", "rng"),
    "weight_decay": ("wd", "l2"),
    "model": ("hidden_layer_sizes", "module"),
    "features": ("hidden", "hidden_sizes", "layers", "units"),
    "run_dir": ("out", "out_dir", "output", "output_dir", "log_dir", "save_dir"),
    "resume": ("restore", "ckpt", "checkpoint", "continue"),
    "progress": ("verbose", "quiet"),
    "patience": ("early_stopping", "early_stopping_rounds", "n_iter_no_change"),
    "device": ("platform", "backend", "accelerator"),
    "devices": ("gpus", "num_gpus", "num_devices"),
    "report_every": ("log_every", "log_interval"),
    "eval_every": ("eval_interval", "val_every", "validate_every"),
    "checkpoint_every": ("save_every", "save_interval"),
    # Of trees, in scikit-learn, XGBoost, LightGBM and CatBoost.
    "num_trees": (
        "n_estimators",
        "max_iter",
        "n_iter",
        "num_iterations",
        "num_boost_round",
        "num_rounds",
        "iterations",
    ),
    "max_depth": ("depth",),
    "num_leaves": ("max_leaf_nodes", "max_leaves"),
    "l1": ("reg_alpha", "alpha", "lambda_l1"),
    "l2": ("reg_lambda", "lambda", "lambda_l2", "l2_regularization", "l2_leaf_reg"),
    "min_child_weight": ("min_samples_leaf", "min_child_samples", "min_data_in_leaf", "min_sum_hessian_in_leaf"),
    "min_gain": ("gamma", "min_split_gain", "min_split_loss", "min_gain_to_split", "min_impurity_decrease"),
    "row_fraction": ("subsample", "bagging_fraction", "max_samples"),
    "column_fraction": ("max_features", "colsample_bytree", "feature_fraction", "rsm"),
    "max_bins": ("max_bin", "border_count"),
    "categorical": ("categorical_features", "categorical_feature", "cat_features"),
    "monotone": ("monotonic_cst", "monotone_constraints"),
    "random_state": ("seed", "random_seed"),
    "objective": ("loss", "criterion"),
}


class JaxnnError(ValueError):
    """Invalid input: one line with what is wrong, where, and what to change.

    Command lines print its message alone and exit with status 2; defects of jaxnn raise other errors. Control
    characters, as the name of a file may have, are escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__())

    def add_note(self, note: str, /) -> None:
        """Leaves out JAX's note about its frames in tracebacks, which would be the last line, after the message."""
        if "JAX_TRACEBACK_FILTERING" not in note:
            super().add_note(note)


class ConfigError(JaxnnError):
    """A config field or run option with a value that cannot be used."""


class DataError(JaxnnError):
    """Data that are missing, damaged or inconsistent."""


class RecordError(JaxnnError):
    """A run directory that cannot be read, written or resumed."""


class TrainingError(JaxnnError):
    """Training that cannot continue, such as a loss that is no longer finite."""


class LostError(TrainingError):
    """Machines or processes that training needs are gone: what was saved is intact, and resuming continues it."""


class Batch(NamedTuple):
    """Examples of one step.

    Attributes:
        inputs: ``[batch, ...]``: an array, or a pytree of arrays such as ``{"image": …, "text": …}``.
        targets: the same, or None: integer labels ``[batch]`` to classify, floats to regress.
        mask: ``[batch]`` float32: 1.0 for an example, 0.0 for padding, which must not count. Losses, metrics and
            ``nn.BatchNorm`` leave it out; another layer that computes across the batch, such as Flax's BatchNorm, must
            call ``nn.batch_mask()``. Batches of a run are full in training, padded in evaluation.

    >>> batch = jn.Batch(np.zeros((4, 64), np.float32), np.arange(4), mask=np.ones(4, np.float32))
    """

    inputs: PyTree
    targets: PyTree
    mask: Array


class TrainState(NamedTuple):
    """The state of training: arrays only, so it may be carried by a scan, donated and saved.

    Attributes:
        step: ``[]`` int32, the number of updates done.
        params: the parameters, updated by the optimizer.
        model_state: updated by the model, such as batch statistics; ``{}`` if there is none.
        opt_state: the optimizer's state.
        key: ``[]`` a typed PRNG key; it never changes, a step's key is folded from it and ``step``.

    >>> int(run.state.step), sorted(run.state.params)
    (20, ['Dense_0', 'Dense_1'])
    """

    step: jax.Array
    params: Params
    model_state: ModelState
    opt_state: optax.OptState
    key: jax.Array


type TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def _missing(name: str, user: str) -> Callable[..., Any]:
    """The ``name`` of a task that has none: an error when it is called, as ``user`` does."""

    def missing(*_: Any) -> Any:
        raise ConfigError(f"the task has no {name}, which {user} needs: give it one, jn.Task(init, …, {name}={name}).")

    return missing


type Direction = Literal["min", "max"]
"""Whether less or more of a metric is better."""


class Task(NamedTuple):
    """A model and its objective as pure functions; those that nothing calls may be left out.

    Attributes:
        init: ``(key, batch) -> (params, model_state)``.
        loss: ``(params, model_state, batch, key) -> (loss, (model_state, metrics))``, both masked means. An
            experiment's own step may do without.
        evaluate: ``(params, model_state, batch, key) -> sums``: masked sums of each metric over the batch, numbers or
            arrays, and their ``count``, the divisor of the sums, such as ``batch.mask.sum()``. The key is for losses
            that are sampled; it is that of the batch, the same in each evaluation. Needed for data with an eval split.
        predict: ``(params, model_state, inputs) -> outputs``; outputs may be anything. Needed for `Run.predict`.
        derive_metrics: from the mean of each metric over a split, numbers or arrays, to the numbers that are reported;
            called on the host for one run, or one member of a sweep, at a time. It may add other metrics, such as a
            perplexity, and must reduce arrays to numbers. It is tested on made-up means before training.
        metrics: functions ``(targets, outputs) -> number`` by name, computed on the host from all targets and outputs
            of ``predict`` of a split, such as ``{"auc": sklearn.metrics.roc_auc_score}``.
        check: ``(params, model_state, batch, splits) -> None``, called once before training: raises `DataError` for
            data that the task cannot be trained on, such as labels that the model has no output for. The first three
            are shapes; ``splits`` are the data.
        directions: ``"min"`` or ``"max"`` by the names of metrics, where less or more of it is better: for those that
            rank members or stop runs. Common names, such as ``loss``, ``mae`` and ``accuracy``, need none.
        evaluate_again: ``(params, model_state, batch, key, kept) -> (sums, kept)``: ``evaluate`` for a task that uses
            what its last evaluation of the batch in the same training kept, as boosted trees use scores. ``kept`` is a
            tree of arrays, zeros at first; None while only its shapes are asked for. None: nothing is kept.

    >>> task = jn.tasks.classification(jn.models.MLP((8, 10)))
    >>> task = task._replace(derive_metrics=lambda means: {**means, "error": 1 - means["accuracy"]})
    """

    init: Callable[[jax.Array, Batch], tuple[Params, ModelState]]
    loss: Callable[[Params, ModelState, Batch, jax.Array], tuple[jax.Array, tuple[ModelState, Metrics]]] = _missing(
        "loss", "a training step that is not the experiment's own"
    )
    evaluate: Callable[[Params, ModelState, Batch, jax.Array], Metrics] = _missing("evaluate", "an evaluation of data")
    predict: Callable[[Params, ModelState, PyTree], Any] = _missing("predict", "a prediction")
    derive_metrics: Callable[[dict[str, Any]], dict[str, Any]] = lambda means: means
    metrics: Mapping[str, Callable[[Any, Any], Any]] = {}
    check: Callable[[Params, ModelState, Batch, Splits], None] = lambda *_: None
    directions: Mapping[str, Direction] = {}
    evaluate_again: Callable[[Params, ModelState, Batch, jax.Array, PyTree], tuple[Metrics, PyTree]] | None = None


class Examples(NamedTuple):
    """All examples of one split, put on the device once."""

    inputs: PyTree  # ``[examples, ...]``; ``uint8`` stays ``uint8`` and is scaled to 0…1 a batch at a time
    targets: PyTree  # ``[examples, ...]``, or None


ENDLESS = 2**31 - 1
"""The number of examples of a source that generates them."""


def path_name(path: tuple[Any, ...], separator: str = "/") -> str:
    """Returns the name of a leaf, ``Dense_0/kernel``, of its path in a tree; empty if the tree is the leaf."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def named_leaves(tree: PyTree, separator: str = "/") -> dict[str, Any]:
    """Returns the leaves of ``tree`` by their names, as of `path_name`, in order."""
    return {path_name(path, separator): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def error_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def on_one_line(text: object) -> str:
    """Returns a message, of an error or a warning, on one line and without its full stop."""
    return " ".join(str(text).split()).rstrip(".")


def shapes_of(examples: PyTree) -> str:
    """Dtypes and shapes of an example, as ``float32 [64]`` or ``{image: uint8 [28, 28, 1], text: int32 [12]}``."""
    one = {name: f"{x.dtype} {list(x.shape[1:])}" for name, x in named_leaves(examples, ".").items()}
    if not one or "" in one:
        return next(iter(one.values()), "none")
    return "{" + ", ".join(f"{name}: {shape}" for name, shape in one.items()) + "}"


class Source(Protocol):
    """One split of the data: the batch of a step is a pure function of ``(seed, step)``."""

    @property
    def examples(self) -> Examples | None:
        """The split's arrays, on the host; None if they are not in memory."""

    @property
    def num_examples(self) -> int:
        """The number of examples in the split; `ENDLESS` if they are generated."""

    @property
    def targets(self) -> PyTree:
        """All targets ``[examples, ...]``, on the host, or None."""

    def read(self, indices: np.ndarray) -> Examples:
        """The examples at ``indices [n]``, on the host: ``[n, ...]`` each."""

    def order(self, seed: Array | int, steps: Array, batch_size: int) -> Array:
        """The indices of the examples of each of ``steps [k]``: ``[k, batch]`` int32; NumPy in, NumPy out."""

    def as_batch(self, examples: Examples, mask: Array | None = None) -> Batch:
        """Rows ``[batch, ...]`` as a batch that is ready for a model; pure, to be traced."""

    def gather(self, examples: Examples, indices: Array, mask: Array | None = None) -> Batch:
        """The examples at ``indices [batch]``, ready for a model; pure, to be traced."""

    def transform(self, batch: Batch, key: jax.Array) -> Batch:
        """Random augmentation of a training batch; the identity if there is none."""

    def fingerprint(self, digest: Any) -> None:
        """Updates ``digest``, of ``hashlib``, with the content of the examples."""


class Splits(NamedTuple):
    """A data set: its sources, name and classes.

    Attributes:
        train: the training split.
        test: the split for the final evaluation, or None.
        validation: the split that is evaluated during training; if None, ``test`` is.
        others: further splits that are evaluated with it, by name, such as examples of another distribution.
        name: the data set's name, for reports.
        class_names: one name per class for labels 0, 1, …; empty if targets are not labels.

    >>> splits = jn.data.arrays(train=(np.zeros((8, 2)), np.arange(8) % 2), test=(np.ones((4, 2)), np.arange(4) % 2))
    >>> splits.train.num_examples, splits.eval_split
    (8, 'test')
    """

    train: Source
    test: Source | None = None
    validation: Source | None = None
    name: str = "arrays"
    class_names: tuple[str, ...] = ()
    others: Mapping[str, Source] = {}

    def __repr__(self) -> str:
        counts = {name: source.num_examples for name, source in self.named().items()}
        parts = [f"{name} generated" if n == ENDLESS else f"{n:,} {name}" for name, n in counts.items()]
        if self.train.examples is None:
            parts.append("streamed")
        elif jax.tree.leaves(self.train.examples):
            parts.append(f"inputs {shapes_of(self.train.examples.inputs)}")
        parts += [f"{len(self.class_names):,} classes"] if self.class_names else []
        return f"Splits({self.name}: {', '.join(parts)})"

    @property
    def eval_split(self) -> str | None:
        """The name of the split evaluated during training: ``validation`` if there is one, else ``test``; or None."""
        return next((name for name in ("validation", "test") if name in self.named()), None)

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The names of the splits evaluated during training: `eval_split` first, then `others`."""
        return (*((self.eval_split,) if self.eval_split else ()), *self.others)

    def named(self) -> dict[str, Source]:
        """The splits that are not None, by name, ``train`` first."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test, **self.others}
        return {name: source for name, source in splits.items() if source is not None}

    def with_sources(self, sources: Mapping[str, Source]) -> Splits:
        """These splits with other ``sources``, one for each name of `named`."""
        own: dict[str, Any] = {name: one for name, one in sources.items() if name not in self.others}
        return self._replace(**own, others={name: sources[name] for name in self.others})


STEP_MAKER = (
    "an experiment's step must be a function of (task, optimizer) or (task, optimizer, config) that returns the "
    "function step(state, batch) -> (state, metrics)"
)


@dataclasses.dataclass(frozen=True)
class Experiment[Config]:
    """An experiment as a value: a config and functions of it.

    Attributes:
        config: a frozen dataclass with at least ``batch_size``, ``num_steps`` and ``seed``. The optional fields
            ``init_seed``, ``order_seed`` and ``step_seed`` replace ``seed`` for one purpose each: the initial
            parameters, the order of the data, and the random numbers of steps and evaluations (dropout, augmentation,
            sampling). None: ``seed`` decides.
        data: ``config -> Splits``; called outside the compiled program, once. None: the task needs no data.
        task: ``config -> Task``; called inside the compiled program, where float fields may be tracers.
        optimizer: ``config -> optax.GradientTransformation``; likewise. Or a dict of them, by the name of the part of
            the parameters that each one updates, such as ``{"generator": …, "discriminator": …}``.
        step: ``(task, optimizer) -> step``, or ``(task, optimizer, config) -> step``, called where ``task`` is: a
            training step of the experiment's own, ``step(state, batch) -> (state, metrics)``, a pure function whose
            metrics are numbers, ``loss`` among them. The engine counts the steps: state and key are otherwise the
            step's own. None: `steps.make_train_step`.
        params: ``config -> values`` to start from, in place of those that the task draws: nested dicts of arrays, as
            ``jn.open_run(path).state.params`` or of a file, matched with the task's by path, or a `TrainState`, whose
            ``model_state`` is taken too. Arrays that the task has and the values lack are drawn as usual; the report
            says which. None, or a function that returns None: all are drawn. Called once, outside the compiled program.

    >>> experiment = jn.Experiment(
    ...     experiment.config,  # a frozen dataclass of the user
    ...     data=lambda config: jn.data.digits(),
    ...     task=lambda config: jn.tasks.classification(jn.models.MLP((32, 10))),
    ...     optimizer=lambda config: optax.adam(config.learning_rate),
    ... )
    """

    config: Config
    data: Callable[[Config], Splits] | None
    task: Callable[[Config], Task]
    optimizer: Callable[[Config], optax.GradientTransformation | Mapping[str, optax.GradientTransformation]]
    step: Callable[..., TrainStep] | None = None
    params: Callable[[Config], PyTree | None] | None = None

    def __post_init__(self) -> None:
        if not dataclasses.is_dataclass(self.config) or isinstance(self.config, type):
            raise ConfigError(
                f"an experiment's config must be an instance of a dataclass, not {self.config!r}: "
                "decorate its class with @dataclasses.dataclass(frozen=True) and pass Config()."
            )
        for name in ("data", "task", "optimizer", "step", "params"):
            value = getattr(self, name)
            if not callable(value) and not (value is None and name in ("data", "step", "params")):
                if name == "step":
                    raise ConfigError(f"{STEP_MAKER}, not {value!r}.")
                raise ConfigError(
                    f"an experiment's {name} must be a function of its config, not a {type(value).__name__}: pass "
                    "lambda config: ..., because each config has its own."
                )

    def replace(self, **fields: Any) -> Experiment[Config]:
        """Returns the experiment with other values for some config fields; ConfigError names unknown ones.

        >>> experiment.replace(learning_rate=0.01).config.learning_rate
        0.01
        """
        known = [field.name for field in dataclasses.fields(self.config)]  # type: ignore[arg-type]
        for name in fields:
            if name not in known:
                raise ConfigError(f"the config has no field {name!r}: {suggest(name, known)}.")
        config = dataclasses.replace(self.config, **fields)  # type: ignore[type-var]
        return dataclasses.replace(self, config=config)


def named_object(name: str, option: str) -> Any:
    """Imports the object ``package.module:name``, also from the working directory; ConfigError names ``option``."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"{option} is {name!r}, and must be MODULE:NAME, such as my_package.my_module:my_object.")
    try:
        if "" not in sys.path and "." not in sys.path:
            sys.path.append("")  # as in an interactive session: a script's own folder is there already
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} is {name!r}, which cannot be imported ({error}).") from error


def check_int(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Returns ``value`` as an ``int``; ConfigError unless it is an integer of ``least`` to ``most``, no boolean."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        allowed = f">= {least}" if most is None else f"in {least}…{most}"
        raise ConfigError(f"{name} must be an integer {allowed}, not {value!r}.")
    return int(value)


def check_call(wanted: str, function: Any, count: int, *keywords: str) -> None:
    """Raises ConfigError, ``wanted``, unless ``function`` can be called with ``count`` arguments, and ``keywords``."""
    try:
        inspect.signature(function).bind(*range(count), **dict.fromkeys(keywords))
    except TypeError as error:
        given = f"{getattr(function, '__name__', 'one')}{inspect.signature(function)}" if callable(function) else None
        raise ConfigError(f"{wanted}, not {given or f'a {type(function).__name__}'}.") from error
    except ValueError:  # a builtin without a signature
        pass


def cpu_count() -> int | None:
    """Returns the number of CPU cores this process may use, which a container or taskset limits; None: unknown.

    >>> jn.observe.cpu_count() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def warn(message: str) -> None:
    """Warns of ``message`` at the line that called jaxnn, also through a cached property or a context."""
    # Python 3.12 skips no file by its full name.
    warnings.warn(
        printable(message),
        skip_file_prefixes=(
            __file__.removesuffix("types.py"),
            *(str(module.__file__).removesuffix(".py") for module in (contextlib, functools)),
        ),
    )


def suggest(word: object, known: Iterable[str]) -> str:
    """Returns ``did you mean 'x'? Known are 'x', 'y'``: the nearest of ``known`` to ``word``, then all."""
    known = sorted(known)
    near = nearest(word, known)
    listed = ", ".join(map(repr, known)) or "none"
    return f"did you mean {near!r}? Known are {listed}" if near else f"known are {listed}"


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The name in ``known`` that ``word`` means in other libraries or is spelled like; None if there is none."""
    known = sorted(known)
    usual = (name for name in known if word in USUAL_NAMES.get(name.rpartition(".")[2], ()))
    return next(usual, None) or next(iter(difflib.get_close_matches(str(word), known, n=1)), None)


def printable(text: object, *, lines: bool = True) -> str:
    r"""Escapes control characters and lone surrogates, as ``\x1b``; line ends and tabs stay if ``lines``."""
    return "".join(
        character
        if character.isprintable() or (lines and character in "\n\t")
        else character.encode("unicode_escape").decode()
        for character in str(text)
    )


def is_half(dtype: Any) -> bool:
    """Whether ``dtype`` is a float of 16 bits or fewer, in which a sum of many terms loses most of them."""
    return jax.dtypes.issubdtype(dtype, np.floating) and np.dtype(dtype).itemsize < 4


def is_key(leaf: Any) -> bool:
    """Whether an array or a shape is of typed PRNG keys."""
    return bool(jax.dtypes.issubdtype(getattr(leaf, "dtype", bool), jax.dtypes.prng_key))
