"""A diffusion model of a spiral (Ho et al. 2020, arXiv:2006.11239), of generated data, sampled by DDIM after training.

Command   python experiments/sketches/diffusion.py
Result    mean distance of drawn points to the spiral 0.05; its arms are 0.63 apart
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 256
    num_steps: int = 5_000
    seed: int = 0


def spiral(key, count):
    turn = 1.5 * jnp.pi * (1 + 2 * jax.random.uniform(key, (count,)))
    return jnp.stack([turn * jnp.cos(turn), turn * jnp.sin(turn)], 1) / 10


def mixed(points, noise, level):
    """Points with noise at a level in 0…1, by the cosine schedule (Nichol & Dhariwal 2021)."""
    return jnp.cos(level * jnp.pi / 2) * points + jnp.sin(level * jnp.pi / 2) * noise


def data(config):
    def noisy(key, step):
        points_key, level_key, noise_key = jax.random.split(key, 3)
        level = jax.random.uniform(level_key, (config.batch_size, 1))
        noise = jax.random.normal(noise_key, (config.batch_size, 2))
        return jnp.concatenate([mixed(spiral(points_key, config.batch_size), noise, level), level], 1), noise

    return jn.data.generated(noisy, test=8)


def task(config):
    return jn.tasks.regression(jn.models.MLP((128, 128, 128, 2), activation=jax.nn.silu))


def distance(run, count=500):
    """Of points that are drawn by 50 deterministic steps (Song et al. 2021, arXiv:2010.02502), the mean."""
    predict, levels = jax.jit(jn.steps.make_predict_step(task(run.config))), jnp.linspace(0.98, 0.0, 50)
    drawn, true = jax.random.normal(jax.random.key(1), (count, 2)), spiral(jax.random.key(2), 5_000)
    for level, lower in zip(levels[:-1], levels[1:], strict=True):
        noise = predict(run.state, jnp.concatenate([drawn, jnp.full((count, 1), level)], 1))
        drawn = mixed((drawn - mixed(0, noise, level)) / mixed(1, 0, level), noise, lower)
    return jnp.linalg.norm(drawn[:, None] - true[None], axis=2).min(1).mean()


experiment = jn.Experiment(Config(), data, task, lambda config: optax.adam(jn.schedules.cosine(2e-3, config.num_steps)))

if __name__ == "__main__":
    print(f"mean distance of drawn points to the spiral {distance(jn.main(experiment)):.3f}")
