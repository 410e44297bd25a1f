"""A folder of pictures, one folder per class, as a data set in memory or streamed."""

from __future__ import annotations

import dataclasses
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data._arrays import arrays
from jaxnn.data._files import PathLike, check_file, classified, folder_with, list_folder
from jaxnn.data._stream import HostAugmentation
from jaxnn.data._stream import stream as stream_readers
from jaxnn.types import ConfigError, DataError, Splits

_SUFFIXES = (".jpg", ".jpeg", ".png")
# Under any suffix. Pillow knows others too, and starts a program for PostScript.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")


def image_folder(
    path: PathLike,
    image_size: tuple[int, int],
    *,
    grayscale: bool = False,
    stream: bool = False,
    num_workers: int | None = None,
    augment: HostAugmentation | None = None,
) -> Splits:
    """Pictures in ``path/{train,val,test}/<class>/*.{jpg,jpeg,png}``, all resized to one size.

    ``validation/`` may stand for ``val/``; it and ``test/`` may be missing. Labels number the classes in the order of
    their names, examples are ordered by class and then by file name. Pictures are decoded by Pillow and scaled
    bilinearly to ``image_size``, ignoring their proportions. All are decoded once, in threads, and held in memory,
    ``height * width * channels`` bytes each; or they stay files and are decoded when a step needs them, see
    `stream`. The numbers are the same.

    Args:
        path: the folder.
        image_size: ``(height, width)`` in pixels.
        grayscale: 1 channel instead of red, green and blue.
        stream: the pictures stay files.
        num_workers: of a stream: how many processes decode; 0: threads.
        augment: of a stream: ``(rng, image uint8 [height, width, channels]) -> image`` for each training picture, on
            the host.

    Returns:
        Inputs uint8 ``[height, width, channels]``, labels int32, and the classes' names.

    Raises:
        ConfigError: ``num_workers`` or ``augment`` of pictures in memory; a stream without Grain.
        DataError: another layout, splits with different classes, a class without pictures, a file that is no picture or
            too large; it is named. A stream checks the first files here, the others when they are read.
    """
    root = Path(path)
    sides = image_size if isinstance(image_size, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise DataError(f"image_size must be (height, width) in pixels, not {image_size!r}.")
    if not stream and (num_workers is not None or augment is not None):
        raise ConfigError(
            "num_workers and augment are for pictures that are decoded while training: give stream=True too, or "
            "augment those in memory by jn.data.augmented."
        )
    found, class_names = classified(list_folder(root, _SUFFIXES), root, _SUFFIXES)
    readers: dict[str, Any] = {
        split: Pictures(root / folder, names, labels, image_size, grayscale)
        for split, (folder, names, labels) in found.items()
    }
    name = root.resolve().name
    if stream:
        return stream_readers(**readers, name=name, class_names=class_names, augment=augment, num_workers=num_workers)
    pairs: dict[str, Any] = {split: (pictures.decode(), pictures.targets) for split, pictures in readers.items()}
    return arrays(**pairs, name=name, class_names=class_names)


def cats_vs_dogs(
    data_dir: PathLike | None = None,
    image_size: tuple[int, int] = (96, 96),
    *,
    stream: bool = True,
    num_workers: int | None = None,
    augment: HostAugmentation | None = None,
) -> Splits:
    """Photographs of cats and dogs in the data directory's ``cats_vs_dogs/``, as `image_folder` reads them.

    Elson, Douceur, Howell & Saul, "Asirra: a CAPTCHA that exploits interest-aligned manual image categorization"
    (2007). Their licence forbids redistribution, and they are not downloaded: if they are not there, the DataError says
    where to get them. Arguments and other errors as of `image_folder`.
    """
    advice = (
        "get the photographs from Microsoft or Kaggle (Dogs vs. Cats) and put them there as train/cats/*.jpg, "
        "train/dogs/*.jpg and likewise val/"
    )
    root = folder_with("cats_vs_dogs", ["train"], advice, data_dir)
    return image_folder(root, image_size, stream=stream, num_workers=num_workers, augment=augment)


@dataclasses.dataclass(frozen=True, eq=False)
class Pictures:
    """A reader of picture files, see `stream`: ``names`` in ``folder``, resized to ``size``, ``(height, width)``."""

    folder: Path
    names: list[str]
    targets: np.ndarray
    size: tuple[int, int]
    grayscale: bool

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A picture, uint8 ``[height, width, channels]``, decoded now, and its label."""
        from PIL import Image

        file = self.folder / self.names[index]
        check_file(file)
        try:
            with Image.open(file, formats=_FORMATS) as image:
                width, height = image.size
                # Before anything is decoded; Pillow itself only warns of pictures up to twice as large.
                if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
                    raise Image.DecompressionBombError(f"{width:,}×{height:,} pixels")
                converted = image.convert("L" if self.grayscale else "RGB")
            resized = converted.resize(self.size[::-1], Image.Resampling.BILINEAR)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(
                f"{file} has more pixels than Pillow decodes without danger ({error}): make it smaller, or set "
                "PIL.Image.MAX_IMAGE_PIXELS at the top of the script."
            ) from error
        # Pillow's decoders fail on damaged files in many ways: OSError, SyntaxError, ValueError, ...
        except Exception as error:
            raise DataError(f"{file} does not decode as a picture ({error}): replace it.") from error
        return np.asarray(resized).reshape(*self.size, -1), self.targets[index]

    def fingerprint(self, digest: Any) -> None:
        """Feeds ``digest`` with each file's name, size in bytes and label; the content is not read."""
        digest.update(f"{self.grayscale}".encode())
        for name, label in zip(self.names, self.targets, strict=True):
            digest.update(f"{name} {(self.folder / name).stat().st_size} {label}\n".encode())

    def decode(self) -> np.ndarray:
        """All pictures, decoded in threads: uint8 ``[examples, height, width, channels]``."""
        from PIL import Image

        images = np.empty((len(self), *self.size, 1 if self.grayscale else 3), np.uint8)
        with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
            # Pictures that it warns of are refused.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            for index, (image, _) in enumerate(pool.map(self.__getitem__, range(len(self)))):
                images[index] = image
        return images
