"""The ledger tells what was compiled and whether the persistent cache had it."""

import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnn.observe import Compilation, Ledger, compile_ahead
from jaxnn.observe.savings import saved_seconds

PROBE = """
import sys, json, dataclasses, jax, jax.numpy as jnp
from jaxnn.observe import compile_ahead
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
print(json.dumps(dataclasses.asdict(compile_ahead(lambda x: x @ x, "square", "test", x)[1])))
"""


def test_the_executable_computes_what_the_function_does() -> None:
    def power(x: jax.Array, exponent: int) -> jax.Array:
        return x**exponent

    x = jnp.arange(3.0)
    compiled, entry = compile_ahead(power, "power", "first call", x, 3, static_argnums=1)
    np.testing.assert_array_equal(compiled(x), [0.0, 1.0, 8.0])
    assert (entry.name, entry.cause) == ("power", "first call")
    assert min(entry.trace_seconds, entry.lower_seconds, entry.compile_seconds) > 0
    assert not entry.cache_hit and entry.saved_seconds == 0.0


def test_arguments_are_donated_when_told() -> None:
    x = jnp.arange(3.0)
    compiled, _ = compile_ahead(lambda x: x + 1, "add", "test", x, donate_argnums=0)
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


@pytest.fixture
def cache(tmp_path):
    """A persistent compilation cache of the test's own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_hit_saves_what_the_compilation_took_less_its_retrieval(cache) -> None:
    assert saved_seconds("program", 2.5, hit=False) == 0.0
    assert saved_seconds("program", 0.5, hit=True) == 2.0
    # A retrieval slower than the compilation saved nothing; it did not save less than nothing.
    assert saved_seconds("program", 3.0, hit=True) == 0.0


def test_a_hit_of_another_program_or_of_no_cache_saves_nothing(cache) -> None:
    saved_seconds("program", 2.5, hit=False)
    assert saved_seconds("another", 0.5, hit=True) == 0.0
    jax.config.update("jax_compilation_cache_dir", None)
    assert saved_seconds("program", 0.5, hit=True) == 0.0


def test_a_hit_on_another_thread_is_not_ours(monkeypatch) -> None:
    compile_really = jax.stages.Lowered.compile

    def compile_beside_another(lowered):
        hit = "/jax/compilation_cache/cache_hits"
        other = threading.Thread(target=jax.monitoring.record_event, args=(hit,))
        other.start()
        other.join()
        return compile_really(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_beside_another)
    assert not compile_ahead(lambda x: x, "identity", "test", 1.0)[1].cache_hit


@pytest.mark.parametrize("fails", [False, True])
def test_no_listener_stays_behind(monkeypatch, fails: bool) -> None:
    heard = []
    register = jax.monitoring.register_event_listener
    unregister = jax.monitoring.unregister_event_listener
    monkeypatch.setattr(jax.monitoring, "register_event_listener", lambda f: (heard.append(f), register(f)))
    monkeypatch.setattr(jax.monitoring, "unregister_event_listener", lambda f: (heard.remove(f), unregister(f)))

    def compile_badly(lowered):
        assert len(heard) == 1
        raise RuntimeError("out of memory")

    if fails:
        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_badly)
        with pytest.raises(RuntimeError, match="out of memory"):
            compile_ahead(lambda x: x, "identity", "test", 1.0)
    else:
        compile_ahead(lambda x: x, "identity", "test", 1.0)
    assert not heard


def test_the_ledger_adds_up() -> None:
    ledger = Ledger()
    ledger.append(Compilation("train", "first step", 1.0, 2.0, 4.0))
    ledger.append(Compilation("evaluate", "first evaluation", 0.5, 0.25, 0.125, True, 3.0))
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
