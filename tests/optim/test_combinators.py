"""Clipping, accumulation, averages, loss scales and schedules: numbers by hand, any nesting, traced or plain."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import optim
from jaxnn.optim import schedules
from tests import tiny

SGD = optax.sgd(1.0)
WRAPPERS: dict[str, Callable] = {
    "clipping": lambda inner: optim.with_clipping(inner, 1.0),
    "accumulation": lambda inner: optim.with_accumulation(inner, 2),
    "ema": lambda inner: optim.with_ema(inner, 0.5),
    "norms": optim.with_norms,
}


def train(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> tuple[Any, Any]:
    """The parameters and the state after an update for each of the stacked gradients."""

    def step(carry: Any, gradient: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[0]


def test_clipping_by_hand():
    def clipped(max_norm: Any, gradient: Any) -> Any:
        optimizer = optim.with_clipping(SGD, max_norm)
        return optimizer.update(gradient, optimizer.init(gradient), gradient)[0]

    # In float16 the squares overflow, but the norm, 500, is computed in float32.
    large = [np.array([300.0, 400.0], dtype) for dtype in ("float32", jnp.bfloat16, "float16")]
    small, norms = [np.float32([0.3, -0.1234567]), np.zeros(2, np.float32)], (1.0, 5.0, np.inf)
    tree, within, nan, traced = jax.jit(
        lambda: (
            clipped(1.0, {"a": jnp.array([3.0, 0.0]), "b": jnp.float32(4.0)}),
            [[clipped(max_norm, gradient) for gradient in small] for max_norm in norms],
            [clipped(max_norm, jnp.array([np.nan, 1.0])) for max_norm in norms],
            [jax.vmap(clipped, (0, None))(jnp.array([250.0, 1000.0]), gradient) for gradient in large],
        )
    )()
    # The norm over all leaves, of (3, 0) and 4, is 5: each is divided by it, then subtracted.
    np.testing.assert_allclose(tree["a"], [-0.6, 0.0], rtol=1e-6)
    np.testing.assert_allclose(tree["b"], -0.8, rtol=1e-6)
    # Gradients within the norm are unchanged, and a NaN is not hidden.
    assert all(np.array_equal(each, [-gradient for gradient in small]) for each in within)
    assert np.isnan([each[0] for each in nan]).all()
    for each, gradient in zip(traced, large, strict=True):
        assert each.dtype == gradient.dtype
        np.testing.assert_array_equal(np.asarray(each, np.float32), [[-150.0, -200.0], [-300.0, -400.0]])


def test_accumulation_updates_once_in_num_steps_calls():
    rates = optax.piecewise_constant_schedule(1.0, {1: 10.0})  # 1 at update 0, 10 at update 1: updates count, not calls
    optimizer, got = optim.with_accumulation(optax.sgd(rates), 3), []
    update, state = jax.jit(optimizer.update), optimizer.init(jnp.float32(0.0))
    for gradient in (1.0, 2.0, 6.0, 5.0, 5.0, 5.0):
        step, state = update(jnp.float32(gradient), state, jnp.float32(0.0))
        got.append(float(step))
    # The means of 1, 2, 6 and of 5, 5, 5, at the third call of each.
    np.testing.assert_allclose(got, [0, 0, -3, 0, 0, -50], rtol=1e-6)
    assert optim.with_accumulation(SGD, 1) is SGD


# SGD at rate 1 with these gradients leads from 10 to 8, 4 and 5.

GRADIENTS = np.float32([2.0, 4.0, -1.0])


def average(optimizer: optax.GradientTransformation) -> Any:
    return optim.evaluation_params(*train(optimizer, {"w": jnp.float32(10.0)}, {"w": GRADIENTS}))["w"]


def test_state_of_an_average():
    params = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    optimizer = optim.with_ema(optax.adam(0.1), 0.999)
    before = optimizer.init(params)
    typeof = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)  # noqa: E731
    types = typeof(before)
    # Before the first update the average is the start; without an average the parameters are.
    assert np.array_equal(optim.evaluation_params(params, before)["w"], [1.0, 1.0])
    assert optim.evaluation_params(params, before.inner) is params
    # The average is a copy: parameters and state may be donated together.
    step = jax.jit(lambda params, state: optimizer.update(params, state, params), donate_argnums=(0, 1))
    updates, after = step(params, before)
    # Averaged in float32, with types that do not change: nothing recompiles.
    assert after.average["w"].dtype == jnp.float32 and types == typeof(after)
    assert optim.evaluation_params(updates, after)["w"].dtype == jnp.bfloat16


AVERAGED = optim.with_ema(SGD, 0.5)
DEBIASED = 9 / 1.75  # 8, 4, 5 weigh 1/4, 1/2, 1, over 7/4: (2 + 2 + 5) / 1.75
AVERAGES: dict[str, tuple[optax.GradientTransformation, float]] = {
    "debiased": (AVERAGED, DEBIASED),
    # (10 + 8)/2 = 9, (9 + 4)/2 = 6.5, 11.5/2.
    "from the start": (optim.with_ema(SGD, 0.5, debias=False), 5.75),
    "the last": (optim.with_ema(SGD, 0.0), 5.0),
    "the plain mean": (optim.with_ema(SGD, 1.0), 17 / 3),
    "the start": (optim.with_ema(SGD, 1.0, debias=False), 10.0),
    # Found in any state.
    "MultiSteps": (optax.MultiSteps(AVERAGED, 1).gradient_transformation(), DEBIASED),
    "injected": (optax.inject_hyperparams(lambda unused: AVERAGED)(unused=0.0), DEBIASED),
    "apply_if_finite": (optax.apply_if_finite(AVERAGED, 3), DEBIASED),
    "a chain in a chain": (optax.chain(optax.clip(1e9), optax.chain(AVERAGED, optax.identity())), DEBIASED),
    "another average": (optim.with_ema(optim.with_ema(SGD, 0.0), 0.5), DEBIASED),
    "masked": (optax.masked(AVERAGED, {"w": True}), DEBIASED),
    # The mean of the gradients is 5/3: one update, or 10, 10 and 25/3 after the calls.
    "of updates": (optim.with_accumulation(AVERAGED, 3), 25 / 3),
    "of calls": (optim.with_ema(optim.with_accumulation(SGD, 3), 0.5), (10 / 4 + 10 / 2 + 25 / 3) / 1.75),
}


def test_averages_by_hand_in_any_state():
    def run(decays: jax.Array) -> Any:
        traced = jax.vmap(lambda decay: average(optim.with_ema(SGD, decay)))(decays)
        return {name: average(optimizer) for name, (optimizer, _) in AVERAGES.items()}, traced

    got, traced = jax.jit(run)(np.float32([0.0, 0.5, 1.0]))
    assert {name: float(value) for name, value in got.items()} == pytest.approx(
        {name: expected for name, (_, expected) in AVERAGES.items()}
    )
    np.testing.assert_allclose(traced, [5.0, DEBIASED, 17 / 3], rtol=1e-6)


def test_averages_of_parts():
    parts = {"a": optim.with_ema(SGD, 0.5), "b": optim.with_ema(optax.sgd(0.5), 0.0), "c": SGD}
    partition = optax.partition(parts, {name: name for name in parts})
    given = dict.fromkeys("abc", jnp.float32(10.0)), dict.fromkeys("abc", GRADIENTS)
    split = jax.jit(lambda: optim.evaluation_params(*train(partition, *given)))()
    # a: as above; b: at half the rate, 10 - 5/2 last; c: the parameter itself.
    np.testing.assert_allclose([split[name] for name in "abc"], [9 / 1.75, 7.5, 5.0], rtol=1e-6)


def test_model_states_are_averaged_for_evaluation():
    def loss(params: Any, model_state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        state = {"mean": batch.inputs.mean().astype(jnp.bfloat16), "count": model_state["count"] + 1}
        return params["w"] ** 2, (state, {})

    start = {"w": jnp.float32(1.0)}, {"mean": jnp.bfloat16(8.0), "count": jnp.int32(0)}
    task = jn.Task(init=lambda key, batch: start, loss=loss, evaluate=None, predict=lambda _, state, __: state)
    batches = [jn.Batch(np.full((1, 1), value, np.float32), None, np.ones(1, np.float32)) for value in (8, 2, 16)]
    optimizers = [optim.with_ema(SGD, 0.5, debias=debias) for debias in (True, False)]
    optimizers += [optax.chain(optimizers[0], optax.identity()), {"w": optimizers[0]}, SGD]
    found = []
    for optimizer in optimizers:
        state = jn.steps.init_train_state(task, optimizer, jax.random.key(0), batches[0])
        for batch in batches:
            state, _ = jn.steps.make_train_step(task, optimizer)(state, batch)
        predicted = jn.steps.make_predict_step(task)(state, None)
        assert predicted == optim.evaluation_state(state).model_state and predicted["mean"].dtype == jnp.bfloat16
        assert int(predicted["count"]) == 3 and float(state.model_state["mean"]) == 16.0
        found.append(float(predicted["mean"]))
    alone = jn.steps.init_train_state(task, optimizers[0], jax.random.key(0), batches[0])
    _, opt_state = optimizers[0].update({"w": jnp.float32(1.0)}, alone.opt_state, alone.params)
    own = alone._replace(opt_state=opt_state, model_state={"mean": jnp.bfloat16(3.0), "count": jnp.int32(1)})
    assert float(optim.evaluation_state(own).model_state["mean"]) == 3.0, "none was given to average"
    # 8, 2, 16 weigh 1/4, 1/2, 1 times 1, 3/2, 7/4. From the start: 8, then halves.
    average = (2 + 1.5 + 28) / (0.25 + 0.75 + 1.75)
    np.testing.assert_allclose(found, [average, (5 + 16) / 2, average, average, 16.0], rtol=1e-2)


# Each pair in both orders.
@pytest.mark.parametrize("order", [(*WRAPPERS,), (*reversed(WRAPPERS),)])
def test_any_order_gives_the_same_from_a_loop_and_a_vmapped_scan(order):
    draws = np.random.default_rng(2)
    gradients, start = (draws.normal(size=shape).astype(np.float32) for shape in ((6, 3), (3,)))

    def nested(rate: Any) -> optax.GradientTransformation:
        optimizer = optax.adam(rate)
        for name in order:
            optimizer = WRAPPERS[name](optimizer)
        return optimizer

    def scanned(rate: jax.Array) -> Any:
        carry = train(nested(rate), start, gradients)
        return carry[0], optim.evaluation_params(*carry)

    params, averages = jax.jit(jax.vmap(scanned))(np.float32([0.1, 0.3]))
    optimizer = nested(0.1)
    expected, state, update = start, optimizer.init(start), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, expected)
        expected = np.asarray(expected) + np.asarray(updates)
    np.testing.assert_allclose(params[0], expected, rtol=1e-5)
    # The average lags behind.
    assert not np.allclose(params, averages, rtol=1e-3)


def test_extra_arguments_reach_an_optimizer_that_takes_them():
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), updates), state

    def second_update(wrap: str, inner: optax.GradientTransformation) -> Any:
        # Through a chain too, which asks whether its links take extra arguments.
        optimizer, got = optax.chain(WRAPPERS[wrap](inner)), jnp.float32(0.0)
        state = optimizer.init(got)
        for _ in range(2):
            got, state = optimizer.update(jnp.float32(0.5), state, jnp.float32(0.0), value=7.0)
        return got

    takes_value = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    inner = takes_value, optax.scale(-1.0)
    got = jax.jit(lambda: [[second_update(wrap, each) for each in inner] for wrap in WRAPPERS])()
    assert np.array_equal(got, [[7.0, -0.5]] * len(WRAPPERS))


def adam(config):
    return optax.adam(config.learning_rate)


@pytest.mark.slow
def test_a_scale_of_a_power_of_two_changes_no_number(tmp_path):
    experiment = tiny.experiment(
        optimizer=lambda config: jn.optim.with_loss_scale(adam(config), growth_interval=2),
        step=jn.steps.make_scaled_train_step,
        num_steps=6,
    )
    plain = tiny.experiment(optimizer=adam, num_steps=6)
    ours, expected = tiny.fit(experiment, tmp_path, steps_per_call=3, report_every=3), tiny.fit(plain, steps_per_call=3)
    jax.tree.map(np.testing.assert_array_equal, ours.state.params, expected.state.params)
    jax.tree.map(np.testing.assert_array_equal, ours.state.opt_state.inner, expected.state.opt_state)
    assert float(ours.state.opt_state.scale) == 2.0**19 and int(ours.state.opt_state.good_steps) == 0
    np.testing.assert_allclose(ours.metrics["train_loss_scale"], [2.0**16 * 4 / 3, 2.0**16 * 10 / 3])
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
    # 1 is the least, so that a scale that was halved often is not 0.
    low = optim.with_loss_scale(optax.sgd(0.1), init_scale=2.0)
    _, lowest = train(low, params, jax.tree.map(lambda leaf: jnp.full((3, *leaf.shape), jnp.nan), params))
    assert float(lowest.scale) == 1.0
    # Members of a population have their own scales.
    members = {"a": np.float32([[2, 2], [1, np.inf]]), "b": np.full((2, 3), 2, np.float32)}
    updates, states = jax.jit(jax.vmap(optimizer.update, (0, None, None)))(members, before, params)
    assert states.scale.tolist() == [2.0**24, 2.0**23] and updates["b"].any(axis=1).tolist() == [True, False]


@pytest.mark.several_devices
def test_an_overflow_on_one_device_skips_the_update_on_all():
    narrow = jn.tasks.classification(tiny.MODEL, policy=jn.nn.Policy(compute="float16"))
    task = jn.tasks.averaged_over(narrow, "devices")
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


STEPS = np.arange(26)  # two shapes of 20 steps, and some beyond

# name -> (ours, Optax's), each of a peak
SHAPES: dict[str, tuple[Callable, Callable]] = {
    "linear": (lambda peak: schedules.linear(peak, 20), lambda peak: optax.linear_schedule(peak, 0.0, 20)),
    "linear warm-up": (
        lambda peak: schedules.linear(peak, 20, warmup_steps=5, final_fraction=0.1),
        lambda peak: optax.join_schedules(
            [optax.linear_schedule(0.0, peak, 5), optax.linear_schedule(peak, peak * 0.1, 15)], [5]
        ),
    ),
    "cosine warm-up": (
        lambda peak: schedules.cosine(peak, 20, warmup_steps=4, final_fraction=0.2),
        lambda peak: optax.warmup_cosine_decay_schedule(0.0, peak, 4, 20, end_value=peak * 0.2),
    ),
    "one-cycle": (lambda peak: schedules.one_cycle(peak, 20), lambda peak: optax.cosine_onecycle_schedule(20, peak)),
    "one-cycle, all given": (
        lambda peak: schedules.one_cycle(peak, 20, warmup_fraction=0.5, initial_divisor=4.0, final_divisor=10.0),
        lambda peak: optax.cosine_onecycle_schedule(20, peak, 0.5, 4.0, 10.0),
    ),
}
OURS = {name: ours for name, (ours, _) in SHAPES.items()} | {
    "inverse-sqrt": lambda peak: schedules.inverse_sqrt(peak, warmup_steps=4),
    "inverse-time": lambda peak: schedules.inverse_time(peak, 0.1),
}


def values(schedule: optax.Schedule) -> jax.Array:
    return jax.vmap(schedule)(STEPS)


def test_plain_and_traced_peaks_give_the_numbers_of_optax():
    @jax.jit
    def run(peaks: jax.Array) -> Any:
        traced = jax.vmap(lambda peak: {name: values(make(peak)) for name, make in OURS.items()})(peaks)
        plain = {name: values(make(0.3)) for name, make in OURS.items()}
        return traced, plain, {name: values(optaxs(0.3)) for name, (_, optaxs) in SHAPES.items()}

    traced, plain, expected = run(np.float32([0.0, 0.3]))
    for name in OURS:
        near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7, err_msg=name)
        near(plain[name], expected.get(name, plain[name]))
        near(traced[name], [np.zeros(len(STEPS)), plain[name]])


def test_fractions_and_divisors_may_be_traced():
    def at_a_step(fraction: Any, divisor: Any) -> list[Any]:
        divisors = {"initial_divisor": divisor, "final_divisor": divisor}
        return [
            schedules.linear(1.0, 20, final_fraction=fraction)(15),
            schedules.cosine(1.0, 20, warmup_steps=2, final_fraction=fraction)(15),
            schedules.one_cycle(1.0, 20, warmup_fraction=fraction, **divisors)(3),
            schedules.inverse_time(1.0, fraction)(15),
        ]

    traced, plain = jax.jit(lambda *given: (at_a_step(*given), at_a_step(0.29, 7.0)))(np.float32(0.29), np.float32(7.0))
    np.testing.assert_allclose(traced, plain, rtol=1e-5)


# Vaswani et al.: d^-0.5 * min(step^-0.5, step * warmup^-1.5), with d = 64 and warmup = 16, peaks at step 16.
VASWANI = {step: 64**-0.5 * min(step**-0.5, step * 16**-1.5) for step in (1, 5, 16, 17, 64, 1000)}
# Keras: learning_rate * (1 / (1 + decay * iterations)), from the first update on; at 1 / rate half the peak.
KERAS = {0: 0.3, 1: 0.24, 2: 0.2, 4: 0.15, 16: 0.06, 10**6: 0.3 / 250_001}
ALL_WARMUP = {0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 5: 0.0}
BY_HAND: list[tuple[optax.Schedule, dict[int, float]]] = [
    (schedules.inverse_sqrt(1 / 32, warmup_steps=16), {0: 0.0, **VASWANI}),
    (schedules.inverse_time(0.3, 0.25), KERAS),
    (schedules.inverse_time(0.3, 0), {1000: 0.3}),
    (schedules.linear(1.0, 4, warmup_steps=4), ALL_WARMUP),
    (schedules.cosine(1.0, 4, warmup_steps=4), ALL_WARMUP),
    (schedules.one_cycle(1.0, 1, warmup_fraction=0.0), {0: 1.0, 1: 1 / 25e4}),  # it only falls
    # Halfway up from 1/4: the mean of 1/4 and 1.
    (schedules.one_cycle(1.0, 4, warmup_fraction=1.0, initial_divisor=4.0), {0: 0.25, 2: 0.625, 4: 1.0}),
]


def test_numbers_by_hand():
    run = jax.jit(lambda steps: [jax.vmap(make)(of_one) for (make, _), of_one in zip(BY_HAND, steps, strict=True)])
    found = run([np.array([*expected]) for _, expected in BY_HAND])
    for row, (got, (_, expected)) in enumerate(zip(found, BY_HAND, strict=True)):
        np.testing.assert_allclose(got, [*expected.values()], rtol=1e-5, atol=2e-7, err_msg=str(row))
