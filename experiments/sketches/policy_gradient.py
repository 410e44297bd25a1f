"""A policy gradient (REINFORCE, Williams 1992) plays Catch (Osband et al. 2020, bsuite): the loss plays the episodes.

Command   python experiments/sketches/policy_gradient.py
Result    a return of 1, the highest, after 500 steps; 0.1 s of training on two busy cores
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxnn as jn

POLICY = jn.models.MLP((64, 3))
ROWS, COLUMNS = 9, 5


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 64  # episodes
    num_steps: int = 500
    seed: int = 0


def play(params, key):
    """One episode: a ball falls, and a paddle moves left, stays, or moves right; the return and its log probability."""
    ball_key, key = jax.random.split(key)
    ball = jax.random.randint(ball_key, (), 0, COLUMNS)

    def move(paddle, now):
        row, key = now
        seen = jnp.concatenate([jax.nn.one_hot(ball, COLUMNS), jax.nn.one_hot(paddle, COLUMNS), row[None] / ROWS])
        log_probs = jax.nn.log_softmax(POLICY.apply({"params": params}, seen[None])[0])
        action = jax.random.categorical(key, log_probs)
        return jnp.clip(paddle + action - 1, 0, COLUMNS - 1), log_probs[action]

    paddle, log_probs = jax.lax.scan(move, COLUMNS // 2, (jnp.arange(ROWS), jax.random.split(key, ROWS)))
    return jnp.where(paddle == ball, 1.0, -1.0), log_probs.sum()


def init(key, batch):
    return POLICY.init(key, jnp.zeros((1, 2 * COLUMNS + 1)))["params"], {}


def loss(params, model_state, batch, key):
    """Has the policy's gradient: the mean of the other returns is the baseline, up to a factor."""
    returns, log_probs = jax.vmap(play, (None, 0))(params, jax.random.split(key, len(batch.mask)))
    return -((returns - returns.mean()) * log_probs).mean(), (model_state, {"return": returns.mean()})


experiment = jn.Experiment(
    Config(),
    data=None,
    task=lambda config: jn.Task(init, loss, lambda *_: {"count": 1.0}, lambda params, state, seen: seen),
    optimizer=lambda config: optax.adam(1e-2),
)

if __name__ == "__main__":
    jn.main(experiment)
