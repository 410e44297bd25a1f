"""PyTorch, eager and compiled, as its performance guide recommends."""

import os
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import torch_networks
from problem import Options, Problem, orders

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make(problem: Problem, *, dropout: bool, steps: int, options: Options) -> Callable[[], float]:
    """Returns a round of ``steps`` training steps that returns their mean loss."""
    device = torch.device(options.device)
    configure(device)
    model = torch_networks.build(problem.network, problem.weights, dropout=dropout).to(device).train()
    if problem.inputs.ndim == 4:
        model = model.to(memory_format=torch.channels_last)
    step = train_step(model, problem.learning_rate, device, options)
    batches = batches_on(device, problem)

    def round_() -> float:
        total = torch.zeros((), device=device)
        for _ in range(steps):
            total += step(*next(batches))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return total.item() / steps

    return round_


def configure(device: torch.device) -> None:
    """Uses all cores and no denormals; on a GPU, TF32 and autotuned convolutions."""
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_flush_denormal(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True


def train_step(model: torch.nn.Module, learning_rate: float, device: torch.device, options: Options) -> Step:
    """Returns forward, backward and fused Adam on a batch; its loss is returned asynchronously."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, learning_rate, betas=(0.9, 0.999), eps=1e-8, fused=True)
    bfloat16 = options.dtype == "bfloat16"

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    forward = loss_of if options.contender == "torch" else compiled(loss_of, device, options.contender)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def compiled(loss_of: Step, device: torch.device, contender: str) -> Step:
    """Compiles forward and backward: on a GPU in the default mode, or with CUDA graphs if ``torch_graphs``.

    The mode ``max-autotune`` was not ready after 75 seconds on an H200.
    On a CPU in the default mode with eager's random numbers: with its own, mnist_mlp took a fifth longer. Compiling the
    optimizer's step, or the C++ wrapper, had no effect beyond noise.
    """
    if device.type == "cuda":
        return torch.compile(loss_of, mode="reduce-overhead" if contender == "torch_graphs" else None)
    return torch.compile(loss_of, options={"fallback_random": True})


def batches_on(device: torch.device, problem: Problem) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the batches of all epochs, gathered on the device; images are channels-last views."""
    inputs = torch.from_numpy(problem.inputs).to(device)
    targets = torch.from_numpy(problem.targets).to(device, torch.int64)
    for order in orders(len(inputs)):
        for rows in torch.from_numpy(order).to(device).split(problem.batch_size):
            batch = inputs.index_select(0, rows)
            yield batch.permute(0, 3, 1, 2) if batch.ndim == 4 else batch, targets.index_select(0, rows)
