"""Which device an experiment should run on: it is measured on each, and the figures say why."""

from jaxnn.advise.advice import Advice as Advice
from jaxnn.advise.advise import advise as advise
from jaxnn.advise.options import AdviseOptions as AdviseOptions
