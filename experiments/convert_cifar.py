"""Converts CIFAR-10 from Python pickles to the binary format that jaxnn reads.

Command   python experiments/convert_cifar.py cifar-10-batches-py

Writes the folder `cifar-10-batches-bin` next to the given one: records of 1 label byte and 3,072 pixel bytes. Unpickles
only the names that CIFAR's pickles need.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np

ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of CIFAR-10: the file may be malicious")
        return super().find_class(module, name)


def unpickle(path: Path) -> dict:
    with open(path, "rb") as file:
        return Unpickler(file, encoding="bytes").load()


def convert(folder: Path) -> Path:
    target = folder.parent / "cifar-10-batches-bin"
    target.mkdir(exist_ok=True)
    for name in (*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"):
        batch = unpickle(folder / name)
        labels = np.array(batch[b"labels"], np.uint8)[:, None]
        np.concatenate([labels, batch[b"data"]], axis=1).tofile(target / f"{name}.bin")
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(convert(Path(sys.argv[1])))
