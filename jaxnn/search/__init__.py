"""The points of a sweep, and searchers that propose them while it trains.

>>> space = {"learning_rate": jn.search.log_uniform(1e-4, 1e-1), "dropout": jn.search.uniform(0.0, 0.5)}
>>> jn.sweep(experiment, jn.search.asha(space, num=1024), lanes=64)  # doctest: +SKIP
"""

from jaxnn.search._distributions import Distribution, choice, integers, log_uniform, uniform
from jaxnn.search._optuna import optuna
from jaxnn.search._parzen import tpe
from jaxnn.search._points import Axis, Points, grid, random, sobol, zip
from jaxnn.search._populations import pbt
from jaxnn.search._rebuilt import rebuilt
from jaxnn.search._searchers import Drop, Fork, Promote, Propose, Reached, Searcher, asha, halving
from jaxnn.search._simulation import Simulation, simulate
from jaxnn.search._stopping import extrapolated, patience

__all__ = [
    "Axis",
    "Distribution",
    "Drop",
    "Fork",
    "Points",
    "Promote",
    "Propose",
    "Reached",
    "Searcher",
    "Simulation",
    "asha",
    "choice",
    "extrapolated",
    "grid",
    "halving",
    "integers",
    "log_uniform",
    "optuna",
    "patience",
    "pbt",
    "random",
    "simulate",
    "sobol",
    "tpe",
    "uniform",
    "zip",
]
