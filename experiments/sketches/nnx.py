"""A model of Flax NNX, with batch statistics and dropout: trained, swept over seeds and resumed as any other.

Command   python experiments/sketches/nnx.py
Result    97.5, 97.2, 97.2 and 97.2 % test accuracy of four seeds
"""

import dataclasses

import jax
import optax
from flax import nnx

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 3e-3
    batch_size: int = 64
    num_steps: int = 1_000
    seed: int = 0


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images):
        hidden = jax.nn.relu(self.norm(self.first(images.reshape(len(images), -1))))
        return self.last(self.dropout(hidden))


experiment = jn.Experiment(
    Config(),
    data=lambda config: jn.data.digits(),
    task=lambda config: jn.tasks.classification(lambda rngs: Net(rngs=rngs)),
    optimizer=lambda config: optax.adam(config.learning_rate),
)

if __name__ == "__main__":
    jn.main(experiment)
    swept = jn.sweep(experiment, jn.grid(seed=range(4)), record=False, progress="none")
    print(", ".join(f"seed {one.point['seed']}: {one.final['test_accuracy']:.3f}" for one in swept.members))
