"""``jn.replay``: the state, the batch and the key of any step of a recorded run, computed again and checked."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxnn import engine, parallel, record
from jaxnn._clock import Clock
from jaxnn._fields import seed_for
from jaxnn._fingerprints import STATE_PARTS, check_same_data, data_fingerprint, differing_parts
from jaxnn._json import config_from_json
from jaxnn._text import Table, format_bytes, short_path, text_table
from jaxnn.observe import nbytes
from jaxnn.proof._batch_table import batch_table
from jaxnn.run import Run
from jaxnn.sweeps import Sweep
from jaxnn.types import Batch, ConfigError, Experiment, Metrics, RecordError, TrainState, check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, repr=False)
class Replay:
    """One update of a recorded run: what it started from, and whether these are the run's bits.

    >>> replay = jn.replay(run, experiment, step=13)
    >>> int(replay.state.step), replay.batch.inputs.shape, replay.exact
    (12, (32, 64), True)
    >>> state, metrics = replay.update()
    >>> int(state.step), sorted(metrics)
    (13, ['accuracy', 'loss'])

    Attributes:
        step: the number of the update, from 1, as reports and messages count.
        state: the training state before it.
        batch: what it trains on, augmented.
        key: the PRNG key that its loss gets.
        exact: whether the digests in the record confirm every bit of ``state``.
        why: by what it is confirmed, or why it is not; without a reason for more it is equal to rounding.
    """

    step: int
    state: TrainState
    batch: Batch
    key: jax.Array
    exact: bool
    why: str
    _recorded: _Recording

    @property
    def experiment(self) -> Experiment[Any]:
        """What is trained, at the recorded config of the run or the member."""
        return self._recorded.experiment

    @property
    def dir(self) -> Path:
        """The directory of the record."""
        return self._recorded.path

    @property
    def member(self) -> int | None:
        """The number of the member of a sweep; None: a run."""
        return None if self._recorded.found.row is None else int(self._recorded.found.about["member"])

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The lines that the run or the member reported, oldest first."""
        return self._recorded.found.lines

    @property
    def status(self) -> str:
        """How the run or the member ended, such as ``diverged``."""
        return str(self._recorded.found.about["status"])

    @property
    def examples(self) -> np.ndarray | None:
        """The numbers ``[batch]`` of the batch's examples in the training split; None if they are generated."""
        return self._recorded.examples(self.step)

    @functools.cached_property
    def step_function(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The update as a pure function of state and batch, not compiled."""
        return engine.make_step(self.experiment)

    def update(self) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the state after the update and its metrics, by a program of one step: equal to rounding."""
        return self._recorded.one_step(self.state, self.batch)  # type: ignore[no-any-return]

    def at(self, step: int) -> Replay:
        """Returns another update; what was computed on the way to this one is kept.

        ConfigError if the run did not do it, RecordError if no state from before is there.
        """
        return self._recorded.replay(step)

    def plot(self, num_examples: int = 32) -> Figure:
        """Returns the first examples of the batch as a figure, if they are pictures, with their targets.

        ConfigError if the inputs are no pictures ``[batch, height, width]`` or ``[batch, height, width, channels]``.
        """
        from jaxnn.proof._batch_figure import draw_batch

        return draw_batch(self.batch, num_examples, f"the batch of step {self.step:,}", self._recorded.class_names)

    def table(self, num_examples: int = 8) -> Table:
        """Returns the first examples of the batch as a table: columns by name, texts, or an array's first numbers."""
        source = self._recorded.trainer.programs.source
        return batch_table(self.batch, self.examples, source, self._recorded.class_names, num_examples)

    def rows(self) -> list[tuple[str, str]]:
        """Returns what it is, as (name, value)."""
        kept = self._recorded.retraining.kept
        size = len(kept) * nbytes(next(iter(kept.values())))
        shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(self.batch.inputs))
        return [
            ("step", f"{self.step:,} of {self.experiment.config.num_steps:,}, {short_path(self.dir)}"),
            ("state", f"{'exact' if self.exact else 'not exact'}: {self.why}"),
            ("batch", shapes),
            ("kept", f"{len(kept)} states on the host, {format_bytes(size)}"),
        ]

    def __repr__(self) -> str:
        return text_table(self.rows())

    def _repr_html_(self) -> str:
        return Table(None, self.rows())._repr_html_()


def replay(
    run: Run | str | Path,
    experiment: Experiment[Any] | None = None,
    step: int = 1,
    *,
    member: int | None = None,
    memory_mib: int = 1024,
) -> Replay:
    """Computes again what an update of a recorded run, or of a ``member`` of a sweep, started from.

    It trains from the nearest earlier checkpoint, or from the start, with the programs of the run, to the end of the
    window that holds the step, where the record has a digest of the state. Further steps, by `Replay.at`, start from
    states kept on the way.

    >>> replay = jn.replay("runs/digits", experiment, step=8)  # doctest: +SKIP
    >>> replay.exact, replay.at(9).batch.targets[:4]  # doctest: +SKIP

    Args:
        run: what `fit` or `open_run` returned, or its directory; nothing is written there.
        experiment: what was trained; default: the one ``run`` has. It gets the config of the record.
        step: the number of the update, from 1.
        member: the number of a member of the sweep in the directory.
        memory_mib: the most memory, in MiB, of the states that are kept; fewer are, if it is little.

    Raises:
        ConfigError: there is no such step, or no experiment.
        RecordError: the run has no record, the data are others, or no state from before the step can be had.
    """
    path, member = located(run, member)
    experiment = run.experiment if experiment is None and isinstance(run, Run) else experiment
    if not isinstance(experiment, Experiment):
        given = "" if experiment is None else f", and {experiment!r:.60} is none"
        raise ConfigError(f"a replay needs the experiment{given}: jn.replay({str(path)!r}, experiment, step={step}).")
    found = record.RecordReader(path).member(member)
    return _Recording(path, found, experiment, check_int("memory_mib", memory_mib) * 2**20).replay(step)


def located(run: Any, member: int | None) -> tuple[Path, int | None]:
    """The directory of a record and the number of a member, from a run or its directory; ConfigError if it is none."""
    if isinstance(run, Run):
        if run.dir is None:
            raise ConfigError("the run has no record: train it without record=False.")
        if None not in (member, run.member) and member != run.member:
            raise ConfigError(f"the run is member {run.member}, and member is {member}: leave it out.")
        return run.dir, run.member if member is None else member
    if isinstance(run, Sweep):
        raise ConfigError("a sweep is given: give its directory and the number of a member, as in sweep.dir, member=3.")
    if not isinstance(run, str | os.PathLike):
        raise ConfigError(f"{run!r:.60} is no recorded run: give what jn.fit or jn.open_run returned, or a directory.")
    return Path(run), member


class _Recording:
    """A recorded run or member, and its training again."""

    def __init__(self, path: Path, found: record.Recorded, experiment: Experiment[Any], most_bytes: int) -> None:
        self.path, self.found = path, found
        config = config_from_json(found.about["config"], experiment.config)
        self.experiment = dataclasses.replace(experiment, config=config)
        options = self._options()
        splits = engine.load_data(self.experiment)
        kind = "run" if found.row is None else "sweep"
        check_same_data(path, found.group["fingerprint"], data_fingerprint(splits), kind)
        self.class_names = splits.class_names
        self._noted: list[str] = []  # what makes it start otherwise
        layout = self._layout()
        self.members = members = None if found.row is None else self._members()
        how: Any = {"members": members, "steps_per_call": found.group["steps_per_call"]}
        self.trainer = engine.open_trainer(self.experiment, options, splits, layout, Clock(), **how)
        shape = None
        if members is not None:
            arranged = engine.VmapPlan.of_json(found.group["vmap"])
            # A loop over chunks is another program than one chunk; their number is known only when it runs.
            chunks = 1 if arranged.block <= arranged.size else 2
            shape = engine.Shape(chunks, arranged.size * self.trainer.programs.spec.num_devices)
        digests = {line["step"]: line["digest"] for line in found.lines if "digest" in line}
        self.retraining = engine.Retraining(self.trainer, digests, shape, most_bytes)
        self._keep_saved()

    def replay(self, step: int) -> Replay:
        """The update ``step``, from 1."""
        if not self.found.lines:
            raise RecordError(f"{self.path} has no report of a step: metrics.jsonl is gone or empty.")
        last = self.found.lines[-1]["step"]
        number = check_int("step", step)
        if number > last:
            raise ConfigError(f"step is {step}, and the record in {self.path} has {last} steps.")
        if not any(kept < number for kept in self.retraining.kept):
            raise RecordError(
                f"no state from before step {step} is in {self.path}: the member is a copy of another, whose steps "
                "are replayed by its number; search.jsonl has it."
            )
        state, agrees, at = self.retraining.state(number - 1)
        exact, why = self._verdict(agrees, at)
        batch, key = self.trainer.programs.step_batch(number - 1), jax.random.fold_in(state.key, state.step)
        return Replay(number, state, batch, key, exact, why, self)

    def examples(self, step: int) -> np.ndarray | None:
        """As `Replay.examples`, of the update ``step``."""
        config = self.experiment.config
        seed = seed_for(config, "order")
        if self.members is not None and self.members.shared_seed is not None:
            seed = self.members.shared_seed
        steps = np.array([step - 1], np.int32)
        chosen = np.asarray(self.trainer.programs.source.order(seed, steps, config.batch_size))[0]
        return chosen if chosen.shape == (config.batch_size,) else None

    @functools.cached_property
    def differences(self) -> list[str]:
        """What differs from the process that trained, which can explain other bits."""
        changed = engine.PopulationRecord.changes(self.found, self.trainer)
        resumes = [one for one in self.found.facts.get("resumed") or () if one["changed"]]
        since = [f"resumed after step {one['step']:,} with {', '.join(one['changed'])}" for one in resumes]
        return [*self._noted, *changed, *since]

    @functools.cached_property
    def one_step(self) -> Any:
        """The compiled program of one update."""
        return jax.jit(engine.make_step(self.experiment))

    def _verdict(self, agrees: bool, at: int) -> tuple[bool, str]:
        """Whether the state has the run's bits, by the digests at the step ``at``, and why."""
        before, now = self.retraining.digests.get(at), self.retraining.reached.get(at)
        if before is None or now is None:
            return False, f"the record has no digest of step {at:,}"
        if before != now:
            since = f" ({'; '.join(self.differences)})" if self.differences else ""
            parts = " and ".join(STATE_PARTS[part] for part in differing_parts(before, now))
            return False, f"at step {at:,} {parts} differ from the record{since}"
        if not agrees:
            return False, "a part of a call has other bits than the whole call, after which they are the record's"
        return True, f"the digest of step {at:,} is that in the record"

    def _options(self) -> engine.RunOptions:
        """The recorded options that decide programs, without what would be called or written."""
        known = self.found.facts["options"]
        names = ("report_every", "eval_every", "checkpoint_every", "eval_batch_size", "eval_batches", "deterministic")
        given = {name: known[name] for name in names if known.get(name) is not None}
        if self.found.facts.get("search") is not None:  # members in lanes have windows of one length
            given |= dict.fromkeys(("report_every", "eval_every"), self.found.lines[0]["step"])
        return engine.RunOptions(record=False, progress="none", **given)

    def _layout(self) -> parallel.Layout:
        """The recorded strategy and mesh, if its devices are here."""
        recorded = self.found.group["layout"]
        if not (axes := recorded["mesh"]):
            return parallel.SINGLE_DEVICE
        try:
            strategy = parallel.Strategy.find(recorded["strategy"])
            devices = parallel.choose_devices(parallel.find_devices(None), math.prod(axes.values()))
        except ConfigError as error:
            used = f"{recorded['strategy']} over {parallel.format_mesh(axes)}"
            self._noted.append(f"it was trained as {used}: {str(error).rstrip('.')}")
            return parallel.SINGLE_DEVICE
        data_axes = (parallel.DATA,) if self.found.row is None else (parallel.DATA, engine.MEMBERS)
        return parallel.Layout(strategy, parallel.make_mesh(devices, axes), data_axes)

    def _members(self) -> engine.Members:
        """The member alone, as one of a population in the recorded arrangement."""
        facts, group = self.found.facts, self.found.group
        seed = seed_for(types.SimpleNamespace(**facts["config"]), "order", dict(facts["points"][0]))
        return engine.Members.of(
            [self.experiment],
            group["traced"],
            shared_seed=int(seed) if facts["options"].get("order") == "shared" else None,
            plan=engine.VmapPlan.of_json(group["vmap"]),
            in_step=facts.get("search") is None,
        )

    def _keep_saved(self) -> None:
        """Keeps the states that are known: the initial one, unless it is another member's, and the checkpoints'."""
        found, programs, keep = self.found, self.trainer.programs, self.retraining.keep
        if found.row is None:
            keep(0, self.trainer.state)
            checkpoints = record.Checkpoints(found.states)
            for step in checkpoints.steps():
                try:
                    keep(step, record.load_checkpoint(found.states / f"{step}", programs.shapes))
                except RecordError as error:  # it is trained from an earlier one
                    self._noted.append(str(error))
            return
        number = found.about["member"]
        if not _is_copy(self.path, found):
            keep(0, programs.initial.member(0, programs.shapes))
        like = functools.partial(engine.HostStates.shapes, programs.shapes)
        try:
            saved = record.Checkpoints(found.states).restore_members([number], found.group["members"], like)
        except RecordError:  # a search deleted the state
            return
        if saved is not None:
            restored, (row,) = saved
            state = restored.state.member(row, programs.shapes)
            keep(int(state.step), state)


def _is_copy(path: Path, found: record.Recorded) -> bool:
    """Whether a member of a search started as a copy of another."""
    if found.facts.get("search") is None:
        return False
    proposals = [one for event in record.RecordReader(path).events() for one in event.get("proposals", ())]
    return "fork" in [one for one in proposals if "point" in one][found.about["member"]]
