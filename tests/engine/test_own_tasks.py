"""Tasks of a user's own: what they may give, and what a user hears of what they may not."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxnn as jn
from tests import tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

FIRST = tiny.points(tiny.NUM_TEST, 1)[0][0, 0]
SIZES = np.arange(7.0, dtype=np.float32)


def init(key: jax.Array, batch: jn.Batch) -> Any:
    return tiny.init(key, batch.inputs), {}


def nats(params: Any, batch: jn.Batch) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(tiny.apply(params, batch.inputs), batch.targets)


def loss(params: Any, model_state: Any, batch: jn.Batch, key: jax.Array) -> Any:
    return nats(params, batch).mean(), (model_state, {"half": 0.5})


def evaluate(params: Any, model_state: Any, batch: jn.Batch) -> dict[str, Any]:
    return {"loss": (nats(params, batch) * batch.mask).sum(), "count": batch.mask.sum()}


def predict(params: Any, model_state: Any, inputs: Any) -> Any:
    return tiny.apply(params, inputs)


OWN = jn.Task(init, loss, evaluate, predict)


def own(**parts: Any) -> jn.Experiment[tiny.Config]:
    return tiny.experiment(task=lambda config: OWN._replace(**parts))


def sums(**others: Any) -> Any:
    """An evaluation with more in it: functions of a batch."""
    return lambda params, model_state, batch: (
        evaluate(params, model_state, batch) | {name: other(batch) for name, other in others.items()}
    )


def sweep(experiment: jn.Experiment[Any], points: jn.search.Points | None = None, **options: Any) -> jn.Sweep:
    points = points or jn.grid(learning_rate=[0.1, 0.2, 0.3])
    return jn.sweep(experiment, points, **{**tiny.HOW, "record": False, "vmap_size": 2, "devices": 1, **options})


def test_arrays_are_summed_over_batches_alone_and_reach_finish_in_fit_and_sweep() -> None:
    def finish(means: dict[str, Any]) -> dict[str, Any]:
        assert means["sizes"].shape == (7,) and np.ndim(means["loss"]) == 0
        return {"loss": means["loss"], "largest": means["sizes"].max(), "all": sum(means["sizes"])}

    task = own(evaluate=sums(sizes=lambda batch: (batch.mask[:, None] * SIZES[None]).sum(0)), derive_metrics=finish)
    alone = tiny.fit(task, eval_batch_size=4)
    assert alone.final["test_largest"] == 6.0 and alone.final["test_all"] == 21.0
    members = sweep(task, eval_batch_size=4).members
    assert [member.final["test_all"] for member in members] == [21.0] * 3
    assert members[0].final["test_loss"] == pytest.approx(alone.final["test_loss"], rel=1e-5)


# What is wrong, and the words that name it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "arrays that finish leaves": (
        {"evaluate": sums(sizes=lambda batch: (batch.mask[:, None] * SIZES[None]).sum(0))},
        r"sizes.* of shape \(7,\).* derive_metrics",
    ),
    "words from derive_metrics": (
        {"derive_metrics": lambda means: {"loss": "low"}},
        r"'loss'.* 'low'.* derive_metrics",
    ),
    "finish that breaks": ({"derive_metrics": lambda means: {"loss": means["los"]}}, r"derive_metrics.*KeyError.*los"),
    "finish that gives nothing": ({"derive_metrics": lambda means: None}, r"derive_metrics.*NoneType"),
    "no count": ({"evaluate": lambda *_: {"loss": jnp.float32(1)}}, r"evaluate.* count"),
    "a count for each example": ({"evaluate": sums(count=lambda batch: batch.mask)}, r"count.* shape \(8,\)"),
    "sums that are no dict": ({"evaluate": lambda *_: jnp.float32(1)}, r"evaluate.* dict"),
    "no metrics beside the loss": (
        {"loss": lambda params, state, batch, key: nats(params, batch).mean()},
        r"loss.* \(loss, \(",
    ),
    "metrics that are none": (
        {"loss": lambda params, state, batch, key: (nats(params, batch).mean(), (state, None))},
        "dict",
    ),
    "a loss for each example": (
        {"loss": lambda params, state, batch, key: (nats(params, batch), (state, {}))},
        r"loss.* shape \(8,\).* mean",
    ),
    "a metric of the loss's name": (
        {"loss": lambda params, state, batch, key: (nats(params, batch).mean(), (state, {"loss": 0.5}))},
        "named 'loss'",
    ),
    "another model state": (
        {"loss": lambda params, state, batch, key: (nats(params, batch).mean(), ({"half": 0.5}, state))},
        r"model_state.* half",
    ),
    "no model state": (
        {"loss": lambda params, state, batch, key: (nats(params, batch).mean(), (None, {}))},
        r"model_state.* NoneType",
    ),
    "a name that is no string": (
        {"loss": lambda params, state, batch, key: (nats(params, batch).mean(), (state, {1: 0.5}))},
        "strings",
    ),
    "an integer loss": ({"loss": lambda params, state, batch, key: (jnp.int32(1), (state, {}))}, "int32"),
    "a metric for each example": (
        {
            "loss": lambda params, state, batch, key: (
                nats(params, batch).mean(),
                (state, {"each": nats(params, batch)}),
            )
        },
        r"each.* shape \(8,\)",
    ),
    "means": (
        {"evaluate": lambda params, state, batch: {"loss": nats(params, batch).mean(), "count": batch.mask.sum()}},
        r"loss.* sum",
    ),
    "means of those that count, of which one is 0": (
        {"evaluate": sums(late=lambda batch: ((batch.inputs[:, 0] != FIRST) * batch.mask).sum() / batch.mask.sum())},
        r"late.* sum",
    ),
    "a count that is constant": ({"evaluate": sums(count=lambda batch: 1.0)}, r"count.* mask"),
    "padding that counts": ({"evaluate": sums(count=lambda batch: len(batch.mask))}, r"count.* mask"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_task_may_not_give_is_named_before_training(case: str, tmp_path: Path) -> None:
    parts, words = REFUSED[case]
    with pytest.raises(jn.ConfigError, match=words) as caught:
        tiny.fit(own(**parts), tmp_path / "run")
    assert "\n" not in str(caught.value) and "task" in str(caught.value)
    with pytest.raises(jn.JaxnnError, match=words) as caught:
        sweep(own(**parts), record=True, run_dir=tmp_path / "sweep")
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", [case for case, (parts, _) in REFUSED.items() if "loss" in parts])
def test_the_functional_core_names_it_too(case: str) -> None:
    parts, words = REFUSED[case]
    batch = jn.Batch(*tiny.points(8), np.ones(8, np.float32))
    step = jn.steps.make_train_step(OWN._replace(**parts), optax.sgd(0.1))
    state = jn.steps.init_train_state(OWN, optax.sgd(0.1), jax.random.key(0), batch)
    with pytest.raises(jn.ConfigError, match=words):
        jax.eval_shape(step, state, batch)


def test_sums_that_do_not_double_with_their_examples_may_be_what_they_should_be() -> None:
    def coupled(batch: jn.Batch) -> jax.Array:
        """As of a contrastive loss: nothing of one example alone, and more for each other one."""
        return batch.mask.sum() * jnp.log(jnp.maximum(batch.mask.sum(), 1.0))

    others = {
        "coupled": coupled,
        "never": lambda batch: jnp.zeros(3),
        "endless": lambda batch: jnp.where(batch.mask > 0, jnp.inf, 0.0).sum(),
        # Of a batch of two there are no five.
        "ranked": lambda batch: jax.lax.top_k(batch.mask, 5)[0].min() * batch.mask.sum(),
    }
    run = tiny.fit(own(evaluate=sums(**others), derive_metrics=_without_never))
    # Two batches, of 16 and of 7 examples.
    assert run.final["test_coupled"] == pytest.approx((16 * np.log(16) + 7 * np.log(7)) / 23, rel=1e-6)
    assert run.final["train_half"] == 0.5


def _without_never(means: dict[str, Any]) -> dict[str, Any]:
    return {name: mean for name, mean in means.items() if name != "never"}


def test_nothing_is_presumed_of_what_a_task_of_ones_own_predicts() -> None:
    def decode(params: Any, model_state: Any, codes: Any) -> Any:
        if codes.shape[1:] != (2,):
            raise TypeError("codes [batch, 2]")
        return codes @ params["kernel"][:2]

    def twice(params: Any, model_state: Any, inputs: Any) -> Any:
        return inputs[:, :1]

    labels = jn.data.arrays((tiny.points(37)[0], np.arange(37) % 9), (tiny.points(23)[0], np.arange(23) % 9))
    clipped = lambda task: tiny.experiment(data=labels, task=lambda config: task)  # noqa: E731
    free = OWN._replace(
        loss=lambda params, state, batch, key: loss(params, state, batch._replace(targets=batch.targets % 3), key),
        evaluate=lambda params, state, batch: evaluate(params, state, batch._replace(targets=batch.targets % 3)),
    )
    run = tiny.fit(clipped(free._replace(predict=decode)))
    assert run.predict(np.ones((5, 2))).shape == (5, 3)
    assert sweep(clipped(free._replace(predict=twice)), plan_only=True).status == "planned"


@dataclasses.dataclass(frozen=True)
class Config(tiny.Config):
    decay: float = 0.1
    depth: int = 1


@dataclasses.dataclass(frozen=True)
class Derived(Config):
    rate: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", 2 * self.decay)


def test_a_swept_field_that_nothing_reads_is_named(tmp_path: Path) -> None:
    experiment = dataclasses.replace(tiny.experiment(), config=Config(num_steps=5))
    # One that cannot start compiles nothing, and is warned of all the same.
    with pytest.warns(UserWarning, match="nothing reads.* 'depth'"), pytest.raises(jn.ConfigError, match="monitor"):
        sweep(experiment, jn.grid(depth=[1, 2], seed=[0, 1]), monitor="none")
    with pytest.warns(UserWarning, match="nothing reads.* 'decay'"):
        sweep(experiment, jn.grid(decay=[0.1, 0.2]), record=True, run_dir=tmp_path / "sweep")
    assert tiny.read(tmp_path / "sweep", "sweep.json")["unread"] == ["decay"]


def test_a_swept_field_from_which_the_config_computes_another_is_read() -> None:
    experiment = tiny.experiment(optimizer=lambda config: optax.sgd(config.rate))
    experiment = dataclasses.replace(experiment, config=Derived(num_steps=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep(experiment, jn.grid(decay=[0.1, 0.2]), plan_only=True)
