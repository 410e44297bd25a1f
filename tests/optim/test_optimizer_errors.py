"""Wrong arguments and uses of optimizers, by one table: each is named before anything is compiled."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxnn as jn
from jaxnn import optim
from jaxnn.optim import schedules, sparse_rows
from tests import tiny
from tests.optim.test_sparse_rows import IDS, KEY, TASK, TEXTS, step_of

SGD, ADAM = optax.sgd(1.0), optax.adam(0.1)


def step_with(optimizer: Any) -> None:
    state = jn.steps.init_train_state(TASK, optimizer, KEY, TEXTS[0])
    step_of(TASK, optimizer)(state, TEXTS[0])
    optimizer.update(state.params, state.opt_state)


def use(read: Callable[[jax.Array], Any]) -> None:
    """Asks for a gradient by rows of a loss that reads a table otherwise."""

    def loss(params: Any) -> Any:
        return 0.0, read(params["layer"]["table"])

    optim.value_and_row_gradient(loss, lambda _: True, has_aux=True)({"layer": {"table": np.ones((5, 2), np.float32)}})


def scaled_step_without_a_scale() -> None:
    task, batch = jn.tasks.classification(tiny.MODEL), jn.Batch(*tiny.points(8), np.ones(8, np.float32))
    state = jn.steps.init_train_state(task, SGD, KEY, batch)
    jn.steps.make_scaled_train_step(task, SGD)(state, batch)


ROWS = "'layer/table' has no gradient by rows, .*"
TABLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: optim.with_clipping(SGD, 0.0), "with_clipping: max_norm must be a number > 0"),
    (lambda: optim.with_accumulation(SGD, 0), "num_steps must be an integer >= 1, not 0"),
    (lambda: optim.with_accumulation(SGD, 2.0), "num_steps must be an integer >= 1"),
    (lambda: optim.with_ema(SGD, -0.1), "with_ema: decay must be a number in 0…1"),
    (lambda: optim.with_ema(SGD, 1.1), "decay must be"),
    (lambda: optim.with_ema(SGD, float("nan")), "decay must be"),
    (lambda: optim.with_ema(SGD, 0.9).update(0.0, None), "needs the parameters"),
    (lambda: optim.with_norms(SGD).update(0.0, None), "with_norms: update needs the parameters"),
    (scaled_step_without_a_scale, "needs as optimizer jn.optim.with_loss_scale"),
    (lambda: schedules.linear(0.1, 0), "num_steps must be an integer >= 1, not 0"),
    (lambda: schedules.cosine(0.1, 10.5), "num_steps must be an integer >= 1, not 10.5"),
    (lambda: schedules.one_cycle(0.1, -3), "num_steps must be an integer >= 1, not -3"),
    (lambda: schedules.cosine(0.1, 5, warmup_steps=6), "warmup_steps=6 is more than num_steps"),
    (lambda: schedules.linear(0.1, 5, warmup_steps=-1), "warmup_steps must be an integer >= 0"),
    (lambda: schedules.cosine(0.1, 5, final_fraction=1.5), "final_fraction must be a number in"),
    (lambda: schedules.cosine(-0.1, 5), "peak must be a number >= 0, not -0.1"),
    (lambda: schedules.inverse_time(float("nan"), 1.0), "inverse_time: peak must be a number >= 0, not nan"),
    (lambda: schedules.one_cycle(0.1, 5, warmup_fraction=2), "warmup_fraction must be"),
    (lambda: schedules.one_cycle(0.1, 5, initial_divisor=0.0), "initial_divisor must be"),
    (lambda: schedules.one_cycle(0.1, 5, final_divisor=0.0), "final_divisor must be"),
    (lambda: schedules.inverse_sqrt(0.1, warmup_steps=0), "warmup_steps must be an integer >="),
    (lambda: schedules.inverse_time(0.1, -1e-4), "inverse_time: rate must be a number >= 0, not -0.0001"),
    (lambda: use(lambda table: (table[IDS] @ table.T).sum()), f"{ROWS}'transpose'"),
    (lambda: use(lambda table: table[IDS].sum() + (table**2).sum()), f"{ROWS}'(integer_pow|square|mul)'"),
    (lambda: use(lambda table: table[IDS, :1].sum()), f"{ROWS}'gather'"),
    (lambda: use(lambda table: table[:2].sum()), f"{ROWS}'slice'"),
    (lambda: use(lambda table: jax.lax.map(lambda i: table[i].sum(), IDS).sum()), f"{ROWS}'scan'"),
    (lambda: use(jax.checkpoint(lambda table: table[IDS].sum())), f"{ROWS}'(remat2|checkpoint)'"),
    (lambda: use(lambda table: table), f"{ROWS}because the loss returns it"),
    (lambda: step_with(sparse_rows(ADAM, tables="embeding")), "no parameter is called 'embeding': did you mean"),
    (lambda: step_with(sparse_rows(ADAM, tables=("embedding", "tags/embedding"))), "called 'tags/embedding'"),
    (lambda: step_with(sparse_rows(optim.with_ema(ADAM, 0.9))), "AveragedState .* put with_ema"),
    (lambda: step_with(sparse_rows(optim.with_accumulation(ADAM, 2))), "MultiStepsState"),
    (lambda: step_with(sparse_rows(optax.lbfgs())), r"keeps \[10, 50, 3\] for the table 'words/embedding' \[50, 3\]"),
    (lambda: step_with(sparse_rows(optax.adafactor(0.1, min_dim_size_to_factor=2))), "element by element"),
    (lambda: step_with(sparse_rows(optax.chain(SGD, optax.scale_by_backtracking_linesearch(5)))), "for a step size"),
    (lambda: step_with(sparse_rows(ADAM)), "update needs the parameters"),
]


@pytest.mark.parametrize(("call", "words"), TABLE, ids=[words for _, words in TABLE])
def test_wrong_arguments_and_uses_are_named(call, words):
    def run() -> None:
        call()

    with pytest.raises(jn.ConfigError, match=words):
        jax.eval_shape(run)
