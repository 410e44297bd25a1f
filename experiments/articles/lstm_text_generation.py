"""Keras's lstm_text_generation, as benchmarked by Woolf on CPUs and GPUs in 2017: an LSTM, RMSprop, 10 epochs.

Claim     none: the article reports a training loss of 1.41 on texts by Nietzsche; this is tiny Shakespeare
Command   python experiments/articles/lstm_text_generation.py
Result    1.41 nats per character in training, 1.66 in test; 17 minutes on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 128  # Windows of 40 characters per step
    num_steps: int = 26_130  # Updates: ten epochs
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.char_corpus(length=40, stride=3, targets="last", lowercase=True)


def network(config):
    return jn.models.RecurrentClassifier(39, vocabulary_size=39, embedding_features=None, features=128)


def task(config):
    return jn.tasks.classification(network(config))


experiment = jn.Experiment(Config(), data, task, lambda config: optax.rmsprop(1e-2, eps=1e-7, eps_in_sqrt=False))

if __name__ == "__main__":
    jn.main(experiment, commands={"generate": jn.text_command(network)}, at_end="generate")
