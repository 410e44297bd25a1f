"""The LSTM of Shi et al. (2017, arXiv:1608.07249): two layers of 256 on the Penn Treebank, gradients clipped.

Claim     validation perplexity of at most 135
Command   python experiments/articles/ptb_lstm.py
Result    128.3; test perplexity 122.6, by `run.evaluate("test")`; 2.4 steps/s on two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 64  # Sequences of 32 words per step, the second size of the article
    num_steps: int = 3_624  # Updates: eight epochs
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.ptb(length=32)


def network(config):
    return jn.models.RecurrentLanguageModel(10_000, features=256, num_layers=2)


def optimizer(config):
    # The loss is a mean over words; the article's scripts sum over the 32 words of a sequence.
    return optax.chain(optax.scale(32.0), optax.clip_by_global_norm(5.0), optax.sgd(1.0))


experiment = jn.Experiment(Config(), data, lambda config: jn.tasks.next_token(network(config)), optimizer)

if __name__ == "__main__":
    jn.main(experiment, commands={"generate": jn.text_command(network)}, at_end="generate")
