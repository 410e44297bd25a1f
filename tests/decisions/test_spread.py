"""``jn.spread``: planted sources are named, members are solo runs, intervals hold, what is unknown is said."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import decisions
from jaxnn.types import ConfigError
from tests import tiny

HOW: dict[str, Any] = {**tiny.HOW, "vmap_size": 8, "devices": 1}
NUM = 6


def planted(source: str) -> jn.Experiment[Any]:
    """Three biases whose only random numbers are in their initial values, their batches or their steps."""

    def init(key: jax.Array, batch: jn.Batch) -> Any:
        return {"bias": jax.random.normal(key, (3,)) if source == "init" else jnp.zeros(3)}, {}

    def nats(params: Any, batch: jn.Batch) -> jax.Array:
        logits = jnp.broadcast_to(params["bias"], (len(batch.mask), 3))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)

    def loss(params: Any, model_state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        slopes = jax.random.normal(key, (3,)) if source == "step" else jnp.zeros(3)
        value = nats(params, batch).mean() if source == "order" else (slopes * params["bias"]).sum()
        return value, (model_state, {})

    def evaluate(params: Any, model_state: Any, batch: jn.Batch, key: jax.Array) -> Any:
        return {"loss": (nats(params, batch) * batch.mask).sum(), "count": batch.mask.sum()}

    task = jn.Task(init=init, loss=loss, evaluate=evaluate)
    return tiny.experiment(task=lambda config: task)


@pytest.mark.parametrize("source", ["init", "order", "step"])
def test_the_planted_source_is_named(source):
    found = jn.spread(planted(source), "test_loss", NUM, record=False, **HOW)
    deviations = {purpose: one.deviation.value for purpose, one in found.sources.items()}
    assert {purpose for purpose, value in deviations.items() if value > 0} == {source, "whole"}
    assert found.sources[source].share[0] > 0 < found.test.share[0]
    shown = repr(found)
    assert shown.count("as if nothing used these random numbers") == 2
    assert f"test_loss means something to ± {found.total.value:.2g}: {found.rounded}" in shown


def noisy(**parts: Any) -> jn.Experiment[Any]:
    """The linear classifier's data for a network with dropout, and an error rate and a perplexity beside its loss."""

    def task(config: tiny.Config) -> jn.Task:
        made = jn.tasks.classification(jn.models.MLP((8, 3), dropout=0.3))
        return made._replace(
            derive_metrics=lambda means: {**means, "perplexity": np.exp(means["loss"])},
            metrics={"hits": lambda targets, outputs: (outputs.argmax(-1) == targets).mean()},
            **parts,
        )

    return tiny.experiment(task=task, num_steps=40, learning_rate=0.05)


def test_whole_runs_are_solo_runs_and_the_test_set_has_the_error_of_a_bootstrap(tmp_path):
    found = jn.spread(noisy(), "test_perplexity", NUM, run_dir=tmp_path / "sweep", **HOW)
    assert len(found.sweep.members) == 4 * NUM
    assert found.sweep.summary["num_compilations"] <= 4  # of one group
    for member in found.sweep.members[:2]:
        solo = tiny.fit(noisy().replace(seed=member.point["init_seed"]))
        assert solo.final["test_perplexity"] == pytest.approx(member.final["test_perplexity"], rel=1e-5)
    whole = np.array(found.sources["whole"].values)
    assert found.sources["whole"].deviation.value == pytest.approx(whole.std(ddof=1))
    # Seeds that vary are of one group each, and the others are those of the config.
    points = [member.point for member in found.sweep.members]
    fixed = [sum(seed == 0 for seed in point.values()) for point in points]
    assert fixed == [0] * NUM + [2] * 3 * NUM
    draws, variances = np.random.default_rng(0), []
    for sums in found.sweep.example_sums()[:4]:
        chosen = draws.integers(0, tiny.NUM_TEST, (20_000, tiny.NUM_TEST))
        variances.append(np.exp(sums["loss"][chosen].mean(axis=1)).var())
    assert found.test.deviation.value == pytest.approx(math.sqrt(np.mean(variances)), rel=0.1)
    resumed = jn.spread(noisy(), "test_accuracy", NUM, resume=tmp_path / "sweep", progress="none")
    errors = [accuracy * (1 - accuracy) / (tiny.NUM_TEST - 1) for accuracy in resumed.sources["whole"].values[:4]]
    assert resumed.test.deviation.value == pytest.approx(math.sqrt(np.mean(errors)))
    assert len(resumed.plot().axes) == 2
    assert "<table>" in resumed._repr_html_()
    hits = jn.spread(noisy(), "test_hits", NUM, resume=tmp_path / "sweep", progress="none")
    assert "test set: not known, hits is a function of all targets and outputs together" in repr(hits)
    assert hits.total.value == hits.sources["whole"].deviation.value


def test_members_without_a_result_and_sources_that_do_not_vary_are_said():
    def explode(config: tiny.Config) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            # The sign of a random gradient decides.
            bad = jax.tree.leaves(updates)[0].reshape(-1)[0] > 0.02
            return jax.tree.map(lambda leaf: jnp.where(bad & (state > 2), jnp.nan, -0.05 * leaf), updates), state + 1

        return optax.GradientTransformation(lambda params: jnp.int32(0), update)

    breaking = dataclasses.replace(noisy(), optimizer=explode).replace(num_steps=5)
    how = {**HOW, "eval_every": 5, "order": "shared"}
    found = jn.spread(breaking, "test_loss", NUM, record=False, **how)
    assert len(found.sweep.members) == 3 * NUM
    lost = sum(member.status == "diverged" for member in found.sweep.members)
    assert 0 < lost == found.left_out["diverged"]
    assert f"{lost} diverged" in repr(found).partition("Left out: ")[2]
    assert sum(len(source.values) for source in found.sources.values()) == 3 * NUM - sum(found.left_out.values())
    assert all(0 < value < 10 for source in found.sources.values() for value in source.values)
    assert "order of the data: order='shared' gives all members one order" in repr(found)


def test_a_wrong_request_is_refused_before_training():
    with pytest.raises(ConfigError, match=r"members will have no metric 'test_acuracy'.*test_accuracy"):
        jn.spread(tiny.experiment(), "test_acuracy", NUM, record=False)
    with pytest.raises(ConfigError, match=r"num must be an integer >= 2, not 1"):
        jn.spread(tiny.experiment(), num=1)
    with pytest.raises(ConfigError, match=r"spread needs all members"):
        jn.spread(tiny.experiment(), shard="1/2")


def test_intervals_hold_the_truth_in_95_of_100_cases():
    """Deviations of few normal values, errors of accuracies, both together, and shares."""
    draws, repeats, accuracy, examples = np.random.default_rng(0), 1_000, 0.9, 300
    error, part, whole = math.sqrt(accuracy * (1 - accuracy) / examples), 0.01, 0.02
    total = math.hypot(whole, error)
    truth = part, error, total, (part / total) ** 2, (whole / total) ** 2
    right = np.zeros(len(truth))
    for _ in range(repeats):
        init = decisions.Deviation.of_values(part * draws.standard_normal(8), 0)
        runs = decisions.Deviation.of_values(whole * draws.standard_normal(16), 1)
        sums = {"hit": draws.random(examples) < accuracy, "count": np.ones(examples)}
        test = decisions.Deviation.of_mean(decisions.jackknife(sums, lambda means: means["hit"])[1][None], 2)
        one = decisions.Deviation.together(runs, test)
        found = init.interval, test.interval, one.interval, init.share_of(one)[1:], runs.share_of(one)[1:]
        right += [low <= value <= high for (low, high), value in zip(found, truth, strict=True)]
    assert np.all((right / repeats > 0.93) & (right / repeats < 0.97)), right / repeats
    known = decisions.Deviation.of_values(np.array([-1.0, 1.0] * 8) / math.sqrt(16 / 15))
    np.testing.assert_allclose(known.interval, (0.7387, 1.5477), rtol=1e-4)


@pytest.mark.parametrize(
    ("value", "deviation", "shown"), [(0.9722, 0.004, "0.97"), (0.97118, 0.0102, "0.97"), (1234.0, 35.0, "1200")]
)
def test_numbers_are_rounded_to_digits_that_mean_something(value, deviation, shown):
    assert decisions.rounded(value, deviation) == shown
