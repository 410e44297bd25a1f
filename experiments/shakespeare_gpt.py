"""nanoGPT's setting for a CPU (Karpathy, 2022): a GPT of 0.8 M parameters on the characters of tiny Shakespeare.

Claim     validation loss of at most 1.88 nats per character, nanoGPT's, after 2,000 steps
Command   python experiments/shakespeare_gpt.py; python experiments/shakespeare_gpt.py generate RUN --prompt "ROMEO:"
Result    1.81; 1.89 with nanoGPT's learning rate, 1e-3; 3 to 21 minutes by load, two cores of an AMD EPYC, jax 0.12.0.1
"""

import dataclasses

import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 2e-3  # Peak learning rate of AdamW, with warmup over 100 steps and cosine decay to a tenth
    batch_size: int = 12  # Windows of 64 characters per step
    num_steps: int = 2_000  # Updates
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.char_corpus(length=64, stride=16)


def network(config):
    return jn.models.GPT(vocabulary_size=65, tied=True, epsilon=1e-5)


def optimizer(config):
    schedule = jn.schedules.cosine(config.learning_rate, config.num_steps, warmup_steps=100, final_fraction=0.1)
    return jn.optim.with_clipping(optax.adamw(schedule, b2=0.99, weight_decay=0.1), 1.0)


experiment = jn.Experiment(Config(), data, lambda config: jn.tasks.next_token(network(config)), optimizer)

if __name__ == "__main__":
    jn.main(experiment, commands={"generate": jn.text_command(network)}, at_end="generate")
