"""``jn.verify``: whether an experiment computes the same each time, proven in fresh processes on this machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn._disk import refusals, write_json
from jaxnn._fields import bounded, check_config, check_fields, with_changes
from jaxnn._json import config_json
from jaxnn._provenance import Definition, check_not_imported
from jaxnn._text import Table, say_error
from jaxnn.engine import near_divisor
from jaxnn.proof._conditions import REMEDIES
from jaxnn.proof._fresh import CALLS, Job, difference, is_set, num_devices
from jaxnn.record import RecordReader, load_checkpoint
from jaxnn.types import ConfigError, Experiment, JaxnnError, RecordError, TrainingError

PASS, ROUNDS, FAIL, LEFT_OUT = "pass", "to rounding", "fail", "left out"
# The parts of a run that may differ, in the order in which a run makes them.
PARTS = {
    "data": "the data",
    "order": "the order of batches",
    "batches": "the batches",
    "program": "the program of a step",
    "evaluation": "the evaluation",
    "initial": "the initial values",
    "step": "the computation of a step",
    "resume": "the resumed run",
}
DATA = "data", "order", "batches"
WINDOWS = 10  # of the steps: each has a digest, and a short comparison takes one
FINE_STEPS = 50  # a difference within these first steps is looked for step by step
MOST_ULP = 1_000_000  # numbers that are further apart are simply others
MOST_VARIABLES = 4  # of the environment that are tried out
_AGAIN = (
    "equal in fresh processes, and other when it is made again in one of them: a mutable default, a global, or an "
    "array that is changed in place"
)
_ELSEWHERE = "uninterrupted runs are equal: something that a step uses is not in the state, so it is not saved"
_READING = "a batch depends on where reading starts: iterables and batches(seed, first_step) must start there"


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Options of `verify`; flags of every script's ``verify`` command."""

    steps: int = bounded(200, least=2)
    """Updates of a run; at most those of the config. Schedules stay those of all steps."""
    json: bool = False
    """Print JSON in place of a table."""
    out: Path | None = None
    """File of the result; default: runs/NAME/verify.json, beside the runs of the script."""
    monitor: str = "loss"
    """An evaluation metric that the task has, as the run option of this name."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class Check:
    """One claim that was tried out.

    Attributes:
        name: the claim, such as ``"same run twice"``.
        result: ``pass``, ``to rounding``, ``fail`` or ``left out``.
        detail: what was compared, or why it was left out.
        part: of a failure, the first part of the run that differs: ``data``, ``order``, ``batches``, ``program``,
            ``evaluation``, ``initial``, ``step`` or ``resume``.
        cause: what makes runs equal, or None if nothing that was tried out does.
        step: the first step, from 1, after which states differ.
        difference: the first array that differs there: ``leaf``, ``numbers`` that differ ``of`` all, most ``ulp``.
    """

    name: str
    result: str
    detail: str = ""
    part: str | None = None
    cause: str | None = None
    step: int | None = None
    difference: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        words = [PARTS[self.part]] if self.part is not None else []
        words += [f"from step {self.step}"] if self.step is not None else []
        if (found := self.difference) is not None:
            ulp = f" by up to {found['ulp']:,} ulp" if (found["ulp"] or MOST_ULP) < MOST_ULP else ""
            words.append(f"{found['numbers']:,} of {found['of']:,} numbers of {found['leaf']}{ulp}")
        return ", ".join([*words, *filter(None, [self.detail])])


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """Whether an experiment computes the same each time; prints as a table.

    Attributes:
        checks: the claims that were tried out.
        steps: number of updates of a run.
        seconds: wall time of all processes.
        file: where the result was written.
    """

    checks: tuple[Check, ...]
    steps: int
    seconds: float
    file: Path

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed; empty if the experiment computes the same each time."""
        return tuple(check for check in self.checks if check.result == FAIL)

    def as_json(self) -> dict[str, Any]:
        """Its content as ``verify.json`` has it."""
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jaxnn")}
        numbers = {"passed": not self.failed, "steps": self.steps, "seconds": self.seconds, "versions": versions}
        return {**numbers, "checks": [dataclasses.asdict(check) for check in self.checks]}

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        rows = [(check.name, check.result, str(check)) for check in self.checks]
        causes = dict.fromkeys(check.cause or "nothing that was tried out makes it equal" for check in self.failed)
        verdict = "not reproducible" if self.failed else "reproducible on this machine"
        notes = ["", *(f"cause: {cause}" for cause in causes), f"{verdict}, {self.seconds:.0f} s"]
        return Table((f"{self.steps} steps", "result", ""), rows, notes)


def verify(experiment: Experiment[Any], options: VerifyOptions | None = None, **changes: Any) -> Verification:
    """Proves in fresh processes that ``experiment`` computes the same each time on this machine.

    | check | states and batches must be |
    |---|---|
    | the same run twice; killed at random and resumed | equal at each window, by digests of the states |
    | one compiled call, forty times on equal buffers | equal |
    | one core and all; 1, 2 and 4 devices where they are there; a member of a sweep | equal, or to rounding |
    | batches asked for again, backwards, in other processes, without workers | equal |
    | data, task and optimizer made twice from one config | equal |
    | environment variables that the experiment's own code reads have other values | equal |

    After a failure it tries out causes in further processes until two are equal: ``PYTHONHASHSEED``, unseeded
    generators, the clock, host callbacks, native kernels, flags for known faults, threads, augmentations. Runs train
    the first ``steps`` of the plan in a temporary folder, about three times as many in all, and without a failure four
    processes start. Programs are compiled in the first one; the others load them, as scripts do from their compile
    cache. Rounding explains a difference of the parameters up to 1 % of the update so far, 25 % in half precision, or
    up to four times what one changed bit of each initial parameter does.

    Args:
        experiment: a variable of a script or module, which fresh processes import.
        options: see `VerifyOptions`.
        **changes: single options, such as ``steps=50``.

    Raises:
        ConfigError: no file has the experiment, or it cannot be run in a fresh process.
        TrainingError: its first steps diverge.

    >>> print(jn.verify(experiment, steps=20))  # doctest: +SKIP
    20 steps                     result       ...
    """
    check_not_imported()
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{experiment!r:.60} is no experiment: give jn.Experiment(config, data, task, optimizer).")
    options = with_changes(options or VerifyOptions(), changes, experiment.config)
    check_config(experiment.config)
    if (defined := Definition.find(experiment)) is None:
        raise ConfigError(
            "verify runs the experiment in fresh processes, which import it from a file, and no file has it as a "
            "variable: write `experiment = jn.Experiment(…)` at the top level of a script, and run "
            "`jaxnn verify script.py`."
        )
    started, origin = time.monotonic(), defined[0]
    steps = min(options.steps, experiment.config.num_steps)
    file = options.out or Path("runs") / Path(origin.file).stem / "verify.json"
    with refusals(f"{file} cannot be written", ", or choose another file by out= or --out."):
        file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxnn-verify-") as folder:
        checks = _Verifier(experiment.config, options.monitor, origin, Path(folder), steps).checks()
    found = Verification(tuple(checks), steps, time.monotonic() - started, file)
    about = {"experiment": f"{origin.file}:{origin.name}", "config": config_json(experiment.config)}
    write_json(file, {**about, **found.as_json()})
    return found


class _Verifier:
    """The processes of one verification, and what follows from their results."""

    def __init__(self, config: Any, monitor: str, origin: Definition, folder: Path, steps: int) -> None:
        self.about, self.folder, self.steps = (origin, config, monitor), folder, steps
        self.every = near_divisor(steps, max(1, steps // WINDOWS))
        self.cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.processes = 0

    def start(
        self, why: str, variables: Mapping[str, str | None] | None = None, **job: Any
    ) -> tuple[Path, dict[str, Any]]:
        """Starts a fresh process, and returns the folder of its run and its result."""
        self.processes += 1
        if sys.stderr is not None and sys.stderr.isatty():
            say_error(f"verify: process {self.processes}, {why}")
        where = Job(self.folder / f"{self.processes}", variables={**self.cache, **(variables or {})}, **job)
        return where.folder / "run", where.start(*self.about)

    def checks(self) -> list[Check]:
        """All checks, and the causes of those that failed."""
        whole: dict[str, Any] = {"steps": self.steps, "every": self.every}
        self.path, self.first = self.start("a run", **whole, calls=True, probe=True)
        if "error" in self.first:
            raise TrainingError(f"the experiment does not train: {self.first['error']}")
        self.expected, on_cpu = _digests(self.path), self.first["platform"] == "cpu"
        killed, _ = self.start("a run that is killed", **whole, kill=True)
        before, devices = _digests(killed), {"JAX_NUM_CPU_DEVICES": str(num_devices())} if on_cpu else {}
        self.how = {"steps_per_call": self.first["steps_per_call"], "every": self.every}
        more = {"others": True, "probe": True, **self.how}
        _, resumed = self.start("the killed run resumed", devices, steps=self.steps, resume=killed, **more)
        self.probes, core = [self.first, resumed], list[Check]()
        if on_cpu and num_devices() > 1:
            path, one = self.start("one core", steps=self.every, probe=True, remedies=("core",), **self.how)
            self.probes.append(one)
            core = [self.cores(path, one)]
        found = [self.twice(before), self.resumed(killed, resumed), self.calls(), *core]
        found += [_rounding(name, about) for name, about in resumed["others"].items()]
        return self.explained([*found, self.batches(), self.made_twice(), *self.environment()])

    def part(self, otherwise: str) -> str:
        """The first part that differs between processes; ``otherwise`` if all that was compared is equal."""
        facts = [probe["facts"] for probe in self.probes]
        return next((part for part in PARTS if len({one.get(part) for one in facts}) > 1), otherwise)

    def twice(self, before: Mapping[int, str]) -> Check:
        if (step := _first_different(self.expected, before)) is not None:
            return Check("same run twice", FAIL, part=self.part("step"), step=step)
        if not before:
            return Check("same run twice", LEFT_OUT, "it was killed before its first report")
        return Check("same run twice", PASS, f"equal at {len(before)} windows, up to step {max(before)}")

    def resumed(self, killed: Path, result: Mapping[str, Any]) -> Check:
        name, part = "killed and resumed", self.part("resume")
        if "error" in result:
            return Check(name, FAIL, result["error"] if part == "resume" else "refused, since it changed", part)
        where = f"from step {RecordReader(killed).run_facts()['resumed'][-1]['step']} to {self.steps}"
        step = _first_different(self.expected, after := _digests(killed))
        if step is None and self.steps in after:
            return Check(name, PASS, f"equal {where}")
        if part == "resume":
            path, _ = self.start("an uninterrupted run", steps=self.steps, every=self.every)
            part = "resume" if _first_different(self.expected, _digests(path)) is None else "step"
        return Check(name, FAIL, where, part, None, step, _unequal_states(self.path, killed, self.steps))

    def calls(self) -> Check:
        name, found = f"one call {CALLS} times", self.first["calls"]
        if found is None:
            return Check(name, PASS, "equal")
        return Check(name, FAIL, f"call {found['call']}", "step", None, found["steps"], found["difference"])

    def cores(self, path: Path, result: Mapping[str, Any]) -> Check:
        name = "one core and all"
        if "error" not in result and _first_different(self.expected, _digests(path)) is None:
            return Check(name, PASS, f"equal up to step {self.every}")
        _, found = self.start("all cores", steps=self.every, against=path, **self.how)
        return _rounding(name, found.get("against", {"left out": result.get("error", found.get("error"))}))

    def batches(self) -> Check:
        name = "batches"
        if (part := self.part("step")) in DATA:
            return Check(name, FAIL, "in another process", part)
        if not all(probe["asked again"] for probe in self.probes):
            return Check(name, FAIL, "asked for again", "batches")
        if not all(probe["backwards"] for probe in self.probes):
            return Check(name, FAIL, "asked for backwards", "resume", _READING)
        return Check(name, PASS, f"equal in {len(self.probes)} processes, again and backwards")

    def made_twice(self) -> Check:
        again = [probe["again"] for probe in self.probes]
        wrong = next((part for part in PARTS if not all(one.get(part, True) for one in again)), None)
        if wrong is None:
            return Check("made twice", PASS, "data, programs and initial values are equal")
        # If it is another in each process too, one cause explains both.
        part = self.part("step")
        return Check("made twice", FAIL, "in one process", *((wrong, _AGAIN) if part == "step" else (part, None)))

    def environment(self) -> list[Check]:
        """Tries out other values of the variables that the experiment's own code reads."""
        reads = sorted({name for probe in self.probes for name in probe["reads"]})[:MOST_VARIABLES]
        for name in reads:
            try:
                _, found = self.start(f"another {name}", {name: None if is_set(name) else "1"}, probe=True)
            except JaxnnError:  # the experiment cannot run so, which everybody notices
                continue
            mine = self.first["facts"]
            if (part := next((part for part in PARTS if found["facts"].get(part) != mine.get(part)), None)) is not None:
                cause = f"the environment variable {name} decides: make it a field of the config, which the record has"
                return [Check("environment", FAIL, name, part, cause)]
        return [Check("environment", PASS, f"equal with other values of {', '.join(reads)}")] if reads else []

    def explained(self, found: Sequence[Check]) -> list[Check]:
        """The checks with the cause of their failures, and the first step and array that differ."""
        wrong = [check for check in found if check.result == FAIL and check.cause is None]
        if not wrong:
            return list(found)
        # What differs first explains what is made from it.
        part = min((str(check.part) for check in wrong), key=[*PARTS].index)
        cause = self.cause(part, [check.cause for check in found])
        changes: dict[str, Any] = {"part": part, "cause": cause}
        if part != "resume":
            upto = min((check.step for check in wrong if check.step is not None), default=self.every)
            changes["step"], changes["difference"] = self.fine(part, upto)
        result = []
        for check in found:
            if check in wrong:
                own = changes if check == wrong[0] and changes.get("step") else {"part": part, "cause": cause}
                check = dataclasses.replace(check, **own)
            result.append(check)
        return result

    def fine(self, part: str, upto: int) -> tuple[int | None, dict[str, Any] | None]:
        """The first step after which two runs differ, and the first array there."""
        if part in DATA:
            files = [self.folder / f"{number + 1}" / "batch.npz" for number in range(self.processes)]
            saved = [dict(np.load(file, allow_pickle=False)) for file in files if file.exists()]
            found = (difference(saved[0], other) for other in saved[1:])
            return 1, next((one for one in found if one is not None), None)
        every, length = (1, 1) if upto <= FINE_STEPS else (self.every, None)
        how: dict[str, Any] = {"steps": upto, "every": every, "keep": upto, "steps_per_call": length}
        (one, _), (other, _) = (self.start("step by step", **how) for _ in range(2))
        step = _first_different(_digests(one), _digests(other))
        return step, None if step is None else _unequal_states(one, other, step)

    def cause(self, part: str, known: Sequence[str | None]) -> str | None:
        """What the first remedy shows with which two processes are equal, twice."""
        first = self.first
        if part == "resume":
            return _READING if _READING in known else _ELSEWHERE
        can_help = {
            "callbacks": part == "step" and first["has_callbacks"],
            "native": part == "step" and first["is_native"],
            "fault": part == "step" and first["faults"],
            "deterministic": part == "step" and first["platform"] != "cpu",
            "clock": part != "step",
            "core": part in (*DATA, "step") and num_devices() > 1,
            "augmentation": part in DATA and first["is_augmented"],
            "hash": not is_set("PYTHONHASHSEED"),
        }
        names = [name for name in REMEDIES if can_help.get(name, True)]
        for name in sorted(names, key=lambda name: part == "step" and name in ("hash", "generators")):
            callbacks = set[str]()
            if all(self.equal(name, part, callbacks) for _ in range(2)):
                return f"{REMEDIES[name]}{f' ({", ".join(sorted(callbacks))})' if callbacks else ''}"
        return None

    def equal(self, remedy: str, part: str, callbacks: set[str]) -> bool:
        """Whether two fresh processes are equal in ``part`` with a ``remedy``."""
        values = {"hash": ("PYTHONHASHSEED", "0"), "native": ("JAXNN_NATIVE", "off")}
        values["fault"] = "XLA_FLAGS", self.first["faults"]
        job: dict[str, Any] = {"remedies": (remedy,), "probe": part != "step"}
        if part == "step":
            job |= {"steps": self.every, "every": self.every, "calls": True}
        done = []
        try:
            for _ in range(2):
                path, result = self.start(f"{remedy}?", dict([values[remedy]]) if remedy in values else {}, **job)
                callbacks |= {*result["callbacks"]}
                if "error" in result or result.get("calls") or not result.get("asked again", True):
                    return False
                done.append(_digests(path) if part == "step" else result["facts"][part])
        except ConfigError:  # it does not run so
            return False
        return bool(done[0] == done[1])


def _rounding(name: str, found: Mapping[str, Any]) -> Check:
    """The check of runs that may differ by rounding."""
    if "left out" in found:
        return Check(name, LEFT_OUT, found["left out"])
    if found["difference"] is None:
        return Check(name, PASS, "equal")
    detail = f"parameters apart by {found['share']:.1g} of the update"
    if found["rounds"]:
        return Check(name, ROUNDS, detail, difference=found["difference"])
    return Check(name, FAIL, detail, "step", difference=found["difference"])


def _digests(path: Path) -> dict[int, str]:
    """The digests of the state in the record of a run, by step; none if there is no record."""
    try:
        return {line["step"]: line["digest"] for line in RecordReader(path).lines()}
    except RecordError:
        return {}


def _first_different(one: Mapping[int, str], other: Mapping[int, str]) -> int | None:
    """The first step that both have at which digests differ."""
    return next((step for step in sorted(one.keys() & other.keys()) if one[step] != other[step]), None)


def _unequal_states(one: Path, other: Path, step: int) -> dict[str, Any] | None:
    """The first array that differs in two runs' checkpoints of ``step``; None if they are equal or missing."""
    try:
        states = [load_checkpoint(path / "checkpoints" / f"{step}") for path in (one, other)]
    except RecordError:
        return None
    return difference(*states)
