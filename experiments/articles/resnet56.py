"""ResNet-56 of He et al. (2015), as benchmarked by Shi et al. (2017, arXiv:1608.07249) on CIFAR-10.

Claim     at least 78 % test accuracy after 3,900 steps of the authors' 64,000
Command   python experiments/articles/resnet56.py
Result    79.1 % on JPEG-compressed images; 92 minutes of training on two busy cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 128  # Images per step, the largest size of the article
    num_steps: int = 3_900  # Updates: ten epochs
    seed: int = 0  # Determines initial parameters, data order and augmentation


def data(config):
    return jn.data.with_augmentation(jn.data.cifar10(), jn.data.compose(jn.data.random_shift(4), jn.data.random_flip()))


def task(config):
    return jn.tasks.classification(jn.models.ResNet(10, num_blocks=(9, 9, 9)))


experiment = jn.Experiment(
    Config(), data, task, lambda config: optax.sgd(jn.schedules.cosine(0.1, config.num_steps), momentum=0.9)
)

if __name__ == "__main__":
    jn.main(experiment)
