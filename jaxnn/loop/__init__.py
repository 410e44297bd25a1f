"""Training: windows, reports, evaluation, checkpoints, and the run they leave."""

from jaxnn.loop.fit import Iteration as Iteration
from jaxnn.loop.fit import fit as fit
from jaxnn.loop.fit import iterate as iterate
from jaxnn.loop.options import RunOptions as RunOptions
from jaxnn.loop.quick import train as train
from jaxnn.loop.report import Report as Report
from jaxnn.loop.report import Summary as Summary
from jaxnn.loop.run import Run as Run
from jaxnn.loop.single import save as save
