"""Scaling: how fast an experiment trains on more and more devices, measured and predicted."""

from jaxnn.scaling.cost import Link as Link
from jaxnn.scaling.options import ScalingOptions as ScalingOptions
from jaxnn.scaling.scaling import scaling as scaling
from jaxnn.scaling.study import ScalingStudy as ScalingStudy
