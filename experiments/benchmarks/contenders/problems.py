"""The problem of all contenders: a network, its initial weights, and random data in training order."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import flax
import flax_networks
import jax
import numpy as np

import jaxnn as jn

SEED = 0
LEARNING_RATE = 3e-4


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a network is trained and timed: ``round_steps`` take one to three seconds on two CPU cores."""

    batch_size: int
    num_batches: int
    round_steps: int
    make: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def images(*shape: int) -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
    """One noisy pattern per class."""

    def make(generator: np.random.Generator, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
        patterns = generator.normal(size=(10, *shape)).astype(np.float32)
        targets = generator.integers(10, size=num_examples, dtype=np.int32)
        noise = generator.normal(size=(num_examples, *shape)).astype(np.float32)
        return 0.25 * (noise + patterns[targets]), targets

    return make


def texts(length: int) -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
    """Words by Zipf's law; the two classes prefer even and odd frequent words."""

    def make(generator: np.random.Generator, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
        targets = generator.integers(2, size=num_examples, dtype=np.int32)
        ids = np.exp(generator.uniform(0, np.log(20_000), size=(num_examples, length))).astype(np.int32)
        swap = (ids % 2 != targets[:, None]) & (generator.random(ids.shape) < 0.2)
        return np.minimum(ids + swap, 19_999).astype(np.int32), targets

    return make


def characters(generator: np.random.Generator, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """A noisy walk over 65 characters."""
    steps = np.where(generator.random((num_examples, 65)) < 0.8, 7, generator.integers(65, size=(num_examples, 65)))
    walk = (np.cumsum(steps, axis=1) % 65).astype(np.int32)
    return walk[:, :-1].copy(), walk[:, 1:].copy()


def tokens(generator: np.random.Generator, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens of GPT-2's vocabulary."""
    text = generator.integers(50_257, size=(num_examples, 1025), dtype=np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


SETTINGS = {
    "mnist_mlp": Setting(128, 256, 768, images(784)),
    "mnist_cnn": Setting(128, 64, 32, images(28, 28, 1)),
    "cifar10_cnn": Setting(32, 128, 64, images(32, 32, 3)),
    "imdb_lstm": Setting(32, 256, 192, texts(100)),
    "fasttext": Setting(32, 256, 1024, texts(400)),
    "char_gpt": Setting(12, 512, 64, characters),
    "resnet20": Setting(128, 64, 16, images(32, 32, 3)),
    "gpt2_124m": Setting(16, 4, 4, tokens),  # on GPUs
}


def write_problem(name: str, folder: Path) -> None:
    """Writes ``spec.json``, ``inputs.npy``, ``targets.npy`` and ``weights.npz``, the initial weights as Flax's."""
    setting = SETTINGS[name]
    num_examples = setting.num_batches * setting.batch_size
    inputs, targets = setting.make(np.random.default_rng(SEED), num_examples)
    order = jn.data.batch_indices(SEED, np.arange(setting.num_batches), num_examples, setting.batch_size).reshape(-1)
    module = flax_networks.network(name, dropout=False)
    params = jax.jit(module.init)(jax.random.key(SEED), inputs[: setting.batch_size])["params"]
    folder.mkdir(parents=True, exist_ok=True)
    spec = {"network": name, "learning_rate": LEARNING_RATE}
    spec |= {field: getattr(setting, field) for field in ("batch_size", "num_batches")}
    (folder / "spec.json").write_text(json.dumps(spec))
    np.save(folder / "inputs.npy", inputs[order])
    np.save(folder / "targets.npy", targets[order])
    np.savez(folder / "weights.npz", **flax.traverse_util.flatten_dict(params, sep="/"))
