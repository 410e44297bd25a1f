"""A folder of pictures, one folder a class, becomes a data set."""

from __future__ import annotations

import dataclasses
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data.arrays import arrays
from jaxnn.data.files import data_dir as find_data_dir
from jaxnn.data.files import refusals_named
from jaxnn.data.streaming.build import stream as streamed
from jaxnn.data.streaming.reading import HostAugmentation
from jaxnn.types import ConfigError, DataError, Splits

_SUFFIXES = (".jpg", ".jpeg", ".png")
# Whatever a file is called. Pillow knows others too, and has PostScript drawn by the program for that.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
_SMALLER = "make it smaller, or set PIL.Image.MAX_IMAGE_PIXELS at the top of the script"
_FOLDERS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}


def image_folder(
    path: str | os.PathLike[str],
    image_size: tuple[int, int],
    *,
    grayscale: bool = False,
    stream: bool = False,
    num_workers: int | None = None,
    augment: HostAugmentation | None = None,
) -> Splits:
    """Pictures in ``path/{train,val,test}/<class>/*.{jpg,jpeg,png}``, all resized to one size.

    ``validation/`` may stand for ``val/``; it and ``test/`` may be missing. Labels number the
    classes in the order of their names, examples go by class and then by file name. Pictures are
    decoded by Pillow and scaled bilinearly to ``image_size`` whatever their proportions. All are
    decoded once, in threads, and held in memory, ``height * width * channels`` bytes each; or they
    stay files and are decoded whenever a step needs them, see `stream`. Numbers are the same.

    Args:
        path: the folder.
        image_size: ``(height, width)`` in pixels.
        grayscale: 1 channel instead of red, green and blue.
        stream: the pictures stay files.
        num_workers: of a stream: how many processes decode; 0: threads.
        augment: of a stream: ``(rng, image uint8 [height, width, channels]) -> image`` for each
            training picture, on the host.

    Returns:
        Inputs uint8 ``[height, width, channels]``, labels int32, and the classes' names.

    Raises:
        ConfigError: ``num_workers`` or ``augment`` of pictures in memory; a stream without Grain.
        DataError: another layout, splits with different classes, a class without pictures, a file
            that is no picture or too large a one; it names the folder or file. Of a stream the
            first files are looked at, the others when it is their turn.
    """
    root = Path(path)
    size = _checked_size(image_size)
    if not stream and (num_workers is not None or augment is not None):
        raise ConfigError(
            "num_workers and augment are for pictures that are decoded while training: give stream=True too, or "
            "augment those in memory by jn.data.augmented."
        )
    readers: dict[str, Any] = {}
    with refusals_named():
        folders = _split_folders(root)
        class_names = _class_names(folders["train"])
        for split, folder in folders.items():
            readers[split] = Pictures(folder, *_list_split(folder, class_names), size, grayscale)
    name = root.resolve().name
    if stream:
        return streamed(**readers, name=name, class_names=class_names, augment=augment, num_workers=num_workers)
    pairs: dict[str, Any] = {split: (_decode(pictures), pictures.targets) for split, pictures in readers.items()}
    return arrays(**pairs, name=name, class_names=class_names)


@refusals_named()
def cats_vs_dogs(
    data_dir: str | os.PathLike[str] | None = None,
    image_size: tuple[int, int] = (96, 96),
    *,
    stream: bool = True,
    num_workers: int | None = None,
    augment: HostAugmentation | None = None,
) -> Splits:
    """Photographs of cats and dogs in the data directory's ``cats_vs_dogs/``, as `image_folder` reads them.

    Elson, Douceur, Howell & Saul, "Asirra: a CAPTCHA that exploits interest-aligned manual image
    categorization" (2007). They may not be passed on and are not downloaded.

    Args:
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.
        image_size: ``(height, width)`` in pixels.
        stream: the pictures stay files.
        num_workers: of a stream: how many processes decode; 0: threads.
        augment: of a stream: for each training picture, on the host.

    Raises:
        DataError: they are not there; it says how to put them there. Else as `image_folder`.
    """
    root = find_data_dir(data_dir) / "cats_vs_dogs"
    if not root.is_dir():
        raise DataError(
            f"the photographs of cats_vs_dogs are not in {root}, and may not be passed on: get them from Microsoft or "
            f"Kaggle (Dogs vs. Cats), put them there as train/cats/*.jpg, train/dogs/*.jpg and likewise val/, or set "
            "JAXNN_DATA to a folder that has cats_vs_dogs/."
        )
    return image_folder(root, image_size, stream=stream, num_workers=num_workers, augment=augment)


@dataclasses.dataclass(frozen=True, eq=False)
class Pictures:
    """A reader of picture files, see `jaxnn.data.streaming.reading.Reader`.

    Attributes:
        folder: where they lie.
        names: their paths in it.
        targets: their labels, ``[examples]`` int32.
        size: ``(height, width)`` that they are resized to.
        grayscale: 1 channel instead of 3.
    """

    folder: Path
    names: list[str]
    targets: np.ndarray
    size: tuple[int, int]
    grayscale: bool

    def __len__(self) -> int:
        """How many there are."""
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A picture, uint8 ``[height, width, channels]``, decoded now, and its label."""
        return _decode_one(self.folder / self.names[index], self.size, self.grayscale), self.targets[index]

    def fingerprint(self, digest: Any) -> None:
        """Feeds ``digest`` with each file's name, size in bytes and label; what is in the files is not read."""
        digest.update(f"{self.grayscale}".encode())
        for name, label in zip(self.names, self.targets, strict=True):
            digest.update(f"{name} {(self.folder / name).stat().st_size} {label}\n".encode())


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


def _list_split(folder: Path, class_names: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """The files of a split, by their paths in its folder, and their labels."""
    found = _class_names(folder)
    if found != class_names:
        odd = ", ".join(sorted(set(found) ^ set(class_names)))
        raise DataError(
            f"{folder} does not have the class folders that train has (they differ in {odd}): make them the same."
        )
    names: list[str] = []
    counts = []
    for name in class_names:
        pictures = sorted(f"{name}/{item.name}" for item in (folder / name).iterdir() if _is_picture(item))
        if not pictures:
            raise DataError(f"{folder / name} holds no .jpg, .jpeg or .png: add some or remove it.")
        names += pictures
        counts.append(len(pictures))
    return names, np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _is_picture(item: Path) -> bool:
    """Whether a file's name is a picture's, and not hidden."""
    return item.suffix.lower() in _SUFFIXES and not item.name.startswith(".")


def _decode(pictures: Pictures) -> np.ndarray:
    """All pictures as uint8 ``[examples, height, width, channels]``."""
    from PIL import Image

    images = np.empty((len(pictures), *pictures.size, 1 if pictures.grayscale else 3), np.uint8)
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        # What it warns of is an error here.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        for index, (image, _) in enumerate(pool.map(pictures.__getitem__, range(len(pictures)))):
            images[index] = image
    return images


def _decode_one(file: Path, size: tuple[int, int], grayscale: bool) -> np.ndarray:
    """One picture as uint8 ``[height, width, channels]``."""
    from PIL import Image

    height, width = size
    if not file.is_file():
        raise DataError(
            f"{file} is a broken link, or a folder or the like, instead of a picture: remove or replace it."
        )
    try:
        with Image.open(file, formats=_FORMATS) as image:
            _check_pixels(file, *image.size, Image.MAX_IMAGE_PIXELS)
            converted = image.convert("L" if grayscale else "RGB")
        resized = converted.resize((width, height), Image.Resampling.BILINEAR)
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{file} has more pixels than Pillow decodes without danger: {_SMALLER}.") from error
    # Pillow's decoders fail on damaged files in many ways: OSError, SyntaxError, ValueError, ...
    except Exception as error:
        raise DataError(f"{file} does not decode as a picture ({error}): replace it.") from error
    return np.asarray(resized).reshape(height, width, -1)


def _check_pixels(file: Path, width: int, height: int, most: int | None) -> None:
    """Raises DataError, before anything is decoded, for a picture that Pillow itself only warns of."""
    if most is not None and width * height > most:
        raise DataError(f"{file} has {height:,}×{width:,} pixels, more than {most:,}: {_SMALLER}.")
