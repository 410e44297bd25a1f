"""Woolf's text_generator_keras: an LSTM with auxiliary logits, dense layers with batch norm, Adam, 10 epochs.

Claim     none: no loss is published; this is tiny Shakespeare
Command   python experiments/articles/text_generator.py
Result    1.57 nats per character in training, 1.55 in test; 29 minutes on two cores of an AMD EPYC, jax 0.12.0.1
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
    return jn.models.TextGenRNN(39)


def task(config):
    return jn.tasks.classification(network(config), auxiliary_weight=0.2)


experiment = jn.Experiment(Config(), data, task, lambda config: optax.adam(jn.schedules.inverse_time(1e-3, 1e-4)))

if __name__ == "__main__":
    jn.main(experiment, commands={"generate": jn.text_command(network)}, at_end="generate")
