"""The programs that a study times: training steps, the same without collectives, and all-reduces by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxnn.loop.checks import check_alike_on_devices
from jaxnn.loop.compiling import Programs
from jaxnn.loop.feed import make_feed
from jaxnn.loop.tuning import Call
from jaxnn.observe import Clock, Ledger, nbytes
from jaxnn.parallel import DATA, SINGLE, Layout, make_layout
from jaxnn.scaling.cases import Case, Message
from jaxnn.scaling.collectives import Collective, read_collectives
from jaxnn.scaling.options import ScalingOptions
from jaxnn.scaling.timing import Contender
from jaxnn.types import Experiment, Splits, TrainState

# So many all-reduces a call hide what the call itself costs.
REDUCTIONS_PER_CALL = 8


class Alone(Layout):
    """The layout of ``pmap``, but no device hears of another: each trains by itself on its rows."""

    __slots__ = ()

    @property
    def axis_name(self) -> str | None:
        """There is none to speak over."""
        return None


class Workshop:
    """Makes contenders of cases.

    Attributes:
        collectives: those of a step, by the cases made so far.
        parameter_bytes: of the model, whole; 0 before the first case.
    """

    def __init__(self, experiment: Experiment[Any], splits: Splits, options: ScalingOptions) -> None:
        self._experiment, self._splits, self._options = experiment, splits, options
        # One program makes the states of all cases whose states lie alike.
        self._inits: dict[Layout, Callable[[], TrainState]] = {}
        self.collectives: dict[Case, tuple[Collective, ...]] = {}
        self.parameter_bytes = 0

    def step(self, case: Case) -> Contender:
        """The training step of ``case``, compiled; its examples lie on the devices already."""
        programs, length = self._programs(case), self._options.steps_per_call
        program: Any = programs.compile_train(length, "to measure scaling")
        init = self._inits.setdefault(programs.layout, programs.init)
        self.collectives[case] = read_collectives(program.as_text(), case.num_devices, length)
        self.parameter_bytes = nbytes(programs.shapes.params)

        def begin() -> Call:
            state, examples = init(), programs.feed.sample(length)

            def call() -> object:
                nonlocal state
                state, totals = program(state, programs.zeros, examples)
                return totals

            return call

        return Contender(begin, length)

    def reduction(self, message: Message) -> Contender:
        """All-reduces of ``message``, one after another."""
        layout = self._layout(message.num_devices)
        whole = layout.whole
        zeros = np.zeros(message.num_bytes // 4, np.float32)
        placed = jax.ShapeDtypeStruct(zeros.shape, zeros.dtype, sharding=whole)
        program = jax.jit(_reduce_often(layout), donate_argnums=0).lower(placed).compile()

        def begin() -> Call:
            array = layout.place(zeros)

            def call() -> object:
                nonlocal array
                array = program(array)
                return array

            return call

        return Contender(begin, REDUCTIONS_PER_CALL)

    def _programs(self, case: Case) -> Programs:
        experiment, splits = self._experiment.replace(batch_size=case.batch_size), self._splits
        layout = self._layout(case.num_devices)
        if case.alone:
            layout = Alone("pmap", layout.mesh)
        feed = make_feed(splits, experiment.config.seed, case.batch_size, resident=False, layout=layout)
        programs = Programs(experiment, splits.train, feed, Ledger(), Clock(), layout)
        if not case.alone:
            check_alike_on_devices(programs, splits)
        return programs

    def _layout(self, num_devices: int) -> Layout:
        if num_devices == 1:
            return SINGLE
        return make_layout(self._options.strategy, num_devices, platform=self._options.device)


def _reduce_often(layout: Layout) -> Callable[[jax.Array], jax.Array]:
    """A function of zeros, whole on each device, to the same: sums over all devices."""

    def reduce(array: jax.Array) -> jax.Array:
        for _ in range(REDUCTIONS_PER_CALL):
            # XLA must not know that all devices hold the same: it would multiply instead.
            own = 0.0 * jax.lax.axis_index(DATA).astype(jnp.float32)
            array = jax.lax.psum(array.at[0].add(own), DATA)
        return array

    whole = PartitionSpec()
    assert isinstance(layout.whole, NamedSharding)
    return jax.shard_map(reduce, mesh=layout.mesh, in_specs=whole, out_specs=whole, check_vma=False)
