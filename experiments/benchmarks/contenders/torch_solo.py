"""Members of a sweep in PyTorch, in sequence, as users write it: requests and answers are JSON lines.

check          losses of the first steps, with the given weights and batches
run, seconds   trains a new member for this long: steps/s and their mean loss
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_networks import Flatten, named, relu, state_dict

WARM_UP_SECONDS = 0.3


def mlp() -> nn.Module:
    layers = {"Dense_0": nn.Linear(64, 32), "relu_0": relu(), "Dense_1": nn.Linear(32, 32), "relu_1": relu()}
    return named(**layers, Dense_2=nn.Linear(32, 10))


def cnn() -> nn.Module:
    first = {"Conv_0": nn.Conv2d(1, 8, 3, padding=1), "relu_0": relu(), "pool_0": nn.MaxPool2d(2)}
    second = {"Conv_1": nn.Conv2d(8, 16, 3, padding=1), "relu_1": relu(), "pool_1": nn.MaxPool2d(2)}
    dense = {"flatten": Flatten(), "Dense_0": nn.Linear(784, 32), "relu_2": relu(), "Dense_1": nn.Linear(32, 10)}
    return named(**first, **second, **dense).to(memory_format=torch.channels_last)


class Problem:
    """The network and the data of a folder, on the device."""

    def __init__(self, folder: Path, device: str) -> None:
        spec = json.loads((folder / "spec.json").read_text())
        self.make: Callable[[], nn.Module] = {"mlp": mlp, "cnn": cnn}[spec["network"]]
        self.batch_size, self.learning_rate = spec["batch_size"], spec["learning_rate"]
        self.device = torch.device(device)
        self.inputs = layout(torch.from_numpy(np.load(folder / "inputs.npy")), spec["network"]).to(self.device)
        self.targets = torch.from_numpy(np.load(folder / "targets.npy")).to(self.device, torch.int64)
        self.order = torch.from_numpy(np.load(folder / "order.npy")).to(self.device, torch.int64)
        with np.load(folder / "weights.npz") as weights:
            self.weights = {name: torch.from_numpy(array) for name, array in state_dict(weights).items()}

    def member(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Returns a network with the first member's weights, and fused Adam, PyTorch's fastest."""
        model = self.make()
        model.load_state_dict(self.weights)
        model = model.to(self.device).train()
        return model, torch.optim.Adam(model.parameters(), lr=self.learning_rate, fused=True)

    def batches(self) -> Iterator[torch.Tensor]:
        """Yields the rows of shuffled batches of all epochs; the remainder is dropped."""
        num_examples = len(self.targets)
        while True:
            order = torch.randperm(num_examples, device=self.device)
            yield from order[: num_examples // self.batch_size * self.batch_size].split(self.batch_size)


def layout(images: torch.Tensor, network: str) -> torch.Tensor:
    """Returns images [examples, height, width, channel] as rows, or as channels-last views."""
    return images.flatten(1) if network == "mlp" else images.permute(0, 3, 1, 2)


def train_step(
    problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(problem.inputs[rows]), problem.targets[rows])
    loss.backward()
    optimizer.step()
    return loss.detach()


def check(problem: Problem) -> dict[str, list[float]]:
    member = problem.member()
    return {"losses": [train_step(problem, *member, rows).item() for rows in problem.order]}


def run(problem: Problem, seconds: float) -> dict[str, float]:
    member, batches = problem.member(), problem.batches()
    total, steps, started = torch.zeros((), device=problem.device), 0, time.perf_counter()
    while not steps or time.perf_counter() - started < seconds:
        total += train_step(problem, *member, next(batches))
        steps += 1
    loss = total.item() / steps  # waits for the device
    return {"steps_per_second": steps / (time.perf_counter() - started), "loss": loss}


def configure(threads: int | None) -> None:
    """Sets the threads, no denormals, as in XLA, and on a GPU TF32 and autotuned convolutions."""
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if threads is not None:
        torch.set_num_threads(threads)


def main() -> None:
    """Warms up, sends its facts, then answers until stdin ends; output of libraries goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="PROBLEM_DIR")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    configure(arguments.threads)
    problem = Problem(arguments.folder, arguments.device)
    run(problem, WARM_UP_SECONDS)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), file=out, flush=True)
    for request in map(json.loads, sys.stdin):
        answer = check(problem) if request["command"] == "check" else run(problem, request["seconds"])
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
