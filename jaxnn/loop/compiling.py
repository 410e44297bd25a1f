"""The programs of one run, each compiled ahead of time and entered in the ledger with its cause."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxnn.loop.evaluating import finished
from jaxnn.loop.feed import Feed
from jaxnn.loop.programs import Totals, TrainProgram, make_init, make_names, make_step, make_train
from jaxnn.nn import partition_specs, platform
from jaxnn.observe import (
    Clock,
    Ledger,
    compile_ahead,
    implementations,
    plain_convolutions,
    product_dtypes,
    temporary_bytes,
)
from jaxnn.parallel import SINGLE_DEVICE, Layout, shardings_of
from jaxnn.record import data_fingerprint, program_fingerprint, text_fingerprint
from jaxnn.steps import make_evaluate_step
from jaxnn.types import Batch, Examples, Experiment, Source, Splits, TrainState


@dataclasses.dataclass
class Programs:
    """What a run has compiled so far.

    Attributes:
        experiment: what is compiled.
        source: its training split.
        feed: how that reaches the device.
        ledger: gets an entry a compilation.
        clock: gets the time as ``compile``.
        layout: the devices, and how the state lies on them.
        first_examples: the first batch's examples, on the device.
        shapes: the state's.
        shardings: where each of its arrays lies; None on one device.
        zeros: totals of no steps, on the host.
        train: the training programs by number of steps.
    """

    experiment: Experiment[Any]
    source: Source
    feed: Feed
    ledger: Ledger
    clock: Clock
    layout: Layout = SINGLE_DEVICE
    first_examples: Examples = dataclasses.field(init=False)
    shapes: TrainState = dataclasses.field(init=False)
    shardings: Any = dataclasses.field(init=False)
    zeros: Totals = dataclasses.field(init=False)
    train: dict[int, TrainProgram] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        size = self.experiment.config.batch_size
        self.first_examples = self.layout.place(self.source.read(np.arange(size)))
        with self.clock.span("compile", "tracing the model"):
            init = make_init(self.experiment, self.source)
            self.shapes = jax.eval_shape(init, self.first_examples)
            self.layout = self.layout.resolve(self.shapes)
            self.shardings = self._shardings()
            self.zeros = self._zeros()

    def init(self) -> TrainState:
        """The state before the first step; the same each time."""
        state: TrainState = self._init(self.first_examples)
        return state

    def compile_train(self, num_steps: int, cause: str) -> TrainProgram:
        """The program of ``num_steps`` training steps, compiled if it was not yet."""
        if num_steps not in self.train:
            train = make_train(self.experiment, self.source, self.feed, num_steps, self.layout)
            name = f"train {num_steps} step{'s' if num_steps > 1 else ''}"
            examples = self.feed.sample(num_steps)
            jit: dict[str, Any] = {"donate_argnums": 0}
            if self.shardings is not None:
                spread = self.shardings, self.layout.replicated
                jit |= {"in_shardings": (*spread, shardings_of(examples)), "out_shardings": spread}
            self.train[num_steps] = self.compile(train, name, cause, self.shapes, self.zeros, examples, **jit)
        return self.train[num_steps]

    def fingerprint(self, splits: Splits) -> dict[str, str | None]:
        """Digests of the data, and by `record.PARTS` of what is computed with them, free of how it is run.

        That of the evaluation is None where nothing is held out.
        """
        source, step = self.source, np.arange(1, dtype=np.int32)
        rows = jax.ShapeDtypeStruct((self.experiment.config.batch_size,), np.int32)

        def make_batch(examples: Examples, rows: jax.Array, key: jax.Array) -> Batch:
            return source.transform(source.gather(examples, rows), key)

        # Seeds are config. An order is what it gives: it may be computed by the host.
        order = np.asarray(source.order(0, step, self.experiment.config.batch_size)).tolist()
        made = program_fingerprint(make_batch, self._like, rows, self.shapes.key)
        return {
            "program": program_fingerprint(self._step, self.shapes, self._like),
            "batches": text_fingerprint(f"{order} {made}"),
            "evaluation": self._evaluation_fingerprint() if splits.held_out else None,
            "data": data_fingerprint(splits),
        }

    def _evaluation_fingerprint(self) -> str:
        # Derived metrics are plain Python, whose text says little of what it does.
        derived = {name: f"{float(value):.6g}" for name, value in self._derived.items()}
        return text_fingerprint(f"{program_fingerprint(self._evaluate, self.shapes, self._batch())} {derived}")

    @functools.cached_property
    def product_dtypes(self) -> dict[str, int]:
        """How many matrix products and convolutions a training step has in each precision."""
        return product_dtypes(self._step, self.shapes, self._like)

    @functools.cached_property
    def implementations(self) -> dict[str, list[str]]:
        """Which implementations of jaxnn's operations a training step computes with."""
        return implementations(self._step, self.shapes, self._like)

    @functools.cached_property
    def plain_convolutions(self) -> int:
        """How many convolutions of a training step's forward pass no layer of jaxnn traced."""
        return plain_convolutions(self._step, self.shapes, self._like)

    def temporary_host_bytes(self, num_steps: int) -> int:
        """What a call of ``num_steps`` training steps takes of the host's memory and frees again."""
        return temporary_bytes(self.train[num_steps]) if platform() == "cpu" else 0

    def evaluation_metrics(self) -> list[str]:
        """The names of the metrics that an evaluation gives.

        Raises:
            ConfigError: what the task makes of them cannot be reported.
        """
        return list(self._derived)

    @functools.cached_property
    def _derived(self) -> dict[str, float]:
        """What the task makes of the means of an evaluation's metrics, for some numbers between 0 and 1."""
        sums = jax.eval_shape(self._evaluate, self.shapes, self._batch())
        del sums["count"]
        numbers = np.linspace(0.4, 0.6, len(sums))
        means = {name: np.full(one.shape, x)[()] for (name, one), x in zip(sums.items(), numbers, strict=True)}
        with np.errstate(all="ignore"):
            return finished(self.experiment.task(self.experiment.config), means, "made-up means from 0.4 to 0.6, ")

    @functools.cached_property
    def _init(self) -> Any:
        # Its arrays are born where they are to lie: the whole state is never on one device.
        jit = {} if self.shardings is None else {"out_shardings": self.shardings}
        init = make_init(self.experiment, self.source)
        return self.compile(init, "initialise", "start", self.first_examples, **jit, **for_one_call())

    @functools.cached_property
    def _like(self) -> Examples:
        """The shapes of a batch's examples, wherever they are placed: a trace tells devices apart."""
        shapes: Examples = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape, rows.dtype), self.first_examples)
        return shapes

    @functools.cached_property
    def _step(self) -> Any:
        # Jitted, so that all who look into it share one trace. The batch is made within: its mask is known there.
        step = make_step(self.experiment)
        return jax.jit(lambda state, examples: step(state, self.source.as_batch(examples)))

    @functools.cached_property
    def _evaluate(self) -> Any:
        return jax.jit(make_evaluate_step(self.experiment.task(self.experiment.config)))

    def _batch(self) -> Batch:
        batch: Batch = jax.eval_shape(self.source.as_batch, self._like)
        return batch

    def _shardings(self) -> Any:
        if self.layout.mesh is None:
            return None
        named = jax.eval_shape(make_names(self.experiment, self.source), self.first_examples)
        return self.layout.state_shardings(self.shapes, partition_specs(named))

    def _zeros(self) -> Totals:
        _, metrics = jax.eval_shape(self._step, self.shapes, self._like)
        sums = {name: np.zeros(value.shape, np.float32) for name, value in metrics.items()}
        return Totals(sums, np.int32(-1))

    def compile(self, function: Any, name: str, cause: str, *arguments: Any, **jit: Any) -> Any:
        """Compiles ``function`` as `compile_ahead` does, on the clock and in the ledger."""
        with self.clock.span("compile", f"compiling the program to {name}"):
            program, entry = compile_ahead(function, name, cause, *arguments, **jit)
        self.ledger.append(entry)
        return program


def for_one_call() -> dict[str, Any]:
    """What `jax.jit` is given for a program that is called once: compiling it well takes longer than it runs.

    On a CPU, LLVM works 77 seconds on the initial state of a ResNet-56, and 6 with few of its passes; the bits are the
    same.
    """
    return {"compiler_options": {"xla_backend_optimization_level": 1}} if platform() == "cpu" else {}
