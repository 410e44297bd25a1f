"""How every test runs: four CPU devices, rank promotion an error, one compile cache, slow tests where asked for."""

import os
import pathlib
import shutil
import tempfile

import jax
import pytest

# Before a backend starts: the number of its devices is read then.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")

# What one test compiled no other compiles again, in whichever process: workers and scripts read these variables.
CACHE = "JAX_COMPILATION_CACHE_DIR"
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="jaxnn_tests_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or os.environ.get("CI") == "true":
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The folder of real data sets; the test is skipped where there is none."""
    folder = pathlib.Path(os.environ.get("JAXNN_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set JAXNN_DATA to a folder that has them")
    return folder
