"""Compiled programs and their ledger, and what is read from traced ones: implementations, dtypes, operations."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxnn as jn
from jaxnn.observe import (
    Compilation,
    Ledger,
    implementations,
    lower_ahead,
    operations,
    plain_convolutions,
    product_dtypes,
)
from tests import shell

# --- compilations ---


def test_lower_ahead_compiles_and_times_each_stage() -> None:
    x = jnp.arange(3.0)
    power, options = lambda x, exponent: x**exponent, {"static_argnums": 1, "donate_argnums": 0}
    compiled, entry = lower_ahead(power, "power", "first call", x, 3, **options).compile()
    np.testing.assert_array_equal(compiled(x), [0.0, 1.0, 8.0])
    assert x.is_deleted(), "donated"
    assert (entry.name, entry.cause) == ("power", "first call")
    assert min(entry.trace_seconds, entry.lower_seconds, entry.compile_seconds) > 0
    assert not entry.cache_hit and entry.saved_seconds == 0.0


PROBE = """
import sys, json, dataclasses, jax, jax.numpy as jnp
from jaxnn.observe import lower_ahead
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
print(json.dumps(dataclasses.asdict(lower_ahead(lambda x: x @ x, "square", "test", x).compile()[1])))
"""


@pytest.mark.slow
def test_second_process_hits_the_persistent_cache(tmp_path) -> None:
    first, second = (json.loads(shell.python("-c", PROBE, tmp_path).stdout) for _ in range(2))
    assert not first["cache_hit"] and second["cache_hit"]
    assert 0.0 <= second["saved_seconds"] <= first["compile_seconds"]


def test_cache_hits_of_this_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = "/jax/compilation_cache/compile_time_saved_sec"
    # Compiled here, since the cache, if it is on, reports events of its own.
    compiled, reported, listeners = jax.jit(lambda x: x).lower(1.0).compile(), list[float](), list[Any]()
    names = {"register_event_duration_secs_listener": "append", "unregister_event_duration_listener": "remove"}

    def compile_with_events(lowered):
        assert len(listeners) == 1
        for seconds in reported:
            jax.monitoring.record_event_duration_secs(saved, seconds)
        other = threading.Thread(target=jax.monitoring.record_event_duration_secs, args=(saved, 7.0))
        other.start()
        other.join()
        if reported == [9.0]:
            raise RuntimeError("out of memory")
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_with_events)
    for name, change in names.items():
        real, counted = getattr(jax.monitoring, name), getattr(listeners, change)
        monkeypatch.setattr(jax.monitoring, name, lambda f, real=real, counted=counted: (counted(f), real(f)))
    # A retrieval slower than the compilation saved nothing; it did not save less than nothing.
    for found, expected in (([], (False, 0.0)), ([2.0], (True, 2.0)), ([-0.5], (True, 0.0))):
        reported[:] = found
        entry = lower_ahead(lambda x: x, "identity", "test", 1.0).compile()[1]
        assert (entry.cache_hit, entry.saved_seconds) == expected and not listeners
    reported[:] = [9.0]
    with pytest.raises(RuntimeError, match="out of memory"):
        lower_ahead(lambda x: x, "identity", "test", 1.0).compile()
    assert not listeners


def test_ledger_adds_up() -> None:
    ledger = Ledger()
    ledger.compilations.append(Compilation("train", "first step", 1.0, 2.0, 4.0))
    ledger.compilations.append(Compilation("evaluate", "first evaluation", 0.5, 0.25, 0.125, True, 3.0))
    # 1 + 2 + 4 = 7 seconds, then 0.5 + 0.25 + 0.125 = 0.875.
    counts = {"num_compilations": 2, "num_cache_hits": 1, "seconds": 7.875, "saved_seconds": 3.0}
    assert ledger.totals() == {"trace_seconds": 1.5, "lower_seconds": 2.25, "compile_seconds": 4.125} | counts
    written = json.loads(json.dumps(ledger.as_json()))
    assert [one["name"] for one in written["compilations"]] == ["train", "evaluate"]
    assert written["totals"] == ledger.totals()


# --- traced programs ---

X = np.ones((1, 4, 4, 2), np.float32)
KERNEL = jax.ShapeDtypeStruct((3, 3, 2, 2), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def custom(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return convolve(x, kernel)


custom.defvjp(lambda x, kernel: (convolve(x, kernel), (x, kernel)), lambda saved, g: jax.vjp(convolve, *saved)[1](g))


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution as jaxnn's layers trace theirs."""
    with jax.named_scope("jaxnn.convolution.mine"):
        return custom(x, kernel)


def scanned_within(x: jax.Array, kernel: jax.Array) -> jax.Array:
    with jax.named_scope("jaxnn.convolution.mine"):
        return jax.lax.scan(lambda carry, _: (convolve(carry, kernel), None), x, length=3)[0]


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(lambda kernel: function(X, kernel).sum()))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit(layer),
    "remat": jax.checkpoint(layer),
    "scan": lambda x, kernel: jax.lax.scan(lambda carry, _: (layer(carry, kernel), None), x, length=3)[0],
    "scan within the scope": scanned_within,
    "vmap": lambda x, kernel: jax.vmap(layer, (None, 0))(x, jnp.stack([kernel, kernel])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_implementations_and_plain_convolutions_of_a_training_step(name: str) -> None:
    function, plain = FUNCTIONS[name], jax.checkpoint(convolve)
    assert implementations(gradient(function), KERNEL) == {"convolution": ["mine"]}
    assert plain_convolutions(gradient(function), KERNEL) == 0
    # Those that are no layer's count without their gradients.
    two = gradient(lambda x, kernel: plain(function(convolve(x, kernel), kernel).reshape(-1, 4, 4, 2), kernel))
    assert plain_convolutions(two, KERNEL) == 2


def test_only_scopes_of_implementations_are_read_and_in_one_trace() -> None:
    traces = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        traces.append(x)
        for name in ("attention.cudnn", "recurrence.fused_inputs", "attention.math"):
            with jax.named_scope(f"jaxnn.{name}"):
                x = x + 1
        for name in ("jaxnn", "jaxnn.attention", "mine.jaxnn_like.x", "myjaxnn.attention.mine"):
            with jax.named_scope(name):  # of no implementation
                x = x + 1
        with jax.named_scope("jaxnn.attention.cudnn"), jax.named_scope("jaxnn.normalization.custom_vjp"):
            return x * 2

    assert implementations(step, X) == {
        "attention": ["cudnn", "math"],
        "recurrence": ["fused_inputs"],
        "normalization": ["custom_vjp"],
    }
    assert product_dtypes(step, X) == {} and plain_convolutions(step, X) == 0 and len(traces) == 1


def test_flax_layers_show_their_convolutions_and_compute_dtype() -> None:
    def explicit(*args: Any, **kwargs: Any) -> jax.Array:
        with jax.named_scope("jaxnn.convolution.xla"):
            return jax.lax.conv_general_dilated(*args, **kwargs)

    own = jn.nn.Conv(2, (3, 3))
    variables = jax.eval_shape(own.init, jax.random.key(0), X)
    assert [*implementations(own.apply, variables, X)] == ["convolution"], "layers of jaxnn name theirs"
    low = linen.Conv(2, (3, 3), dtype=jnp.bfloat16)
    for module, expected in ((low, 1), (linen.Conv(2, (3, 3), conv_general_dilated=explicit), 0), (linen.Dense(2), 0)):
        variables = jax.eval_shape(module.init, jax.random.key(0), X)
        step = jax.grad(lambda variables, module=module: module.apply(variables, X).sum())
        assert plain_convolutions(step, variables) == expected
    assert product_dtypes(low.apply, jax.eval_shape(low.init, jax.random.key(0), X), X) == {"bfloat16": 1}


@jax.custom_vjp
def product(x: jax.Array) -> jax.Array:
    return x @ x


product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))


def test_products_are_counted_by_dtype() -> None:
    for function in (
        jax.jit(lambda x: x @ x),
        lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0],
        lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ c, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x),
        jax.checkpoint(lambda x: x @ x),
        product,
        lambda x: jax.vmap(lambda row: row @ x)(x),
    ):
        assert product_dtypes(function, MATRIX) == {"float32": 1}

    def mixed(x: jax.Array) -> jax.Array:
        low = x.astype(jnp.bfloat16)
        # lax takes operands of unequal dtypes as they are; jnp would promote them.
        unequal = jax.lax.dot_general(low, x, (((1,), (0,)), ((), ())))
        return low @ low @ low + unequal.astype(jnp.bfloat16)

    assert list(product_dtypes(mixed, MATRIX).items()) == [("bfloat16", 2), ("bfloat16*float32", 1)]
    assert product_dtypes(jax.grad(lambda x: product(x).sum()), MATRIX) == {"float32": 3}


def test_operations_count_products_and_the_steps_of_loops() -> None:
    left, right = jax.ShapeDtypeStruct((4, 5), jnp.float32), jax.ShapeDtypeStruct((5, 6), jnp.float32)
    matmul = 2 * 4 * 5 * 6 + 4 * 6
    assert operations(jnp.matmul, left, right) == pytest.approx(matmul)

    def scanned(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (carry, left @ right), 0, length=7)[1]

    assert operations(scanned, left, right) >= 7 * matmul
    assert operations(lambda x: jax.lax.optimization_barrier((x, jax.lax.create_token(x)))[0], left) >= 4 * 5
    assert operations(lambda x: jax.lax.while_loop(jnp.any, jnp.sin, x), left) == float("inf")
