"""Keras's cifar10_cnn, as benchmarked by Woolf on CPUs and GPUs in 2017: four convolutions, RMSprop, 20 epochs.

Claim     75.1 % test accuracy in the article; on JPEG-compressed images, at least the accuracy of Keras
Command   python experiments/articles/cifar10_cnn.py
Result    72.4 % on JPEG-compressed images (Keras 3: 71.5 %); 18 minutes on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 32  # Images per step
    num_steps: int = 31_260  # Updates: twenty epochs
    seed: int = 0  # Determines initial parameters, data order, augmentation and dropout


def data(config):
    return jn.data.with_augmentation(jn.data.cifar10(), jn.data.compose(jn.data.random_shift(3), jn.data.random_flip()))


def task(config):
    blocks, padding = ((32, 32), (64, 64)), ("SAME", "VALID")
    return jn.tasks.classification(
        jn.models.CNN(10, blocks=blocks, padding=padding, dense=(512,), dropout=0.25, dense_dropout=0.5)
    )


def optimizer(config):
    return optax.rmsprop(jn.schedules.inverse_time(1e-4, 1e-6), eps=1e-7, eps_in_sqrt=False)


experiment = jn.Experiment(Config(), data, task, optimizer)

if __name__ == "__main__":
    jn.main(experiment)
