"""AlexNet-R of Shi et al. (2017, arXiv:1608.07249): three convolutions on CIFAR-10, 85 thousand parameters.

Claim     at least 70 % test accuracy
Command   python experiments/articles/alexnet_r.py
Result    72.8 % on JPEG-compressed images; nine minutes on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 128  # Images per step, the smallest size of the article
    num_steps: int = 7_800  # Updates: twenty epochs
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.cifar10()


def task(config):
    blocks, pooling = ((32,), (32,), (64,)), (jn.nn.max_pool, jn.nn.max_pool, jn.nn.avg_pool)
    return jn.tasks.classification(
        jn.models.CNN(
            10, blocks=blocks, kernel_size=(5, 5), pool=(3, 3), pool_strides=(2, 2), pooling=pooling, dense=()
        )
    )


experiment = jn.Experiment(Config(), data, task, lambda config: optax.adam(1e-3))

if __name__ == "__main__":
    jn.main(experiment)
