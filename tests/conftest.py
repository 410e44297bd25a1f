"""Configures all tests: four CPU devices, rank promotion raises, compiled programs are kept, slow ones need --slow."""

import gc
import hashlib
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator

import jax
import jaxlib
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.costs import Costs

# A backend reads the number of devices when it starts.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--only-slow", action="store_true", help="run the tests marked slow, and no other")
    parser.addoption("--cold", action="store_true", help="start without the compiled programs of earlier runs")
    parser.addoption("--costs", type=int, default=0, help="print the time and programs of that many tests and files")
    parser.addoption("--costs-to", help="a file that gets a line of totals, in JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs(config, config.getoption("--costs")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    wanted = config.getoption("--only-slow")
    left_out = [item for item in items if (item.get_closest_marker("slow") is not None) != wanted]
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


CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
MOST_CACHED = 2**31  # bytes of programs that are kept


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


@pytest.fixture(scope="session")
def program_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """The folder of this process for compiled programs: it starts with those of earlier runs, which get its new ones.

    JAX writes entries in place, so processes must not share a folder.
    """
    own = tmp_path_factory.getbasetemp() / "programs"
    kept = request.config.cache.mkdir("programs") / machine_key()
    if request.config.getoption("--cold") or not kept.is_dir():
        own.mkdir()
    else:
        shutil.copytree(kept, own)
    old = set(os.listdir(own))
    yield own
    kept.mkdir(exist_ok=True)
    if sum(file.stat().st_size for file in kept.iterdir()) > MOST_CACHED:
        shutil.rmtree(kept)
        return
    for name in set(os.listdir(own)) - old:
        copy = kept / f".{os.getpid()}-{name}"
        shutil.copyfile(own / name, copy)
        copy.replace(kept / name)  # whole, also if another process merges its own


@pytest.fixture(scope="module", autouse=True)
def cached(program_cache: pathlib.Path) -> Iterator[None]:
    """Caches compiled programs, also after a module that turned the cache off or another one on, as `jn.main` does."""
    use_cache(str(program_cache), 0.0)
    yield
    use_cache(str(program_cache), 0.0)


@pytest.fixture
def empty_cache(program_cache: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[None]:
    """Caches compiled programs in an empty folder, for tests of what is compiled."""
    use_cache(str(tmp_path / "programs"), 0.0)
    yield
    use_cache(str(program_cache), 0.0)
