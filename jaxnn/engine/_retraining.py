"""A member's training again, in the calls of its run: its state before any step, and whether its bits are the same."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxnn.engine._digests import show_digests, state_digests
from jaxnn.engine._states import EMPTY, HostStates, Shape, key_words, with_keys
from jaxnn.engine._trainer import Trainer
from jaxnn.observe import nbytes
from jaxnn.types import Examples, TrainState


@dataclasses.dataclass
class Retraining:
    """The training of a run, or of one member of a sweep in its first lane, and the states that it reached."""

    trainer: Trainer  # of the run, or of a population of this member alone; steps per call and cadences as recorded
    digests: Mapping[int, str]  # of the run's states, by the step after which they were noted
    shape: Shape | None  # of the population; None: a run
    most_bytes: int  # of the states that are kept
    kept: dict[int, TrainState] = dataclasses.field(default_factory=dict)  # on the host, by step
    reached: dict[int, str] = dataclasses.field(default_factory=dict)  # the digests of this training
    every: int = 1  # calls from one kept state to the next; doubled when they take more than ``most_bytes``

    def keep(self, step: int, state: Any) -> None:
        """Keeps the state after ``step`` updates; every second one goes when all take more than ``most_bytes``."""
        self.kept[step] = jax.tree.map(np.array, key_words(state))
        while len(self.kept) > 2 and len(self.kept) * nbytes(self.kept[step]) > self.most_bytes:
            self.every *= 2
            for dropped in sorted(self.kept)[1:-1:2]:
                del self.kept[dropped]

    def state(self, step: int) -> tuple[TrainState, bool, int]:
        """The state after ``step`` updates, on the devices, trained from the nearest kept one.

        Also whether a part of a call had the same bits as the whole, and the step whose digest confirms the state: its
        training gets there once, and `reached` has it.
        """
        plan, programs, calls = self.trainer.plan, self.trainer.programs, 0
        at = max(kept for kept in self.kept if kept <= step)
        confirming = min((noted for noted in self.digests if noted >= step), default=plan.window_end(step))
        state, found, agrees = self._placed(at), None, True
        if at == confirming:
            self.reached[at] = self._digest(state)
        while True:
            if at == step:
                found = self._member(state)
            if found is not None and (at >= confirming or confirming in self.reached):
                return found, agrees, confirming
            before, length = at, plan.call_length(at)
            at += length
            examples, rest = programs.spec.feed.prepare(before, length), None
            if before < step < at:
                middle = self._part(state, length, examples, 0, step - before)
                found, rest = self._member(middle), self._part(middle, length, examples, step - before, length)
            # Its own memory goes to the next state: what is found is a copy.
            state, totals = programs.train(self.shape, length, "to replay")(state, self._zeros(noting=True), examples)
            if rest is not None:
                agrees = self._digest(rest) == self._digest(state)
            if at in self.digests:
                self.reached[at] = show_digests(np.asarray(totals.digests)[self._place])
            calls += 1
            if calls % self.every == 0:
                self.keep(at, self._member(state))

    @property
    def _place(self) -> Any:
        """The lane of the member, in arrays of a population."""
        return () if self.shape is None else (0, 0)

    def _zeros(self, *, noting: bool) -> Any:
        zeros = self.trainer.programs.zeros(self.shape)
        return zeros._replace(notes=np.full_like(zeros.notes, 2 if noting else 0))

    def _part(self, state: Any, length: int, examples: Examples, first: int, end: int) -> Any:
        program = self.trainer.programs.train_part(self.shape, length)
        return program(state, self._zeros(noting=False), examples, np.array([first, end], np.int32))[0]

    def _placed(self, step: int) -> Any:
        """The kept state after ``step`` updates on the devices, in the first lane of a population."""
        programs, kept = self.trainer.programs, self.kept[step]
        if self.shape is None:
            return jax.device_put(with_keys(kept, programs.shapes), programs.shardings)
        rows = HostStates(jax.tree.map(lambda leaf: leaf[None], kept), np.full(1, -1, np.int32))
        slots = np.full(self.shape, EMPTY)
        slots[0, 0] = 0
        return programs.lay_out(rows, slots, np.ones(1, np.bool_), step if programs.spec.in_step else 0)

    def _member(self, state: Any) -> TrainState:
        """A copy of the state of the member."""
        members = state if self.shape is None else jax.tree.map(lambda leaf: leaf[0, 0], state.members)
        return jax.tree.map(jnp.copy, members)  # type: ignore[no-any-return]

    def _digest(self, state: Any) -> str:
        return show_digests(np.asarray(_digests(self._member(state))))


_digests = jax.jit(state_digests)
