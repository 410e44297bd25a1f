"""Ledger of compilations: what was compiled, why, how long it took, what the persistent cache saved."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program made ready to run.

    Attributes:
        name: the program, such as ``"train_steps"``.
        cause: why it had to be compiled, such as ``"first step"``.
        trace_seconds: Python to jaxpr.
        lower_seconds: jaxpr to StableHLO.
        compile_seconds: StableHLO to an executable, or its retrieval from the cache.
        cache_hit: whether the executable came from the persistent compilation cache.
        saved_seconds: after a hit, the whole seconds of the compilation that filled the cache, less the retrieval's.
        temporary_bytes: memory that each call allocates and frees, besides its arguments and results.
    """

    name: str
    cause: str
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    cache_hit: bool = False
    saved_seconds: float = 0.0
    temporary_bytes: int = 0

    @property
    def seconds(self) -> float:
        """All three stages together."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds


@dataclasses.dataclass
class Ledger:
    """The compilations of a run, in order."""

    compilations: list[Compilation] = dataclasses.field(default_factory=list)

    def totals(self) -> dict[str, float]:
        """Sums over all: seconds of each stage and together, number of compilations and hits, seconds saved."""
        names = ("trace_seconds", "lower_seconds", "compile_seconds", "seconds", "saved_seconds")
        sums = {name: sum(getattr(one, name) for one in self.compilations) for name in names}
        hits = sum(one.cache_hit for one in self.compilations)
        return {"num_compilations": len(self.compilations), "num_cache_hits": hits, **sums}

    def as_json(self) -> dict[str, Any]:
        """Content of ``compiles.json``: the compilations and their totals."""
        listed = [dataclasses.asdict(one) for one in self.compilations]
        return {"compilations": listed, "totals": self.totals()}


class Lowered(NamedTuple):
    """A program that is traced and lowered, ready to be compiled, in any thread; fields as in `Compilation`."""

    program: jax.stages.Lowered
    name: str
    cause: str
    trace_seconds: float
    lower_seconds: float

    def compile(self) -> tuple[jax.stages.Compiled, Compilation]:
        """The executable, which refuses arguments of another shape, dtype or sharding, and its entry."""
        started = time.perf_counter()
        thread = threading.get_ident()
        saved: list[float] = []  # seconds that hits of the persistent cache on this thread save, as JAX reports them

        def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
            if event == "/jax/compilation_cache/compile_time_saved_sec" and threading.get_ident() == thread:
                saved.append(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(on_duration)
        try:
            compiled = self.program.compile()
        finally:
            jax.monitoring.unregister_event_duration_listener(on_duration)
        seconds, saving, taken = time.perf_counter() - started, max(0.0, sum(saved)), temporary_bytes(compiled)
        times = self.trace_seconds, self.lower_seconds, seconds
        return compiled, Compilation(self.name, self.cause, *times, bool(saved), saving, taken)


def lower_ahead(function: Callable[..., Any], name: str, cause: str, *args: Any, **jit_options: Any) -> Lowered:
    """Traces and lowers a pure ``function`` without running it; ``name`` and ``cause`` are for the ledger.

    ``args`` are its arguments, or ``jax.ShapeDtypeStruct`` in their place; static ones are omitted when the executable
    is called. ``jit_options`` are those of ``jax.jit``: ``static_argnums``, ``donate_argnums``, ``out_shardings``, ….
    """
    started = time.perf_counter()
    traced = jax.jit(function, **jit_options).trace(*args)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    return Lowered(lowered, name, cause, traced_at - started, time.perf_counter() - traced_at)


def temporary_bytes(compiled: Any) -> int:
    """Memory that each call allocates and frees, besides its arguments and results; 0 where XLA does not report it."""
    return getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
