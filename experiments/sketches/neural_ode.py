"""A neural ODE (Chen et al. 2018, arXiv:1806.07366) learns the equation of a pendulum from its paths.

Command   python experiments/sketches/neural_ode.py
Result    mean absolute error 0.042 of angles and speeds over four seconds of test paths
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxnn as jn

MODEL = jn.models.MLP((32, 32, 2), activation=jnp.tanh)


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 64
    num_steps: int = 2_000
    seed: int = 0


def path(field, start, num_steps=20, dt=0.2):
    """The states ``[num_steps, 2]`` after ``start [2]``, by the classical method of Runge and Kutta."""

    def advance(x, _):
        one = field(x)
        two = field(x + dt / 2 * one)
        three = field(x + dt / 2 * two)
        x = x + dt / 6 * (one + 2 * two + 2 * three + field(x + dt * three))
        return x, x

    return jax.lax.scan(advance, start, length=num_steps)[1]


def data(config):
    def pendulum(x):
        return jnp.stack([x[1], -jnp.sin(x[0]) - 0.1 * x[1]])  # of angle and speed

    def paths(key, step):
        start = jax.random.uniform(key, (config.batch_size, 2), minval=-2.0, maxval=2.0)
        return start, jax.vmap(path, (None, 0))(pendulum, start)

    return jn.data.generated(paths, test=4)


def task(config):
    def apply(params, starts):
        return jax.vmap(path, (None, 0))(lambda x: MODEL.apply({"params": params}, x[None])[0], starts)

    return jn.tasks.regression((lambda key, starts: MODEL.init(key, starts)["params"], apply))


experiment = jn.Experiment(Config(), data, task, lambda config: optax.adam(jn.schedules.cosine(5e-3, config.num_steps)))

if __name__ == "__main__":
    jn.main(experiment)
