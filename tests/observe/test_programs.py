"""Devices, memory, spans and tables; compiled programs, their ledger, and what is read from traced ones."""

import importlib.metadata
import json
import os
import pathlib
import resource
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxnn as jn
from jaxnn import observe
from jaxnn._clock import Clock
from jaxnn._text import Table, format_bytes
from jaxnn.observe import Lowered, Traced, text_table
from jaxnn.types import ConfigError
from tests import native, shell

PLATFORM = jax.default_backend()


def raise_no_backend(platform: str | None = None) -> None:
    raise RuntimeError("Unable to initialize\nbackend 'cuda'.")


def test_description_is_json(monkeypatch):
    described = observe.describe_devices()
    assert json.loads(json.dumps(described)) == described and described["backend"] == PLATFORM
    assert [device["id"] for device in described["devices"]] == [d.id for d in jax.devices()]
    assert described["versions"]["jax"] == jax.__version__
    assert str(described["native"]).startswith("jaxnn-native ") == (native.USED and PLATFORM == "cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert observe.describe_devices()["cpu_count"] == 2, "those of this process"
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    with pytest.raises(ConfigError, match="Unable to initialize backend 'cuda'"):  # in one line
        observe.describe_devices()


def test_missing_gpu_has_a_reason(tmp_path, monkeypatch):
    plugins: list[str] = []

    def version(package: str) -> str:
        if not plugins:
            raise importlib.metadata.PackageNotFoundError
        return "1"

    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    monkeypatch.setattr(importlib.metadata, "version", version)
    before = jax.config.jax_platforms
    try:
        for platforms, found, words, absent in (
            (None, [], 'not installed: run pip install "jax[cuda13]"', "JAX_PLATFORMS"),
            ("cpu", ["1"], "unset JAX_PLATFORMS, which allows only 'cpu'", "pip"),
            ("cpu", [], ", and unset JAX_PLATFORMS", "failed"),
            (None, ["1"], "jax-cuda13-plugin failed (Unable to ini", "JAX_PLATFORMS"),
            ("cpu, gpu", ["1"], "jax-cuda13-plugin failed (Unable to ini", "JAX_PLATFORMS"),
        ):
            jax.config.update("jax_platforms", platforms)
            plugins[:] = found
            reason = observe.missing_gpu(tmp_path) or ""
            assert reason.startswith("An NVIDIA GPU is visible to the system") and words in reason
            assert absent not in reason
    finally:
        jax.config.update("jax_platforms", before)


def test_no_reason_without_a_gpu_or_if_jax_uses_it(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # the driver's own node is no GPU
    assert observe.missing_gpu(tmp_path) is None
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr(jax, "devices", lambda platform: ["cuda:0"])
    assert observe.missing_gpu(tmp_path) is None
    monkeypatch.setattr(jax, "devices", raise_no_backend)
    assert observe.missing_gpu(tmp_path) is not None


def device(**stats: int) -> Any:
    """A GPU that reports its memory."""
    return SimpleNamespace(platform="gpu", id=0, memory_stats=lambda: stats)


def test_nbytes_of_every_kind_of_leaf():
    keys, planned = jax.random.split(jax.random.key(0), 3), jax.ShapeDtypeStruct((2,), jnp.int32)
    tree = [jnp.zeros((2, 3)), jnp.zeros(5, jnp.bfloat16), np.zeros(7, np.uint8), keys, planned, 1.0, None]
    assert observe.nbytes(tree) == 6 * 4 + 5 * 2 + 7 + 3 * 2 * 4 + 2 * 4 + 8 and observe.nbytes({}) == 0


def test_peak_memory_is_the_process_or_the_fullest_device(monkeypatch):
    peak, what = observe.peak_memory_bytes()
    assert what == "resident in the process" and peak > 2**25
    devices = [device(peak_bytes_in_use=5), device(peak_bytes_in_use=9), device()]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert observe.peak_memory_bytes() == (9, f"in use on {devices[1]}")


@pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux's own numbers")
def test_available_bytes(monkeypatch):
    assert observe.available_bytes(device(bytes_limit=100, bytes_in_use=30)) == 70
    assert observe.available_bytes(device()) is None
    cpu, page = jax.devices("cpu")[0], os.sysconf("SC_PAGE_SIZE")
    assert 0 < (observe.available_bytes(cpu) or 0) <= os.sysconf("SC_PHYS_PAGES") * page
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * page
    for limit, least, most in ((taken + 2**26, 1, 2**27), (taken // 2, 0, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, resource.RLIM_INFINITY))
        left = observe.available_bytes(cpu)
        assert left is not None and least <= left <= most


@pytest.mark.several_devices
def test_placement_counts_copies_and_shards():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    params = {"kernel": jnp.zeros((2, 3)), "bias": jax.device_put(jnp.zeros(3), jax.devices()[0])}
    replicated = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P()))
    sharded = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, jax.P("data")))
    trees = {"parameters": params, "key": jax.random.key(0), "copies": replicated, "data": sharded, "model_state": {}}
    observed = {tree.name: tree for tree in observe.Placement.of(**trees)}
    assert {name: tree.device_bytes for name, tree in observed.items()} == {
        "parameters": {f"{PLATFORM}:0": 36},
        "key": {f"{PLATFORM}:0": 8},
        "copies": {f"{PLATFORM}:0": 32, f"{PLATFORM}:1": 32},
        "data": {f"{PLATFORM}:0": 16, f"{PLATFORM}:1": 16},
        "model state": {},
    }
    assert [tree.num_bytes for tree in observed.values()] == [36, 8, 32, 32, 0]
    assert str(observed["parameters"]) == f"parameters: 2 leaves, 36 B on {PLATFORM}:0"
    assert str(observed["copies"]) == f"copies: 1 leaf, 32 B on {PLATFORM}:0, {PLATFORM}:1, 32 B each"
    assert str(observed["model state"]) == "model state: 0 leaves, 0 B on no device"


def test_inner_spans_pause_outer_ones():
    now = [100.0]
    clock = Clock(lambda: now[0])
    assert clock.current == (None, None, 100.0)
    with clock.span("compute"):
        now[0] += 1.0
        with clock.span("evaluation", "of a test"):
            now[0] += 2.0
            assert clock.seconds["evaluation"] == 2.0, "an open span counts up to now"
            assert clock.current == ("evaluation", "of a test", 101.0), "reading the seconds starts no span"
            with pytest.raises(KeyError), clock.span("checkpoint"):
                now[0] += 4.0
                raise KeyError
        assert clock.current == ("compute", None, 107.0)
        now[0] += 8.0
    now[0] += 16.0  # outside every span
    with clock.span("evaluation"), clock.span("evaluation"):
        now[0] += 32.0
    # compute 1 + 8, evaluation 2 + 32, checkpoint 4; other 16; together 63, the wall time.
    assert clock.seconds == {"compute": 9.0, "evaluation": 34.0, "checkpoint": 4.0, "other": 16.0}


def test_tables_are_aligned_and_escaped():
    rows, header = [("a", ""), ("longer", "<b>|")], ("name", "x")
    assert text_table(rows, header) == "name    x\na\nlonger  <b>|", "without trailing spaces"
    noted = Table(header, rows, ["a note"])
    assert repr(noted).endswith("\na note") and noted._repr_html_().endswith("<p>a note</p>")
    assert format_bytes(1024**2 - 1) == "1.0 MiB", "1023.999 KiB rounds up to the next unit"
    assert "&lt;b&gt;" in noted._repr_html_() and "<b>" not in Table(None, rows)._repr_html_()


X = np.ones((1, 4, 4, 2), np.float32)


def test_lower_ahead_compiles_and_times_each_stage(empty_cache):
    x = jnp.arange(3.0)
    power, options = lambda x, exponent: x**exponent, {"static_argnums": 1, "donate_argnums": 0}
    compiled, entry = Lowered.of(power, "power", "first call", x, 3, **options).compile()
    np.testing.assert_array_equal(compiled(x), [0.0, 1.0, 8.0])
    assert x.is_deleted(), "donated"
    assert (entry.name, entry.cause) == ("power", "first call")
    assert min(entry.trace_seconds, entry.lower_seconds, entry.compile_seconds) > 0
    assert not entry.cache_hit and entry.saved_seconds == 0.0


def test_hits_of_the_persistent_cache_count(empty_cache):
    first, second = (Lowered.of(lambda x: x @ x.T + 17.5, "square", "test", X[0, 0]).compile()[1] for _ in range(2))
    assert not first.cache_hit and second.cache_hit
    assert 0.0 <= second.saved_seconds <= first.compile_seconds
    totals = observe.Compilation.totals([first, second])
    assert totals["num_cache_hits"] == 1 and totals["saved_seconds"] == second.saved_seconds


def test_cache_hits_of_this_thread_count(monkeypatch):
    # Compiled here, since the cache, if it is on, reports events of its own.
    compiled, reported = jax.jit(lambda x: x).lower(1.0).compile(), list[float]()
    record = partial(jax.monitoring.record_event_duration_secs, "/jax/compilation_cache/compile_time_saved_sec")

    def compile_with_events(lowered: Any) -> Any:
        for seconds in reported:
            record(seconds)
        other = threading.Thread(target=record, args=(7.0,))
        other.start()
        other.join()
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_with_events)
    # A retrieval slower than the compilation saved nothing; it did not save less than nothing.
    for number, (found, expected) in enumerate((([], (False, 0.0)), ([2.0], (True, 2.0)), ([-0.5], (True, 0.0)))):
        reported[:] = found
        entry = Lowered.of(lambda x, number=number: x + number, "add", "test", 1.0).compile()[1]
        assert (entry.cache_hit, entry.saved_seconds) == expected


def test_an_equal_program_is_neither_lowered_nor_compiled_again(monkeypatch):
    def program() -> Callable[[jax.Array], jax.Array]:
        table = np.arange(3.0, dtype=np.float32)

        @jax.jit
        def step(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.relu(x * row + jax.random.normal(jax.random.key(5), x.shape)), None

        return lambda x: jax.lax.scan(step, x, table[:, None])[0]

    def unread(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * 5.25

    three, two = (Lowered.of(unread, "five", "test", jnp.ones(3), jnp.ones(n)).compile()[0] for n in (3, 2))
    assert three(jnp.ones(3), jnp.ones(3)).tolist() == two(jnp.ones(3), jnp.ones(2)).tolist() == [5.25] * 3
    first = Lowered.of(program(), "scan", "test", jnp.ones(2)).compile()[0]
    monkeypatch.delattr(jax.stages.Traced, "lower")
    again, entry = Lowered.of(program(), "scan", "test", jnp.ones(2)).compile()
    assert again is first and entry.cache_hit


def test_programs_that_differ_do_not_share_an_executable():
    x = jnp.float32([-1.0, 2.0])
    for pair in (
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x + np.float32([1.0, 2.0]), lambda x: x + np.float32([1.0, 3.0])),
        (lambda x: x * x[0], lambda x: x * x[1]),
        (lambda x: jnp.sin(jnp.cos(x)), lambda x: (jnp.sin(x), jnp.cos(x))[1]),
        (lambda x: jnp.sum(x, keepdims=True) - x, lambda x: x - jnp.sum(x, keepdims=True)),
        (lambda x: (x, x), lambda x: [x, x]),
    ):
        results = [Lowered.of(function, "one", "test", x).compile()[0](x) for function in pair]
        assert [*map(str, results)] == [str(function(x)) for function in pair]


@pytest.mark.several_devices
def test_programs_on_other_devices_do_not_share_an_executable():
    def devices_of(x: Any, **options: Any) -> set[jax.Device]:
        compiled = Lowered.of(lambda x: x * 6.5, "six", "test", x, **options).compile()[0]
        return set(compiled(np.ones(4, np.float32)).sharding.device_set)

    first, second = jax.devices()[:2]
    x, like = jnp.ones(4), jax.ShapeDtypeStruct((4,), np.float32)
    assert devices_of(like) == {first} and devices_of(jax.device_put(x, second)) == {second}
    for device in (first, second):
        with jax.set_mesh(jax.sharding.Mesh([device], ("data",))):
            assert devices_of(like, out_shardings=PartitionSpec("data")) == {device}


def test_programs_that_call_python_do_not_share_it():
    for factor in (2.0, 3.0):

        def scale(x: jax.Array, factor: float = factor) -> jax.Array:
            return jax.pure_callback(lambda x: x * np.float32(factor), x, x)

        assert Lowered.of(scale, "scale", "test", jnp.ones(())).compile()[0](jnp.ones(())) == factor


def test_products_with_one_value_are_right():
    # jaxlib 0.12.0 reduces them wrongly on CPUs: 1e30, infinite or NaN.
    def spread(x, value):
        return jnp.square(x @ (jnp.full_like(x, value) * 2)).sum(-1)

    def looped(x, value):
        same = jnp.full_like(x, 2 * value)
        return jax.lax.scan(lambda _, __: (None, jnp.square(x @ same).sum(-1)), None, length=2)[1][1]

    x, values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32), np.float32([1.3, -2.0])
    right = 64 * np.square(2 * x.astype(np.float64).sum(1) * values[:, None])
    cases = [(function, right[0]) for function in (spread, jax.jit(spread), looped)]
    for function, expected in [*cases, (lambda x, _: jax.vmap(spread)(jnp.stack([x, x]), values), right)]:
        compiled, _ = Lowered.of(function, "spread", "test", x, values[0]).compile()
        np.testing.assert_allclose(compiled(x, values[0]), expected, rtol=1e-4)


def test_faults_are_listed_for_the_versions_that_have_them():
    here, platform = observe.known_faults(jax.default_backend()), jax.default_backend()
    others = [fault for fault in observe.known_faults(platform, "0.11.2") if fault not in here]
    assert [fault.pattern for fault in here if not fault.shows()] == []  # jaxlib was repaired: take the version out
    assert [fault.pattern for fault in others if fault.shows()] == []
    step = Traced(lambda x: jnp.square(x @ jnp.full_like(x, 2)).sum(), np.ones((8, 8), np.float32))
    assert step.faults(platform) == here[:1] and not Traced(jnp.sin, np.ones(2)).faults(platform)


GRAPHS = """
import sys
import jax
import jax.numpy as jnp
from jaxnn import observe

def failing(kind, name, fails):
    real = getattr(kind, name)
    def method(self, *given):
        if fails(*given):
            raise jax.errors.JaxRuntimeError("INTERNAL: no graphs")
        return real(self, *given)
    setattr(kind, name, method)

options, calls = [], []
fails = sys.argv[1]
failing(jax.stages.Lowered, "compile", lambda given={}: options.append([*given]) or (fails == "compile" and given))
failing(jax.stages.Compiled, "__call__", lambda *_: calls.append(0) or (fails == "call" and len(calls) == 1))

def convolve(x):
    return jax.lax.conv(x, jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"), jnp.sum(x)

for function in (convolve, lambda x: convolve(2 * x), lambda x: (x, x)):
    compiled, _ = observe.Lowered.of(function, "", "", jnp.ones((1, 1, 4, 4)), platform="cuda").compile()
    print(*(float(jnp.sum(part)) for part in compiled(jnp.ones((1, 1, 4, 4)))))
print(options, observe.given_up())
"""


@pytest.mark.parametrize("failing", ["nothing", "compile", "call"])
def test_convolutions_are_in_cuda_graphs_unless_that_fails(failing):
    done = shell.python("-c", GRAPHS, failing)
    *sums, last = done.stdout.splitlines()
    assert sums == ["100.0 16.0", "200.0 32.0", "16.0 16.0"], done.stderr
    # After a failure no other program of the process is compiled so.
    assert last.count("xla_gpu_enable_command_buffer") == (2 if failing == "nothing" else 1)
    assert ("launched one by one: INTERNAL: no graphs" in last) == (failing != "nothing")


OWN, PLAIN = jn.nn.Conv(2, (3, 3)), linen.Conv(2, (3, 3))
VARIABLES = jax.eval_shape(PLAIN.init, jax.random.key(0), X)


def scanned(apply: Callable[..., Any], scope: str) -> Callable[..., Any]:
    def function(variables: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope(scope):
            return jax.lax.scan(lambda carry, _: (apply(variables, carry), None), x, length=3)[0]

    return function


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "remat": jax.checkpoint(jax.jit(OWN.apply)),
    "scan": scanned(OWN.apply, "mine"),
    "scan within the scope": scanned(PLAIN.apply, "jaxnn.convolution.mine"),
    "vmap": lambda variables, x: jax.vmap(OWN.apply, (None, 0))(variables, jnp.stack([x, x]))[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_implementations_and_plain_convolutions_of_a_training_step(name):
    function, plain = FUNCTIONS[name], jax.checkpoint(PLAIN.apply)
    step = jax.jit(jax.grad(lambda variables: function(variables, X).sum()))
    assert [*Traced(step, VARIABLES).implementations] == ["convolution"]
    assert Traced(step, VARIABLES).plain_convolutions == 0
    # Those that are no layer's count without their gradients.
    two = jax.grad(lambda variables: plain(variables, function(variables, PLAIN.apply(variables, X))).sum())
    assert Traced(two, VARIABLES).plain_convolutions == 2


def test_only_scopes_of_implementations_are_read_and_in_one_trace():
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

    assert Traced(step, X).implementations == {
        "attention": ["cudnn", "math"],
        "recurrence": ["fused_inputs"],
        "normalization": ["custom_vjp"],
    }
    assert Traced(step, X).product_dtypes == {} and Traced(step, X).plain_convolutions == 0 and len(traces) == 1


@jax.custom_vjp
def product(x: jax.Array) -> jax.Array:
    return x @ x


product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))


def test_products_are_counted_by_dtype():
    matrix = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    for function in (
        lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0],
        lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ c, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x),
        jax.jit(jax.checkpoint(lambda x: x @ x)),
        product,
    ):
        assert Traced(function, matrix).product_dtypes == {"float32": 1}

    assert Traced(linen.Conv(2, (3, 3), dtype=jnp.bfloat16).apply, VARIABLES, X).product_dtypes == {"bfloat16": 1}

    def mixed(x: jax.Array) -> jax.Array:
        low = x.astype(jnp.bfloat16)
        # lax takes operands of unequal dtypes as they are; jnp would promote them.
        unequal = jax.lax.dot_general(low, x, (((1,), (0,)), ((), ())))
        return low @ low @ low + unequal.astype(jnp.bfloat16)

    assert list(Traced(mixed, matrix).product_dtypes.items()) == [("bfloat16", 2), ("bfloat16*float32", 1)]
    assert Traced(jax.grad(lambda x: product(x).sum()), matrix).product_dtypes == {"float32": 3}


@pytest.mark.parametrize(
    ("capability", "default"), [("9.0", "float32 as TF32"), ("7.5", "float32"), ("gfx942", "float32")]
)
def test_products_that_a_gpu_rounds_to_tf32_are_named(capability, default, pretend_gpu):
    pretend_gpu(capability)
    matrix, half = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    assert Traced(lambda x: x @ x, matrix).product_dtypes == {default: 1}
    assert Traced(lambda x: x @ x, half).product_dtypes == {"bfloat16": 1}
    assert Traced(jn.nn.Conv(2, (3, 3)).apply, VARIABLES, X).product_dtypes == {default: 1}
    for precision in ("highest", "F32_F32_F32"):
        assert Traced(lambda x, p=precision: jnp.dot(x, x, precision=p), matrix).product_dtypes == {"float32": 1}
    with jax.default_matmul_precision("highest"):
        assert Traced(lambda x: jnp.dot(x, x), matrix).product_dtypes == {"float32": 1}
        assert Traced(lambda *args: jn.nn.Conv(2, (3, 3)).apply(*args), VARIABLES, X).product_dtypes == {"float32": 1}


def test_operations_count_products_and_the_steps_of_loops():
    left, right = jax.ShapeDtypeStruct((4, 5), jnp.float32), jax.ShapeDtypeStruct((5, 6), jnp.float32)
    matmul = 2 * 4 * 5 * 6 + 4 * 6
    assert Traced(jnp.matmul, left, right).operations == pytest.approx(matmul)
    looped = lambda left, right: jax.lax.scan(lambda carry, _: (carry, left @ right), 0, length=7)  # noqa: E731
    assert Traced(looped, left, right).operations >= 7 * matmul
    assert Traced(lambda x: jax.lax.optimization_barrier((x, jax.lax.create_token(x)))[0], left).operations >= 4 * 5
    assert Traced(lambda x: jax.lax.while_loop(jnp.any, jnp.sin, x), left).operations == float("inf")
