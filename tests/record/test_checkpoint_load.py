"""A run's state without its script, data, working directory and devices: with `jn.load_checkpoint`, and as the docs
show."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from tests import shell, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> jn.Run:
    """A run on two devices, each of which holds its part of the state; it holds the checkpoints of steps 10 and 20."""
    adam = tiny.experiment(optimizer=lambda config: optax.adam(config.learning_rate))
    path = tmp_path_factory.mktemp("runs") / "run"
    return tiny.fit(adam, path, devices=2, strategy="fsdp", checkpoint_every=10)


def test_a_run_and_its_checkpoints_are_loaded_as_numpy_arrays(run: jn.Run) -> None:
    assert run.dir is not None
    newest = jn.load_checkpoint(run.dir)
    assert newest["step"] == 20 and jn.load_checkpoint(run.dir / "checkpoints" / "10")["step"] == 10
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(newest))
    tiny.assert_bitwise_equal(newest["params"], jax.device_get(run.state.params))
    tiny.assert_bitwise_equal(newest["opt_state"][0]["mu"], jax.device_get(run.state.opt_state[0].mu))
    tiny.assert_bitwise_equal(newest["key"], jax.random.key_data(run.state.key))


def test_a_checkpoint_is_loaded_like_a_state(run: jn.Run) -> None:
    assert run.dir is not None
    found = jn.load_checkpoint(run.dir / "checkpoints" / "20", run.state)
    tiny.assert_bitwise_equal(found.params, run.state.params)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, run.state)
    with pytest.raises(jn.RecordError, match="opt_state"):
        jn.load_checkpoint(run.dir, run.state._replace(opt_state={}))


def test_a_saved_state_is_loaded_as_numpy_arrays(tmp_path: Path) -> None:
    jn.save_checkpoint(tmp_path / "state", {"w": jax.numpy.arange(3.0), "more": [np.float64(0.1)]})
    tiny.assert_bitwise_equal(jn.load_checkpoint(tmp_path / "state")["w"], np.arange(3.0, dtype=np.float32))


def test_what_cannot_be_loaded_is_named(run: jn.Run, tmp_path: Path) -> None:
    assert run.dir is not None
    copy = Path(shutil.copytree(run.dir, tmp_path / "copy"))
    (copy / "checkpoints" / "20" / "default" / "_METADATA").write_text("{}")
    with pytest.raises(jn.RecordError, match="checkpoints/20 is damaged"):
        jn.load_checkpoint(copy)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(jn.RecordError, match="does not hold a state"):
        jn.load_checkpoint(copy)


READ = """
import os
os.chdir("/")
assert jax.device_count() == 1 and metrics[-1]["step"] == step == int(state["step"])
import jaxnn as jn
again = jn.load_checkpoint(run)
np.testing.assert_array_equal(again["params"]["kernel"], state["params"]["kernel"])
print(jax.tree.structure(again) == jax.tree.structure(state), type(state["params"]["kernel"]).__name__)
"""


@pytest.mark.slow
def test_the_documented_recipe_reads_on_one_device_what_two_saved(run: jn.Run) -> None:
    text = (shell.ROOT / "docs" / "records.md").read_text()
    (recipe,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "orbax" in block)
    code = recipe.replace("/abs/path/runs/…", str(run.dir)).replace("4000", "20")
    assert code != recipe
    done = shell.python("-W", "ignore", "-c", code + READ, JAX_NUM_CPU_DEVICES="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "ndarray"]
