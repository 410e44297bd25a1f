"""Transfer: a network that knows eight digits learns the other two from three examples of each.

Command   python experiments/sketches/transfer.py
Result    TODO
"""

import dataclasses

import numpy as np
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 20
    num_steps: int = 1_000
    seed: int = 0


def digits(labels, per_class=None):
    splits, pairs = jn.data.digits(), {}
    for name, source in splits.named().items():
        inputs, targets = source.examples
        most = per_class if name == "train" else None
        rows = np.concatenate([np.flatnonzero(targets == label)[:most] for label in labels])
        pairs[name] = inputs[rows], np.searchsorted(labels, targets[rows])
    return jn.data.arrays(**pairs, num_classes=len(labels))


def experiment_of(labels, per_class=None, params=None, **fields):
    return jn.Experiment(
        Config(**fields),
        data=lambda config: digits(labels, per_class),
        task=lambda config: jn.tasks.classification(jn.models.MLP((64, 32, len(labels)))),
        optimizer=lambda config: optax.adam(1e-3),
        params=params,
    )


first = experiment_of(range(8))


def second(run=None):
    """Two classes of three examples each, from all layers of a run but the last, or from the start."""
    layers = run and {name: layer for name, layer in run.state.params.items() if name != "Dense_2"}
    return experiment_of((8, 9), 3, run and (lambda config: layers), batch_size=6, num_steps=100)


def compare(run):
    for name, start in (("from the start", None), ("from the features", run)):
        swept = jn.sweep(second(start), jn.grid(seed=range(8)), record=False, progress="none")
        print(f"{name}: test accuracy {sum(member.final['test_accuracy'] for member in swept.members) / 8:.3f}")


if __name__ == "__main__":
    compare(jn.main(first))
