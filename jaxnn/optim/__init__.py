"""Schedules, combinators that take an Optax optimizer and return one, and Adam in one pass."""

from jaxnn.optim import _schedules as schedules
from jaxnn.optim._adam import adam, adamw
from jaxnn.optim._combinators import (
    LossScaleState,
    evaluation_params,
    evaluation_state,
    first_matches,
    init_state,
    is_decayed,
    layer_decay,
    step_norms,
    update_params,
    with_accumulation,
    with_clipping,
    with_ema,
    with_loss_scale,
    with_norms,
    with_rates,
)
from jaxnn.optim._row_gradients import SparseRows, apply_updates, value_and_row_gradient
from jaxnn.optim._sparse_rows import sparse_rows, value_and_grad_of

__all__ = [
    "adam",
    "adamw",
    "evaluation_params",
    "evaluation_state",
    "is_decayed",
    "layer_decay",
    "schedules",
    "sparse_rows",
    "step_norms",
    "value_and_grad_of",
    "with_accumulation",
    "with_clipping",
    "with_ema",
    "with_loss_scale",
    "with_norms",
    "with_rates",
]
