"""Error rates of `jn.decide`, beside what people do with the same members: one run, two seeds, peeking, Optuna.

Claim     at most 5 % of equal experiments are kept; an effect of one standard deviation is found in 80 % or more, with
          at most 0.75 of the pairs of a fixed test; at most 10 % of what a session keeps is false
Command   python experiments/benchmarks/decisions.py  (--decisions 6 --gpts 3 --planted 6 --sessions 1 --candidates 8)

Four parts, each by `jn.decide` itself, which answers from members that are trained before as one sweep a side:

equal    Digits MLPs, and tiny character GPTs, against themselves. ``variant`` is folded into the key of the initial
         parameters, so that B has other random numbers of the same distribution. Every decision has its own seeds.
planted  A higher learning rate improves the mean test loss by one standard deviation of it over seeds, as calibrated
         on seeds of its own; B has its own initial parameters, as another architecture would, or those of A. Mean
         pairs are compared with the pairs that a fixed paired t-test at 5 % needs for the power that was observed, at
         most 0.999, by SciPy's noncentral t with mean and deviation of all differences that were trained; in brackets
         for the lower end of the 95 % interval of the power.
session  Fifty candidates in random order share the seeds of one baseline. 45 are variants of it, five improve by 1.5
         standard deviations. ``each alone`` keeps B if the same evidence exceeds 1 / alpha after any pair.

The others see the same pairs: ``one run`` and ``two seeds`` keep B if its mean is better; ``peeking`` is a two-sided
paired t-test at 5 % at each look of decide; ``WilcoxonPruner`` is the example of Optuna's documentation with A as the
first trial and B as the second, p_threshold 0.1, which keeps B if it is the best trial of the study.

Measured at 84a8e770 on two cores of an Intel Xeon, beside the project's tests:

A against A, false keeps  200 digits                60 GPTs
jn.decide, t              0.5 % (0.0 to 2.8)        0 % (0.0 to 6.0)
jn.decide, ranks          2.0 % (0.5 to 5.0)        0 % (0.0 to 6.0)
one run                   55.5 %                    48.3 %
two seeds                 56.5 %                    51.7 %
paired t-test, peeking    9.0 % (5.4 to 13.9)       0 % (0.0 to 6.0)
WilcoxonPruner            40.5 % (33.6 to 47.7)     43.3 % (30.6 to 56.8)

Members and decisions took 199 s and 168 s by t, and by ranks, of the same members, 108 s and 66 s.

planted, 40 decisions      effect / s of A  / s of B - A  kept   pairs  fixed t (least)  ratio
own initial values, t      0.98             0.76          100 %  22.8   47 (22)          0.49
own initial values, ranks  0.98             0.76          100 %  23.6   47 (22)          0.50
the same, t or ranks       0.96             3.70          100 %  8.0    5 (4)            1.60

sessions, 20 of fifty    false share of kept  false ones  found, each
jn.decide                0.0 %                0           5 of 5
each alone               15.6 %               1.60 each   5 of 5
one run                  81.0 %               25.7 each   4.45 of 5

Sessions took 60.2 pairs a decision and 26 minutes in two calls, the first of five sessions: 6 minutes trained 65,280
members, the rest decided; each decision reads the records of both sides, of 1,280 members each.

Where pairs share initial values, a difference of 3.7 of its deviations needs 5 pairs by a fixed test, and the first
look of `decide` is at 8.
"""

import dataclasses
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import optuna
import tyro
from harness import describe_machine
from scipy import stats  # type: ignore[import-untyped]

import jaxnn as jn
from jaxnn.cli import exit_on_user_error
from jaxnn.decisions import Decision, Side
from jaxnn.observe import text_table

METRIC, ALPHA, SESSION_ALPHA = "test_loss", 0.05, 0.1
LOOKS = (8, 16, 24, 32, 48, 64)  # pairs at which decide looks
CHUNK = 20  # decisions that share a folder: each reads all members there
REAL, EFFECT, SESSION_EFFECT = 5, 1.0, 1.5  # candidates with an effect, effects in standard deviations of A
CALIBRATION_SEED, CALIBRATION_SEEDS = 1_000_000, 128
RATES = tuple(float(rate) for rate in np.linspace(3e-3, 5e-3, 9).round(6))


@dataclasses.dataclass(frozen=True)
class Config:
    """The experiment of all decisions."""

    learning_rate: float = RATES[0]
    variant: int = 0
    """Other random numbers for the initial parameters, of the same distribution."""
    batch_size: int = 32
    num_steps: int = 100
    seed: int = 0


def with_variant(task: jn.Task, config: Config) -> jn.Task:
    """Returns the task with the initial parameters of a variant."""
    return task._replace(init=lambda key, batch: task.init(jax.random.fold_in(key, config.variant), batch))


def digits_task(config: Config) -> jn.Task:
    return with_variant(jn.tasks.classification(jn.models.MLP((32, 32, 10))), config)


def gpt_task(config: Config) -> jn.Task:
    model = jn.models.GPT(65, num_layers=1, features=16, num_heads=2, max_length=8)
    return with_variant(jn.tasks.next_token(model), config)


def optimizer(config: Config) -> optax.GradientTransformation:
    return optax.adam(config.learning_rate)


DIGITS = jn.Experiment(Config(), lambda config: jn.data.digits(0.3), digits_task, optimizer)
GPT = jn.Experiment(
    Config(learning_rate=1e-2, batch_size=8, num_steps=80),
    lambda config: jn.data.char_corpus(length=8),
    gpt_task,
    optimizer,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """How many decisions, and where to write the results."""

    decisions: int = 200
    """Of digits MLPs against themselves."""
    gpts: int = 60
    """Decisions of GPTs against themselves."""
    planted: int = 100
    """Decisions with the planted effect, by each test, with own and with the same initial parameters."""
    sessions: int = 20
    candidates: int = 50
    """In a session, with the five real ones."""
    max_seeds: int = 64
    gpt_seeds: int = 32
    records: Path | None = None
    """Folder that keeps members and decisions, so that a second call continues; default: a temporary one."""
    out: Path = Path("runs/benchmarks")
    """Folder for decisions.json."""


class Answer(NamedTuple):
    """A decision of jaxnn, and the members that it could use."""

    decision: Decision
    a: np.ndarray  # [max_seeds]
    b: np.ndarray


Values = Mapping[int, float]  # the metric by seed
Rival = Callable[[np.ndarray, np.ndarray], str]


def how(experiment: jn.Experiment[Config]) -> dict[str, Any]:
    """The options of decisions and pools, which have to agree for members to be shared."""
    few = {"eval_batch_size": 64, "eval_batches": 4} if experiment.task is gpt_task else {}
    end = experiment.config.num_steps
    return {"report_every": end, "eval_every": 0, "checkpoint_every": 0, "progress": "none", **few}


def train_pool(experiment: jn.Experiment[Config], seeds: range, folder: Path) -> Values:
    """Trains the members of ``seeds`` as one sweep, where decisions in ``folder`` find them."""
    side = Side(experiment, jn.SweepOptions(record=True, **how(experiment)), folder, METRIC)
    if not side.train(seeds):
        raise SystemExit("interrupted")
    return {seed: side.members[seed].final.get(METRIC, np.nan) for seed in seeds}


def answers(
    a: jn.Experiment[Config], b: jn.Experiment[Config], count: int, folder: Path, **options: Any
) -> tuple[list[Answer], float]:
    """Returns ``count`` decisions with their own seeds, and the seconds of training and deciding."""
    found, started, most = list[Answer](), time.monotonic(), options["max_seeds"]
    for first in range(0, count, CHUNK):
        chunk, seeds = folder / str(first), range(most * first, most * min(first + CHUNK, count))
        left, right = (train_pool(one, seeds, chunk) for one in (a, b))
        for start in seeds[::most]:
            one, other = (side.replace(seed=start) for side in (a, b))
            decision = jn.decide(one, other, METRIC, run_dir=chunk, **how(a), **options)
            of = range(start, start + most)
            found.append(
                Answer(decision, np.array([left[seed] for seed in of]), np.array([right[seed] for seed in of]))
            )
    return found, time.monotonic() - started


def by_mean(count: int) -> Rival:
    """Keeps the better mean of ``count`` seeds."""
    return lambda a, b: "keep" if b[:count].mean() < a[:count].mean() else "discard"


def peeking(a: np.ndarray, b: np.ndarray) -> str:
    """A fixed paired t-test at 5 %, repeated at each look."""
    for count in (look for look in LOOKS if look <= len(a)):
        found = stats.ttest_rel(a[:count], b[:count])
        if found.pvalue < ALPHA:
            return "keep" if found.statistic > 0 else "discard"
    return "undecided"


def pruner(a: np.ndarray, b: np.ndarray) -> str:
    """Optuna's WilcoxonPruner as its documentation has it, whose instances are seeds; B is the second trial."""
    order = np.random.default_rng(len(a))

    def objective(trial: optuna.Trial) -> float:
        results, values = list[float](), (a, b)[trial.number]
        for seed in order.permutation(len(values)):
            results.append(float(values[seed]))
            trial.report(results[-1], int(seed))
            if trial.should_prune():
                break
        return sum(results) / len(results)

    study = optuna.create_study(pruner=optuna.pruners.WilcoxonPruner(p_threshold=0.1))
    study.optimize(objective, n_trials=2)
    return "keep" if study.best_trial.number == 1 else "discard"


RIVALS: dict[str, Rival] = {
    "one run": by_mean(1),
    "two seeds": by_mean(2),
    "paired t-test, peeking": peeking,
    "WilcoxonPruner": pruner,
}


def shares(verdicts: Sequence[str]) -> dict[str, Any]:
    """The share of each verdict, and the 95 % interval of the kept ones (Clopper and Pearson)."""
    of = {name: verdicts.count(name) / len(verdicts) for name in ("keep", "discard", "undecided")}
    low, high = stats.binomtest(verdicts.count("keep"), len(verdicts)).proportion_ci()
    return {"decisions": len(verdicts), **of, "keep_interval": [low, high]}


def equal(experiment: jn.Experiment[Config], count: int, most: int, folder: Path) -> dict[str, Any]:
    """Decisions of an experiment against itself: by both tests, and by the others on the same members."""
    found: dict[str, Any] = {}
    given: list[Answer] = []
    for test in ("t", "ranks"):
        given, seconds = answers(experiment, experiment.replace(variant=1), count, folder, max_seeds=most, test=test)
        pairs = float(np.mean([len(one.decision.pairs) for one in given]))
        more = {"pairs": pairs, "seconds": seconds}
        found[f"jn.decide, {test}"] = shares([one.decision.verdict for one in given]) | more
    for name, rival in RIVALS.items():
        found[name] = shares([rival(one.a, one.b) for one in given])
    return found


def calibrate(effects: Sequence[float]) -> tuple[list[float], dict[str, Any]]:
    """Returns the learning rates with these effects, in standard deviations of A, by interpolation; and the pool."""
    seeds = range(CALIBRATION_SEED, CALIBRATION_SEED + CALIBRATION_SEEDS)
    pool = jn.sweep(DIGITS, jn.grid(learning_rate=RATES, seed=seeds), record=False, **how(DIGITS))
    values = pool.values(METRIC).reshape(len(RATES), len(seeds))
    gains = (values[0].mean() - values.mean(1)) / values[0].std(ddof=1)
    if (np.diff(gains) <= 0).any() or gains[-1] < max(effects):
        raise SystemExit(f"the learning rates {RATES} have effects of {gains.round(2)} standard deviations: widen them")
    rates = [round(float(np.interp(effect, gains, RATES)), 6) for effect in effects]
    about = {"rates": RATES, "effects": gains.tolist(), "deviation": float(values[0].std(ddof=1)), "chosen": rates}
    print(f"learning rates with effects of {effects} standard deviations: {rates}", flush=True)
    return rates, about


def fixed_pairs(effect: float, power: float) -> int:
    """Pairs that a two-sided paired t-test at 5 % needs; ``effect`` is in standard deviations of the difference."""

    def reached(n: int) -> bool:
        edge = stats.t.ppf(1 - ALPHA / 2, n - 1)
        return bool(stats.nct.sf(edge, n - 1, effect * np.sqrt(n)) >= power)

    return next(n for n in range(2, 100_000) if reached(n))


def planted(b: jn.Experiment[Config], count: int, most: int, folder: Path) -> dict[str, Any]:
    """Decisions with an effect: how many are kept, and pairs beside those of a fixed test with the same power."""
    found: dict[str, Any] = {}
    for test in ("t", "ranks"):
        given, seconds = answers(DIGITS, b, count, folder, max_seeds=most, test=test)
        a, other = (np.concatenate([getattr(one, side) for one in given]) for side in "ab")
        effect = float((a - other).mean() / (a - other).std(ddof=1))
        about = shares([one.decision.verdict for one in given])
        pairs = float(np.mean([len(one.decision.pairs) for one in given]))
        fixed = fixed_pairs(effect, min(about["keep"], 0.999))
        least = fixed_pairs(effect, min(about["keep_interval"][0], 0.999)) if about["keep"] > 0 else 2
        about |= {
            "fixed_pairs_least": least,
            "effect": float((a - other).mean() / a.std(ddof=1)),
            "effect_of_pair": effect,
            "seconds": seconds,
        }
        found[test] = about | {"pairs": pairs, "fixed_pairs": fixed, "ratio": pairs / fixed}
    return found


def session(number: int, real: jn.Experiment[Config], pools: Sequence[Values], folder: Path, most: int) -> list[Any]:
    """Decides all candidates in random order; returns for each whether it is real, and what each rule kept.

    ``pools`` are the baseline's members and those of the candidates, by variant; the last five are real.
    """
    found, start = list[Any](), number * most
    for variant in 1 + np.random.default_rng(number).permutation(len(pools) - 1):
        is_real = bool(variant >= len(pools) - REAL)
        one = (real if is_real else DIGITS).replace(variant=int(variant), seed=start)
        baseline = DIGITS.replace(seed=start)
        options = {"session": f"{number}", "alpha": SESSION_ALPHA, "max_seeds": most, **how(DIGITS)}
        decision = jn.decide(baseline, one, METRIC, run_dir=folder, **options)
        enough = np.flatnonzero(decision.evidence.log >= -np.log(SESSION_ALPHA))
        alone = len(enough) > 0 and decision.differences[: enough[0] + 1].mean() < 0
        once = pools[variant][start] < pools[0][start]
        kept = {"session": decision.verdict == "keep", "each alone": alone, "one run": once}
        found.append((is_real, {rule: bool(value) for rule, value in kept.items()}, len(decision.pairs)))
    return found


def sessions(rate: float, options: Options, folder: Path) -> dict[str, Any]:
    """Sessions of candidates, few of them real: the share of false discoveries, and how many real ones are found."""
    started, seeds = time.monotonic(), range(options.sessions * options.max_seeds)
    real, count = DIGITS.replace(learning_rate=rate), options.candidates
    each = [DIGITS.replace(variant=variant) for variant in range(count + 1 - REAL)]
    each += [real.replace(variant=variant) for variant in range(count + 1 - REAL, count + 1)]
    pools = [train_pool(one, seeds, folder) for one in each]
    trained = time.monotonic() - started
    every = [session(number, real, pools, folder, options.max_seeds) for number in range(options.sessions)]
    rules: dict[str, Any] = {}
    for rule in every[0][0][1]:
        false, true = (
            np.array([sum(kept[rule] for is_real, kept, _ in one if is_real == wanted) for one in every])
            for wanted in (False, True)
        )
        share = false / np.maximum(false + true, 1)
        rules[rule] = {
            "false_proportion": float(share.mean()),
            "false": float(false.mean()),
            "found": float(true.mean()),
            "by_session": [false.tolist(), true.tolist()],
        }
    pairs = float(np.mean([pairs for one in every for _, _, pairs in one]))
    return {"rules": rules, "pairs": pairs, "train_seconds": trained, "seconds": time.monotonic() - started}


def show_equal(results: Mapping[str, Any]) -> None:
    """Prints the verdicts of equal experiments."""
    rows = []
    for name in (name for name in ("digits", "gpt") if name in results):
        for rule, one in results[name].items():
            low, high = one["keep_interval"]
            kept = f"{one['keep']:.1%} ({low:.1%} to {high:.1%})"
            last = [f"{one[key]:.0f}" if key in one else "" for key in ("pairs", "seconds")]
            rows.append((name, rule, f"{one['decisions']}", kept, f"{one['discard']:.1%}", *last))
    header = ("A against A", "rule", "decisions", "false keeps (95 %)", "false discards", "pairs", "seconds")
    print(f"\n{text_table(rows, header)}", flush=True)


def show_planted(by_name: Mapping[str, Any]) -> None:
    """Prints how many effects were found, and with how many pairs."""
    rows = []
    for name, by_test in by_name.items():
        for test, one in by_test.items():
            effects = f"{one['effect']:.2f}", f"{one['effect_of_pair']:.2f}"
            pairs = f"{one['pairs']:.1f}", f"{one['fixed_pairs']} ({one['fixed_pairs_least']})", f"{one['ratio']:.2f}"
            rows.append((name, test, *effects, f"{one['keep']:.1%}", f"{one['discard']:.1%}", *pairs))
    header = (
        "planted",
        "test",
        "effect / s of A",
        "/ s of B - A",
        "kept",
        "discarded",
        "pairs",
        "fixed t (least)",
        "ratio",
    )
    print(f"\n{text_table(rows, header)}", flush=True)


def show_sessions(found: Mapping[str, Any]) -> None:
    """Prints the share of false discoveries, and how many real candidates were found in a session."""
    rows = []
    for rule, one in found["rules"].items():
        counts = f"{one['false']:.2f}", f"{one['found']:.2f} of {REAL}"
        rows.append((rule, f"{one['false_proportion']:.1%}", *counts))
    header = ("rule of a session", "false share of kept", "false ones", "found")
    print(f"\n{text_table(rows, header)}\n{found['pairs']:.1f} pairs, {found['seconds']:.0f} s", flush=True)


def main(options: Options) -> None:
    """Measures all parts; the JSON is written after each."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # what its documentation shows
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxnn-decisions-") as temporary:
        folder = options.records or Path(temporary)
        results: dict[str, Any] = {**describe_machine()._asdict(), "settings": dataclasses.asdict(options)}

        def write(name: str, value: Any) -> Any:
            results[name] = value
            (options.out / "decisions.json").write_text(json.dumps(results, default=str, indent=1))
            return value

        for name, one, count, most in (
            ("digits", DIGITS, options.decisions, options.max_seeds),
            ("gpt", GPT, options.gpts, options.gpt_seeds),
        ):
            if count:
                show_equal({name: write(name, equal(one, count, most, folder / name))})
        if not options.planted and not options.sessions:
            return
        (rate, session_rate), about = calibrate((EFFECT, SESSION_EFFECT))
        write("calibration", about)
        if options.planted:
            better = DIGITS.replace(learning_rate=rate)
            cases = {"own initial values": better.replace(variant=1), "the same": better}
            # In the same folder, as the members of A are the same.
            found = {
                name: planted(b, options.planted, options.max_seeds, folder / "digits") for name, b in cases.items()
            }
            show_planted(write("planted", found))
        if options.sessions:
            show_sessions(write("session", sessions(session_rate, options, folder / "sessions")))


if __name__ == "__main__":
    with exit_on_user_error():
        main(tyro.cli(Options, description=__doc__))
