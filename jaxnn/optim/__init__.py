"""Schedules, and combinators that take an Optax optimizer and return one."""

from jaxnn.optim import schedules as schedules
from jaxnn.optim.accumulation import accumulated as accumulated
from jaxnn.optim.averaging import AveragedState as AveragedState
from jaxnn.optim.averaging import averaged as averaged
from jaxnn.optim.averaging import evaluation_params as evaluation_params
from jaxnn.optim.clipping import clipped as clipped
from jaxnn.optim.gradients import value_and_grad_of as value_and_grad_of
from jaxnn.optim.lazy import LazyTransformation as LazyTransformation
from jaxnn.optim.lazy import lazy as lazy
from jaxnn.optim.row_gradients import value_and_row_gradient as value_and_row_gradient
from jaxnn.optim.rows import apply_updates as apply_updates
from jaxnn.optim.rows import is_rows as is_rows
