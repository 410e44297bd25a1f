"""Plans: what a training step needs and can reach on a graphics card, compiled for it and not run."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxnn import engine, parallel
from jaxnn._compat import tracing_for
from jaxnn._fields import with_changes
from jaxnn._text import Table, format_bytes
from jaxnn.data import steps_per_epoch
from jaxnn.kernels import collect_reasons
from jaxnn.observe import Work, available_bytes, nbytes
from jaxnn.plans._cards import Card, card_here, find_card
from jaxnn.types import ConfigError, Experiment, Splits, check_int

RESIDENT_SHARE = 0.5  # of the memory that a run can allocate, for data that stay on the card
PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
INSTALL = "pip install 'jaxnn[gpu-compile]'"
TRIES = 4  # compilations that look for the largest batch


class StepPlan(NamedTuple):
    """What a training step needs and can reach on a card: compiled, not measured; prints as a table.

    Memory of libraries' workspaces, of the autotuner and of communication comes on top; times are lower bounds.

    Attributes:
        card: the card.
        layout: the strategy and the mesh.
        batch_size: examples per step, on all cards together.
        members: number of vmapped members, 1 for a run.
        memory: bytes on each card, by part.
        work: kernels, memory traffic, calls to libraries and collectives of a step on each card.
        products: floating-point operations of the step's products on each card, by their dtype.
        implementations: of jaxnn's operations.
        reasons: why an implementation that is preferred on this kind of device is not used.
        largest: the largest batch size that fits, if it was looked for.
        usable: bytes that a run can allocate on each card: three quarters of it, or what JAX can allocate here.
    """

    card: Card
    layout: parallel.Layout
    batch_size: int
    members: int
    memory: Mapping[str, int]
    work: Work
    products: Mapping[str, float]
    implementations: Mapping[str, list[str]]
    reasons: tuple[str, ...]
    largest: int | None
    usable: float

    @property
    def peak_bytes(self) -> int:
        """Memory that a step takes on each card."""
        return sum(self.memory.values())

    @property
    def flops(self) -> float:
        """Floating-point operations of the step's products on each card."""
        return sum(self.products.values())

    @property
    def fits(self) -> bool:
        """Whether it takes no more than JAX can allocate."""
        return self.peak_bytes <= self.usable

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that a step takes at least, by what limits it."""
        found = {"products": sum(flops / self.card.flops(dtype) for dtype, flops in self.products.items())}
        if self.card.capability:  # a CPU's caches hold much of what its kernels exchange
            found |= {"memory": self.work.bytes / self.card.bandwidth, "launches": self.work.launch_seconds}
        return found | ({"links": self.work.sent / self.card.link} if self.work.sent else {})

    @property
    def seconds(self) -> float:
        """The time that a step takes at least."""
        return max(self.bounds.values())

    @property
    def utilization(self) -> float:
        """The highest possible share of the card's peak FLOP/s (MFU), of measured ones if none are published."""
        return self.bounds["products"] / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        what = f"{self.card.name}, {self.layout}" if self.layout.num_devices > 1 else self.card.name
        verdict = "fits" if self.fits else "does not fit"
        published = not self.card.is_measured
        of_card = f"{100 * self.usable / self.card.memory:.0f} % of the card" if published else "available here"
        limit = f"{format_bytes(self.usable)}, {of_card}"
        rows = [("batch size", str(self.batch_size) + (f", {self.members} members" if self.members > 1 else ""))]
        rows += [(name, format_bytes(size)) for name, size in self.memory.items()]
        rows += [("memory", f"{format_bytes(self.peak_bytes)} of {limit}: it {verdict}")]
        if self.largest is not None:
            rows += [("largest batch", str(self.largest) if self.largest else "none fits")]
        limiting = max(self.bounds, key=lambda name: self.bounds[name])
        bounds = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.bounds.items() if seconds)
        flops = ", ".join(f"{flops:.3g} FLOPs in {dtype}" for dtype, flops in self.products.items()) or "no products"
        kernels = f"{self.work.launches:,.0f} kernels"
        if self.card.capability:
            kernels += f", {self.work.alone:,.0f} outside of CUDA graphs"
        rows += [("work", f"{flops}, {format_bytes(self.work.bytes)} of traffic, {kernels}")]
        if self.seconds:
            # Where products limit, a share of a measured peak would always be all of it.
            share = f" MFU {self.utilization:.0%}," if published else ""
            speed = f"{1 / self.seconds:,.3g} steps/s,{share} limited by {limiting}"
            rows += [("at least", bounds), ("at most", speed)]
        collectives = ", ".join(
            f"{count:g} {kind} of {format_bytes(size)}" for kind, (count, size) in self.work.collectives.items()
        )
        calls = ", ".join(f"{count:g} {name}" for name, count in self.work.calls.items())
        used = ", ".join(f"{name} {'/'.join(which)}" for name, which in self.implementations.items())
        rows += [
            (name, text)
            for name, text in (("collectives", collectives), ("library calls", calls), ("implementations", used))
            if text
        ]
        rows += [("", reason) for reason in self.reasons]
        note = "Compiled, not measured: without workspaces of libraries, autotuning and buffers of communication."
        return Table(("training step", what), rows, [note])


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of `plan`; flags of every script's ``plan`` command."""

    device: str | None = None
    """Card to compile for (or --for), h100 or my_card.toml; default: the device at hand, measured if it is unknown."""
    devices: int | None = None
    """Number of cards; default: the size of the mesh, or 1."""
    strategy: engine.StrategyOption = "auto"
    """How training is distributed over them, as in a run."""
    mesh: str | None = None
    """Devices along named axes, such as data=4,model=2; default: all along data."""
    members: int = 1
    """Seeds of a sweep that are one program, on one card."""
    largest: bool = False
    """Look for the largest batch size that fits, by some more compilations."""

    def __post_init__(self) -> None:
        if self.devices is not None:
            check_int("devices", self.devices)
        check_int("members", self.members)


def plan(experiment: Experiment[Any], options: PlanOptions | None = None, **changes: Any) -> StepPlan:
    """Compiles a training step of ``experiment`` for a graphics card that need not be here; trains nothing.

    Args:
        experiment: what would be trained; its data are loaded, for their shapes.
        options: what to compile for, see `PlanOptions`.
        **changes: single options, such as ``device="h100"``.

    Raises ConfigError for an unknown card, a batch that its cards cannot share, or if the compiler is not installed;
    DataError for a batch larger than the training split.

    >>> print(jn.plan(experiment))  # the machine at hand; jn.plan(experiment, device="h100") for one that is not
    training step ...
    """
    options = with_changes(options or PlanOptions(), changes)
    axes = parallel.parse_mesh(options.mesh) if options.mesh else {parallel.DATA: options.devices or 1}
    count, strategy = options.devices or math.prod(axes.values()), parallel.Strategy.find(options.strategy)
    if options.members > 1:
        axes = {engine.MEMBERS: 1, **axes}
        if count > 1:
            raise ConfigError("members are planned on one card: leave devices and mesh out.")
        if strategy.axis_name is not None:
            raise ConfigError(f"members cannot be planned with the strategy {strategy.name}: leave strategy out.")
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.device is None:
        found = parallel.choose_devices(parallel.find_devices(), count)
        card, usable = card_here(found[0]), float(available_bytes(found[0]) or 0)
    else:
        card = find_card(options.device)
        usable = card.usable
        found = list(topology(card, count))
        context = tracing_for(found[0])
    if strategy is parallel.STRATEGIES["auto"]:  # chooses by the memory of this card
        strategy = strategy._replace(choose=lambda _, shapes: parallel.strategy_for(shapes, int(usable)))
    layout = parallel.Layout(strategy, parallel.make_mesh(found, axes), abstract=True)
    splits = engine.load_data(experiment)
    if options.members > 1 and splits.train.examples is None:
        raise ConfigError("members are planned with data in memory, and these are streamed: plan one run.")
    steps_per_epoch(splits.train.num_examples, experiment.config.batch_size)  # raises if there is not one
    layout.check_divides(experiment.config.batch_size)
    with context:
        planned = _plan(experiment, splits, card, usable, layout, options.members)
        return planned._replace(largest=_largest(planned, experiment, splits)) if options.largest else planned


@functools.cache
def topology(card: Card, count: int) -> tuple[jax.Device, ...]:
    """Devices to compile for: ``count`` cards of one machine; ConfigError if the compiler for them is missing."""
    versions = {}
    for name in PLUGINS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ConfigError(f"to compile for a GPU, install JAX's compiler for them: {INSTALL}.") from error
    jaxlib = importlib.metadata.version("jaxlib")
    if wrong := [f"{name} {version}" for name, version in versions.items() if version != jaxlib]:
        raise ConfigError(f"{' and '.join(wrong)} cannot compile for jaxlib {jaxlib}: {INSTALL} with equal versions.")
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=card.target(), topology=f"1x1x{count}")
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        # Where JAX has started and found no GPU, it has no compiler for them either.
        remedy = "; on a machine without a GPU, set JAX_PLATFORMS=cpu in the environment before JAX starts"
        raise ConfigError(f"JAX's compiler for GPUs cannot compile for {card.name}: {reason}{remedy}.") from error
    return tuple(found.devices)


def _plan(
    experiment: Experiment[Any], splits: Splits, card: Card, usable: float, layout: parallel.Layout, members: int
) -> StepPlan:
    room = RESIDENT_SHARE * usable
    sizes = [nbytes(one.examples) for one in splits.named().values() if one.examples is not None]
    resident = splits.train.examples is not None and sum(sizes) <= room
    num_seeds, shape = (members, engine.Shape(1, members)) if members > 1 else (None, None)
    programs = engine.programs_of(experiment, splits, resident=resident, layout=layout, num_seeds=num_seeds)
    # As many as a run has in a call: their order is computed once for all.
    num_steps = engine.ENOUGH_STEPS if resident else 1
    with collect_reasons() as reasons:
        try:
            compiled: Any = programs.train(shape, num_steps, "plan")
        except RuntimeError as error:
            if "Unknown backend" not in str(error):
                raise
            reason = "a step that calls Python (jax.debug.print, jax.pure_callback, io_callback) cannot be compiled"
            raise ConfigError(f"{reason} for a card that is not here: leave these calls out.") from error
    products = {
        dtype: members * flops / layout.num_devices for dtype, flops in programs.traced_step.product_flops().items()
    }
    stats = compiled.memory_analysis()
    memory = {name: members * nbytes(part) for name, part in programs.shards._asdict().items()}
    given = stats.argument_size_in_bytes - sum(memory.values())
    names = {"params": "parameters", "opt_state": "optimizer state", "model_state": "model state"}
    parts = {text: memory[name] for name, text in names.items() if memory[name]}
    parts["data on the card" if resident else "batch"] = given
    if resident and (other := sum(sizes) - nbytes(splits.train.examples)):
        parts["other splits"] = other
    parts["temporaries"] = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    work = Work(0, 0, {}, {}).plus(Work.of(compiled.as_text()), 1 / num_steps)
    size, used = experiment.config.batch_size, programs.traced_step.implementations
    return StepPlan(card, programs.layout, size, members, parts, work, products, used, tuple(reasons), None, usable)


def _largest(found: StepPlan, experiment: Experiment[Any], splits: Splits) -> int:
    """The largest batch size that fits, found by compiling; temporaries are nearly linear in the batch."""
    step = found.layout.data_size
    limit = found.usable
    most = splits.train.num_examples // step * step
    tried = {found.batch_size: found.peak_bytes}
    for _ in range(TRIES):
        low = max((size for size, used in tried.items() if used <= limit), default=0)
        high = min((size for size, used in tried.items() if used > limit), default=most + step)
        if high - low <= step:
            break
        guess = 2 * found.batch_size if len(tried) == 1 else int(min(_line(tried, limit), most + step))
        if guess <= low or (guess >= high and high in tried):  # beyond all examples: all of them
            guess = (low + high) // 2
        guess = min(max(guess // step * step, low + step), high - step)
        again = dataclasses.replace(experiment, config=dataclasses.replace(experiment.config, batch_size=guess))
        tried[guess] = _plan(again, splits, found.card, limit, found.layout, found.members).peak_bytes
    return max((size for size, used in tried.items() if used <= limit), default=0)


def _line(tried: Mapping[int, int], limit: float) -> float:
    """The batch size at which the line through the trials nearest to the limit reaches it, a little below."""
    (x, y), (x2, y2) = sorted(tried.items(), key=lambda one: abs(one[1] - limit))[:2]
    return x + 0.99 * (limit - y) * (x2 - x) / (y2 - y) if y2 != y else math.inf if y < limit else 0.0
