"""Schedules, and combinators that take an Optax optimizer and return one."""

from jaxnn.optim import _schedules
from jaxnn.optim._combinators import accumulated as accumulated
from jaxnn.optim._combinators import averaged as averaged
from jaxnn.optim._combinators import clipped as clipped
from jaxnn.optim._combinators import evaluation_params as evaluation_params
from jaxnn.optim._lazy import lazy as lazy
from jaxnn.optim._lazy import value_and_grad_of as value_and_grad_of
from jaxnn.optim._row_gradients import SparseRows as SparseRows
from jaxnn.optim._row_gradients import apply_updates as apply_updates
from jaxnn.optim._row_gradients import value_and_row_gradient as value_and_row_gradient

schedules = _schedules
