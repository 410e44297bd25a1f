"""Tokens per second of generation, relative to computing the whole text again for each token.

Claim     with a cache a small GPT of characters generates at least 4 times as many tokens/s
Command   python experiments/benchmarks/generation.py
Result    15 to 22 times, streamed 8 to 18 times: docs/performance.md; four minutes on two busy cores of an AMD EPYC
"""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from harness import interleaved, median_interval, per_call

import jaxnn as jn

ROUNDS, PROMPT, NEW = 7, 16, 112
MODELS = {
    "GPT": jn.models.GPT(65, max_length=128),
    "GPT, rotary, one key head": jn.models.GPT(65, rotary=True, num_key_heads=1),
    "LSTM": jn.models.RecurrentLanguageModel(65),
}


def recompute(model, params, prompt):
    """Returns a greedy continuation by one compiled loop over complete, padded texts."""

    def step(index, tokens):
        logits = model.apply({"params": params}, tokens)[:, index - 1]
        return tokens.at[:, index].set(jnp.argmax(logits, axis=-1))

    tokens = jnp.pad(prompt, [(0, 0), (0, NEW)])
    return jax.lax.fori_loop(PROMPT, PROMPT + NEW, step, tokens)[:, PROMPT:]


for name, model in MODELS.items():
    params = linen.unbox(jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8), np.int32)))["params"]
    again = jax.jit(lambda params, prompt, model=model: recompute(model, params, prompt))
    for batch in (1, 4):
        prompt = np.random.default_rng(0).integers(0, 65, (batch, PROMPT)).astype(np.int32)
        options: dict[str, Any] = {"num_tokens": NEW, "temperature": 0}
        calls = {
            "generate": lambda: jn.models.generate(model, params, prompt, **options),  # noqa: B023
            "stream": lambda: np.stack(list(jn.models.stream(model, params, prompt, **options)), 1),  # noqa: B023
            "recomputed": lambda: np.asarray(again(params, prompt)),  # noqa: B023
        }
        first = {call: make() for call, make in calls.items()}
        assert all((found == first["recomputed"]).all() for found in first.values())
        seconds = interleaved({call: per_call(make, 0.0) for call, make in calls.items()}, rounds=ROUNDS)
        row = [f"{name}, batch {batch}"]
        for call in ("generate", "stream"):
            ratios = [slow / fast for slow, fast in zip(seconds["recomputed"], seconds[call], strict=True)]
            low, high = median_interval(ratios)
            rate = batch * NEW / statistics.median(seconds[call])
            row.append(f"{call} {rate:,.0f} tokens/s, {statistics.median(ratios):.1f} ({low:.1f} to {high:.1f})")
        print(" | ".join(row))
