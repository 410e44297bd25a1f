"""Sequences of different lengths: padded, with their lengths as an input, which the LSTM stops at.

Command   python experiments/sketches/sequence_lengths.py
Result    100 % of 1,000 test sequences
"""

import dataclasses

import numpy as np
import optax
from flax import linen

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 64
    num_steps: int = 2_000
    seed: int = 0


def sequences(count, seed):
    """Sequences of 1 to 20 bits; the target is the parity of their ones."""
    draw = np.random.default_rng(seed)
    bits = [draw.integers(0, 2, length) for length in draw.integers(1, 21, count)]
    tokens, lengths = jn.data.pad_sequences(bits, 20)
    return {"tokens": tokens, "length": lengths}, np.array([one.sum() % 2 for one in bits])


class Parity(linen.Module):
    @linen.compact
    def __call__(self, inputs):
        embedded = jn.nn.Embed(2, 8)(inputs["tokens"])
        (_, last), _ = jn.nn.LSTM(32, return_carry=True)(embedded, seq_lengths=inputs["length"])
        return jn.nn.Dense(2)(last)


experiment = jn.Experiment(
    Config(),
    data=lambda config: jn.data.arrays(train=sequences(20_000, 0), test=sequences(1_000, 1), num_classes=2),
    task=lambda config: jn.tasks.classification(Parity()),
    optimizer=lambda config: jn.optim.with_clipping(optax.adam(1e-2), 1.0),
)

if __name__ == "__main__":
    jn.main(experiment)
