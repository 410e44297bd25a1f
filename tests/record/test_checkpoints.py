"""Saved states come back bit for bit, misfits are named, and plain Orbax reads them."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn.record import Checkpoints
from jaxnn.types import RecordError, TrainState


def make_state(step: int = 0, width: int = 3) -> TrainState:
    params = {"dense": {"kernel": jnp.full((2, width), 0.1 + step), "bias": jnp.zeros(width, jnp.bfloat16)}}
    opt_state = (jnp.int32(step), {}, {"mean": jnp.full((2, width), jnp.nan)})
    return TrainState(jnp.int32(step), params, {}, opt_state, jax.random.key(7))


def assert_equal(found: Any, expected: Any) -> None:
    """The same tree of the same bits in the same dtypes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert left.dtype == right.dtype
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_array_equal(np.asarray(left, np.float64), np.asarray(right, np.float64))


def test_state_comes_back_with_key_bfloat16_and_empty_dicts(tmp_path: Path) -> None:
    state = make_state(5)
    jn.save_checkpoint(tmp_path / "state", state)
    found = jn.load_checkpoint(tmp_path / "state", state)
    assert isinstance(found, TrainState)
    assert_equal(found, state)
    assert_equal(jax.random.normal(found.key, (3,)), jax.random.normal(state.key, (3,)))
    by_shape = jn.load_checkpoint(tmp_path / "state", jax.eval_shape(make_state, 5))
    assert_equal(by_shape, state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(by_shape))


def test_numpy_arrays_keep_their_wide_dtypes(tmp_path: Path) -> None:
    tree = {"fine": np.array([1.0 + 1e-12]), "large": np.array([2**40]), "plain": 3}
    jn.save_checkpoint(tmp_path / "tree", tree)
    found = jn.load_checkpoint(tmp_path / "tree", tree)
    np.testing.assert_array_equal(found["fine"], tree["fine"])
    np.testing.assert_array_equal(found["large"], tree["large"])
    assert int(found["plain"]) == 3


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "a chain with a schedule": optax.chain(optax.clip(1.0), optax.sgd(optax.linear_schedule(1.0, 0.0, 9), 0.9)),
    "masked": optax.masked(optax.adam(1e-3), {"dense": {"kernel": True, "bias": False}}),
    "two in one": optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(1e-3)}, {"dense": "a"}),
    "averaged and accumulated": jn.optim.with_ema(jn.optim.with_accumulation(optax.adam(1e-3), 2), 0.9),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(1e-3),
    "second order": optax.lbfgs(),
}


def test_state_of_any_optimizer_comes_back(tmp_path: Path) -> None:
    params = make_state().params
    states = {name: optimizer.init(params) for name, optimizer in OPTIMIZERS.items()}
    jn.save_checkpoint(tmp_path / "states", states)
    assert_equal(jn.load_checkpoint(tmp_path / "states", jax.eval_shape(lambda: states)), states)


def test_bad_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    jn.save_checkpoint(tmp_path / "state", make_state(1))
    for call, words in (
        (lambda: jn.save_checkpoint(tmp_path / "state", make_state(2)), f"{tmp_path / 'state'} exists already"),
        (lambda: jn.save_checkpoint(tmp_path / "file" / "state", make_state()), "cannot be written"),
        (lambda: jn.load_checkpoint(tmp_path / "nowhere", make_state()), "there is no checkpoint at .*nowhere"),
        (lambda: jn.load_checkpoint(tmp_path, make_state()), "does not hold a state"),
    ):
        with pytest.raises(RecordError, match=words):
            call()
    assert_equal(jn.load_checkpoint(tmp_path / "state", make_state()), make_state(1))


MISFITS = {
    "another shape": make_state(width=4),
    "another dtype": make_state()._replace(step=jnp.float32(0)),
    "another field": make_state()._replace(params={"conv": jnp.zeros(2)}),
    "one field more": make_state()._replace(model_state={"mean": jnp.zeros(2)}),
    "one field less": make_state()._replace(opt_state=()),
}


def test_states_that_do_not_fit_are_named_in_one_line(tmp_path: Path) -> None:
    jn.save_checkpoint(tmp_path / "state", make_state())
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(3, make_state(), {})
    checkpoints.wait()
    for like in MISFITS.values():
        with pytest.raises(RecordError, match="does not hold a state") as caught:
            jn.load_checkpoint(tmp_path / "state", like)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
        with pytest.raises(RecordError, match="run/3 does not hold a state .*its (params|step|opt|model)"):
            checkpoints.restore_newest(like)
    checkpoints.close()


def kept(directory: Path, values: list[float | None], **options: Any) -> tuple[list[int], int | None]:
    """Which of steps 1, 2, … with these losses are kept, and which is best."""
    checkpoints = Checkpoints(directory, monitor="test_loss", **options)
    for step, value in enumerate(values, start=1):
        metrics = {"train_loss": -float(step)} | ({} if value is None else {"test_loss": value})
        checkpoints.save(step, make_state(step), metrics)
    checkpoints.wait()
    found = checkpoints.steps(), checkpoints.best()
    checkpoints.close()
    reopened = Checkpoints(directory, monitor="test_loss", **options)
    assert (reopened.steps(), reopened.best()) == found, "what is best is not known after reopening"
    return found


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    losses: list[float | None] = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert kept(tmp_path / "a", losses, keep_last=2, keep_best=1) == ([2, 4, 5], 2)
    assert kept(tmp_path / "b", losses, keep_last=1, keep_best=2) == ([2, 4, 5], 2)
    assert kept(tmp_path / "c", losses, keep_last=1, keep_best=0) == ([5], 5)
    assert kept(tmp_path / "d", losses, keep_last=1, keep_best=1, higher_is_better=True) == ([1, 5], 1)


def test_unmeasured_checkpoints_are_never_best(tmp_path: Path) -> None:
    losses = [None, 2.0, math.nan, None]
    assert kept(tmp_path / "a", losses, keep_last=1, keep_best=1) == ([2, 4], 2)
    assert kept(tmp_path / "b", losses, keep_last=1, higher_is_better=True) == ([2, 4], 2)
    assert kept(tmp_path / "c", [None, None, None], keep_last=1, keep_best=0) == ([3], 3)


def test_newest_is_restored_with_its_bits(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.best() is None
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {"loss": 1.0})
    checkpoints.close()
    reopened = Checkpoints(tmp_path / "run")
    assert reopened.steps()[-1] == 2
    assert_equal(jn.load_checkpoint(tmp_path / "run" / "2", make_state()), make_state(2))


def test_save_is_complete_though_its_buffers_are_donated_at_once(tmp_path: Path) -> None:
    # Large enough that writing outlasts the updates that overwrite the buffers.
    size = 300_000
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = TrainState(jnp.int32(0), {"w": jnp.zeros(size)}, {}, {"m": jnp.zeros(size)}, jnp.int32(0))
    like = jax.eval_shape(lambda: state)
    checkpoints = Checkpoints(tmp_path / "run", keep_last=100, keep_best=0)
    for step in range(1, 7):
        state = update(state)
        checkpoints.save(step, state, {})
    for _ in range(50):
        state = update(state)
    checkpoints.wait()
    assert checkpoints.steps() == list(range(1, 7))
    for step in checkpoints.steps():
        for leaf in jax.tree.leaves(jn.load_checkpoint(tmp_path / "run" / str(step), like)):
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, step, leaf.dtype))
    checkpoints.close()


def test_plain_orbax_reads_both_kinds(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    state = make_state(5)
    jn.save_checkpoint(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "state")
    np.testing.assert_array_equal(found["params"]["dense"]["kernel"], state.params["dense"]["kernel"])
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(5, state, {"loss": 0.25})
    checkpoints.close()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        found = manager.restore(5, args=ocp.args.StandardRestore())
        assert manager.latest_step() == 5
    assert set(found) == set(TrainState._fields) and int(found["step"]) == 5
    assert found["params"]["dense"]["bias"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["params"]["dense"]["kernel"], state.params["dense"]["kernel"])


@pytest.mark.parametrize("tree", [{}, None, jnp.ones(3), np.ones(3)], ids=["empty", "None", "array", "numpy"])
def test_trees_that_cannot_be_saved_are_named(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(RecordError, match="put arrays in a dict"):
        jn.save_checkpoint(tmp_path / "state", tree)
    assert not (tmp_path / "state").exists()
