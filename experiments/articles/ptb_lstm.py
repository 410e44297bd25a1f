"""The LSTM of Shi et al. (2017, arXiv:1608.07249): two layers of 256 on the Penn Treebank's words, clipped at 5.

Claim     a perplexity of at most 135 on the validation words
Command   python experiments/articles/ptb_lstm.py
Seen      128.3, and of the test words, by `run.evaluate("test")`, 122.6; 2.4 steps a second on two cores of an
          AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 64  # Sequences of 32 words a step, the second of the article's
    num_steps: int = 3_624  # Updates in all: eight epochs
    seed: int = 0  # Decides initial parameters and data order


def data(config):
    return jn.data.ptb(length=32)


def task(config):
    return jn.tasks.next_token(jn.models.RecurrentLanguageModel(10_000, features=256, num_layers=2))


def optimizer(config):
    # The loss is a mean over words, where the article's scripts add up the 32 of a sequence.
    return optax.chain(optax.scale(32.0), optax.clip_by_global_norm(5.0), optax.sgd(1.0))


experiment = jn.Experiment(Config(), data, task, optimizer)

if __name__ == "__main__":
    jn.main(experiment)
