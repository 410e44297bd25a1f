"""The programs of a population, compiled ahead of time and entered in the ledger with their cause."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxnn import observe
from jaxnn._clock import Clock
from jaxnn._fingerprints import PARTS, STATE_PARTS, data_fingerprint, program_listing, text_fingerprint
from jaxnn._text import format_bytes
from jaxnn.engine import _pure
from jaxnn.engine._digests import WORDS
from jaxnn.engine._feed import Piece, evaluation_pieces
from jaxnn.engine._prediction import in_batches, make_predict, metrics_of_made_up_means, metrics_of_outputs
from jaxnn.engine._states import EMPTY, MEMBERS, HostStates, Population, Shape, Start, find_start, to_host, with_keys
from jaxnn.engine._windows import TrainProgram
from jaxnn.kernels import collect_reasons
from jaxnn.parallel import Layout, process_count
from jaxnn.steps import Totals, make_evaluate_step
from jaxnn.types import ENDLESS, Array, Batch, ConfigError, Examples, Source, Splits, Task, TrainingError, TrainState

# Initial states are made at most this many at a time, so that one program serves any number of members.
MOST_AT_ONCE = 64
# Of members that take the place of others, a few at a time.
FEW_AT_ONCE = 8


@dataclasses.dataclass
class Programs:
    """What has been compiled so far; a shape of None means one member alone, without the axes of a population."""

    spec: _pure.GroupSpec  # what is compiled
    splits: Splits  # the data
    eval_batch_size: int  # examples per evaluation batch
    eval_batches: int | None = None  # batches of a split that training looks at; None: all
    values: Mapping[str, Array] = dataclasses.field(default_factory=dict)  # ``[members]`` of each traced field
    num_members: int = 1  # the number of members
    deterministic: bool = False  # whether programs that train and evaluate have equal bits in each process
    ledger: list[observe.Compilation] = dataclasses.field(default_factory=list)  # in order
    clock: Clock = dataclasses.field(default_factory=Clock)  # gets the time as ``trace``, ``compile``
    while_compiling: Callable[[], None] = lambda: None  # called when a compilation has begun
    first_examples: Examples = dataclasses.field(init=False)  # the first batch's examples, on the device
    shapes: TrainState = dataclasses.field(init=False)  # those of the state of one member
    shardings: Any = dataclasses.field(init=False, default=None)  # of each of its arrays; None on one device
    metrics: tuple[str, ...] = dataclasses.field(init=False)  # the names of the training metrics
    reasons: dict[str, bool] = dataclasses.field(init=False)  # for implementations, see `kernels.collect_reasons`
    _pieces: dict[tuple[str, int], Callable[[], Iterator[Piece]]] = dataclasses.field(init=False, default_factory=dict)
    _compiled: dict[_pure.Program, Any] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        size = self.spec.experiment.config.batch_size
        self.first_examples = self.layout.place(self.source.read(np.arange(size)))
        with self.clock.span("trace", "tracing the model"), collect_reasons() as self.reasons:
            self.shapes = jax.eval_shape(self._init, self.first_examples)
            self.spec = self.spec._replace(layout=self.layout.resolve(self.shapes))
            if self.layout.mesh is not None:
                # Parameters as the task makes them still name their mesh axes.
                named = jax.eval_shape(
                    lambda rows: self.task.init(jax.random.key(0), self.source.as_batch(rows))[0], self.first_examples
                )
                self.shardings = self.layout.state_shardings(self.shapes, linen.get_partition_spec(named))
            self.metrics = tuple(jax.eval_shape(self._step, self.shapes, self._trained_on)[1])

    @property
    def source(self) -> Source:
        """The training split."""
        return self.spec.source

    @property
    def layout(self) -> Layout:
        """The devices, and how a member's state is placed on them."""
        return self.spec.layout

    @functools.cached_property
    def task(self) -> Task:
        """The task of one member; its functions on the host are the same for all."""
        return self.spec.experiment.task(self.spec.experiment.config)

    def compile_together(self, shape: Shape | None, lengths: Sequence[int], split: str | None, cause: str) -> None:
        """Compiles in parallel threads initial states, calls of ``lengths`` steps for ``cause``, and an evaluation."""
        init = _pure.Initialise(None if shape is None else self._init_count)
        # First those that compile the longest.
        wanted: list[_pure.Program] = [*(_pure.Train(shape, length) for length in lengths), init]
        wanted += [_pure.Evaluate(shape, split, self.eval_batches is not None)] if split is not None else []
        self._compile([one for one in wanted if one not in self._compiled], cause, f"s{_pure.of_members(shape)}")

    def _compile(self, programs: Sequence[_pure.Program], cause: str, named: str) -> None:
        def lowered() -> Iterator[observe.Lowered]:
            # Traced here, in the caller's JAX contexts; only XLA runs in other threads, meanwhile.
            for program in programs:
                with self.clock.span("trace", "tracing the programs"):
                    found = self._lowered(program, cause)
                yield found
            self.while_compiling()

        with self.clock.span("compile", f"compiling the program{named}"):
            for program, (compiled, entry) in zip(programs, observe.Lowered.compile_all(lowered()), strict=True):
                self._compiled[program] = compiled
                self.ledger.append(entry)

    @functools.cached_property
    def start(self) -> Start:
        """The arrays that the experiment starts from, and which of the state's are drawn."""
        return find_start(self.spec.experiment, self.shapes)

    def init(self) -> TrainState:
        """The state of one member before the first step; the same each time."""
        state = self._program(_pure.Initialise(None), "start")(*self._init_arguments)
        return state if self._init_device is None else jax.device_put(state, self.layout.device)  # type: ignore[no-any-return]

    @functools.cached_property
    def initial(self) -> HostStates:
        """The states of all members before the first step, on the host."""
        return self.fresh(self.values, self.num_members)

    def fresh(self, values: Mapping[str, Array], num_members: int) -> HostStates:
        """The states before the first step of members with these ``values``; made a few at a time by one program."""
        needed = 2 * num_members * self.member_bytes
        free = observe.available_bytes(jax.local_devices(backend="cpu")[0])
        if free is not None and needed > free:
            raise TrainingError(
                f"the states of {num_members} members take {format_bytes(needed)} of the host's memory "
                f"while they are made, and {format_bytes(free)} are free: sweep fewer at a time, as with "
                "shard='1/4'."
            )
        init = self._program(_pure.Initialise(count := self._init_count), "start")
        parts, given = [], self._init_arguments
        for first in range(0, num_members, count):
            # The last few are filled up with the last member.
            rows = np.minimum(np.arange(first, first + count), num_members - 1)
            states = init(jax.device_put(_pure.rows_of(dict(values), rows), self._init_device), *given)
            parts.append(to_host(states))
        whole = parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        return jax.tree.map(lambda leaf: leaf[:num_members], whole)  # type: ignore[no-any-return]

    def train(self, shape: Shape | None, num_steps: int, cause: str) -> TrainProgram:
        """The program of ``num_steps`` training steps, compiled if it was not yet."""
        return self._program(_pure.Train(shape, num_steps), cause)  # type: ignore[no-any-return]

    def train_part(self, shape: Shape | None, num_steps: int) -> Callable[..., tuple[Any, Totals]]:
        """The program of some steps of a call of ``num_steps``; it also takes their bounds, and donates no state."""
        return self._program(_pure.TrainPart(shape, num_steps), "to replay a step")  # type: ignore[no-any-return]

    def temporary_bytes(self, shape: Shape | None, num_steps: int) -> int:
        """The memory that a call takes on each device and frees again."""
        return observe.temporary_bytes(self._compiled[_pure.Train(shape, num_steps)])

    @property
    def most_temporary_bytes(self) -> int:
        """The memory that the largest compiled program takes on each device and frees again; 0 before the first."""
        made = [compiled for one, compiled in self._compiled.items() if not isinstance(one, _pure.Initialise)]
        return max(map(observe.temporary_bytes, made), default=0)

    def launch_seconds(self, shape: Shape | None, num_steps: int) -> float:
        """The seconds on a GPU that the launches of a call take, of one chunk of a population."""
        return observe.Work.of(self._compiled[_pure.Train(shape, num_steps)].as_text()).launch_seconds

    def finite_source(self, split: str) -> Source:
        """The split of that name; ConfigError if there is none, or its examples are generated without an end."""
        known = {name: one for name, one in self.splits.named().items() if one.num_examples < ENDLESS}
        if split not in known:
            raise ConfigError(f"there is no split {split!r} to evaluate: the data have {', '.join(known) or 'none'}.")
        return known[split]

    def evaluate(
        self, shape: Shape | None, split: str, state: Any, *, part: bool = False, kept: dict[Any, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """The exact mean of each metric over a split, loss first, and metrics of all outputs: ``[*shape, ...]`` each.

        With ``part``, over the examples that training looks at. ``kept`` holds what `Task.evaluate_again` kept of
        earlier states of this training, and gets what it keeps of this one.
        """
        self.finite_source(split)
        part = part and self.eval_batches is not None  # otherwise one program serves both
        pieces, program = self._pieces_of(split, part), self._program(_pure.Evaluate(shape, split, part), "start")
        kept, results = {} if kept is None else kept, []
        for number, piece in enumerate(pieces()):
            if (before := kept.get((split, number))) is None:
                before = jax.tree.map(
                    lambda one: np.zeros(one.shape, one.dtype), self._kept_shapes(shape, split, piece)
                )
            *found, kept[split, number] = program(state, *piece, before)
            results.append(jax.device_get(found))
        sums, batches = [sums for sums, _ in results], 0 if shape is None else len(shape)
        totals = {name: np.sum([one[name].sum(batches, np.float64) for one in sums], axis=0) for name in sums[0]}
        count = totals.pop("count")
        # Chunks without a living member are not computed: zero of zero examples.
        with np.errstate(invalid="ignore"):
            # A metric that is an array has more axes than its count.
            means = {name: (totals[name].T / count.T).T for name in sorted(totals, key=lambda name: name != "loss")}
        if not self.task.metrics:
            return means
        seen = [outputs for _, outputs in results]
        return means | metrics_of_outputs(self.task, seen, count, self._evaluated(split, part))

    @functools.cached_property
    def predict(self) -> Callable[[TrainState, Any], Any]:
        """The model's outputs for a batch of inputs, compiled once per shape."""
        gathered = self.layout.replicated if process_count() > 1 else None
        return jax.jit(make_predict(self.task, self.source, self.layout), out_shardings=gathered)

    def predict_in_batches(self, state: TrainState, inputs: Any, batch_size: int) -> Any:
        """The outputs ``[examples, ...]`` of one member, as `in_batches`, sharded over the devices."""
        return in_batches(functools.partial(self.predict, state), self.inputs, inputs, batch_size, self.layout)

    def predict_members(self, population: Population, inputs: Any, batch_size: int) -> Any:
        """The outputs ``[chunks, lanes, examples, ...]`` of a population, as `in_batches`."""
        predict = functools.partial(jax.jit(_pure.make_population_predict(self.spec)), population)
        return in_batches(predict, self.inputs, inputs, batch_size, axis=2)

    @functools.cached_property
    def step_batch(self) -> Callable[[int], Batch]:
        """The batch of the update after a number of others, augmented."""
        make = jax.jit(_pure.make_step_batch(self.spec))
        return lambda step: make(self.spec.feed.prepare(step, 1), np.int32(step))

    def zeros(self, shape: Shape | None) -> Totals:
        """Totals of no steps, on the host."""
        zeros: dict[str, Any] = {name: np.zeros(shape or (), np.float32) for name in self.metrics}
        digests = np.zeros((*(shape or ()), len(STATE_PARTS), WORDS), np.uint32)
        bad_step, notes = np.full(shape or (), -1, np.int32), np.zeros(shape or (), np.int32)
        return Totals(zeros, zeros, bad_step, notes, digests)

    def abstract(self, shape: Shape | None) -> Any:
        """A state, or a population of ``shape``, without its arrays."""
        if shape is None:
            return self.shapes

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype, weak_type=leaf.weak_type)

        first = jax.eval_shape(lambda values: {name: value[0] for name, value in values.items()}, self.values)
        members, values = jax.tree.map(stacked, (self.shapes, first))
        step, alive = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.bool_)
        return Population(step, members, values, stacked(alive), stacked(step), step)  # type: ignore[arg-type]

    def lay_out(
        self,
        host: HostStates,
        slots: np.ndarray,
        alive: np.ndarray,
        step: int,
        values: Mapping[str, Array] | None = None,
    ) -> Population:
        """The members of ``slots [chunks, lanes]`` on the devices, those that are ``alive [members]`` after ``step``.

        An empty lane computes what the first member does, and is not alive. ``values`` are by default those of all.
        """
        rows = np.where(slots == EMPTY, slots.flat[0], slots)
        living = alive[rows] & (slots != EMPTY)
        population = Population(
            step=np.int32(step),
            members=with_keys(jax.tree.map(lambda leaf: leaf[rows], host.states), self.shapes),
            # As weakly typed as before, which NumPy's arrays cannot be.
            values=_pure.rows_of(dict(self.values if values is None else values), rows),
            alive=living,
            bad_step=host.bad_step[rows],
            num_chunks=np.int32(living.any(axis=1).sum()),
        )
        sharding = self.sharding(Shape(*slots.shape))
        if sharding is None:
            return jax.device_put(population)  # type: ignore[no-any-return]
        return Population(*(jax.device_put(part, where) for part, where in zip(population, sharding, strict=True)))

    def sharding(self, shape: Shape | None) -> Any:
        """The shardings of a state, or of a population; None on one device."""
        if shape is None or self.layout.mesh is None:
            return self.shardings
        mesh = self.layout.mesh
        members = jax.tree.map(lambda one: PartitionSpec(None, MEMBERS, *one.spec), self.shardings)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), _pure.population_specs()._replace(members=members))

    @functools.cached_property
    def member_bytes(self) -> int:
        """The memory of the state of one member."""
        return observe.nbytes(self.shapes)

    @functools.cached_property
    def shards(self) -> TrainState:
        """The shapes of what one device holds of each array of the state of one member."""

        def shard(leaf: jax.ShapeDtypeStruct, where: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(where.shard_shape(leaf.shape), leaf.dtype)

        return self.shapes if self.shardings is None else jax.tree.map(shard, self.shapes, self.shardings)

    @functools.cached_property
    def traced(self) -> dict[str, observe.Traced]:
        """What the first member computes, however it is run, by the `PARTS` of a fingerprint."""
        order = self._first_order
        rows = jax.ShapeDtypeStruct(order.shape[1:], order.dtype)
        parts = {
            "start": observe.Traced(self._init, self.first_examples),
            "program": self.traced_step,
            "batches": observe.Traced(_pure.make_batch(self.source), self._like, rows, self.shapes.key),
        }
        return parts | ({"evaluation": self._traced_evaluation} if self.splits.eval_split else {})

    def fingerprint(self) -> dict[str, str | None]:
        """Digests of the data, and by `PARTS` of what the first member computes, however it is run."""
        prints: dict[str, str | None] = {name: one.fingerprint for name, one in self.traced.items()}
        # Seeds are config. An order is identified by its values, since the host may compute it.
        prints["batches"] = text_fingerprint(f"{self._first_order.tolist()} {prints['batches']}")
        return prints | {"evaluation": self.evaluation_fingerprint(), "data": data_fingerprint(self.splits)}

    def listing(self) -> str:
        """The equations of `traced` as text, with their lines in the source, at most `MOST_LISTED` characters."""
        return program_listing({PARTS[name]: one.listing() for name, one in self.traced.items()})

    def evaluation_fingerprint(self) -> str | None:
        """A digest of what an evaluation of the first member computes; None without an eval split."""
        if not self.splits.eval_split:
            return None
        # Derived metrics are plain Python: identified by their values.
        derived = {name: f"{float(value):.6g}" for name, value in self.derived.items()}
        return text_fingerprint(f"{self._traced_evaluation.fingerprint} {derived}")

    @functools.cached_property
    def traced_step(self) -> observe.Traced:
        """A training step of the first member."""
        return observe.Traced(self._step, self.shapes, self._trained_on)

    @functools.cached_property
    def _traced_evaluation(self) -> observe.Traced:
        return observe.Traced(self._evaluate, self.shapes, self.batch)

    @functools.cached_property
    def _first_order(self) -> np.ndarray:
        """The examples of the first batch ``[1, batch]``."""
        return np.asarray(self.source.order(0, np.arange(1, dtype=np.int32), self.spec.experiment.config.batch_size))

    @functools.cached_property
    def half_sums(self) -> list[Any]:
        """The sums of a training step that lose terms."""
        return observe.half_sums(self._step, self.shapes, self._trained_on)

    @functools.cached_property
    def derived(self) -> dict[str, float]:
        """The metrics that an evaluation reports, for some means; ConfigError if they cannot be reported."""
        return metrics_of_made_up_means(self.task, jax.eval_shape(self._evaluate, self.shapes, self.batch))

    @property
    def _init_arguments(self) -> tuple[Examples, Any]:
        given = self.first_examples, self.layout.place(self.start.arrays)
        return given if self._init_device is None else jax.device_put(given, self._init_device)

    @functools.cached_property
    def _init_device(self) -> jax.Device | None:
        """The CPU, where states for one accelerator are made: there, compiling takes seconds more; None: as it is."""
        if self.layout.platform == "cpu" or self.shardings is not None:
            return None
        try:
            return jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX opens the accelerator alone, by its settings
            return None

    @property
    def inputs(self) -> Any:
        """Inputs ``[batch, ...]`` as the data set holds them; their shapes if it generates them."""
        held = self.first_examples.inputs
        return held if jax.tree.leaves(held) else self.batch.inputs

    @functools.cached_property
    def batch(self) -> Batch:
        """The shapes of a batch of the training split."""
        return jax.eval_shape(self.source.as_batch, self._like)  # type: ignore[no-any-return]

    def _program(self, program: _pure.Program, cause: str) -> Any:
        if program not in self._compiled:
            self._compile([program], cause, f" to {program}")
        return self._compiled[program]

    def _lowered(self, program: _pure.Program, cause: str) -> observe.Lowered:
        """Traces and lowers a program."""
        jit: dict[str, Any] = {"deterministic": self.deterministic}
        match program:
            case _pure.Initialise(None):
                # Its arrays are created on their devices: the full state is never on one device.
                jit |= {} if self.shardings is None else {"out_shardings": self.shardings}
                init: Any = _pure.make_init(self.spec.experiment, self.source)
                return self._lowered_once(init, f"{program}", **jit)
            case _pure.Initialise(count):
                assert count is not None
                values = jax.eval_shape(_pure.rows_of, dict(self.values), np.zeros(count, np.int32))
                init = _pure.make_population_init(self.spec, count)
                return self._lowered_once(init, f"{program}", values)
            case _pure.Train(shape, num_steps):
                make = _pure.make_train if shape is None else _pure.make_population_train
                examples = self.spec.feed.sample(num_steps)
                arguments: list[Any] = [self.abstract(shape), self.zeros(shape), examples]
                in_part = isinstance(program, _pure.TrainPart)
                arguments += [np.zeros(2, np.int32)] if in_part else []
                if (state := self.sharding(shape)) is not None:
                    totals = self._members_sharding(shape)
                    placed = jax.tree.map(lambda array: array.sharding, examples)
                    given = state, totals, placed, *[self.layout.replicated] * in_part
                    jit |= {"in_shardings": given, "out_shardings": (state, totals)}

                def train(state: Any, totals: Totals, examples: Examples, bounds: Array | None = None) -> Any:
                    call = make(self.spec, num_steps, bounds=bounds)
                    return _pure.with_digests(call, shape, self.layout)(state, totals, examples)

                jit |= {} if in_part else {"donate_argnums": 0}
                return observe.Lowered.of(train, f"{program}", cause, *arguments, **jit)
            case _pure.Evaluate(shape, split, part):
                piece = next(self._pieces_of(split, part)())
                if (state := self.sharding(shape)) is not None:
                    placed = jax.tree.map(lambda array: array.sharding, piece)
                    jit |= {"in_shardings": (state, *placed, self._members_sharding(shape))}
                    jit |= {"out_shardings": self.layout.replicated} if shape is None else {}
                given = self.abstract(shape), *piece, self._kept_shapes(shape, split, piece)
                return observe.Lowered.of(self._evaluation(shape, split), f"{program}", "start", *given, **jit)

    def _members_sharding(self, shape: Shape | None) -> NamedSharding:
        spec = PartitionSpec() if shape is None else PartitionSpec(None, MEMBERS)
        return NamedSharding(self.layout.mesh, spec)  # type: ignore[arg-type]

    def _evaluation(self, shape: Shape | None, split: str) -> Callable[..., Any]:
        make = _pure.make_evaluate if shape is None else _pure.make_population_evaluate
        return make(self.spec, self.splits.named()[split])

    def _kept_shapes(self, shape: Shape | None, split: str, piece: Piece) -> Any:
        """The shapes of what `Task.evaluate_again` keeps of a piece of a split; empty if nothing."""
        if self.task.evaluate_again is None:
            return ()
        return jax.eval_shape(self._evaluation(shape, split), self.abstract(shape), *piece, None)[2]

    def _lowered_once(self, init: Callable[..., Any], name: str, *values: Any, **jit: Any) -> observe.Lowered:
        """Lowers what makes initial states from traced ``values`` and the given arrays."""
        device = self._init_device
        platform = None if device is None else "cpu"
        if device is not None:
            values = jax.tree.map(lambda leaf: leaf.update(sharding=SingleDeviceSharding(device)), values)
        try:
            given = (*values, *self._init_arguments)
            return observe.Lowered.of(init, name, "start", *given, platform=platform, once=True, **jit)
        except NotImplementedError:  # parameters that depend on an operation of the accelerator
            if platform is None:
                raise
            self._init_device = None
            return self._lowered_once(init, name, *values, **jit)

    @functools.cached_property
    def _init_count(self) -> int:
        """The number of states made at a time, so that they take little memory of the device."""
        free = observe.available_bytes(self.layout.device)
        fitting = MOST_AT_ONCE if free is None else free // (4 * self.member_bytes)
        most = MOST_AT_ONCE if self.spec.in_step else FEW_AT_ONCE
        return int(max(1, min(self.num_members, most, fitting)))

    @functools.cached_property
    def _like(self) -> Examples:
        """The shapes of a batch's examples, without shardings, on which a trace depends."""
        shapes: Examples = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape, rows.dtype), self.first_examples)
        return shapes

    @functools.cached_property
    def _init(self) -> Any:
        return jax.jit(_pure.make_init(self.spec.experiment, self.source))

    @functools.cached_property
    def _step(self) -> Any:
        # Jitted, so that all uses share one trace. The batch is made within: its mask is known there.
        step = _pure.make_step(self.spec.experiment)
        return jax.jit(lambda state, batch: step(state, batch._replace(mask=np.ones(batch.mask.shape, np.float32))))

    @functools.cached_property
    def _trained_on(self) -> Batch:
        """The shapes of an augmented batch."""

        def augmented(examples: Examples, key: jax.Array) -> Batch:
            batch = self.source.transform(self.source.as_batch(examples), key)
            return batch._replace(mask=jnp.asarray(batch.mask))

        return jax.eval_shape(augmented, self._like, self.shapes.key)  # type: ignore[no-any-return]

    @functools.cached_property
    def _evaluate(self) -> Any:
        return jax.jit(make_evaluate_step(self.task))

    def _evaluated(self, split: str, part: bool) -> int:
        """The number of examples of a split that are evaluated, in ``part`` or all."""
        most = self.eval_batches * self.eval_batch_size if part and self.eval_batches else ENDLESS
        return min(self.splits.named()[split].num_examples, most)

    def _pieces_of(self, split: str, part: bool) -> Callable[[], Iterator[Piece]]:
        source, count = self.splits.named()[split], self._evaluated(split, part)
        if (split, count) not in self._pieces:
            resident, shares = self.spec.feed.resident, self.layout.data_size
            # Padding beyond the split would be computed for nothing.
            batch_size = min(self.eval_batch_size, -(-count // shares) * shares)
            self._pieces[split, count] = evaluation_pieces(source, count, batch_size, resident, self.layout)
        return self._pieces[split, count]
