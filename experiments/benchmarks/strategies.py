"""What a strategy costs where it gains nothing: one device under each against the same device plain, in turn.

Claim     the strategy data on one device takes at most 1.02 times as long as the run that has none
Command   python experiments/benchmarks/strategies.py
Seen      0.998 to 1.005 for four networks: docs/devices.md; three minutes on two cores
"""

import itertools
import math
import statistics

import jax
import numpy as np
import optax

import jaxnn as jn
from jaxnn.loop.compiling import Programs
from jaxnn.loop.feed import make_feed
from jaxnn.loop.quick import TrainConfig
from jaxnn.loop.trials import make_calls
from jaxnn.loop.tuning import timed_round
from jaxnn.observe import Clock, Ledger
from jaxnn.parallel import SINGLE, make_layout

# Many short calls, one of each strategy a round: the machine's moods fall on all alike and average out.
ROUNDS, CALL_SECONDS = 200, 0.06


def images(size, channels=1):
    """Random pictures of ten classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(2048, size, size, channels)).astype(np.float32), rng.integers(0, 10, 2048)


def experiments():
    """A small and a large MLP, a convolutional network and a transformer, by name."""
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


def caller(pair, batch_size, task, layout):
    """From a number of steps to a call that trains so many under ``layout``."""
    config = TrainConfig(batch_size=batch_size, num_steps=1000, seed=0)
    splits = jn.data.arrays(train=pair)
    experiment = jn.Experiment(config, lambda _: splits, lambda _: task, lambda _: optax.adam(1e-3))
    feed = make_feed(splits, 0, batch_size, layout=layout)
    return make_calls(Programs(experiment, splits.train, feed, Ledger(), Clock(), layout), "start")


def median_interval(values):
    """The 95 % confidence interval of a median, from the order of the values alone (Conover, 1999, section 3.2)."""
    ordered, spread = sorted(values), 0.98 * len(values) ** 0.5
    return ordered[int(len(values) / 2 - spread)], ordered[math.ceil(len(values) / 2 + spread)]


def compare(name, pair, batch_size, task):
    """Prints the ratio of each strategy to none: the median of the rounds, and where that of more rounds would lie."""
    layouts = {"none": SINGLE} | {strategy: make_layout(strategy, 1) for strategy in ("data", "fsdp", "pmap")}
    makers = {strategy: caller(pair, batch_size, task, layout) for strategy, layout in layouts.items()}
    first = makers["none"](1)
    jax.block_until_ready(first())
    steps = max(1, round(CALL_SECONDS / timed_round(first, 1, 20)))
    calls = {strategy: make(steps) for strategy, make in makers.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    seconds = {strategy: [] for strategy in calls}
    orders = itertools.cycle(itertools.permutations(calls))
    for order in itertools.islice(orders, ROUNDS):
        for strategy in order:
            seconds[strategy].append(timed_round(calls[strategy], steps, 1))
    for strategy in list(calls)[1:]:
        ratios = [mine / plain for mine, plain in zip(seconds[strategy], seconds["none"], strict=True)]
        low, high = median_interval(ratios)
        median = statistics.median(ratios)
        print(f"{name:<11} {strategy} / none: {median:.3f}  (95 %: {low:.3f} to {high:.3f}), {steps} steps a call")


if __name__ == "__main__":
    for parts in experiments():
        compare(*parts)
