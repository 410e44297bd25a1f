"""The flight recorder's cost: training with digests of the state and without, of each of the seven networks.

Claim     on a CPU, digests take at most 0.5 % of the time between two evaluations, an epoch apart
Command   python experiments/benchmarks/recorder.py [NETWORK …]
Result    0.001 % (ResNet-20) to 0.13 % (fastText), 0.8 to 5 ms a digest; two cores of an Intel Xeon with native kernels

Two runs of a network in one process take turns, call by call; one of them was compiled without digests. A call is so
short that the digest at its end shows: the cost is the median of the differences, beside the time of an epoch.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from harness import interleaved, median_interval

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
import jaxnn_networks
import problems
from jax_contender import Config

import jaxnn as jn
from jaxnn.engine import _pure
from jaxnn.types import Examples

PAIRS, CALL_SECONDS, MOST_SECONDS = 200, 0.05, 180.0
# The training examples of the real data set; for the GPT, 250 steps as in char_gpt.py.
EPOCHS = {
    "mnist_mlp": 60_000,
    "mnist_cnn": 60_000,
    "cifar10_cnn": 50_000,
    "imdb_lstm": 25_000,
    "fasttext": 25_000,
    "char_gpt": 3_000,
    "resnet20": 50_000,
}


def without_digests(train: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    """Stands for ``with_digests`` in a program that notes none."""

    def plain(state: Any, totals: Any, examples: Any) -> Any:
        trained, sums = train(state, totals._replace(notes=None, digests=None), examples)
        return trained, sums._replace(digests=jnp.zeros_like(totals.digests))

    return plain


def windows(name: str, steps: int) -> Iterator[float]:
    """Yields the seconds of each call of ``steps`` updates; all are evaluated, on one batch."""
    setting = problems.SETTINGS[name]
    num_examples = setting.num_batches * setting.batch_size
    inputs, targets = setting.make(np.random.default_rng(0), num_examples)
    few = Examples(inputs[: setting.batch_size], targets[: setting.batch_size])
    data = jn.Splits(jn.data.ArraySource(Examples(inputs, targets)), test=jn.data.ArraySource(few))
    make_task = jn.tasks.next_token if targets.ndim == 2 else jn.tasks.classification
    experiment = jn.Experiment(
        Config(setting.batch_size, 100_000 * steps, problems.LEARNING_RATE),
        lambda config: data,
        lambda config: make_task(jaxnn_networks.network(name, dropout=True)),
        lambda config: jn.optim.adam(config.learning_rate),
    )
    calls = jn.iterate(experiment, record=False, steps_per_call=steps, report_every=steps, eval_every=steps)
    for report in calls:
        yield report.seconds


def started(name: str, steps: int, *, noting: bool) -> Callable[[], float]:
    """Returns a warm run's next call; its programs are compiled here."""
    patch = contextlib.nullcontext() if noting else mock.patch.object(_pure, "with_digests", without_digests)
    calls = windows(name, steps)
    with patch:
        for _ in range(3):
            next(calls)
    return lambda: next(calls)


def measure(name: str) -> str:
    """Returns the line of one network."""
    trial = started(name, 1, noting=False)
    step = statistics.median(trial() for _ in range(5))
    steps = max(1, round(CALL_SECONDS / step))
    sides = {noting: started(name, steps, noting=noting) for noting in (True, False)}
    pairs = max(12, min(PAIRS, round(MOST_SECONDS / (2 * steps * step))))
    taken = interleaved(sides, rounds=pairs)
    differences = [with_them - without for with_them, without in zip(taken[True], taken[False], strict=True)]
    cost, (low, high) = statistics.median(differences), median_interval(differences)
    call = statistics.median(taken[False])
    epoch = call / steps * EPOCHS[name] / problems.SETTINGS[name].batch_size
    share = ", ".join(f"{100 * value / epoch:.3f}" for value in (low, high))
    return (
        f"{name:<12} call of {steps} {1e3 * call:7.1f} ms  digest {1e3 * cost:6.2f} ms ({1e3 * low:.2f} to "
        f"{1e3 * high:.2f}, {pairs} pairs)  epoch {epoch:6.2f} s  share {100 * cost / epoch:.3f} % ({share})"
    )


if __name__ == "__main__":
    for network in sys.argv[1:] or EPOCHS:
        print(measure(network), flush=True)
