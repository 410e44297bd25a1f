"""Sharpness-aware minimization (Foret et al. 2021, arXiv:2010.01412): a training step of one's own, in a few lines.

Claim     over eight seeds, SAM classifies handwritten digits with at least 97.2 % mean test accuracy
Command   python experiments/digits_sam.py sweep --seed 0 1 2 3 4 5 6 7
Result    97.5 ± 0.2 % (standard error) and a test loss of 0.13; without SAM (`step=None`) 97.0 ± 0.2 % and 0.16. With
          `--radius 0.0 0.05 0.1 0.2` too, which rounds otherwise, 96.9, 97.2, 97.2 and 97.0 %, losses 0.16 to 0.13
"""

import dataclasses

import jax
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    radius: float = 0.05  # How far SAM goes uphill, by the norm of all parameters, before it takes the gradient
    learning_rate: float = 0.1  # Peak learning rate of SGD with momentum, with cosine decay to zero
    batch_size: int = 32  # Examples per step
    num_steps: int = 2_000  # Updates: about 45 epochs
    seed: int = 0  # Determines initial parameters and data order


def data(config):
    return jn.data.digits()


def task(config):
    return jn.tasks.classification(jn.models.MLP((32, 32, 10)))


def optimizer(config):
    return optax.sgd(jn.schedules.cosine(config.learning_rate, config.num_steps), momentum=0.9)


def step(task, optimizer, config):
    def uphill(loss, has_aux):
        def value_and_grad(params, *rest):
            gradient, _ = jax.grad(loss, has_aux=has_aux)(params, *rest)
            worst = optax.tree.add_scale(params, config.radius / (optax.tree.norm(gradient) + 1e-12), gradient)
            return jax.value_and_grad(loss, has_aux=has_aux)(worst, *rest)

        return value_and_grad

    return jn.steps.make_train_step(task, optimizer, value_and_grad=uphill)


experiment = jn.Experiment(Config(), data, task, optimizer, step)

if __name__ == "__main__":
    jn.main(experiment)
