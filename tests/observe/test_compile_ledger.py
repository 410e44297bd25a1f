"""The ledger records what was compiled and whether the persistent cache had it."""

import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.observe import Compilation, Ledger, lower_ahead

PROBE = """
import sys, json, dataclasses, jax, jax.numpy as jnp
from jaxnn.observe import lower_ahead
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
print(json.dumps(dataclasses.asdict(lower_ahead(lambda x: x @ x, "square", "test", x).compile()[1])))
"""


def test_the_executable_computes_what_the_function_does() -> None:
    def power(x: jax.Array, exponent: int) -> jax.Array:
        return x**exponent

    x = jnp.arange(3.0)
    compiled, entry = lower_ahead(power, "power", "first call", x, 3, static_argnums=1).compile()
    np.testing.assert_array_equal(compiled(x), [0.0, 1.0, 8.0])
    assert (entry.name, entry.cause) == ("power", "first call")
    assert min(entry.trace_seconds, entry.lower_seconds, entry.compile_seconds) > 0
    assert not entry.cache_hit and entry.saved_seconds == 0.0


def test_arguments_are_donated() -> None:
    x = jnp.arange(3.0)
    compiled, _ = lower_ahead(lambda x: x + 1, "add", "test", x, donate_argnums=0).compile()
    compiled(x)
    assert x.is_deleted()


def test_a_second_process_hits_the_persistent_cache(tmp_path) -> None:
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    first, second = (
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(2)
    )
    assert not first["cache_hit"]
    assert second["cache_hit"]
    assert 0.0 <= second["saved_seconds"] <= first["compile_seconds"]


SAVED = "/jax/compilation_cache/compile_time_saved_sec"


def test_a_hit_of_this_thread_counts_with_what_it_saved(monkeypatch) -> None:
    compile_really = jax.stages.Lowered.compile
    reported: list[float] = []

    def compile_with_events(lowered):
        for seconds in reported:
            jax.monitoring.record_event_duration_secs(SAVED, seconds)
        other = threading.Thread(target=jax.monitoring.record_event_duration_secs, args=(SAVED, 7.0))
        other.start()
        other.join()
        return compile_really(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_with_events)
    # A retrieval slower than the compilation saved nothing; it did not save less than nothing.
    for found, expected in (([], (False, 0.0)), ([2.0], (True, 2.0)), ([-0.5], (True, 0.0))):
        reported[:] = found
        entry = lower_ahead(lambda x: x, "identity", "test", 1.0).compile()[1]
        assert (entry.cache_hit, entry.saved_seconds) == expected


@pytest.mark.parametrize("fails", [False, True])
def test_no_listener_stays_behind(monkeypatch, fails: bool) -> None:
    heard = []
    names = ("register_event_duration_secs_listener", "unregister_event_duration_listener")
    register, unregister = (getattr(jax.monitoring, name) for name in names)
    monkeypatch.setattr(jax.monitoring, names[0], lambda f: (heard.append(f), register(f)))
    monkeypatch.setattr(jax.monitoring, names[1], lambda f: (heard.remove(f), unregister(f)))

    def compile_badly(lowered):
        assert len(heard) == 1
        raise RuntimeError("out of memory")

    if fails:
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_badly)
        with pytest.raises(RuntimeError, match="out of memory"):
            lower_ahead(lambda x: x, "identity", "test", 1.0).compile()
    else:
        lower_ahead(lambda x: x, "identity", "test", 1.0).compile()
    assert not heard


def test_the_ledger_adds_up() -> None:
    ledger = Ledger()
    ledger.compilations.append(Compilation("train", "first step", 1.0, 2.0, 4.0))
    ledger.compilations.append(Compilation("evaluate", "first evaluation", 0.5, 0.25, 0.125, True, 3.0))
    # 1 + 2 + 4 = 7 seconds, then 0.5 + 0.25 + 0.125 = 0.875.
    assert ledger.totals() == {
        "num_compilations": 2,
        "num_cache_hits": 1,
        "trace_seconds": 1.5,
        "lower_seconds": 2.25,
        "compile_seconds": 4.125,
        "seconds": 7.875,
        "saved_seconds": 3.0,
    }
    written = json.loads(json.dumps(ledger.as_json()))
    assert [one["name"] for one in written["compilations"]] == ["train", "evaluate"]
    assert written["totals"] == ledger.totals()
