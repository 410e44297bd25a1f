"""Which device an experiment should run on: it is measured on each, and the figures say why."""

from jaxnn.advice._advice import Advice as Advice
from jaxnn.advice._advice import AdviseOptions as AdviseOptions
from jaxnn.advice._advice import DeviceFigures as DeviceFigures
from jaxnn.advice._advice import advise as advise
from jaxnn.advice._probes import BatchSizePlan as BatchSizePlan
from jaxnn.advice._probes import StepParts as StepParts
from jaxnn.advice._probes import plan_batch_size as plan_batch_size
