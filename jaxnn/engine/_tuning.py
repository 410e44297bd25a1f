"""Sizes chosen by timing compiled calls: steps per call, members under one ``vmap``, examples per batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxnn._text import format_bytes
from jaxnn.engine._compiler import Programs
from jaxnn.engine._states import Shape
from jaxnn.engine._windows import Plan, near_divisor, typical_window
from jaxnn.observe import available_bytes
from jaxnn.parallel import broadcast_from_primary
from jaxnn.types import TrainingError

# A probe of many steps is as long as this many seconds of single steps: long enough to hide the host's cost, and
# short even if a compiler makes a scanned step thirty times slower, as XLA does for convolutions on a CPU.
PROBE_SECONDS = 0.1
MOST_STEPS = 1024
# Page faults on large temporaries are paid once per call: sixteen steps per call make them small.
ENOUGH_STEPS = 16
# If a loop may be many times slower, this many steps show it.
WARY_STEPS = 2
# A step of fewer arithmetic operations takes less than about a millisecond: long calls of it are the fastest.
SHORT_STEP = 2e6
# Members with short steps share a vmap up to this many operations of a step: wider ones gain little.
SHORT_VMAP = 1e8
ROUNDS = 3
# Steps per call are measured, programs compiled for it included, for a tenth of the first minute.
MEASURE_SECONDS = 6.0
WORTHWHILE, HARMLESS = 0.95, 1.05
# The overhead of a call is a few percent at 0.1 seconds per call of an MNIST MLP, and hardly any at longer ones.
CALL_SECONDS = 0.3
# A call of so many operations takes about as long.
CALL_OPERATIONS = 6e8
# A size that is this much slower than the best ends the search: larger ones were never faster again.
SLOWER = 1.05
# The share of a device's free memory that may be taken.
MEMORY_SHARE = 0.8
# Each vmap size tried is this many times the one before: throughput changes slowly with it.
FACTOR = 4
# The least number of chunks for the lanes of a search on a CPU.
LANE_CHUNKS = 4
# A second size is tried if the training takes this many times as long as the first trial did, compilation included.
WORTH_TRYING = 10
# The overhead of shorter calls is noticeable.
SHORT_CALL = 0.01
# On an accelerator a call of this many operations takes 4 ms if products fill it (a GPT-2 on an H200), and a tenth of a
# second if kernels are short (a ResNet-20): long enough to hide the host's work, and soon interrupted.
ACCELERATOR_OPERATIONS = 1e12
# If a step alone has more operations, this many hide the host's work.
FEWEST_STEPS = 4
# A smaller vmap size is tried on an accelerator if its larger share of launches costs at most this factor.
CLOSE = 1.1

type Call = Callable[[], object]


def choose_steps_per_call(
    make_call: Callable[[int], Call],
    window: int,
    first: int = 1,
    *,
    wary: bool = False,
    compile_seconds: float = 0.0,
) -> tuple[int, dict[int, float]]:
    """Tries calls of one step, of a few, and if those were no slower, of many; they should divide ``window``.

    ``make_call(num_steps)`` returns a compiled call, which returns arrays without waiting. A call of more than one step
    given as ``first`` is the only one tried, and run once, unless it turns out to be long. If ``wary``, as loops may be
    slow, one of two steps is tried before longer ones. What would take more than `MEASURE_SECONDS` in all, where
    another program takes ``compile_seconds``, is not tried. Returns the fastest length, and the seconds per step of
    each one tried.
    """
    measured: dict[int, float] = {}
    until = time.perf_counter() + MEASURE_SECONDS

    def affordable(length: int, step_seconds: float) -> bool:
        return _in_time(compile_seconds + 2 * length * step_seconds, until)

    if first > 1:
        measured[first] = timed_round(make_call(first), first, 1)
        if first * measured[first] <= CALL_SECONDS:
            return first, measured
    measured[1] = seconds_per_step(make_call(1), 1, until=until)
    # About ``PROBE_SECONDS`` of steps, as a power of four so that reruns agree.
    power = max(1, round(math.log(max(2.0, PROBE_SECONDS / measured[1]), 4)))
    probe = min(WARY_STEPS, window) if wary else near_divisor(window, min(MOST_STEPS, 4**power))
    if probe not in measured and affordable(probe, measured[1]):
        measured[probe] = seconds_per_step(make_call(probe), probe, give_up_above=2 * measured[1], until=until)
    if measured.get(probe, math.inf) <= HARMLESS * measured[1]:
        # The compiler is no slower in a loop, so a long call is safe to try.
        steps = min(MOST_STEPS, round(CALL_SECONDS / measured[probe]))
        if measured[probe] < WORTHWHILE * measured[1]:
            steps = max(ENOUGH_STEPS, steps)
        length = near_divisor(window, steps)
        if length > probe and affordable(length, measured[probe]):
            measured[length] = seconds_per_step(make_call(length), length, until=until)
    fastest = min(measured, key=lambda length: measured[length])
    return fastest, measured


def _in_time(seconds: float, until: float) -> bool:
    """Whether ``seconds`` from now are over by ``until``; the first process's answer, so that all choose the same."""
    end = time.perf_counter() + seconds
    return broadcast_from_primary(lambda: end <= until)


def seconds_per_step(call: Call, length: int, give_up_above: float = math.inf, until: float = math.inf) -> float:
    """The fastest of a few rounds of calls of ``length`` steps, after one to warm up; of fewer if they end ``until``.

    ``until`` is a time of ``time.perf_counter``.
    """
    warm_up = timed_round(call, length, 1)
    if warm_up > 4 * give_up_above:
        return warm_up
    num_calls = max(1, min(10, int(PROBE_SECONDS / (warm_up * length))))
    seconds = list[float]()
    for _ in range(ROUNDS):
        if not _in_time(num_calls * length * warm_up, until):
            break
        seconds.append(timed_round(call, length, num_calls))
    return min(seconds, default=warm_up)


def timed_round(call: Call, length: int, num_calls: int) -> float:
    """Seconds per step of ``num_calls`` calls of ``length`` steps; the first process's, so that all choose the same."""
    start = time.perf_counter()
    for _ in range(num_calls):
        result = call()
    jax.block_until_ready(result)
    seconds = (time.perf_counter() - start) / (num_calls * length)
    return broadcast_from_primary(lambda: seconds)


class Trial(NamedTuple):
    """A size that was tried."""

    size: int  # members under one ``vmap`` on a device, or examples per batch
    seconds: float  # of one step
    per_second: float  # the throughput of one device: member-steps or examples per second
    temporary_bytes: int  # the memory that a call takes and frees again

    def is_long(self, num_steps: int) -> bool:
        """Whether ``num_steps`` take long enough to be measured without repetition."""
        return self.seconds * num_steps > PROBE_SECONDS

    @staticmethod
    def measure(size: int, num_steps: int, call: Call, temporary_bytes: int) -> Trial:
        """Times a compiled ``call`` of ``num_steps`` steps: the faster of two calls, after one that warms up."""
        timed_round(call, 1, 1)
        seconds = min(timed_round(call, 1, 1) for _ in range(2)) / num_steps
        return Trial(size, seconds, size / seconds, temporary_bytes)


def widen(
    sizes: Iterable[int],
    trials: list[Trial],
    attempt: Callable[[int], Trial],
    fixed_bytes: float = 0.0,
    free_bytes: float | None = None,
    least: int = 0,
) -> str | None:
    """Tries larger and larger ``sizes``, until they are slower, from ``least`` on, or do not fit.

    ``trials`` holds what was tried so far, at least one, and gets the others. Any size takes ``fixed_bytes`` besides
    its temporaries, of ``free_bytes`` if that is known. Returns why no larger size was tried, if it was not for speed.
    """
    for size in sizes:
        if size <= trials[-1].size:
            continue
        # Temporaries have a fixed part and one for each, extrapolated from the last two sizes compiled.
        last, before = trials[-1], trials[-2] if len(trials) > 1 else Trial(0, 0.0, 0.0, 0)
        each = (last.temporary_bytes - before.temporary_bytes) / (last.size - before.size)
        needed = fixed_bytes + last.temporary_bytes + (size - last.size) * max(each, 0.0)
        if free_bytes is not None and needed > free_bytes:
            return f"{size} would take {format_bytes(needed)} of {format_bytes(free_bytes)} free: not tried"
        try:
            trials.append(attempt(size))
        # Smaller sizes ran: a larger one that fails, for memory or an operation that cannot be mapped, is not used.
        except Exception as error:
            full = "RESOURCE_EXHAUSTED" in str(error)
            reason = "it does not fit in memory" if full else (str(error).strip().splitlines() or [""])[0]
            return f"{size} cannot be run: {reason}"
        if size >= least and trials[-1].per_second * SLOWER < max(trial.per_second for trial in trials):
            return None
    return None


def narrow(
    sizes: Sequence[int], attempt: Callable[[int], tuple[Trial, float]], member_steps: float
) -> tuple[list[Trial], str | None]:
    """Tries smaller and smaller ``sizes``, largest first, as long as they may be faster: for an accelerator.

    Its members share the launches of kernels, so the largest of the sizes that fit is the fastest by what its
    program has to do. Caches may say otherwise: the next smaller one is tried if its larger share of launches costs
    little, and the training of ``member_steps`` takes many times as long as the trial, compilation included.

    ``attempt`` returns a trial and the seconds of its step's launches, or raises MemoryError or JAX's
    RESOURCE_EXHAUSTED for a size that does not fit. Returns what was tried, smallest first, and which did not fit.
    """
    trials: list[Trial] = []
    note = None
    for size in sorted(sizes, reverse=True):
        started = time.perf_counter()
        try:
            trial, launches = attempt(size)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if size == min(sizes) or not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
                raise
            note = note or f"vmap size {size} does not fit in memory"
            continue
        trials.insert(0, trial)
        best = max(one.per_second for one in trials)
        # A step of the next size: the launches remain, all else is shared out.
        next_size = max((one for one in sizes if one < size), default=0)
        expected = next_size / (launches + max(trial.seconds - launches, 0.0) * next_size / size)
        is_long = member_steps / best > WORTH_TRYING * (time.perf_counter() - started)
        if trial.per_second < best or expected * CLOSE < best or not is_long:
            break
    return trials, note


class VmapPlan(NamedTuple):
    """The arrangement chosen for the members of one program."""

    size: int  # members under one ``vmap`` on a device
    steps_per_call: int  # training steps per call
    block: int  # members that are on a device at a time; fewer than all if memory is short
    trials: tuple[Trial, ...] = ()  # the sizes that were tried, smallest first
    note: str | None = None  # why larger ones were not tried, if memory forbade it

    def lines(self) -> list[str]:
        """The throughput curve, a line per size, and what was chosen."""
        curve = [
            f"vmap size {trial.size:>4}: {trial.per_second:>9,.0f} member-steps/s per device, "
            f"{format_bytes(trial.temporary_bytes)} of temporaries" + ("  ← chosen" if trial.size == self.size else "")
            for trial in self.trials
        ]
        return [*curve, *([self.note] if self.note else [])]

    def as_json(self) -> dict[str, Any]:
        """The plan, for a record."""
        return self._asdict() | {"trials": [trial._asdict() for trial in self.trials]}

    @staticmethod
    def of_json(recorded: Mapping[str, Any]) -> VmapPlan:
        """Returns the ``recorded`` plan."""
        trials = tuple(Trial(*(trial[name] for name in Trial._fields)) for trial in recorded["trials"])
        found: dict[str, Any] = {name: recorded.get(name) for name in VmapPlan._fields}
        return VmapPlan(**found | {"trials": trials})

    def size_for(self, num_members: int) -> int:
        """The fastest size that was tried for this many members on a device; as chosen if none was."""
        known = {trial.size: trial.seconds for trial in self.trials} or {self.size: 1.0}
        return min(known, key=lambda size: (-(-num_members // size) * known[size], size))


def plan_vmap_size(
    programs: Programs, plan: Plan, given: int | None, given_steps: int | None, *, apart: bool, thorough: bool
) -> VmapPlan:
    """Chooses vmap size, steps per call, and the number of members that are on a device at a time.

    On a CPU one size is compiled, a second only if the training that it may shorten takes ten times as long: members
    one by one, whose small matrices stay in its cache, then a few together, but many at once if their steps are short.
    On an accelerator all that fit in memory are, see `narrow`. Nothing is measured if there is one size to choose from,
    and its steps per call are given, fill the window, or follow from the operations of a step. ``apart``: some members
    may be stopped before others. If ``thorough``, sizes are tried until they are slower, for their throughput curve.
    TrainingError if not even one member fits.
    """
    num_devices, device = programs.spec.num_devices, programs.layout.device
    num_members, window = -(-programs.num_members // num_devices), min(typical_window(plan), plan.num_steps)
    free, on_cpu = available_bytes(device), programs.layout.platform == "cpu"
    if free is not None:
        # The devices of a CPU share its memory.
        free = int(MEMORY_SHARE * (free // num_devices if on_cpu else free))
    block, note = fitting_block(programs.member_bytes, free, num_members)
    steps = near_divisor(window, ENOUGH_STEPS) if on_cpu else many_steps(programs, window, block)
    steps = min(given_steps or steps, window)
    sizes = _sizes_to_try(programs.traced_step.operations, block, on_cpu=on_cpu, apart=apart, thorough=thorough)
    if on_cpu and not programs.spec.in_step and not thorough:
        # Lanes become empty at the end of a search: chunks without a member are not computed.
        sizes = sorted({min(size, max(1, block // LANE_CHUNKS)) for size in sizes})
    if given is not None:
        sizes = [min(given, block)]
    if given_steps is not None and given is not None:
        return VmapPlan(sizes[0], steps, block, (), note)
    if len(sizes) == 1 and not thorough:
        if given_steps is None and on_cpu:
            # Infinitely many operations, as of a loop, get the fewest steps.
            about = min(MOST_STEPS, CALL_OPERATIONS / max(1.0, block * programs.traced_step.operations))
            steps = near_divisor(window, max(ENOUGH_STEPS, round(about)))
        return VmapPlan(sizes[0], steps, block, (), note)

    def attempt(size: int) -> Trial:
        most = None if on_cpu or size == 1 else free
        return _try_members(programs, Shape.of(block * num_devices, size, num_devices), steps, most)

    def with_launches(size: int) -> tuple[Trial, float]:
        trial, shape = attempt(size), Shape.of(block * num_devices, size, num_devices)
        return trial, programs.launch_seconds(shape, steps) / steps

    member_steps = num_members * plan.num_steps
    if on_cpu or thorough:
        started = time.perf_counter()
        trials, refused = [attempt(sizes[0])], None
        if thorough or member_steps / trials[0].per_second > WORTH_TRYING * (time.perf_counter() - started):
            shorter = widen(sizes, trials, attempt, 2.0 * block * programs.member_bytes, free)
            refused = shorter and f"vmap size {shorter}"
    else:
        trials, refused = narrow(sizes, with_launches, member_steps)
    note = "; ".join(filter(None, [note, refused])) or None
    best = min(trials, key=lambda trial: -(-block // trial.size) * trial.seconds)
    if given_steps is None and on_cpu:
        call_seconds = steps * best.seconds * -(-block // best.size)
        if call_seconds < SHORT_CALL:
            steps = near_divisor(window, min(MOST_STEPS, round(steps * CALL_SECONDS / call_seconds)))
    return VmapPlan(best.size, steps, block, tuple(trials), note)


def many_steps(programs: Programs, window: int, members: int = 1) -> int:
    """The steps per call on an accelerator, where long calls are never slower: by operations, without measuring."""
    most = ACCELERATOR_OPERATIONS / max(1.0, members * programs.traced_step.operations)
    # The batches of a call are on the host, and wait on the device, at the same time.
    limit = MOST_STEPS if programs.spec.feed.resident else ENOUGH_STEPS
    return near_divisor(window, max(FEWEST_STEPS, round(min(limit, most))))


def _sizes_to_try(operations: float, block: int, *, on_cpu: bool, apart: bool, thorough: bool) -> list[int]:
    """The vmap sizes that may be the fastest for ``block`` members of ``operations`` a step each, smallest first."""
    # 1, 4, 16 and so on up to all, each so large that the last chunk is full too, or nearly.
    powers = (min(FACTOR**power, block) for power in range(block.bit_length()))
    sizes = sorted({-(-block // -(-block // size)) for size in powers})
    if thorough or not on_cpu:
        return sizes
    if operations < SHORT_STEP:
        # Most of a short step is overhead of its operations, which members under one vmap share. If some are stopped
        # before others, more chunks are better: those without a living member are not computed.
        most = SHORT_VMAP / (FACTOR if apart else 1)
        return [max(size for size in sizes if size == 1 or size * operations <= most)]
    return sizes[:2]


def _try_members(programs: Programs, shape: Shape, steps: int, most: int | None) -> Trial:
    """Times calls of ``steps`` steps of a population of ``shape``; MemoryError if they need over ``most`` bytes."""
    programs.compile_together(shape, [steps], programs.splits.eval_split, cause := "to choose the vmap size")
    program, temporary = programs.train(shape, steps, cause), programs.temporary_bytes(shape, steps)
    rows, alive = range(min(shape.lanes, programs.num_members)), np.ones(programs.num_members, np.bool_)
    needed = 2 * math.prod(shape) * programs.member_bytes // programs.spec.num_devices + temporary
    if most is not None and needed > most:
        raise MemoryError(f"{format_bytes(needed)} of {format_bytes(most)}")
    population: Any = programs.lay_out(programs.initial, shape.arrange(rows), alive, 0)

    def call() -> object:
        nonlocal population
        population, totals = program(population, programs.zeros(shape), programs.spec.feed.prepare(0, steps))
        return totals

    return Trial.measure(shape.lanes // programs.spec.num_devices, steps, call, temporary)


def fitting_block(member_bytes: int, free_bytes: int | None, num_members: int) -> tuple[int, str | None]:
    """How many members fit on a device with their state twice: before and after a call."""
    needed = 2 * member_bytes
    if free_bytes is None or num_members * needed <= free_bytes:
        return num_members, None
    fitting = free_bytes // needed
    if fitting < 1:
        raise TrainingError(
            f"not one member fits: its state takes twice {format_bytes(member_bytes)}, and "
            f"{format_bytes(free_bytes)} are free: make the model smaller."
        )
    num_blocks = -(-num_members // fitting)
    block = -(-num_members // num_blocks)
    return block, (
        f"{num_members} members of {format_bytes(needed)} do not fit in {format_bytes(free_bytes)} at once: "
        f"{block} at a time, in {num_blocks} rounds"
    )
