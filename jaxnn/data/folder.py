"""A folder of pictures, one folder a class, becomes a data set."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data.arrays import arrays
from jaxnn.types import DataError, Splits

_SUFFIXES = (".jpg", ".jpeg", ".png")
_FOLDERS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}


def image_folder(path: str | os.PathLike[str], image_size: tuple[int, int], *, grayscale: bool = False) -> Splits:
    """Pictures in ``path/{train,val,test}/<class>/*.{jpg,jpeg,png}``, all resized to one size.

    ``validation/`` may stand for ``val/``; it and ``test/`` may be missing. Labels number the
    classes in the order of their names, examples go by class and then by file name. Pictures are
    decoded by Pillow, in threads, and scaled bilinearly to ``image_size`` whatever their
    proportions. All are held in memory: ``height * width * channels`` bytes each.

    Args:
        path: the folder.
        image_size: ``(height, width)`` in pixels.
        grayscale: 1 channel instead of red, green and blue.

    Returns:
        Inputs uint8 ``[height, width, channels]``, labels int32, and the classes' names.

    Raises:
        DataError: another layout, splits with different classes, a class without pictures, a file
            that is no picture or too large a one; it names the folder or file.
    """
    root = Path(path)
    height, width = _checked_size(image_size)
    folders = _split_folders(root)
    class_names = _class_names(folders["train"])
    listed = {split: _list_split(folder, class_names) for split, folder in folders.items()}
    pairs: dict[str, Any] = {
        split: (_decode(files, (height, width), grayscale), np.array(labels, np.int32))
        for split, (files, labels) in listed.items()
    }
    return arrays(**pairs, name=root.resolve().name, class_names=class_names)


def _checked_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """``image_size`` if it is two positive integers."""
    match image_size:
        case (int(height), int(width)) if height > 0 and width > 0:
            return height, width
    raise DataError(f"image_size must be (height, width) in pixels, not {image_size!r}.")


def _split_folders(root: Path) -> dict[str, Path]:
    """Each split's folder."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give the one that holds train/.")
    folders = {}
    for split, names in _FOLDERS.items():
        there = [root / name for name in names if (root / name).is_dir()]
        if len(there) > 1:
            raise DataError(f"{root} has both {' and '.join(names)}: keep one of them.")
        if there:
            folders[split] = there[0]
    if "train" not in folders:
        found = ", ".join(sorted(item.name for item in root.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{root} has no train/ (it has {found}): arrange the pictures as train/<class>/*.jpg, "
            "and likewise val/ and test/ if there are such."
        )
    return folders


def _class_names(folder: Path) -> tuple[str, ...]:
    """The names of the class folders in a split's folder, sorted."""
    names = tuple(sorted(item.name for item in folder.iterdir() if _is_class(item)))
    if not names:
        raise DataError(f"{folder} has no class folders: put the pictures into {folder}/<class>/.")
    return names


def _is_class(item: Path) -> bool:
    """Whether this is a folder that is not hidden."""
    return item.is_dir() and not item.name.startswith(".")


def _list_split(folder: Path, class_names: tuple[str, ...]) -> tuple[list[Path], list[int]]:
    """The files of a split and their labels."""
    found = _class_names(folder)
    if found != class_names:
        odd = ", ".join(sorted(set(found) ^ set(class_names)))
        raise DataError(
            f"{folder} does not have the class folders that train has (they differ in {odd}): make them the same."
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        pictures = sorted(item for item in (folder / name).iterdir() if _is_picture(item))
        if not pictures:
            raise DataError(f"{folder / name} holds no .jpg, .jpeg or .png: add some or remove it.")
        files += pictures
        labels += [label] * len(pictures)
    return files, labels


def _is_picture(item: Path) -> bool:
    """Whether a file's name is a picture's, and not hidden."""
    return item.suffix.lower() in _SUFFIXES and not item.name.startswith(".")


def _decode(files: list[Path], size: tuple[int, int], grayscale: bool) -> np.ndarray:
    """All pictures as uint8 ``[examples, height, width, channels]``."""
    images = np.empty((len(files), *size, 1 if grayscale else 3), np.uint8)
    with ThreadPoolExecutor() as pool:
        decoded = pool.map(lambda file: _decode_one(file, size, grayscale), files)
        for index, image in enumerate(decoded):
            images[index] = image
    return images


def _decode_one(file: Path, size: tuple[int, int], grayscale: bool) -> np.ndarray:
    """One picture as uint8 ``[height, width, channels]``."""
    from PIL import Image

    height, width = size
    try:
        with Image.open(file) as image:
            converted = image.convert("L" if grayscale else "RGB")
        resized = converted.resize((width, height), Image.Resampling.BILINEAR)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{file} has more pixels than Pillow decodes without danger: make it smaller.") from error
    # Pillow's decoders fail on damaged files in many ways: OSError, SyntaxError, ValueError, ...
    except Exception as error:
        raise DataError(f"{file} does not decode as a picture ({error}): replace it.") from error
    return np.asarray(resized).reshape(height, width, -1)
