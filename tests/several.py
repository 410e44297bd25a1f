"""An experiment for runs of several processes, as a script: dropout, Adam, and matrices that are worth sharding.

Command   python tests/several.py NUM_DEVICES [flags]
"""

import sys

import jax
import optax

import jaxnn as jn
from jaxnn.models import MLP
from tests import tiny

MODEL = MLP((128, 3), dropout=0.25)
experiment = tiny.experiment(
    task=lambda config: jn.tasks.classification(MODEL),
    optimizer=lambda config: optax.adam(config.learning_rate),
    learning_rate=0.01,
    num_steps=60,
)
FLAGS = ("--steps-per-call", 5, "--report-every", 5, "--eval-every", 20, "--checkpoint-every", 20)

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    jn.main(experiment, sys.argv[2:])
