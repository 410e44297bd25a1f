"""Which searchers to trust: five of them back-tested on three recorded sweeps, and ASHA trained as predicted.

Claim     a back-test predicts the steps of a live ASHA within 10 %, and shows which searchers lose the best member
Command   python experiments/backtests.py
Result    eight of nine to the step, one 4 % less; asha spends 13 %, extrapolated 40 to 53 % and misses the best in 4 of
          60 orders: docs/sweeps.md has the table; 22 minutes on two overloaded CPU cores

Each sweep trains 81 points of a Sobol sequence to the end. The trees need ``california_housing/housing.csv`` in the
data directory. Interrupted sweeps are trained again.
"""

import dataclasses

import jax
import numpy as np
import optax

import jaxnn as jn

NUM, LANES, LIVE = 81, 16, 3  # members, members in training at once, and orders in which ASHA is trained
SEARCHERS = {
    "halving": jn.search.halving,
    "asha": jn.search.asha,
    "asha, 2 brackets": lambda points: jn.search.asha(points, brackets=2),
    "patience": jn.search.patience,
    "extrapolated": jn.search.extrapolated,
}
RATE = jn.search.log_uniform(1e-4, 1e-1)


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 1e-2  # Peak learning rate of Adam, with cosine decay to zero
    dropout: float = 0.0  # Dropout rate of the hidden layers
    batch_size: int = 64  # Examples per step
    num_steps: int = 1_620  # Updates: 20 times 81, so that windows of all searchers fill them
    seed: int = 0  # Determines initial parameters, data order and dropout


def classifier(data, widths):
    """An MLP with dropout."""
    return jn.Experiment(
        Config(),
        data=lambda config: data,
        task=lambda config: jn.tasks.classification(jn.models.MLP(widths, dropout=config.dropout)),
        optimizer=lambda config: optax.adam(jn.schedules.cosine(config.learning_rate, config.num_steps)),
    )


@dataclasses.dataclass(frozen=True)
class Boosting:
    batch_size: int  # All rows
    learning_rate: float = 0.1  # Factor of each tree
    l2: float = 1.0  # Penalty of the squared values of leaves
    row_fraction: float = 1.0  # Rows that a tree is grown on
    num_steps: int = 162  # Trees
    seed: int = 0  # Determines the rows of each tree


def boosted(path):
    """Regression trees for a table of house prices."""
    data = jn.data.binned(jn.data.table(path, target="median_house_value", validation=0.2, test=0.2))

    def booster(config):
        settings = {name: getattr(config, name) for name in ("learning_rate", "l2", "row_fraction")}
        how = {"num_trees": config.num_steps, "categorical": data.train.bins.num_categories}
        return jn.trees.boosting(jn.trees.squared_error(), **how, **settings)

    return jn.trees.experiment(Boosting(data.train.num_examples), lambda config: data, booster)


def compare(name, experiment, space, **options):
    """Records a sweep, back-tests the searchers on it, and trains ASHA in the first orders of the back-test."""
    points = jn.search.sobol(NUM, 0, **space)
    every = experiment.config.num_steps // NUM
    options |= {"progress": "none"}
    sweep = jn.sweep(experiment, points, report_every=every, eval_every=every, name=f"backtest-{name}", **options)
    print(f"\n{name}: {sweep.best()}\n{sweep.backtest(SEARCHERS, lanes=LANES)}")
    steps = sum(member.step for member in sweep.members)
    predicted = sweep.backtest({"asha": jn.search.asha}, lanes=LANES, orders=LIVE).spent["asha"]
    orders = np.random.default_rng(0)
    for share in predicted:
        ordered = jn.search.Points(tuple(points.points[index] for index in orders.permutation(NUM)), points.scales)
        live = jn.sweep(experiment, jn.search.asha(ordered), lanes=LANES, record=False, **options)
        trained = live.summary["member_steps"] / steps
        print(f"asha, predicted {share:.2%} of the steps, live {trained:.2%}, best live {live.best()}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", min(16, jn.observe.cpu_count() or 1))
    networks = {"learning_rate": RATE, "dropout": jn.search.uniform(0.0, 0.5)}
    compare("digits", classifier(jn.data.digits(validation_fraction=0.2), (64, 32, 10)), networks)
    compare("fashion", classifier(jn.data.fashion_mnist(num_validation=5_000), (128, 64, 10)), networks)
    trees = {"learning_rate": jn.search.log_uniform(1e-2, 1.0), "l2": jn.search.log_uniform(1e-2, 1e2)}
    trees |= {"row_fraction": jn.search.uniform(0.3, 1.0)}
    housing = boosted(jn.data.data_dir() / "california_housing" / "housing.csv")
    compare("trees", housing, trees, monitor="root_mean_squared_error")
