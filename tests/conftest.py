"""Configures all tests: four CPU devices, rank promotion raises, compiled programs are kept, slow ones need --slow."""

import gc
import hashlib
import os
import pathlib
import platform
import shutil
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxnn as jn
from jaxnn.parallel import find_devices
from jaxnn.types import ConfigError
from tests import tiny

jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--only-slow", action="store_true", help="run the tests marked slow, and no other")
    parser.addoption("--cold", action="store_true", help="forget the compiled programs of earlier runs")
    parser.addoption("--device", choices=("cpu", "gpu"), help="one of this kind; without the tests that need others")


def pytest_configure(config: pytest.Config) -> None:
    use_device(config)
    kept = config.cache.mkdir("programs")
    too_large = sum(file.stat().st_size for file in kept.glob("*/*")) > MOST_KEPT
    if not hasattr(config, "workerinput") and (config.getoption("--cold") or too_large):
        shutil.rmtree(kept)


def use_device(config: pytest.Config) -> None:
    """Sets up four CPU devices, or one device of the ``--device`` kind."""
    # A backend reads the number of devices when it starts.
    kind = config.getoption("--device")
    jax.config.update("jax_num_cpu_devices", 1 if kind else 4)
    if kind is None:
        return
    if kind == "gpu":  # several processes share it; products in TF32 are no failure, and native kernels are a CPU's
        os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        os.environ["JAXNN_NATIVE"] = "off"
        jax.config.update("jax_default_matmul_precision", "highest")
    else:
        jax.config.update("jax_platforms", "cpu")
    try:
        find_devices(kind)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """A plugin that prints a failed test's name and message at once: a run may be stopped before its end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            said = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            terminal: Any = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid}: {said[0] if said else 'no message'}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marks = {None: (), "cpu": ("several_devices",), "gpu": ("several_devices", "needs_cpu")}[
        config.getoption("--device")
    ]
    left_out = [item for item in items if any(map(item.get_closest_marker, marks))]
    if not config.getoption("--slow"):
        wanted = config.getoption("--only-slow")
        left_out += [item for item in items if (item.get_closest_marker("slow") is not None) != wanted]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    # What JAX and the test modules imported stays: the collector need not visit it again and again.
    gc.freeze()


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path | None:
    """The folder of real data sets; None if there is none."""
    folder = pathlib.Path(os.environ.get("JAXNN_DATA", REPOSITORY.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def data_dir(real_data: pathlib.Path | None) -> pathlib.Path:
    """The folder of real data sets; the test is skipped if there is none."""
    if real_data is None:
        pytest.skip("no real data sets: set JAXNN_DATA to the folder that holds them")
    return real_data


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    """The tiny experiment, trained for 20 steps without a break; copy the directory to change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return tiny.fit(tiny.experiment(), path, checkpoint_every=5, keep_last=4)


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes JAX report a GPU as its default device, for the choice of implementations."""

    def pretend(capability: str = "9.0") -> None:
        device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda backend: [device])

    return pretend


CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
MOST_KEPT = 2**31  # bytes of programs of earlier runs


def use_cache(*values: object) -> None:
    """Sets JAX's cache of compiled programs, which it opens once, to the values of `CACHE_SETTINGS`."""
    if values != tuple(getattr(jax.config, name) for name in CACHE_SETTINGS):
        for name, value in zip(CACHE_SETTINGS, values, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def machine_key() -> str:
    """A digest of what programs depend on besides their text: versions, the CPU's instructions, XLA's flags."""
    cpu = pathlib.Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    )
    parts = (jaxlib.__version__, platform.processor(), flags, os.environ.get("XLA_FLAGS", ""))
    return hashlib.sha256("\0".join((*parts, (REPOSITORY / "constraints.txt").read_text())).encode()).hexdigest()[:16]


def copy_missing(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies files that ``target`` lacks; each appears there whole, also while another process copies the same."""
    for name in set(os.listdir(source)) - set(os.listdir(target)):
        if not name.startswith("."):
            copy = target / f".{os.getpid()}-{name}"
            shutil.copyfile(source / name, copy)
            copy.replace(target / name)


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of this process for compiled programs: JAX writes entries in place, so processes must not share it."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module", autouse=True)
def cached(program_cache: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Caches compiled programs, with those that other modules compiled, in this run by any worker or in earlier runs.

    Also after a module that turned the cache off or another one on, as `jn.main` does.
    """
    kept = request.config.cache.mkdir("programs") / machine_key()
    kept.mkdir(exist_ok=True)
    copy_missing(kept, program_cache)
    use_cache(str(program_cache), 0.0)
    yield
    use_cache(str(program_cache), 0.0)
    copy_missing(program_cache, kept)


@pytest.fixture
def empty_cache(program_cache: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[None]:
    """Caches compiled programs in an empty folder, for tests of what is compiled."""
    use_cache(str(tmp_path / "programs"), 0.0)
    yield
    use_cache(str(program_cache), 0.0)
