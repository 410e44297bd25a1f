"""Which device an experiment should run on: it is measured on each, and the figures say why."""

from jaxnn.advise._advice import Advice as Advice
from jaxnn.advise._advice import AdviseOptions as AdviseOptions
from jaxnn.advise._advice import DeviceFigures as DeviceFigures
from jaxnn.advise._advice import advise as advise
from jaxnn.advise._probes import BatchSizePlan as BatchSizePlan
from jaxnn.advise._probes import StepParts as StepParts
from jaxnn.advise._probes import plan_batch_size as plan_batch_size
