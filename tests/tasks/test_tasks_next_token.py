"""Next-token prediction: means over tokens by hand, whatever is masked or ignored, and a model that learns."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import tasks
from jaxnn.models import GPT
from jaxnn.types import Batch, ConfigError, Task
from tests import tiny

KEY = jax.random.key(0)
# The outputs are the inputs times a parameter of 1: what a test feeds in is what the loss sees.
SCALE = (lambda key, inputs: {"scale": jnp.ones(())}, lambda params, inputs: inputs * params["scale"])

# Probabilities of a vocabulary of three, at two examples of two positions each.
PROBABILITIES = np.array([[[1, 2, 5], [4, 2, 2]], [[2, 4, 2], [1, 6, 1]]], np.float32) / 8
LOGITS = np.log(PROBABILITIES) + 0.5
# 5/8 and 2/8, then 2/8 and 6/8: of four the first and the last are the likeliest.
TARGETS = np.array([[2, 1], [2, 1]], np.int32)


def batch_of(targets: Any = TARGETS, mask: Any = (1, 1), inputs: Any = LOGITS) -> Batch:
    return Batch(np.asarray(inputs, np.float32), np.asarray(targets), np.asarray(mask, np.float32))


def loss_of(task: Task, batch: Batch) -> dict[str, float]:
    """The training loss and the metrics beside it."""
    params, model_state = task.init(KEY, batch)
    loss, (_, metrics) = task.loss(params, model_state, batch, KEY)
    return {name: float(value) for name, value in {"loss": loss, **metrics}.items()}


def sums_of(task: Task, batch: Batch) -> dict[str, float]:
    sums = task.evaluate(*task.init(KEY, batch), batch)
    return {name: float(value) for name, value in sums.items()}


def slope_of(task: Task, batch: Batch) -> float:
    params, model_state = task.init(KEY, batch)
    return float(jax.grad(lambda params: task.loss(params, model_state, batch, KEY)[0])(params)["scale"])


def told(bits: list[float], right: int) -> tuple[dict[str, float], dict[str, float]]:
    """Means and sums over tokens, from the information of each one and how many were the likeliest."""
    total, count = sum(bits), len(bits)
    sums = {"loss": total * math.log(2), "bits_per_token": total, "accuracy": right}
    means = {name: value / count for name, value in sums.items()}
    return means, {**sums, "count": count}


@pytest.mark.parametrize(
    ("targets", "mask", "bits", "right"),
    [
        (TARGETS, (1, 1), [math.log2(1.6), 2, 2, math.log2(8 / 6)], 2),
        (TARGETS, (0, 1), [2, math.log2(8 / 6)], 1),
        ([[2, -1], [2, 1]], (1, 1), [math.log2(1.6), 2, math.log2(8 / 6)], 2),
        # The ignored one weighs nothing: not the mean of the two examples' means.
        ([[2, -1], [2, 1]], (1, 0), [math.log2(1.6)], 1),
    ],
)
def test_means_and_sums_by_hand(targets: Any, mask: Any, bits: list[float], right: int) -> None:
    task, batch = tasks.next_token(SCALE), batch_of(targets, mask)
    means, sums = told(bits, right)
    assert loss_of(task, batch) == pytest.approx(means, rel=1e-5)
    assert sums_of(task, batch) == pytest.approx(sums, rel=1e-5)


def test_another_token_may_be_what_pads() -> None:
    # 2 is the target of the two first positions: 2/8 and 6/8 remain.
    means, _ = told([2, math.log2(8 / 6)], 1)
    assert loss_of(tasks.next_token(SCALE, ignore=2), batch_of()) == pytest.approx(means, rel=1e-5)


def test_an_ignored_target_changes_neither_value_nor_gradient() -> None:
    task = tasks.next_token(SCALE)
    padded = batch_of([[2, 1, -1], [2, 1, -1]], inputs=np.concatenate([LOGITS, 9 * LOGITS[:, :1]], axis=1))
    assert loss_of(task, padded) == pytest.approx(loss_of(task, batch_of()), rel=1e-6)
    assert slope_of(task, padded) == pytest.approx(slope_of(task, batch_of()), rel=1e-5)


@pytest.mark.parametrize(("targets", "mask"), [(TARGETS, (0, 0)), ([[-1, -1], [-1, -1]], (1, 1))])
def test_nothing_to_predict_is_no_loss(targets: Any, mask: Any) -> None:
    task, batch = tasks.next_token(SCALE), batch_of(targets, mask)
    assert set(loss_of(task, batch).values()) == set(sums_of(task, batch).values()) == {0.0}
    assert slope_of(task, batch) == 0.0


def test_it_equals_classification_of_each_token() -> None:
    flat = Batch(LOGITS.reshape(4, 3), TARGETS.reshape(4), np.ones(4, np.float32))
    expected = loss_of(tasks.classification(SCALE), flat)
    found = loss_of(tasks.next_token(SCALE), batch_of())
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert slope_of(tasks.next_token(SCALE), batch_of()) == pytest.approx(
        slope_of(tasks.classification(SCALE), flat), rel=1e-5
    )


@pytest.mark.slow
def test_the_evaluation_of_a_split_gives_the_mean_over_its_tokens() -> None:
    # Ten sequences in batches of four, evaluated in blocks: the last is partly padding.
    tokens = np.random.default_rng(0).integers(0, 5, size=(10, 7)).astype(np.int32)
    splits = jn.data.arrays((tokens[:, :-1], tokens[:, 1:]), num_classes=5)
    task = jn.tasks.next_token(GPT(5, num_layers=1, features=4, num_heads=1), ignore=0)
    run = jn.fit(_experiment(splits, task, batch_size=4, num_steps=3), record=False, progress="none", steps_per_call=3)
    metrics = run.evaluate("train")
    logits = np.asarray(run.predict(tokens[:, :-1]))
    chosen = jax.nn.log_softmax(logits)[np.arange(10)[:, None], np.arange(6), tokens[:, 1:]]
    loss = -float(np.mean(np.asarray(chosen)[tokens[:, 1:] != 0]))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["bits_per_token"] == pytest.approx(loss / math.log(2), rel=1e-5)
    # Of the whole, not the mean of the batches'.
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_less_perplexity_is_better_and_a_run_or_a_sweep_can_go_by_it() -> None:
    random = np.random.default_rng(0)
    pair = random.normal(size=(12, 6, 5)).astype(np.float32), random.integers(0, 5, (12, 6)).astype(np.int32)
    splits = jn.data.arrays(pair, test=pair, num_classes=5)
    how: dict[str, Any] = {"monitor": "perplexity", "record": False, "progress": "none", "steps_per_call": 2}
    experiment = _experiment(splits, jn.tasks.next_token(SCALE), batch_size=4, num_steps=4)
    options = jn.RunOptions(**how)
    assert not options.higher_is_better
    run = jn.fit(experiment, options, eval_every=2)
    assert run.summary.metrics["test_perplexity"] == pytest.approx(math.exp(run.summary.metrics["test_loss"]), rel=1e-6)
    sweep = jn.sweep(experiment, jn.grid(seed=[0, 1]), devices=1, vmap_size=2, **how)
    for perplexity, loss in zip(sweep.values("test_perplexity"), sweep.values("test_loss"), strict=True):
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-6)


@pytest.mark.slow
def test_a_gpt_learns_to_count() -> None:
    starts = np.arange(32) % 8
    tokens = ((starts[:, None] + np.arange(9)) % 8).astype(np.int32)
    splits = jn.data.arrays((tokens[:, :-1], tokens[:, 1:]), num_classes=8)
    task = jn.tasks.next_token(GPT(8, num_layers=1, features=16, num_heads=2, max_length=8))
    run = jn.fit(
        _experiment(splits, task, batch_size=16, num_steps=150), record=False, progress="none", steps_per_call=50
    )
    metrics = run.evaluate("train")
    assert metrics["accuracy"] == 1.0
    assert metrics["loss"] < 0.1


def _experiment(splits: jn.Splits, task: Task, **fields: Any) -> Any:
    return tiny.experiment(data=splits, task=lambda config: task, optimizer=lambda config: optax.adam(0.01), **fields)


@pytest.mark.parametrize(
    ("inputs", "targets", "sentence"),
    [
        (LOGITS, [2, 1], r"needs targets of integers \[batch, time\], not int\d+ \[2\]: .*tasks.classification"),
        (LOGITS, [[2.0, 1.0]] * 2, r"needs targets of integers \[batch, time\], not float\d+ \[2, 2\]"),
        (LOGITS[:, 0], TARGETS, r"logits \[batch, time, vocabulary\], not \[2, 3\] for targets \[2, 2\]"),
        (LOGITS[:, :1], TARGETS, r"logits \[batch, time, vocabulary\], not \[2, 1, 3\] for targets \[2, 2\]"),
    ],
)
def test_what_cannot_be_predicted_is_named(inputs: Any, targets: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loss_of(tasks.next_token(SCALE), batch_of(targets, inputs=inputs))
