"""Fresh processes of `verify`: how one is started, and what it trains, asks of the data and compares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn import engine
from jaxnn._fields import seed_for
from jaxnn._fingerprints import data_fingerprint
from jaxnn._json import config_json, jsonable
from jaxnn._provenance import Definition, jax_flags
from jaxnn.data import is_augmented
from jaxnn.observe import cpu_count, known_faults
from jaxnn.proof._conditions import changed, reads_noted
from jaxnn.proof._leaf_differences import leaf_differences, plain
from jaxnn.record import RecordReader, load_checkpoint
from jaxnn.run import fit
from jaxnn.search import zip as zip_values
from jaxnn.sweeps import sweep
from jaxnn.types import (
    ConfigError,
    Experiment,
    JaxnnError,
    PyTree,
    TrainState,
    named_leaves,
)

CALLS = 40  # of one program on equal buffers, as the race of jax#39741 was found
ASKED = 4  # the first steps, whose batches are asked for in two orders
MOST_DEVICES = 4
KILL_WITHIN = 60.0  # seconds that a run waits for its first checkpoint before it is killed
SAVED_BYTES = 64 << 20  # of a batch that is written for a comparison
# Largest distance of two runs that only round differently, in units of the update so far; by the width of products.
TOLERANCE, HALF_TOLERANCE = 0.01, 0.25
# Beyond it, the largest distance in units of what one changed bit of each parameter does, such as where Adam divides
# gradients that are rounding errors by their own size.
MOST_ROUNDINGS = 4


@dataclasses.dataclass(frozen=True)
class Job:
    """What one fresh process does."""

    folder: Path  # gets its files: result.json, stderr, batch.npz, and the run in ``run``
    steps: int = 0  # after which the run stops; 0: it trains nothing
    every: int = 1  # steps of a window, and between checkpoints
    keep: int = 2  # number of checkpoints to keep
    steps_per_call: int | None = None  # None: measured, as in a run
    kill: bool = False  # whether it kills itself after a random window
    resume: Path | None = None  # the directory of a run to resume; None: a new run
    against: Path | None = None  # the directory of a run whose newest state is compared with this run's
    calls: bool = False  # whether one compiled call is repeated
    others: bool = False  # whether short runs on several devices and in a sweep are compared with a run alone
    probe: bool = False  # whether digests of data, programs and batches are reported
    remedies: tuple[str, ...] = ()  # conditions of the process to change
    variables: Mapping[str, str | None] = dataclasses.field(default_factory=dict)  # of the environment; None: removed

    def start(self, origin: Definition, config: Any, monitor: str) -> dict[str, Any]:
        """Runs a fresh process and returns its result; empty if it killed itself, as it should.

        ConfigError with the last line of its standard error if it ends without a result.
        """
        self.folder.mkdir(parents=True)
        about = {"origin": origin, "config": config_json(config), "monitor": monitor, "flags": jax_flags()}
        (self.folder / "job.json").write_text(json.dumps(jsonable({**about, "job": dataclasses.asdict(self)})))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.setdefault("PYTHONHASHSEED", str(random.SystemRandom().randrange(1, 2**32)))
        for name, value in self.variables.items():
            before = environment.pop(name, "")
            if value is not None:
                environment[name] = f"{before} {value}".strip() if name == "XLA_FLAGS" else value
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(self.folder / "job.json")]
        with (self.folder / "stderr").open("w") as errors:
            done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, check=False)
        if (result := self.folder / "result.json").exists():
            return dict(json.loads(result.read_text()))
        if self.kill and done.returncode == -signal.SIGKILL:
            return {}
        said = (self.folder / "stderr").read_text(errors="replace").strip().splitlines() or [
            f"status {done.returncode}"
        ]
        raise ConfigError(f"the experiment of {origin.file} cannot be run in a fresh process: {said[-1]}")


def main() -> None:
    """Does the job in the file that is named on the command line, and writes its result."""
    given = json.loads(Path(sys.argv[1]).read_text())
    job, origin, reads, callbacks = Job(**given["job"]), Definition(*given["origin"]), set[str](), list[str]()
    if "core" in job.remedies:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name, value in given["flags"].items():
        jax.config.update(name, value)
    try:
        with reads_noted(reads), changed(job.remedies, callbacks):
            result = _Work(origin.load(given["config"]), job, given["monitor"]).done()
    except JaxnnError as error:
        raise SystemExit(str(error)) from None
    result |= {"reads": sorted(reads), "callbacks": sorted(set(callbacks))}
    Path(job.folder, "result.json").write_text(json.dumps(jsonable(result)))


class _Work:
    """What a fresh process does with an experiment, whose data are loaded once, as in a run."""

    def __init__(self, experiment: Experiment[Any], job: Job, monitor: str) -> None:
        self.made, self.job, self.folder, self.monitor = experiment, job, Path(job.folder), monitor
        self.splits = engine.load_data(experiment)
        if "augmentation" in job.remedies:
            source: Any = self.splits.train
            fields = [name for name in ("augment", "host_augment") if hasattr(source, name)]
            self.splits = self.splits._replace(train=dataclasses.replace(source, **dict.fromkeys(fields)))
        self.experiment = dataclasses.replace(experiment, data=lambda config: self.splits)

    @functools.cached_property
    def programs(self) -> engine.Programs:
        programs = engine.programs_of(self.experiment, self.splits)
        return dataclasses.replace(programs, deterministic=True) if self.deterministic else programs

    @property
    def deterministic(self) -> bool:
        return "deterministic" in self.job.remedies

    def done(self) -> dict[str, Any]:
        result: dict[str, Any] = {"platform": jax.default_backend()}
        if self.job.steps:
            result |= self.trained()
        if self.job.calls and "error" not in result:
            result["calls"] = self.calls(result["steps_per_call"], result["seconds"])
        if self.job.others:
            result["others"] = self.others()
        return result | (self.probed() if self.job.probe else {})

    def options(self, steps: int, **more: Any) -> dict[str, Any]:
        """Those of a run that stops after ``steps``, of the plan of all steps: schedules stay as they are."""

        def stop(lines: Sequence[Mapping[str, Any]]) -> bool:
            return bool(lines[-1]["step"] >= steps)

        how: dict[str, Any] = {
            "report_every": self.job.every,
            "eval_every": self.job.every,
            "eval_batches": 1,
            "keep_best": 0,
        }
        how |= {"steps_per_call": self.job.steps_per_call, "monitor": self.monitor, "stop": stop}
        how["deterministic"] = self.deterministic
        return {**how, "progress": "none", "stall_after": 0, **more}

    def trained(self) -> dict[str, Any]:
        """Trains a run, or resumes one."""
        job, killer = self.job, _Killer(self.folder / "run" / "checkpoints", self.job)
        where = {"run_dir": self.folder / "run", "checkpoint_every": job.every, "keep_last": job.keep}
        how = self.options(job.steps, **where, writers=(killer,) if job.kill else ())
        if job.resume is not None:
            how = {name: how[name] for name in ("stop", "progress", "stall_after", "writers")} | {"resume": job.resume}
        try:
            run = fit(self.experiment, **how)
        except JaxnnError as error:  # such as other data than the run to resume has
            return {"error": str(error)}
        if job.kill:
            killer.join()
        assert run.dir is not None
        length = RecordReader(run.dir).run_facts()["groups"][0]["steps_per_call"]
        result = {"seconds": run.summary.seconds.get("train", 0.0), "steps_per_call": length}
        if job.against is not None:
            result["against"] = self.compared(load_checkpoint(job.against, run.state), run.state)
        return result

    def calls(self, length: int, seconds: float) -> dict[str, Any] | None:
        """Repeats one compiled call, of one step if long ones would take too long; the first array that differs."""
        if CALLS * length * seconds / self.job.steps > max(2.0, 0.3 * seconds):
            length = 1
        feed, expected = self.programs.spec.feed, list[Any]()
        with contextlib.closing(feed):
            program, initial = self.programs.train(None, length, "verify"), self.programs.init()
            zeros: Any = self.programs.zeros(None)._replace(notes=np.full((), 2, np.int32))
            examples = feed.prepare(0, length)
            for number in range(CALLS):
                state, totals = program(jax.tree.map(jnp.copy, initial), zeros, examples)
                digests = np.asarray(totals.digests)
                expected = expected or [state, digests]
                if not np.array_equal(digests, expected[1]):
                    return {"call": number + 1, "steps": length, "difference": difference(expected[0], state)}
        return None

    def others(self) -> dict[str, Any]:
        """Compares runs of one window on several devices, and as a member of a sweep, with a run alone."""
        how, found = self.options(self.job.every, checkpoint_every=0), dict[str, Any]()
        solo = fit(self.experiment, record=False, **how).state
        for count in (2, MOST_DEVICES):
            if count <= jax.local_device_count():
                with _left_out(found, name := f"{count} devices"):
                    run = fit(self.experiment, record=False, **how, devices=count, strategy="data")
                    found[name] = self.compared(solo, run.state)
        config, values = self.made.config, dict[str, Any]()
        if isinstance(rate := getattr(config, "learning_rate", None), float):
            values["learning_rate"] = rate, rate / 2
        if self.programs.spec.feed.resident or not values:  # else members share the order of the data
            values["seed"] = config.seed, (config.seed + 1) % 2**32
        with _left_out(found, name := "member of a sweep"):
            # Free memory may have become less since.
            resident = True if self.programs.spec.feed.resident else None
            where = {"run_dir": self.folder / "sweep", "checkpoint_every": None, "resident": resident}
            swept = sweep(self.experiment, zip_values(**values), **{**how, **where}, vmap_size=2, devices=1)
            found[name] = self.compared(solo, swept.run(0).state)
        return found

    def compared(self, one: TrainState, other: TrainState) -> dict[str, Any]:
        """How far two states are from each other, and whether rounding explains it."""
        share = _distance(one.params, other.params, self.programs.init().params)
        is_half = any("16" in dtype for dtype in self.programs.traced_step.product_dtypes)
        rounds = share <= (HALF_TOLERANCE if is_half else TOLERANCE) or share <= MOST_ROUNDINGS * self.sensitivity
        return {"rounds": rounds, "share": share, "difference": difference(one, other)}

    @functools.cached_property
    def sensitivity(self) -> float:
        """How far runs of one window are apart, as `compared` measures, if one bit of their parameters differs."""
        programs, length, key = self.programs, self.job.steps_per_call or 1, jax.random.key(0)
        program, zeros, first = programs.train(None, length, "verify"), programs.zeros(None), programs.init()
        zeros = zeros._replace(notes=np.zeros((), np.int32))

        def nudged(leaf: jax.Array) -> jax.Array:
            up = jax.random.bernoulli(key, shape=leaf.shape)
            return jnp.nextafter(leaf, jnp.where(up, 1, -1) * jnp.asarray(jnp.inf, leaf.dtype))

        def trained(params: PyTree) -> PyTree:
            state = jax.tree.map(jnp.copy, first)._replace(params=params)
            for step in range(0, self.job.every, length):
                state, _ = program(state, zeros, programs.spec.feed.prepare(step, length))
            return state.params

        with contextlib.closing(programs.spec.feed):
            params = jax.tree.map(jnp.copy, first.params)
            return _distance(trained(params), trained(jax.tree.map(nudged, first.params)), first.params)

    def probed(self) -> dict[str, Any]:
        """Digests of what a run is made from, whether they are equal when made again, and facts for causes."""
        facts, again = self.facts(self.programs), self.facts(None)
        batches, arrays = self.batches(self.programs, range(ASKED))
        repeated, threads, train = self.batches(self.programs, range(ASKED))[0], self.programs, self.splits.train
        if getattr(train, "num_workers", 0):
            alone = self.splits._replace(train=dataclasses.replace(train, num_workers=0))  # type: ignore[type-var]
            threads = engine.programs_of(self.experiment, alone)
        backwards, _ = self.batches(threads, range(ASKED)[::-1])
        if sum(array.nbytes for array in arrays.values()) <= SAVED_BYTES:
            np.savez(self.folder / "batch.npz", **arrays)  # type: ignore[arg-type]
        step, platform = self.programs.traced_step, "cpu" if jax.default_backend() == "cpu" else "cuda"
        return {
            "facts": facts | {"batches": digest([batches[number] for number in range(ASKED)])},
            "again": {name: value == again[name] for name, value in facts.items()},
            "asked again": repeated == batches,
            "backwards": backwards == batches,
            "has_callbacks": any("callback" in equation.primitive.name for equation, _ in step.equations()),
            "is_native": any("native" in names for names in step.implementations.values()),
            "is_augmented": is_augmented(train) or getattr(train, "host_augment", None) is not None,
            "faults": " ".join(f"--{n}={value}" for fault in known_faults(platform) for n, value in fault.options),
        }

    def facts(self, programs: engine.Programs | None) -> dict[str, str]:
        """Digests of the data, the order of the first steps, the programs and the initial values; None: made again."""
        programs = programs or engine.programs_of(self.made, engine.load_data(self.made))
        config, splits, made = self.made.config, programs.splits, programs.fingerprint()
        order = splits.train.order(seed_for(config, "order"), np.arange(ASKED, dtype=np.int32), config.batch_size)
        return {
            "data": digest([data_fingerprint(splits), [source.examples for source in splits.named().values()]]),
            "order": digest(np.asarray(order)),
            "program": f"{made['program']} {made['batches'] if splits.train.examples is not None else ''}",
            "evaluation": str(made["evaluation"]),
            "initial": digest(programs.init()),
        }

    def batches(self, programs: engine.Programs, steps: Sequence[int]) -> tuple[dict[int, str], dict[str, np.ndarray]]:
        """Digests of the batches of ``steps``, as a run trains on them, and the arrays of step 0."""
        found, arrays = dict[int, str](), dict[str, np.ndarray]()

        with contextlib.closing(programs.spec.feed):
            for step in steps:
                batch = jax.device_get(programs.step_batch(step))
                found[step] = digest(batch)
                arrays |= {name.replace("/", "."): leaf for name, leaf in named_leaves(batch).items() if step == 0}
        return found, arrays


class _Killer:
    """A metric writer that kills its process: after a random window, once there is a checkpoint, at any moment."""

    def __init__(self, checkpoints: Path, job: Job) -> None:
        draw, windows = random.SystemRandom(), max(1, job.steps // job.every)
        self._checkpoints, self._thread = checkpoints, threading.Thread(target=self._kill, daemon=True)
        self._step = job.every * draw.randrange(min(2, windows), max(3, windows))
        self._share, self._delay = draw.random(), 0.0

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if lines[-1]["step"] >= self._step and not self._thread.is_alive():
            deadline = time.monotonic() + KILL_WITHIN
            while time.monotonic() < deadline and not any(one.name.isdigit() for one in self._checkpoints.glob("*")):
                time.sleep(0.001)
            self._delay = self._share * float(lines[-1]["seconds"])
            self._thread.start()

    def join(self) -> None:
        """Waits for the kill; a run that ended meanwhile is killed at its end."""
        if self._thread.is_alive():
            self._thread.join()
        self._kill()

    def _kill(self) -> None:
        time.sleep(self._delay)
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _left_out(found: dict[str, Any], name: str) -> Iterator[None]:
    """Notes why a comparison cannot be made here."""
    try:
        yield
    except JaxnnError as error:
        found[name] = {"left out": str(error)}


def digest(tree: PyTree) -> str:
    """A digest of the leaves of a tree, arrays or plain values, in their order."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(plain(leaf))
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def difference(one: PyTree, other: PyTree) -> dict[str, Any] | None:
    """The first array that differs in two trees: its ``leaf``, the ``numbers`` that differ ``of`` all, most ``ulp``."""
    found = leaf_differences(one, other)
    return dataclasses.asdict(found[0]) if found else None


def _distance(one: PyTree, other: PyTree, first: PyTree) -> float:
    """The distance of two trees of parameters as a share of the distance of ``one`` from the ``first``; 0 if equal."""

    def norm(a: PyTree, b: PyTree) -> float:
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return float(np.sqrt(sum(np.square(np.float64(x) - np.float64(y)).sum() for x, y in pairs)))

    return apart / (norm(one, first) or 1.0) if (apart := norm(one, other)) else 0.0


def num_devices() -> int:
    """The number of devices that a CPU with this many cores is divided into; 1 if cores cannot be chosen."""
    return min(cpu_count() or 1, MOST_DEVICES) if hasattr(os, "sched_setaffinity") else 1


def is_set(name: str) -> bool:
    """Whether the environment has a variable."""
    return name in os.environ
