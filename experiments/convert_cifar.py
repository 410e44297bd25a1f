"""Converts CIFAR-10 or CIFAR-100 from the layout of Python pickles to the binary layout, which jaxnn reads.

Command   python experiments/convert_cifar.py cifar-10-batches-py
          python experiments/convert_cifar.py cifar-100-python

Writes the folder `cifar-10-batches-bin` or `cifar-100-binary` beside the given one: records of 1 label byte (CIFAR-100:
the coarse and the fine label) and 3,072 pixel bytes. Only names that CIFAR's pickles need are unpickled.
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
            raise pickle.UnpicklingError(f"{module}.{name} is not part of CIFAR: the file may be hostile")
        return super().find_class(module, name)


def unpickled(path: Path) -> dict:
    with open(path, "rb") as file:
        return Unpickler(file, encoding="bytes").load()


def convert(folder: Path) -> Path:
    fine = (folder / "train").is_file()
    target = folder.parent / ("cifar-100-binary" if fine else "cifar-10-batches-bin")
    target.mkdir(exist_ok=True)
    names = ("train", "test") if fine else (*(f"data_batch_{index}" for index in range(1, 6)), "test_batch")
    for name in names:
        batch = unpickled(folder / name)
        keys = (b"coarse_labels", b"fine_labels") if fine else (b"labels",)
        labels = np.stack([np.array(batch[key], np.uint8) for key in keys], axis=1)
        np.concatenate([labels, batch[b"data"]], axis=1).tofile(target / f"{name}.bin")
    if fine:
        class_names = unpickled(folder / "meta")[b"fine_label_names"]
        (target / "fine_label_names.txt").write_bytes(b"\n".join(class_names) + b"\n")
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(convert(Path(sys.argv[1])))
