"""Image folders: order, sizes and colours, in memory and streamed; bad files raise with their names."""

import contextlib
import hashlib
import os

import numpy as np
import pytest
from PIL import Image

from jaxnn.data import cats_vs_dogs, image_folder, read_image
from jaxnn.types import DataError
from tests.data.test_stream import take

RED, GREEN, BLUE = (200, 0, 0), (0, 200, 0), (0, 0, 200)


def save(path, colour=RED, size=(8, 6), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB" if isinstance(colour, tuple) else "L", size, colour).save(path, **options)
    return path


@pytest.fixture
def root(tmp_path):
    """Two classes in train and val; the files are not created in the order of their names."""
    save(tmp_path / "train" / "dogs" / "b.png", BLUE)
    save(tmp_path / "train" / "cats" / "z.PNG", GREEN, (4, 9))
    save(tmp_path / "train" / "cats" / "a.png", RED)
    save(tmp_path / "val" / "cats" / "a.png", RED)
    save(tmp_path / "val" / "dogs" / "a.png", BLUE)
    return tmp_path


def streamed(root, **options):
    return image_folder(root, (5, 7), **{"stream": True, "num_workers": 0, **options})


def test_images_are_ordered_by_class_then_by_name(root):
    splits = image_folder(root, (5, 7))
    inputs, targets = splits.train.examples
    assert (inputs.shape, inputs.dtype) == ((3, 5, 7, 3), np.uint8)
    np.testing.assert_array_equal(inputs[:, 2, 3], [RED, GREEN, BLUE])
    np.testing.assert_array_equal(targets, [0, 0, 1])
    assert (splits.class_names, splits.name) == (("cats", "dogs"), root.name)
    assert splits.validation.num_examples == 2 and splits.test is None
    save(root / "train" / "cats" / "old" / "z.webp", BLUE)
    nested = image_folder(root, (5, 7)).train
    assert nested.targets.tolist() == [0, 0, 0, 1], "in a folder within, of another format"


def test_height_comes_first_resizing_is_bilinear_and_images_are_turned_upright(tmp_path):
    def read(pixels, size, **options):
        Image.fromarray(np.array(pixels, np.uint8)).save(tmp_path / "x.png", **options)
        return read_image(tmp_path / "x.png", size, grayscale=True)[..., 0].tolist()

    # 2 wide, 4 high: the upper half white, the lower black.
    pixels = [[255, 255], [255, 255], [0, 0], [0, 0]]
    assert read(pixels, (4, 2)) == pixels
    # The centres of the new pixels are at -1/4, 1/4, 3/4 and 5/4 between the two, clamped outside.
    assert read([[0, 100]], (1, 4)) == [[0, 25, 75, 100]]
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    assert read([[0, 255]], (1, 2), exif=exif) == [[255, 0]]
    Image.fromarray(np.array([[256 * 7, 256 * 200 + 9]], np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png", (1, 2))[..., 1].tolist() == [[7, 200]], "the upper bits are kept"
    for dtype, words in ((np.float32, "floats"), (np.int32, "32-bit integers")):
        Image.fromarray(np.arange(4, dtype=dtype).reshape(2, 2)).save(tmp_path / "deep.tif")
        with pytest.raises(DataError, match=f"its pixels are {words}, not 8 or 16 bits"):
            read_image(tmp_path / "deep.tif", (2, 2))


def test_gray_becomes_three_channels_and_colour_luminance(tmp_path):
    save(tmp_path / "train" / "a" / "gray.png", 77)
    save(tmp_path / "train" / "a" / "red.png", (255, 0, 0))
    for kind in ("GIF", "BMP", "WEBP", "TIFF"):  # other formats under a usual name
        save(tmp_path / "train" / "a" / f"{kind}.jpg", 255, format=kind)
    colour = image_folder(tmp_path, (2, 2)).train.examples.inputs
    np.testing.assert_array_equal(colour[:, 0, 0, 1], [255] * 4 + [77, 0])
    gray = image_folder(tmp_path, (2, 2), grayscale=True).train.examples.inputs
    # ITU-R 601: 0.299 * 255 = 76.2.
    assert gray[:, 0, 0].tolist() == [[255]] * 4 + [[77], [76]]


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("content", "message"),
    (
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "cannot be decoded as an image"),
        # Pillow knows this format, and would start Ghostscript to draw it.
        (POSTSCRIPT, "cannot be decoded as an image .*cannot identify"),
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "is not a regular file"),
    ),
)
def test_bad_files_raise_in_memory_and_streamed(root, content, message):
    path = root / "train" / "dogs" / "c.png"
    content(path) if callable(content) else path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} {message}"):
        image_folder(root, (2, 2))
    if not callable(content):
        (path.parent / "d.png").write_bytes(content)
        with pytest.raises(DataError, match=r"c\.png .* 2 files of \d+ are damaged"):
            image_folder(root, (2, 2))
        with pytest.raises(DataError, match=f"{path} {message}"):
            next(streamed(root).train.batches(0, 0, 4))


def test_images_of_more_pixels_than_pillow_allows_and_classes_without_images_raise(root, monkeypatch):
    # Images have 6×8 pixels. Pillow warns about more than the limit, and refuses more than twice the limit.
    for limit in (48, 47, 23):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        refused = pytest.raises(DataError, match=r"a\.png has more pixels .*make it smaller")
        with contextlib.nullcontext() if limit == 48 else refused:
            image_folder(root, (2, 2))
    (root / "val" / "dogs" / "a.png").unlink()
    with pytest.raises(DataError, match=r"val/dogs has no \.jpg or \.jpeg or \.png"):
        image_folder(root, (2, 2))


@pytest.mark.parametrize("grayscale", (False, True))
def test_streamed_images_are_those_in_memory(root, grayscale):
    held, files = image_folder(root, (5, 7), grayscale=grayscale), streamed(root, grayscale=grayscale)
    assert (files.name, files.class_names) == (held.name, held.class_names)
    for split, source in files.named().items():
        examples = held.named()[split].examples
        found = source.read(np.arange(source.num_examples))
        np.testing.assert_array_equal(found.inputs, examples.inputs)
        np.testing.assert_array_equal(found.targets, examples.targets)
        np.testing.assert_array_equal(source.targets, examples.targets)
    inverted = streamed(root, grayscale=grayscale, augment=lambda rng, image: 255 - image)
    (plain,), (augmented,) = (take(splits.train, 3, 0, 1, batch_size=2) for splits in (files, inverted))
    np.testing.assert_array_equal(augmented.inputs, 255 - plain.inputs)
    np.testing.assert_array_equal(inverted.validation.read(np.arange(2)).inputs, held.validation.examples.inputs)


def test_fingerprints_cover_names_sizes_labels_and_colour(root):
    def digest_of(**options):
        digest = hashlib.blake2b()
        streamed(root, **options).train.fingerprint(digest)
        return digest.hexdigest()

    digests = [digest_of(), digest_of(grayscale=True)]
    cats, dogs = root / "train" / "cats", root / "train" / "dogs"
    (cats / "a.png").touch()
    assert digest_of() == digests[0]
    (cats / "z.PNG").rename(cats / "c.png")
    digests.append(digest_of())
    (cats / "c.png").write_bytes((cats / "c.png").read_bytes() + b"\0")
    digests.append(digest_of())
    (cats / "c.png").rename(dogs / "c.png")
    assert len({*digests, digest_of()}) == 5


def test_real_photographs(data_dir):
    splits = cats_vs_dogs(data_dir, (24, 32), num_workers=0)
    assert repr(splits) == "Splits(cats_vs_dogs: 2,000 train, 1,000 validation, streamed, 2 classes)"
    assert np.bincount(splits.train.targets).tolist() == [1000, 1000]
    assert 50 < splits.train.read(np.arange(32)).inputs.mean() < 200


def test_fractions_of_class_folders_are_split_off_at_random(tmp_path):
    for index in range(10):
        save(tmp_path / "shapes" / ("cats" if index < 4 else "dogs") / f"{index}.png", (10 * index, 0, 0))
    flat = image_folder(tmp_path / "shapes", (2, 2), validation=0.3, test=0.2, seed=1)
    parts = [split.examples for split in (flat.train, flat.validation, flat.test)]
    assert [len(part.targets) for part in parts] == [5, 3, 2]
    reds = np.concatenate([part.inputs[:, 0, 0, 0] for part in parts])
    labels = np.concatenate([part.targets for part in parts])
    assert sorted(reds) == list(range(0, 100, 10)) and np.array_equal(labels, reds >= 40)
    assert image_folder(tmp_path / "shapes", (2, 2)).train.num_examples == 10
