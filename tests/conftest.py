"""Configures all tests: four CPU devices, rank promotion raises, slow tests run with --slow."""

import gc
import os
import pathlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# A backend reads the number of devices when it starts.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


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


@pytest.fixture(scope="module", autouse=True)
def uncached() -> Iterator[None]:
    """Turns the cache of compiled programs off again after a module that turned it on, as `jn.main` does."""
    before = {name: getattr(jax.config, name) for name in CACHE_SETTINGS}
    yield
    if before != {name: getattr(jax.config, name) for name in CACHE_SETTINGS}:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def compiled_once(uncached: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Caches compiled programs, for modules that train one network many times or call `jn.main`, which turns it on."""
    # JAX writes cache entries in place, so processes must not share a folder; each worker has its own base.
    folder = str(tmp_path_factory.getbasetemp() / "compiled")
    for name, value in zip(CACHE_SETTINGS, (folder, 0.0), strict=True):
        jax.config.update(name, value)
