"""Run options: how an experiment is run. They never change the numbers beyond rounding."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxnn._fields import check_fields, option
from jaxnn.engine._windows import Plan, near_divisor
from jaxnn.parallel import Strategy, parse_mesh
from jaxnn.record import TRACKERS, Writers
from jaxnn.types import ConfigError, check_int, named_object, suggest

type StoppingRule = Callable[[Sequence[Mapping[str, Any]]], bool]
"""Whether a run or member stops, from its reported lines, oldest first; the last one has an evaluation.

A function of these alone decides the same after a resume: ``lambda lines: lines[-1]["test_accuracy"] > 0.97``.
"""

type Probe = Callable[[Any], Any]
"""A function of the `Run` so far, called after each evaluation; what it returns is recorded under its name.

Numbers become metrics ``probe_NAME``, pictures (a matplotlib figure, an array ``[height, width]`` or ``[height, width,
channels]``, or a grid ``[rows, columns, height, width, channels]``) and texts become files of the record. A mapping of
these is recorded as ``NAME/KEY``; None is not.
"""

if TYPE_CHECKING:
    from jaxnn.parallel import Strategy
    from jaxnn.record import MetricWriter
    from jaxnn.types import Experiment

    type StrategyOption = str | Strategy
    type WritersOption = tuple[str | MetricWriter, ...]
    type StopOption = str | StoppingRule | None
    type ProbesOption = tuple[str | Probe, ...] | Mapping[str, Probe]
else:  # what a command line can give
    StrategyOption, WritersOption, StopOption, ProbesOption = str, tuple[str, ...], str | None, tuple[str, ...]

# By default a run is evaluated about ten times and reported fifty times.
NUM_EVALUATIONS = 10
REPORTS_PER_EVALUATION = 5
EVALUATION_SHARE = 0.2  # of the time of training, for evaluations by default, by the number of examples
MOST_OF_A_NAME = 100  # characters
# Seconds, by the unit of a budget.
UNITS = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run; flags of every script and keyword arguments of ``jn.fit``.

    >>> jn.RunOptions(monitor="accuracy", patience=3).explicit()
    {'monitor': 'accuracy', 'patience': 3}
    """

    run_dir: Path | None = None
    """Directory of the record; default runs/NAME/TIME-ID."""
    resume: Path | None = None
    """Continue what is recorded in this directory, bit for bit, with its config and options."""
    member: int | None = option(least=0)
    """Continue this member of the sweep in `resume` as a run of its own, in a new directory."""
    record: bool = option(True, choices=(True, False))
    """Write a record: facts, metrics.jsonl, checkpoints."""
    name: str | None = option(kept=True)
    """Name of the run or sweep: NAME of its directory, and in comparisons; default: that of the script or the data."""
    budget: str | None = option(kept=True)
    """Time from start to result, such as "10 min": num_steps is chosen by a trial; a search proposes until then."""
    steps_per_call: int | None = option(least=1, kept=True)
    """Training steps compiled into one call; default: chosen by the time or the operations of a step."""
    report_every: int | None = option(least=1, kept=True, decides=True)
    """Steps between reports; default: about fifty reports in all."""
    eval_every: int | None = option(least=0, kept=True, decides=True)
    """Steps between evaluations; default: ten in all, fewer if they took a fifth of the time. 0: only at the end."""
    eval_batch_size: int | None = option(least=1, kept=True, decides=True)
    """Examples per evaluation batch; default: twice the training batch size, or all of a smaller split."""
    eval_batches: int | None = option(least=1, kept=True, decides=True)
    """Batches of each split that are evaluated during training, of evenly spaced examples; default: all."""
    checkpoint_every: int | None = option(least=0, kept=True)
    """Steps between checkpoints; default: at evaluations a minute apart, and at the end. 0: none at all."""
    keep_last: int = option(2, least=1, kept=True)
    """Number of newest checkpoints to keep."""
    keep_best: int = option(1, least=0, kept=True)
    """Number of best checkpoints (by `monitor`) to keep in addition; a sweep keeps none."""
    monitor: str = option("loss", kept=True, decides=True)
    """Evaluation metric that decides which checkpoint or member is best and when to stop early."""
    monitor_mode: Literal["auto", "min", "max"] = option(
        "auto", choices=("auto", "min", "max"), kept=True, decides=True
    )
    """Whether less or more of it is better; auto: as the task states it in `directions`, or as its name is known."""
    patience: int | None = option(least=1, kept=True, decides=True)
    """Stop early after this many evaluations without improvement; default: never."""
    deterministic: bool = option(False, choices=(True, False), kept=True, decides=True)
    """On a GPU, compile without operations whose bits may differ from process to process, which may be slower."""
    resident: bool | None = option(choices=(None, True, False))
    """Keep the training set on the device; default: if it fits."""
    device: Literal["cpu", "gpu", "tpu"] | None = option(choices=(None, "cpu", "gpu", "tpu"))
    """Kind of device to compute on; default: JAX's, a GPU if there is one."""
    devices: int | Literal["all"] | None = None
    """Number of devices, or all; default: a run takes one, or all if a strategy or mesh is given; a sweep takes all."""
    strategy: StrategyOption = "auto"
    """auto, data (batches are sharded), fsdp (the state too), pmap (data in its classic form), or MODULE:NAME."""
    mesh: str | None = None
    """Devices along named axes, such as data=2,model=2 for a model that shards its parameters over model."""
    progress: Literal["auto", "bar", "plain", "none"] = option("auto", choices=("auto", "bar", "plain", "none"))
    """How to show progress; auto: a bar on a terminal or in a notebook, plain lines elsewhere."""
    stall_after: float = 300.0
    """Warn if no step completes for this many seconds; 0 disables."""
    writers: WritersOption = ()
    """Further metric writers, which get every line of metrics.jsonl: tensorboard, wandb, mlflow, or MODULE:NAME."""
    stop: StopOption = option(decides=True)
    """Custom stopping rule, or its name as MODULE:NAME; called after each evaluation, in addition to `patience`."""
    probes: ProbesOption = ()
    """Functions of the run, or MODULE:NAME, called at evaluations; their numbers, pictures and texts are recorded."""

    # The names of options that were given one by one, which count as given at their defaults too.
    _given: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for name in ("run_dir", "resume"):
            if (path := getattr(self, name)) is not None:
                if not isinstance(path, str | os.PathLike):
                    raise ConfigError(f"{name} is {path!r}, and must be a path.")
                object.__setattr__(self, name, Path(path))
        if self.name is not None:
            is_name = isinstance(self.name, str) and self.name.isprintable() and not {*self.name} & {*"/\\"}
            if not is_name or not 0 < len(self.name) <= MOST_OF_A_NAME or not self.name.strip(". "):
                wanted = f"a text of 1 to {MOST_OF_A_NAME} characters, without slashes"
                raise ConfigError(f"name is {self.name!r:.60}, and must be {wanted}: it names a folder.")
        check_fields(self)
        _ = self.budget_seconds  # raises if it is no time
        seconds = self.stall_after
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ConfigError(f"stall_after is {seconds!r}, and must be a number of seconds, 0 or more.")
        if self.devices not in (None, "all"):
            check_int("devices", self.devices)
        Strategy.find(self.strategy)
        if not isinstance(self.writers, tuple | list):
            raise ConfigError(f"writers is {self.writers!r}, and must be a tuple, of writers or of MODULE:NAME.")
        object.__setattr__(self, "writers", tuple(self.writers))
        for writer in self.writers:
            metric_writer(writer)
        stopping_rule(self.stop)
        self.named_probes()
        if self.mesh is not None:
            parse_mesh(self.mesh)
        if self.member is not None and self.resume is None:
            raise ConfigError(f"member {self.member} is of a sweep: give its directory as resume.")
        if self.resume is not None and self.run_dir is not None and self.member is None:
            raise ConfigError(
                "both resume and run_dir are given: a resumed run continues in its directory, leave run_dir out."
            )

    @property
    def budget_seconds(self) -> float:
        """The seconds of ``budget``, infinite without one; ConfigError if it is no time."""
        if self.budget is None:
            return math.inf
        found = re.fullmatch(r"(\d+\.?\d*) *([a-z]+?)s?", str(self.budget).strip())
        unit = UNITS.get(found[2]) if found is not None else None
        if found is None or unit is None or float(found[1]) <= 0:
            raise ConfigError(f'budget is {self.budget!r}, and must be a time such as "90 s", "10 min" or "1.5 h".')
        return float(found[1]) * unit

    def resumed_experiment[Config](
        self, experiment: Experiment[Config], before: Mapping[str, Any], *, ends_search: bool = False
    ) -> Experiment[Config]:
        """The experiment with the number of steps that a budget chose, if one did in the record ``before``.

        ConfigError if another budget is given, unless it ``ends_search``; an explicit None lets the experiment decide.
        """
        if self.budget is not None and not ends_search:
            raise ConfigError(
                "budget chooses num_steps, which a recorded run or sweep has: leave it out, or set num_steps."
            )
        if before["options"].get("budget") is None or "budget" in self.explicit():
            return experiment
        return experiment.replace(num_steps=before["config"]["num_steps"])

    def explicit(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, or were given by name as in ``fit(…, keep_last=2)``."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {n: value for n, (value, default) in values.items() if value != default or n in self._given}

    def recorded(self) -> dict[str, Any]:
        """The options as a record holds them: all but its directory, and objects by their names."""

        def plain(value: Any) -> Any:
            value = tuple(value.values()) if isinstance(value, Mapping) else value
            if isinstance(value, tuple) and not hasattr(value, "_fields"):
                return [plain(one) for one in value]
            if value is None or isinstance(value, bool | int | float | str):
                return value
            return getattr(value, "name", None) or getattr(value, "__qualname__", None) or type(value).__qualname__

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: plain(value) for name, value in values.items() if name not in ("run_dir", "resume", "member")}

    def with_cadences(self, config: Any, evaluated: Sequence[int] = ()) -> RunOptions:
        """The options with ``eval_every`` and ``report_every`` decided for a run of ``config``.

        ``evaluated`` has the number of examples of each split that is evaluated.
        """
        eval_every, num_steps, count = self.eval_every, config.num_steps, NUM_EVALUATIONS
        if evaluated:
            most = (self.eval_batches or math.inf) * (self.eval_batch_size or 2 * config.batch_size)
            # Backward, a step takes about twice as long as forward.
            share = sum(min(one, most) for one in evaluated) / (3 * num_steps * config.batch_size)
            count = max(1, min(count, int(EVALUATION_SHARE / share)))
        if eval_every is None:
            eval_every = near_divisor(num_steps, -(-num_steps // count))
        report_every = self.report_every
        if report_every is None:
            span = eval_every or num_steps
            windows = max(1, round(REPORTS_PER_EVALUATION * NUM_EVALUATIONS * span / num_steps))
            report_every = near_divisor(span, round(span / windows))
        return dataclasses.replace(self, eval_every=eval_every, report_every=report_every)

    def plan(self, num_steps: int) -> Plan:
        """The plan of a run of ``num_steps`` with resolved cadences; its steps per call are open."""
        assert self.report_every is not None and self.eval_every is not None
        return Plan(num_steps, self.report_every, self.eval_every, self.checkpoint_every or 0)

    @contextlib.contextmanager
    def opened_writers(self) -> Iterator[Writers]:
        """The metric writers, closed at the end of the block, also after a failure."""
        with contextlib.closing(Writers([metric_writer(writer) for writer in self.writers])) as writers:
            yield writers

    def named_probes(self) -> dict[str, Probe]:
        """Returns the probes by name, imported if given as ``MODULE:NAME``; ConfigError if one is not a function."""
        probes = self.probes
        if isinstance(probes, str) or not isinstance(probes, Mapping | tuple | list):
            raise ConfigError(f"probes is {probes!r}, and must be a tuple of functions, or a dict of them by name.")
        found: Any = probes.items() if isinstance(probes, Mapping) else ((None, probe) for probe in probes)
        named: dict[str, Probe] = {}
        for given, probe in found:
            function: Any = named_object(probe, "probes") if isinstance(probe, str) else probe
            name = str(given or getattr(function, "__name__", type(function).__name__))
            if not callable(function) or not re.fullmatch(r"\w[\w.-]*", name) or name in named:
                raise ConfigError(
                    f"probes holds {name!r}: {function!r:.60}, and must hold functions of the run with different names "
                    "of letters, digits and _: name them in a dict."
                )
            named[name] = function
        return named

    @classmethod
    def marked(cls, mark: Literal["kept", "decides"]) -> tuple[str, ...]:
        """The names of the options that have a mark of `option`."""
        return tuple(field.name for field in dataclasses.fields(cls) if field.metadata.get(mark))

    @classmethod
    def deciding(cls, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the ``recorded`` options that decide results."""
        found = {name: recorded.get(name) for name in cls.marked("decides")}
        # A function is given as an object, or as MODULE:NAME.
        return found | {"stop": str(recorded.get("stop")).rpartition(":")[2]}


def stopping_rule(stop: StopOption) -> StoppingRule | None:
    """Returns the stopping rule, imported if given as ``MODULE:NAME``; ConfigError if it is not a function."""
    rule: Any = named_object(stop, "stop") if isinstance(stop, str) else stop
    if rule is not None and not callable(rule):
        raise ConfigError(f"stop is {rule!r}, and must be a function of the lines reported so far, or MODULE:NAME.")
    return rule  # type: ignore[no-any-return]


def metric_writer(writer: Any) -> MetricWriter:
    """Returns the metric writer, new or imported if given by name; ConfigError if it has no ``write``."""
    if isinstance(writer, str) and ":" not in writer:
        if writer not in TRACKERS:
            raise ConfigError(f"there is no writer {writer!r}, and it is no MODULE:NAME: {suggest(writer, TRACKERS)}.")
        return TRACKERS[writer]()
    found: Any = named_object(writer, "writers") if isinstance(writer, str) else writer
    if isinstance(found, type) or not callable(getattr(found, "write", None)):
        raise ConfigError(f"writers holds {found!r}, and must hold objects with write(lines), or MODULE:NAME of them.")
    return found  # type: ignore[no-any-return]
