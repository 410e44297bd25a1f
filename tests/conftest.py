"""How every test runs: four CPU devices, rank promotion an error, slow tests where asked for."""

import os
import pathlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Before a backend starts: the number of its devices is read then.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow") or os.environ.get("CI") == "true":
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path | None:
    """The folder of real data sets, if there is one."""
    folder = pathlib.Path(os.environ.get("JAXNN_DATA", REPOSITORY.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def data_dir(real_data: pathlib.Path | None) -> pathlib.Path:
    """The folder of real data sets; the test is skipped if there is none."""
    if real_data is None:
        pytest.skip("no real data beside the repository: set JAXNN_DATA to a folder that has them")
    return real_data


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For modules that train the same networks again and again, or call `jn.main`, which turns the compile cache on."""
    # JAX writes its entries in place: no other process may read them, and each worker has a base of its own.
    folder = str(tmp_path_factory.getbasetemp() / "compiled")
    settings = {"jax_compilation_cache_dir": folder, "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
