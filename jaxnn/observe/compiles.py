"""The ledger of compilations: what was compiled, why, how long it took, what the cache saved."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxnn.observe.savings import saved_seconds

_HIT = "/jax/compilation_cache/cache_hits"


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
        saved_seconds: what the hit saved: the seconds that the compilation took which filled the cache, less those
            of the retrieval.
        temporary_bytes: memory that each call takes and frees again, besides its arguments and results.
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
    """The compilations of a run, in their order.

    Attributes:
        compilations: first to last.
    """

    compilations: list[Compilation] = dataclasses.field(default_factory=list)

    def append(self, compilation: Compilation) -> None:
        """Adds the latest compilation."""
        self.compilations.append(compilation)

    def totals(self) -> dict[str, float]:
        """Sums over all: seconds of each stage and together, how many hits, what they saved."""
        names = ("trace_seconds", "lower_seconds", "compile_seconds", "seconds", "saved_seconds")
        sums = {name: sum(getattr(one, name) for one in self.compilations) for name in names}
        hits = sum(one.cache_hit for one in self.compilations)
        return {"num_compilations": len(self.compilations), "num_cache_hits": hits, **sums}

    def as_json(self) -> dict[str, Any]:
        """What ``compiles.json`` holds: the compilations and their totals."""
        listed = [dataclasses.asdict(one) for one in self.compilations]
        return {"compilations": listed, "totals": self.totals()}


def compile_ahead(
    function: Callable[..., Any], name: str, cause: str, *args: Any, **jit_options: Any
) -> tuple[jax.stages.Compiled, Compilation]:
    """Compiles ``function`` for arguments like ``args`` without running it.

    Args:
        function: what to compile; pure.
        name: the program's name in the ledger.
        cause: why it is compiled.
        *args: arguments, or ``jax.ShapeDtypeStruct`` in their place. Static ones are left out
            when the executable is called.
        **jit_options: as ``jax.jit`` has them: ``static_argnums``, ``donate_argnums``,
            ``out_shardings`` and so on.

    Returns:
        The executable, which refuses arguments of another shape, dtype or sharding, and its entry.
    """
    start = time.perf_counter()
    traced = jax.jit(function, **jit_options).trace(*args)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    with _cache_events() as events:
        compiled = lowered.compile()
    compiled_at = time.perf_counter()
    entry = Compilation(
        name,
        cause,
        trace_seconds=traced_at - start,
        lower_seconds=lowered_at - traced_at,
        compile_seconds=compiled_at - lowered_at,
        cache_hit=_HIT in events,
        saved_seconds=saved_seconds(lowered.as_text(), compiled_at - lowered_at, hit=_HIT in events),
        temporary_bytes=temporary_bytes(compiled),
    )
    return compiled, entry


def temporary_bytes(compiled: Any) -> int:
    """Memory that each call takes and frees again, besides its arguments and results; 0 where XLA does not tell."""
    return getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)


@contextlib.contextmanager
def _cache_events() -> Iterator[dict[str, float]]:
    """JAX's monitoring events on this thread, by name: how often, or the sum of their seconds."""
    thread = threading.get_ident()
    events: dict[str, float] = {}

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if threading.get_ident() == thread:
            events[event] = events.get(event, 0.0) + duration_secs

    def on_event(event: str, **_: str | int) -> None:
        on_duration(event, 1.0)

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_duration)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_duration)
