"""Twelve experiments that do not compute the same each time, each for one usual reason; jn.verify must name it.

Claim     verify names the part that differs, and the cause, of 12 of 12
Command   python experiments/benchmarks/planted_nondeterminism.py
Result    12 of 12 on two cores of an AMD EPYC, jax 0.12.0.1

Words on the command line choose some of them. It exits with 1 if one is not named.
"""

import dataclasses
import functools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

import jaxnn as jn

ROWS, COLUMNS, CLASSES = 64, 6, 3
WORDS = ("ash", "beech", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "yew")
CACHE = {"inputs": np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype(np.float32)}
SHARED = np.random.default_rng(2)


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 0.1  # Of SGD
    batch_size: int = 8  # Examples per step
    num_steps: int = 40  # Updates
    seed: int = 0  # Determines initial parameters and data order


def points(rng):
    """Noisy points, and as labels their largest coordinate of the first three."""
    inputs = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return inputs, inputs[:, :CLASSES].argmax(axis=1)


def data(config):
    return jn.data.arrays(points(np.random.default_rng(0)), test=points(np.random.default_rng(3)))


def logits(params, inputs):
    return inputs @ params["kernel"]


def init(key, inputs):
    return {"kernel": jax.random.normal(key, (inputs.shape[-1], CLASSES))}


def task(config):
    return jn.tasks.classification((init, logits))


def optimizer(config):
    return optax.sgd(config.learning_rate, momentum=0.9)


# The data.


def global_generator(config):
    inputs, labels = points(np.random.default_rng(0))
    return jn.data.arrays((inputs + np.random.normal(size=inputs.shape).astype(np.float32), labels))


def set_order(config):
    numbers = {word: number for number, word in enumerate(set(WORDS))}
    inputs, _ = points(np.random.default_rng(0))
    return jn.data.arrays((inputs, np.array([numbers[WORDS[row % len(WORDS)]] % CLASSES for row in range(ROWS)])))


def mutable_default(config, seen=[]):  # noqa: B006 -- the fault
    seen.append(config)
    inputs, labels = points(np.random.default_rng(0))
    return jn.data.arrays((inputs + len(seen), labels))


def changed_in_place(config):
    CACHE["inputs"] *= 1.5
    return jn.data.arrays((CACHE["inputs"].copy(), points(np.random.default_rng(0))[1]))


def unseeded_split(config):
    inputs, labels = points(np.random.default_rng(0))
    rows = np.random.default_rng().permutation(ROWS)
    train, test = rows[: ROWS // 2], rows[ROWS // 2 :]
    return jn.data.arrays((inputs[train], labels[train]), test=(inputs[test], labels[test]))


class Timed(jn.data.ArraySource):
    """Shuffles by the time."""

    @functools.cached_property
    def rows(self):
        return np.random.default_rng(int(time.time() * 1000)).permutation(ROWS).astype(np.int32)

    def order(self, seed, steps, batch_size):
        places = (steps[:, None] * batch_size + np.arange(batch_size)[None]) % ROWS
        return self.rows[places] if isinstance(steps, np.ndarray) else jnp.asarray(self.rows)[places]


def time_as_seed(config):
    return jn.Splits(Timed(data(config).train.examples))


def threaded_augmentation(config):
    inputs, labels = points(np.random.default_rng(0))

    def noisy(rng, row):
        return row + SHARED.normal(size=row.shape).astype(row.dtype)

    return jn.data.stream(list(zip(inputs, labels, strict=True)), augment=noisy, num_workers=0)


def resumes_wrongly(config):
    inputs, labels = points(np.random.default_rng(0))

    def examples(seed, start):
        while True:
            yield from zip(inputs, labels, strict=True)

    return jn.data.iterable(examples)


# The model, the optimizer and the step.


def python_hash(config):
    scale = 1 + hash("kernel") % 1000 / 1000
    return jn.tasks.classification(
        (lambda key, inputs: jax.tree.map(lambda leaf: scale * leaf, init(key, inputs)), logits)
    )


def environment_variable(config):
    return optax.sgd(config.learning_rate * float(os.environ.get("RATE_SCALE", "0.5")))


def host_callback(config):
    shape = jax.ShapeDtypeStruct((), np.float32)

    def apply(params, inputs):
        noise = io_callback(lambda: np.float32(time.perf_counter() % 1), shape)
        return logits(params, inputs) + noise * inputs[:, :1]

    return jn.tasks.classification((init, apply))


def noisy_kernel(config):
    def add_noise(product):
        return (
            product + np.frombuffer(os.urandom(product.size), np.uint8).reshape(product.shape).astype(np.float32) / 1e6
        )

    @jax.custom_jvp
    def product(x, kernel):
        exact = x @ kernel
        return jax.pure_callback(
            add_noise, jax.ShapeDtypeStruct(exact.shape, exact.dtype), exact, vmap_method="sequential"
        )

    @product.defjvp
    def derivative(primals, tangents):
        (x, kernel), (dx, d_kernel) = primals, tangents
        return product(x, kernel), dx @ kernel + x @ d_kernel

    return jn.tasks.classification((init, lambda params, inputs: product(inputs, params["kernel"])))


class Planted(NamedTuple):
    """An experiment with one fault, the part of a run that differs, and words of the cause."""

    experiment: Any
    part: str
    cause: str


def planted(part, cause, **parts):
    parts = {"data": data, "task": task, "optimizer": optimizer, **parts}
    return Planted(jn.Experiment(Config(), **parts), part, cause)


PLANTED = {
    "global_generator": planted("data", "generators", data=global_generator),
    "set_order": planted("data", "PYTHONHASHSEED", data=set_order),
    "time_as_seed": planted("order", "clock", data=time_as_seed),
    "threaded_augmentation": planted("batches", "augmentation", data=threaded_augmentation),
    "host_callback": planted("step", "callbacks", task=host_callback),
    "resumes_wrongly": planted("resume", "where reading starts", data=resumes_wrongly),
    "python_hash": planted("initial", "PYTHONHASHSEED", task=python_hash),
    "environment_variable": planted("program", "RATE_SCALE", optimizer=environment_variable),
    "mutable_default": planted("data", "mutable default", data=mutable_default),
    "changed_in_place": planted("data", "changed in place", data=changed_in_place),
    "unseeded_split": planted("data", "generators", data=unseeded_split),
    "noisy_kernel": planted("step", "callbacks", task=noisy_kernel),
}
EXPERIMENTS = {name: one.experiment for name, one in PLANTED.items()}  # where fresh processes find them


def main(names):
    named = 0
    for name in names or PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            found = jn.verify(EXPERIMENTS[name], steps=20, out=Path(folder, "verify.json"))
        answers = {(check.part, check.cause) for check in found.failed}
        is_named = bool(answers) and all(
            part == PLANTED[name].part and PLANTED[name].cause in (cause or "") for part, cause in answers
        )
        named += is_named
        print(f"{name}: {'named' if is_named else 'NOT NAMED'}\n{found}\n", flush=True)
    print(f"{named} of {len(names or PLANTED)} named")
    return int(named < len(names or PLANTED))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
