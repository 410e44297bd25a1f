"""A physics-informed network (Raissi et al. 2019) solves Burgers' equation u_t + u u_x = nu u_xx from its residual.

Command   python experiments/sketches/pinn.py
Result    mean squared residual 2.8e-4 at points that it was not trained on
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxnn as jn

MODEL = jn.models.MLP((32, 32, 32, 1), activation=jnp.tanh)
VISCOSITY = 0.1 / jnp.pi


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 256
    num_steps: int = 8_000
    seed: int = 0


def data(config):
    def points(key, step):
        """Points (t, x) in [0, 1] × [-1, 1]; they have no targets."""
        return jax.random.uniform(key, (config.batch_size, 2)) * jnp.array([[1.0, 2.0]]) - jnp.array([[0.0, 1.0]])

    return jn.data.generated(points, test=4)


def solution(params, t, x):
    """The network, bent so that u = -sin(pi x) at t = 0, and u = 0 at both ends."""
    free = MODEL.apply({"params": params}, jnp.stack([t, x])[None])[0, 0]
    return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * free


def residual(params, point):
    t, x = point
    u, (u_t, u_x) = jax.value_and_grad(solution, (1, 2))(params, t, x)
    u_xx = jax.grad(jax.grad(solution, 2), 2)(params, t, x)
    return u_t + u * u_x - VISCOSITY * u_xx


def task(config):
    def init(key, inputs):
        return MODEL.init(key, inputs)["params"]

    def squared(outputs, targets):
        return outputs**2

    return jn.tasks.supervised((init, jax.vmap(residual, (None, 0))), squared, {"loss": squared})


experiment = jn.Experiment(Config(), data, task, lambda config: optax.adam(jn.schedules.cosine(2e-3, config.num_steps)))

if __name__ == "__main__":
    jn.main(experiment)
