"""Callbacks: a rule that stops, a writer that sees every line, and a loop of one's own.

Command   python experiments/sketches/callbacks.py
Result    stopped at step 300; from step 1,400 on it is most wrong about one 6
"""

import dataclasses

import numpy as np
import optax

import jaxnn as jn


@dataclasses.dataclass(frozen=True)
class Config:
    batch_size: int = 32
    num_steps: int = 2_000
    seed: int = 0


experiment = jn.Experiment(
    Config(),
    data=lambda config: jn.data.digits(),
    task=lambda config: jn.tasks.classification(jn.models.MLP((32, 10))),
    optimizer=lambda config: optax.adam(3e-3),
)


class History(list):
    """A metric writer; W&B and TensorBoard are others."""

    def write(self, lines):
        self += lines


def good_enough(lines):
    return lines[-1]["test_accuracy"] >= 0.95


def confused(iteration, inputs, targets):
    """Yields at each report the step and the example that the network is most wrong about."""
    for report in iteration:
        logits = iteration.run.predict(inputs)
        yield report.step, int((logits.max(1) - logits[np.arange(len(targets)), targets]).argmax())


def main():
    history = History()
    run = jn.fit(experiment, stop=good_enough, writers=(history,), eval_every=50, report_every=50, record=False)
    print(f"stopped at step {run.summary.step}, after {len(history)} lines")
    test = experiment.data(experiment.config).test.examples
    for step, example in confused(jn.iterate(experiment, report_every=500, record=False), test.inputs, test.targets):
        print(f"step {step}: most wrong about example {example}, a {test.targets[example]}")


if __name__ == "__main__":
    main()
