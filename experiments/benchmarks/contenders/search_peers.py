"""One search by Optuna or Ray Tune in PyTorch or LightGBM; each evaluation of a trial is a line in a file of reports.

python search_peers.py ARRANGEMENT FOLDER SEED
optuna_1x2   one process on all cores, its study in memory
optuna_2x1   a process on each core, their study in a journal file
ray          Ray Tune: ASHA, an actor on each core, which is reused from trial to trial
"""

import json
import math
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ETA = 3
CORES = len(os.sched_getaffinity(0))


class Task:
    """What is trained: `train` yields the validation loss after each window of a trial."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.spec = json.loads((folder / "spec.json").read_text())
        with np.load(folder / "data.npz") as file:
            self.data = dict(file)
        self.threads = threads
        self.windows: int = self.spec["windows"]
        self.window: int = self.spec["num_steps"] // self.windows
        self.train: Callable[[dict[str, float]], Iterator[float]]
        self.train = self.trees() if self.spec["network"] == "trees" else self.network()

    def network(self) -> Callable[[dict[str, float]], Iterator[float]]:
        """Returns the training of a network: data are tensors, batches are permuted indices, Adam is fused."""
        import torch
        import torch.nn.functional as F
        from torch_solo import layout

        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(True)
        kind, batch_size, num_steps = (self.spec[name] for name in ("network", "batch_size", "num_steps"))

        def tensors(split: str) -> tuple[Any, Any]:
            inputs = torch.from_numpy(self.data[f"{split}_inputs"])
            if kind != "gpt":
                scale = 255 if inputs.dtype == torch.uint8 else 1
                inputs = layout(inputs.float() / scale, "cnn" if kind == "cnn" else "mlp")
            return inputs, torch.from_numpy(self.data[f"{split}_targets"]).long()

        (inputs, targets), validation = tensors("train"), tensors("validation")
        parts = [*zip(*(tensor.split(500) for tensor in validation), strict=True)]

        def batches() -> Iterator[Any]:
            while True:
                order = torch.randperm(len(targets))
                yield from order[: len(targets) // batch_size * batch_size].split(batch_size)

        def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
            return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

        def train(point: dict[str, float]) -> Iterator[float]:
            torch.manual_seed(seed_of(point))
            model, rows = make_network(kind, point["dropout"]), batches()
            rate, decay = point["learning_rate"], point["weight_decay"]
            optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay, fused=True)
            (group,) = optimizer.param_groups
            for window in range(self.windows):
                model.train()
                for step in range(window * self.window, (window + 1) * self.window):
                    group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / num_steps))
                    chosen = next(rows)
                    optimizer.zero_grad()
                    loss_of(model, inputs[chosen], targets[chosen]).backward()
                    optimizer.step()
                model.eval()
                with torch.inference_mode():
                    total = sum(len(part[1]) * loss_of(model, *part) for part in parts)
                yield float(total) / len(validation[1])

        return train

    def trees(self) -> Callable[[dict[str, float]], Iterator[float]]:
        """Returns the training of boosted trees: the bins are made once."""
        import lightgbm

        given: dict[str, Any] = {
            "verbose": -1,
            "num_threads": self.threads,
            "max_bin": 255,
            "feature_pre_filter": False,
        }
        categorical = self.data["categorical"].tolist()
        rows, targets = self.data["train_inputs"], self.data["train_targets"]
        data = lightgbm.Dataset(rows, targets, params=given, categorical_feature=categorical, free_raw_data=False)
        validation = data.create_valid(self.data["validation_inputs"], self.data["validation_targets"])
        given |= {"objective": "binary", "max_depth": 6, "num_leaves": 64, "min_data_in_leaf": 1, "bagging_freq": 1}
        names = {
            "learning_rate": "learning_rate",
            "l2": "lambda_l2",
            "min_child_weight": "min_sum_hessian_in_leaf",
            "row_fraction": "bagging_fraction",
            "column_fraction": "feature_fraction",
        }

        def train(point: dict[str, float]) -> Iterator[float]:
            own = {names[name]: value for name, value in point.items()}
            booster = lightgbm.Booster({**given, **own, "seed": seed_of(point)}, data)
            booster.add_valid(validation, "validation")
            for _ in range(self.windows):
                for _ in range(self.window):
                    booster.update()
                yield booster.eval_valid()[0][2]

        return train


def seed_of(point: dict[str, float]) -> int:
    """Returns the seed of a trial, as in search_jaxnn.py: a number that looks random and is the same for a point."""
    return zlib.crc32(repr(sorted(point.items())).encode()) % 2**31


def make_network(kind: str, rate: float) -> Any:
    """Returns a network with the initial values of jaxnn's."""
    import torch
    from torch import nn
    from torch_networks import GPT, Flatten, named, relu

    def dense(*widths: int) -> dict[str, nn.Module]:
        layers: dict[str, nn.Module] = {}
        for number, (before, after) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            layers |= {f"Dense_{number}": nn.Linear(before, after)}
            if number < len(widths) - 2:
                layers |= {f"relu_{number}": relu(), f"dropout_{number}": nn.Dropout(rate)}
        return layers

    if kind == "gpt":
        model: nn.Module = GPT(65, layers=2, width=32, heads=4, length=32, dropout=rate)
        for name, value in model.named_parameters():
            if value.ndim == 2:
                nn.init.normal_(value, std=0.02 / (2 if name.endswith(("Dense_1.weight", "Dense_3.weight")) else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(value)
        return model
    if kind == "cnn":
        layers: dict[str, nn.Module] = {}
        for number, (before, after) in enumerate(((1, 8), (8, 16))):
            layers |= {f"Conv_{number}": nn.Conv2d(before, after, 3, padding=1), f"relu_of_{number}": relu()}
            layers |= {f"pool_{number}": nn.MaxPool2d(2), f"dropout_of_{number}": nn.Dropout(rate)}
        model = named(**layers, flatten=Flatten(), **dense(784, 32, 10)).to(memory_format=torch.channels_last)
    else:
        model = named(**dense(*{"digits": (64, 32, 32, 10), "fashion": (784, 128, 64, 10)}[kind]))
    for value in model.parameters():
        if value.ndim == 1:
            nn.init.zeros_(value)
        else:  # Flax's lecun_normal
            deviation = value[0].numel() ** -0.5 / 0.87962566
            nn.init.trunc_normal_(value, std=deviation, a=-2 * deviation, b=2 * deviation)
    return model


def write_line(file: Any, steps: int, value: float) -> None:
    print(json.dumps({"time": time.time(), "steps": steps, "value": value}), file=file)


def optuna_process(folder: Path, seed: int, number: int, processes: int, spent: Any) -> None:
    """Runs trials of the study until all processes together have spent the budget."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    task = Task(folder, CORES // processes)
    budget, window = task.spec["budget"], task.window
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log"))) if processes > 1 else None
    study = optuna.create_study(
        study_name="search",
        storage=storage,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=seed + 1_000 * number, constant_liar=processes > 1),
        pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=task.windows, reduction_factor=ETA),
    )
    file = (folder / f"reports_{number}.jsonl").open("w", buffering=1)

    def objective(trial: Any) -> float:
        point = {
            name: trial.suggest_float(name, low, high, log=kind == "log_uniform")
            for name, (kind, low, high) in task.spec["space"].items()
        }
        value = math.nan
        for index, value in enumerate(task.train(point), 1):
            write_line(file, window, value)
            trial.report(value, index)
            with spent.get_lock():
                spent.value += window
            if spent.value >= budget:
                study.stop()
            if spent.value >= budget or (index < task.windows and trial.should_prune()):
                raise optuna.TrialPruned
        return value

    study.optimize(objective)


def ray_search(folder: Path, seed: int) -> None:
    """Runs Ray Tune's ASHA until its trials have spent the budget."""
    os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    spec = json.loads((folder / "spec.json").read_text())
    window = spec["num_steps"] // spec["windows"]

    class Trial(tune.Trainable):
        task: Any = None

        def setup(self, config: dict[str, float]) -> None:
            self.task = self.task or Task(folder, 1)
            self.training = self.task.train(config)

        def step(self) -> dict[str, float]:
            return {"loss": next(self.training)}

        def reset_config(self, new_config: dict[str, float]) -> bool:
            self.training = self.task.train(new_config)
            return True

    class Budget(tune.Callback, tune.Stopper):
        spent = 0

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
            self.spent += window
            with (folder / "reports_0.jsonl").open("a") as file:  # an open file could not be pickled
                write_line(file, window, result["loss"])

        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return bool(result["training_iteration"] >= spec["windows"])

        def stop_all(self) -> bool:
            return bool(self.spent >= spec["budget"])

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    quiet: Any = {"include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", num_cpus=CORES, _temp_dir=str(folder / "ray"), **quiet)
    space = {
        name: (tune.loguniform if kind == "log_uniform" else tune.uniform)(low, high)
        for name, (kind, low, high) in spec["space"].items()
    }
    np.random.seed(seed)  # Ray draws from it
    scheduler = ASHAScheduler(max_t=spec["windows"], grace_period=1, reduction_factor=ETA)
    how: Any = {"metric": "loss", "mode": "min", "num_samples": -1, "reuse_actors": True}
    budget = Budget()
    run_config = tune.RunConfig(
        storage_path=str(folder / "tune"),
        stop=budget,
        callbacks=[budget],
        verbose=0,
        # By default each trial saves at its end, and one that cannot fails and takes its actor with it.
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        failure_config=tune.FailureConfig(fail_fast=True),
    )
    tuned = tune.Tuner(
        Trial, param_space=space, tune_config=tune.TuneConfig(scheduler=scheduler, **how), run_config=run_config
    ).fit()
    if tuned.errors:
        raise SystemExit(f"a trial failed: {tuned.errors[0]}")


def main(arrangement: str, folder: Path, seed: int) -> None:
    """Starts the processes of an arrangement and waits for them."""
    if arrangement == "ray":
        return ray_search(folder, seed)
    context = multiprocessing.get_context("spawn")
    processes = CORES if arrangement == "optuna_2x1" else 1
    spent = context.Value("q", 0)
    started = [
        context.Process(target=optuna_process, args=(folder, seed, number, processes, spent))
        for number in range(1, processes)
    ]
    for process in started:
        process.start()
    optuna_process(folder, seed, 0, processes, spent)
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise SystemExit("a process of the study failed, see above")
    return None


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
