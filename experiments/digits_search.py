"""A searcher of one's own: a small tree-structured Parzen estimator that tunes an MLP on handwritten digits.

Claim     draws gather where results are good: their median loss is below half of the median of random draws
Command   python experiments/digits_search.py
          python experiments/digits_search.py sweep --search asha --space learning_rate=log:1e-4:1 --num 128
Result    0.117, and 0.474 of 16 random rates: 128 members of 1,000 steps, eight seconds on two CPU cores

Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011: draws come from near the best quarter of the
points so far, and the one that is likelier there than near the others is proposed. `jn.search.tpe` has the whole one.
"""

import dataclasses
import math

import numpy as np
import optax

import jaxnn as jn

LOW, HIGH, NUM, FIRST = math.log(1e-4), math.log(1.0), 128, 16


def density(at, points):
    """How likely ``at [n]`` is near ``points [m]``, and anywhere at all: a mixture of normal densities, ``[n]``."""
    near = np.exp(-0.5 * ((at[:, None] - points) / 0.5) ** 2).sum(axis=1)
    return (near + 1) / (len(points) + 1)


def ask(state, count):
    rates, values = state  # the logarithm of each member's rate, and the values that are known, by member
    ranked = np.array([rates[member] for member in sorted(values, key=values.get)])
    new = []
    for number in range(len(rates), min(len(rates) + count, NUM)):
        rng = np.random.default_rng(number)
        rate = rng.uniform(LOW, HIGH)
        if len(ranked) >= FIRST:
            good, bad = np.split(ranked, [len(ranked) // 4])
            draws = np.clip(rng.normal(rng.choice(good, 24), 0.5), LOW, HIGH)
            rate = draws[np.argmax(density(draws, good) / density(draws, bad))]
        new.append(float(rate))
    return ((*rates, *new), values), [jn.search.Propose({"learning_rate": math.exp(rate)}) for rate in new]


def tell(state, reports):
    rates, values = state
    values = {**values, **{report.member: report.value for report in reports}}
    return (rates, values), ["continue"] * len(reports)


parzen = jn.search.Searcher("parzen", lambda: ((), {}), ask, tell, scales={"learning_rate": "log"}, num=NUM)


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 1e-2  # of Adam, with cosine decay to zero
    batch_size: int = 32
    num_steps: int = 1_000
    seed: int = 0


experiment = jn.Experiment(
    Config(),
    data=lambda config: jn.data.digits(),
    task=lambda config: jn.tasks.classification(jn.models.MLP((32, 32, 10))),
    optimizer=lambda config: optax.adam(jn.schedules.cosine(config.learning_rate, config.num_steps)),
)

if __name__ == "__main__":
    jn.testing.check_searcher(parzen)
    found = jn.main(experiment, points=parzen, options=jn.SweepOptions(lanes=16))
    if isinstance(found, jn.Sweep) and len(found.members) == NUM:
        random, chosen = (np.nanmedian(part) for part in np.split(found.values("test_loss"), [FIRST]))
        print(f"median test loss of {FIRST} random rates {random:.3f}, of the others {chosen:.3f}")
