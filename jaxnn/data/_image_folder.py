"""Image folders, with a folder per class, in memory or streamed."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxnn.data._arrays import arrays, split_by_fraction
from jaxnn.data._files import FLAT, PathLike, checked_file, classified, folder_with, list_folder
from jaxnn.data._stream import HostAugmentation
from jaxnn.data._stream import stream as stream_readers
from jaxnn.types import ConfigError, DataError, Splits

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# With any suffix. Other formats are refused: for PostScript, Pillow starts a program.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")


def image_folder(
    path: PathLike,
    image_size: tuple[int, int],
    *,
    validation: float = 0.0,
    test: float = 0.0,
    seed: int = 0,
    grayscale: bool = False,
    stream: bool = False,
    num_workers: int | None = None,
    augment: HostAugmentation | None = None,
) -> Splits:
    """Reads images in ``path/{train,val,test}/<class>/``, or in ``path/<class>/``, as arrays of one size.

    They are the files ending in jpg, jpeg, png, webp, bmp, gif, tif or tiff, also in folders within; others are left
    out with a warning.
    ``val/`` may also be called ``validation/``; it and ``test/`` may be missing. Without ``train/``, fractions
    ``validation`` and ``test`` of all images are split off at random by ``seed``. Labels number the classes in the
    order of their names; examples are ordered by class, then by file name. Each image is decoded as by `read_image`. By
    default all are decoded once, in threads, and kept in memory, ``height * width * channels`` bytes each. With
    ``stream=True`` they are decoded when a step needs them, see `stream`. The numbers are the same.

    >>> import PIL.Image
    >>> for name in ("cats", "dogs"):
    ...     Path("pets", name).mkdir(parents=True)
    ...     PIL.Image.new("RGB", (20, 30)).save(f"pets/{name}/1.png")
    >>> jn.data.image_folder("pets", image_size=(32, 24), validation=0.5)
    Splits(pets: 1 train, 1 validation, inputs uint8 [32, 24, 3], 2 classes)

    ``image_size`` is ``(height, width)`` in pixels. Inputs are uint8 ``[height, width, channels]``, with 1 channel if
    ``grayscale``, else red, green and blue; labels are int32. For a stream, ``num_workers`` processes decode, or
    threads if it is 0, and ``augment(rng, image)`` returns an image, for each training image on the host.

    Raises ConfigError for ``num_workers`` or ``augment`` without ``stream=True``, or a stream without Grain, and
    DataError for another layout, splits with different classes, a class without images, or a file, named in the
    message, that is not an image or too large. A stream checks the first files here, the others when it reads them.
    """
    root = Path(path)
    _check_size(image_size)
    if not stream and (num_workers is not None or augment is not None):
        raise ConfigError(
            "num_workers and augment are for images decoded during training: set stream=True, or augment images in "
            "memory by jn.data.with_augmentation."
        )
    listing = list_folder(root, _SUFFIXES)
    files, class_names = classified(listing, root, _SUFFIXES)
    if fractions := {name: part for name, part in (("validation", validation), ("test", test)) if part}:
        if FLAT not in listing:
            raise DataError(f"{root} has train/: give validation and test as folders, or as fractions without train/.")
        _, names, labels = files["train"]
        files = {split: (FLAT, *pair) for split, pair in split_by_fraction(names, labels, fractions, seed).items()}
    readers: dict[str, Any] = {
        split: ImageReader(root / folder, names, labels, image_size, grayscale)
        for split, (folder, names, labels) in files.items()
    }
    name = root.resolve().name
    if stream:
        return stream_readers(**readers, name=name, class_names=class_names, augment=augment, num_workers=num_workers)
    pairs: dict[str, Any] = {split: (reader.decode(), reader.targets) for split, reader in readers.items()}
    return arrays(**pairs, name=name, class_names=class_names)


def read_image(path: PathLike, image_size: tuple[int, int], *, grayscale: bool = False) -> np.ndarray:
    """Returns an image file as an example of `image_folder`: uint8 ``[height, width, channels]``.

    It is turned upright as its EXIF data say, and resized bilinearly to ``image_size``, ``(height, width)`` in pixels,
    ignoring its aspect ratio. Transparency is dropped, and the upper 8 of 16 bits are kept. Raises DataError for a file
    that is not an image, too large, or of floats or 32-bit integers, which have no largest value to divide by.

    >>> import PIL.Image
    >>> PIL.Image.new("RGB", (20, 30)).save("new.png")
    >>> jn.data.read_image("new.png", (8, 8)).shape  # run.predict(image[None]) classifies it
    (8, 8, 3)
    """
    from PIL import Image, ImageOps

    _check_size(image_size)
    file = checked_file(Path(path))
    try:
        with Image.open(file, formats=_FORMATS) as image:
            width, height = image.size
            # Before decoding; Pillow itself only warns about images up to twice as large.
            if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(f"{width:,}×{height:,} pixels")
            upright = ImageOps.exif_transpose(image)
            if upright.mode in ("I", "F"):
                raise ValueError(
                    f"its pixels are {'32-bit integers' if upright.mode == 'I' else 'floats'}, not 8 or 16 bits"
                )
            if upright.mode.startswith("I;16"):  # Pillow would clip 16 bits to 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            converted = upright.convert("L" if grayscale else "RGB")
        resized = converted.resize(image_size[::-1], Image.Resampling.BILINEAR)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"{file} has more pixels than Pillow considers safe ({error}): make it smaller, or set "
            "PIL.Image.MAX_IMAGE_PIXELS at the top of the script."
        ) from error
    # For damaged files Pillow raises OSError, SyntaxError, ValueError, ...
    except Exception as error:
        raise DataError(f"{file} cannot be decoded as an image ({error}): replace or delete it.") from error
    return np.asarray(resized).reshape(*image_size, -1)


def _check_size(image_size: Any) -> None:
    sides = image_size if isinstance(image_size, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise DataError(f"image_size must be (height, width) in pixels, not {image_size!r}.")


def cats_vs_dogs(
    data_dir: PathLike | None = None,
    image_size: tuple[int, int] = (96, 96),
    *,
    stream: bool = True,
    num_workers: int | None = None,
    augment: HostAugmentation | None = None,
) -> Splits:
    """Reads photographs of cats and dogs in the data directory's ``cats_vs_dogs/`` by `image_folder`.

    Elson, Douceur, Howell & Saul, "Asirra: a CAPTCHA that exploits interest-aligned manual image categorization"
    (2007). Their licence forbids redistribution, so they are not downloaded: if they are missing, the DataError says
    where to get them. Other arguments and errors as for `image_folder`.

    >>> splits = jn.data.cats_vs_dogs(image_size=(64, 64), num_workers=0)
    """
    advice = (
        "get the photographs from Microsoft or Kaggle (Dogs vs. Cats) and put them there as train/cats/*.jpg, "
        "train/dogs/*.jpg and likewise val/"
    )
    root = folder_with("cats_vs_dogs", ["train"], advice, data_dir)
    return image_folder(root, image_size, stream=stream, num_workers=num_workers, augment=augment)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageReader:
    """A reader of image files, see `stream`: ``names`` in ``folder``, resized to ``size``, ``(height, width)``."""

    folder: Path
    names: list[str]
    targets: np.ndarray
    size: tuple[int, int]
    grayscale: bool

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Decodes an image, uint8 ``[height, width, channels]``, and returns it with its label."""
        return read_image(self.folder / self.names[index], self.size, grayscale=self.grayscale), self.targets[index]

    def fingerprint(self, digest: Any) -> None:
        """Updates ``digest`` with each file's name, size in bytes and label; the content is not read."""
        digest.update(f"{self.grayscale}".encode())
        for name, label in zip(self.names, self.targets, strict=True):
            digest.update(f"{name} {(self.folder / name).stat().st_size} {label}\n".encode())

    def decode(self) -> np.ndarray:
        """Decodes all images in threads: uint8 ``[examples, height, width, channels]``."""
        images = np.empty((len(self), *self.size, 1 if self.grayscale else 3), np.uint8)

        def decode_one(index: int) -> None:
            images[index], _ = self[index]

        with ThreadPoolExecutor() as pool:
            pending = [pool.submit(decode_one, index) for index in range(len(self))]
        errors = [error for one in pending if (error := one.exception()) is not None]
        if len(errors) > 1 and all(isinstance(error, DataError) for error in errors):
            raise DataError(f"{errors[0]} {len(errors):,} files of {len(self):,} are damaged.") from errors[0]
        if errors:
            raise errors[0]
        return images
