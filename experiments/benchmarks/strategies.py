"""Overhead of strategies on one device, relative to the same device without a strategy.

Claim     the strategy data on one device takes at most 1.02 times as long as a run without
Command   python experiments/benchmarks/strategies.py
Result    0.998 to 1.005 for four networks: docs/devices.md; three minutes on two cores
"""

import dataclasses
import statistics

import numpy as np
import optax
from harness import interleaved, median_interval, per_call

import jaxnn as jn

# Many short calls, one of each strategy per round: disturbances affect all strategies and average out.
ROUNDS, CALL_SECONDS = 200, 0.06


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int
    num_steps: int = 100_000_000  # more than are trained
    seed: int = 0


def images(size, channels=1):
    """Returns random images of ten classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(2048, size, size, channels)).astype(np.float32), rng.integers(0, 10, 2048)


def experiments():
    """Yields a small and a large MLP, a convolutional network and a transformer, by name."""
    tokens = np.random.default_rng(0).integers(0, 65, (2048, 65)).astype(np.int32)
    digits, objects, text = images(8), images(28), (tokens[:, :-1], tokens[:, 1:])
    networks = {
        "digits MLP": (digits, 32, jn.models.MLP((32, 32, 10))),
        "MNIST MLP": (objects, 128, jn.models.MLP((512, 512, 10), dropout=0.2)),
        "CNN": (objects, 64, jn.models.CNN(10, blocks=((16,), (32,)), dense=(64,), batch_norm=True)),
        "GPT": (text, 8, jn.models.GPT(65, num_layers=2)),
    }
    for name, (pair, batch_size, model) in networks.items():
        task = jn.tasks.next_token if name == "GPT" else jn.tasks.classification
        yield name, pair, batch_size, task(model)


def compare(name, pair, batch_size, task):
    """Prints the ratio of each strategy to none: median over rounds and its 95 % interval."""

    def reports(**layout):
        """Returns a run that trains from one report to the next, in windows of about `CALL_SECONDS`."""
        config = Config(batch_size)
        experiment = jn.Experiment(config, lambda _: splits, lambda _: task, lambda _: optax.adam(1e-3))
        options = {"steps_per_call": steps, "report_every": steps, "eval_every": 0, "record": False}
        return iter(jn.iterate(experiment, **options, **layout))

    splits, steps = jn.data.arrays(train=pair), 16
    first = reports()
    next(first)
    steps = max(1, round(CALL_SECONDS * next(first).steps_per_second))
    first.close()
    runs = {"none": reports(), **{each: reports(devices=1, strategy=each) for each in ("data", "fsdp", "pmap")}}
    for run in runs.values():
        next(run)
    seconds = interleaved({each: per_call(lambda run=run: next(run), 0.0) for each, run in runs.items()}, rounds=ROUNDS)
    for strategy in list(runs)[1:]:
        found = [mine / plain for mine, plain in zip(seconds[strategy], seconds["none"], strict=True)]
        low, high = median_interval(found)
        median = statistics.median(found)
        print(f"{name:<11} {strategy} / none: {median:.3f}  (95 %: {low:.3f} to {high:.3f}), {steps} steps per call")


if __name__ == "__main__":
    for parts in experiments():
        compare(*parts)
