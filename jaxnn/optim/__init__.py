"""Schedules, and combinators that take an Optax optimizer and return one."""

from jaxnn.optim import _schedules as schedules
from jaxnn.optim._combinators import as_one, evaluation_params, with_accumulation, with_clipping, with_ema
from jaxnn.optim._loss_scale import LossScaleState, with_loss_scale
from jaxnn.optim._row_gradients import SparseRows, apply_updates, value_and_row_gradient
from jaxnn.optim._sparse_rows import sparse_rows, value_and_grad_of

__all__ = [
    "evaluation_params",
    "schedules",
    "sparse_rows",
    "value_and_grad_of",
    "with_accumulation",
    "with_clipping",
    "with_ema",
    "with_loss_scale",
]
