"""FCN-5 of Shi et al. (2017, arXiv:1608.07249): four dense layers of sigmoids on MNIST, 14.2 million parameters.

Claim     at least 97 % test accuracy
Command   python experiments/articles/fcn5.py
Result    97.73 %; five minutes on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import jax
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 342  # Digits per step, the smallest size of the article
    num_steps: int = 1_750  # Updates: ten epochs
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.mnist()


def task(config):
    return jn.tasks.classification(jn.models.MLP((2048, 4096, 1024, 10), activation=jax.nn.sigmoid))


experiment = jn.Experiment(Config(), data, task, lambda config: optax.adam(1e-3))

if __name__ == "__main__":
    jn.main(experiment)
