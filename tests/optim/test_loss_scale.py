"""Dynamic loss scaling: the numbers of float32 without an overflow, a skipped update with one, a scale that grows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from tests import tiny


def scaled(**scale):
    return jn.Experiment(
        tiny.Config(num_steps=6),
        data=lambda config: tiny.splits(),
        task=lambda config: jn.tasks.classification(tiny.MODEL),
        optimizer=lambda config: jn.optim.with_loss_scale(optax.adam(config.learning_rate), **scale),
        step=jn.steps.make_scaled_train_step,
    )


def test_a_scale_of_a_power_of_two_changes_no_number(tmp_path):
    experiment = scaled(growth_interval=2)
    plain = jn.Experiment(
        experiment.config, experiment.data, experiment.task, lambda config: optax.adam(config.learning_rate)
    )
    ours, expected = tiny.fit(experiment, tmp_path, steps_per_call=3, report_every=3), tiny.fit(plain, steps_per_call=3)
    jax.tree.map(np.testing.assert_array_equal, ours.state.params, expected.state.params)
    jax.tree.map(np.testing.assert_array_equal, ours.state.opt_state.inner, expected.state.opt_state)
    assert float(ours.state.opt_state.scale) == 2.0**19 and int(ours.state.opt_state.good_steps) == 0
    np.testing.assert_allclose(
        ours.metrics["train_loss_scale"] * 3, [2.0**16 * 4, 2.0**16 * 10]
    )  # means of three steps
    how = {**tiny.HOW, "steps_per_call": 3, "vmap_size": 2, "devices": 1, "record": False}
    swept = jn.sweep(experiment, jn.grid(seed=[0, 1]), **how)
    assert swept.members[0].final["test_loss"] == pytest.approx(ours.final["test_loss"], rel=1e-5)
    resumed = tiny.fit(experiment.replace(num_steps=9), resume=tmp_path, steps_per_call=3, report_every=3)
    assert float(resumed.state.opt_state.scale) == 2.0**20 and int(resumed.state.opt_state.good_steps) == 1


def test_an_overflow_skips_the_update_and_halves_the_scale():
    optimizer = jn.optim.with_loss_scale(optax.adam(0.1), init_scale=2.0**24, growth_interval=1)
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    good = jax.tree.map(lambda leaf: leaf * 2.0, params)
    _, before = update(good, state, params)
    assert float(before.scale) == 2.0**24  # the largest
    updates, after = update(good | {"a": jnp.array([1.0, jnp.inf])}, before, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates)) and float(after.scale) == 2.0**23
    jax.tree.map(np.testing.assert_array_equal, after.inner, before.inner)
    # Members of a population have their own scales.
    members = {"a": np.float32([[2, 2], [1, np.inf]]), "b": np.full((2, 3), 2, np.float32)}
    updates, states = jax.jit(jax.vmap(optimizer.update, (0, None, None)))(members, before, params)
    assert states.scale.tolist() == [2.0**24, 2.0**23] and updates["b"].any(axis=1).tolist() == [True, False]


def test_an_overflow_on_one_device_skips_the_update_on_all():
    task = jn.tasks.averaged_over(
        jn.tasks.classification(tiny.MODEL, policy=jn.nn.Policy(compute="float16")), "devices"
    )
    optimizer = jn.optim.with_loss_scale(jn.optim.with_norms(optax.sgd(0.1)), init_scale=2.0**12)
    inputs, labels = tiny.points(8)
    inputs[4:] *= 1e3  # those of the second device
    batches = jn.Batch(inputs.reshape(2, 4, 3), labels.reshape(2, 4), np.ones((2, 4), np.float32))
    start = jn.steps.init_train_state(task, optimizer, jax.random.key(0), jax.tree.map(lambda rows: rows[0], batches))
    step = jax.pmap(jn.steps.make_scaled_train_step(task, optimizer), "devices", in_axes=(None, 0))
    state, metrics = step(start, batches)
    assert state.opt_state.scale.tolist() == [2.0**11] * 2 and np.isnan(metrics["gradient_norm"]).all()
    np.testing.assert_array_equal(state.params["kernel"], [start.params["kernel"]] * 2)


def test_float16_trains_where_unscaled_gradients_vanish():
    def small(outputs, labels):  # gradients below float16's smallest number, 6e-8
        return 1e-8 * optax.softmax_cross_entropy_with_integer_labels(outputs, labels)

    batch, kernels = jn.Batch(*tiny.points(8), np.ones(8, np.float32)), []
    for dtype, scale in (("float32", 1.0), ("float16", 2.0**20), ("float16", 1.0)):
        task = jn.tasks.supervised(tiny.MODEL, small, {"loss": small}, jn.nn.Policy(compute=dtype))
        optimizer = jn.optim.with_loss_scale(optax.sgd(1e7), init_scale=scale)
        start = jn.steps.init_train_state(task, optimizer, jax.random.key(0), batch)
        state, metrics = jax.jit(jn.steps.make_scaled_train_step(task, optimizer))(start, batch)
        assert float(metrics["loss_scale"]) == scale and float(metrics["loss"]) < 1e-7
        kernels.append(np.asarray(state.params["kernel"] - start.params["kernel"]))
    expected, scaled_up, vanished = kernels
    np.testing.assert_allclose(scaled_up, expected, atol=2e-3 * np.abs(expected).max())
    assert not vanished.any()
