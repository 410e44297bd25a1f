"""The programs of one group of members, each compiled ahead of time and entered in the ledger with its cause."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxnn.loop import Programs, Totals, TrainProgram, evaluation_pieces, for_one_call, mean_metrics
from jaxnn.observe import available_bytes, format_bytes, nbytes, temporary_bytes
from jaxnn.parallel import shardings_of
from jaxnn.sweeps.engine.layout import HostStates, key_words, lay_out, member_state, to_host
from jaxnn.sweeps.engine.population import (
    Formula,
    Population,
    Shape,
    make_population_evaluate,
    make_population_init,
    make_population_train,
    population_sharding,
    totals_sharding,
)
from jaxnn.types import Array, PyTree, Source, Task, TrainingError, TrainState

# States are made so many at a time, at the most: one after another, whatever their number.
MOST_AT_ONCE = 64

type PopulationEvaluator = Callable[[Population], dict[str, np.ndarray]]


@dataclasses.dataclass
class GroupPrograms:
    """What a group has compiled so far.

    Attributes:
        formula: what is compiled.
        solo: the programs of one member alone: its shapes, and what it computes with. None of them is compiled.
        num_members: how many members there are.
        values: the values of each traced field, ``[members]``.
    """

    formula: Formula
    solo: Programs
    num_members: int
    values: Mapping[str, Array]
    _train: dict[tuple[Shape, int], Any] = dataclasses.field(default_factory=dict)
    _evaluate: dict[Shape, PopulationEvaluator] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def initial(self) -> HostStates:
        """The states of all members before the first step, on the host; made a few at a time by one program."""
        self._check_host()
        count, parts = self._init_count, []
        for first in range(0, self.num_members, count):
            # The last few are filled up with the last member.
            rows = np.minimum(np.arange(first, first + count), self.num_members - 1)
            states = self._init({name: value[rows] for name, value in self.values.items()}, self.solo.first_examples)
            parts.append(to_host(states))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: self.num_members], *parts)  # type: ignore[no-any-return]

    def first_state(self) -> TrainState:
        """The state of the first member before the first step, on the host."""
        return member_state(self.initial, self.solo.shapes, 0)

    def lay_out(self, host: HostStates, slots: np.ndarray, alive: np.ndarray, step: int) -> Population:
        """The members of ``slots`` on the devices, see `layout.lay_out`."""
        return lay_out(host, self.solo.shapes, self.values, slots, alive, step, self.sharding)

    def train(self, shape: Shape, num_steps: int, cause: str) -> TrainProgram:
        """The program that trains a population of ``shape`` for ``num_steps`` steps, compiled if it was not yet."""
        if (shape, num_steps) not in self._train:
            steps = f"{num_steps} step{'s' if num_steps > 1 else ''}"
            examples = self.formula.feed.sample(num_steps)
            jit: dict[str, Any] = {"donate_argnums": 0}
            if self.sharding is not None:
                spread = self.sharding, totals_sharding(self.formula.layout.mesh)
                jit |= {"in_shardings": (*spread, shardings_of(examples)), "out_shardings": spread}
            self._train[shape, num_steps] = self.solo.compile(
                make_population_train(self.formula, num_steps),
                f"train {steps} of {shape.chunks} × {shape.lanes} members",
                cause,
                self.abstract(shape),
                self.zeros(shape),
                examples,
                **jit,
            )
        program: TrainProgram = self._train[shape, num_steps]
        return program

    def temporary_bytes(self, shape: Shape, num_steps: int) -> int:
        """What a call takes on each device and frees again."""
        return temporary_bytes(self._train[shape, num_steps])

    def evaluator(self, shape: Shape, name: str, source: Source, batch_size: int) -> PopulationEvaluator:
        """A function from a population of ``shape`` to the mean of each metric of a split: ``[chunks, lanes, ...]``."""
        if shape not in self._evaluate:
            pieces = evaluation_pieces(source, batch_size, self.formula.feed.resident, self.formula.layout)
            piece, jit = next(pieces()), dict[str, Any]()
            if self.sharding is not None:
                jit = {"in_shardings": (self.sharding, *shardings_of(piece))}
            function = make_population_evaluate(self.formula, source)
            label = f"evaluate {name} of {shape.chunks} × {shape.lanes} members"
            program = self.solo.compile(function, label, "start", self.abstract(shape), *piece, **jit)

            def evaluate(population: Population) -> dict[str, np.ndarray]:
                sums = [jax.device_get(program(population, *piece)) for piece in pieces()]
                # Chunks without a living member are not computed: zero of zero examples.
                with np.errstate(invalid="ignore"):
                    return mean_metrics(sums, axis=2)

            self._evaluate[shape] = evaluate
        return self._evaluate[shape]

    @functools.cached_property
    def task(self) -> Task:
        """That of a member; what it does on the host is the same for all."""
        return self.solo.experiment.task(self.solo.experiment.config)

    def zeros(self, shape: Shape) -> Totals:
        """Totals of no steps for a population of ``shape``, on the host."""
        sums = {name: np.zeros(shape, np.float32) for name in self.solo.zeros.sums}
        return Totals(sums, np.full(shape, -1, np.int32))

    def abstract(self, shape: Shape) -> Population:
        """A population of ``shape`` without its arrays."""

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype)

        values = {
            name: jax.ShapeDtypeStruct(shape, value.dtype, weak_type=value.weak_type)  # type: ignore[union-attr]
            for name, value in self.values.items()
        }
        scalar = jax.ShapeDtypeStruct((), np.int32)
        lanes = jax.ShapeDtypeStruct(shape, np.int32), jax.ShapeDtypeStruct(shape, np.bool_)
        members: PyTree = jax.tree.map(stacked, self.solo.shapes)
        return Population(scalar, members, values, lanes[1], lanes[0], scalar)  # type: ignore[arg-type]

    def abstract_host(self) -> HostStates:
        """The members' states on the host without their arrays, to read saved ones into."""
        states = jax.eval_shape(key_words, self.solo.shapes)

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.num_members, *leaf.shape), leaf.dtype)

        return HostStates(jax.tree.map(stacked, states), stacked(jax.ShapeDtypeStruct((), np.int32)))  # type: ignore[arg-type]

    @functools.cached_property
    def sharding(self) -> Population | None:
        """Where a population lies; None on one device."""
        return population_sharding(self.formula.layout.mesh, self.solo.shardings)

    @functools.cached_property
    def member_bytes(self) -> int:
        """What the state of one member takes."""
        return nbytes(self.solo.shapes)

    def _check_host(self) -> None:
        """Raises TrainingError if the host has no room for the states of all members, and again as they are made."""
        needed, free = 2 * self.num_members * self.member_bytes, available_bytes(jax.local_devices(backend="cpu")[0])
        if free is not None and needed > free:
            raise TrainingError(
                f"the states of {self.num_members} members take {format_bytes(needed)} of the host's memory while they "
                f"are made, and {format_bytes(free)} are free: sweep fewer at a time, as with shard='1/4'."
            )

    @functools.cached_property
    def _init(self) -> Any:
        count = self._init_count
        init, rows = make_population_init(self.formula, count), np.zeros(count, np.int32)
        values = {name: value[rows] for name, value in self.values.items()}
        name = f"initialise {count} members"
        return self.solo.compile(init, name, "start", values, self.solo.first_examples, **for_one_call())

    @property
    def _init_count(self) -> int:
        """How many states are made at a time: so many that they take little of the device, as rounds may need."""
        free = available_bytes(self.formula.layout.device)
        fitting = MOST_AT_ONCE if free is None else free // (4 * self.member_bytes)
        return int(max(1, min(self.num_members, MOST_AT_ONCE, fitting)))
