"""Folders of pictures: order, sizes and colours of what is read, and each defect by its name."""

import hashlib
import os
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxnn.data import cats_vs_dogs, image_folder
from jaxnn.types import ConfigError, DataError
from tests.data.test_stream import take

RED, GREEN, BLUE = (200, 0, 0), (0, 200, 0), (0, 0, 200)


def picture(path, colour=RED, size=(8, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "RGB" if isinstance(colour, tuple) else "L"
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def root(tmp_path):
    """Two classes in train and val; the files are not made in the order of their names."""
    picture(tmp_path / "train" / "dogs" / "b.png", BLUE)
    picture(tmp_path / "train" / "cats" / "z.PNG", GREEN, (4, 9))
    picture(tmp_path / "train" / "cats" / "a.png", RED)
    picture(tmp_path / "val" / "cats" / "a.png", RED)
    picture(tmp_path / "val" / "dogs" / "a.png", BLUE)
    return tmp_path


def test_pictures_come_by_class_then_by_name_in_one_size(root):
    splits = image_folder(root, (5, 7))
    inputs, targets = splits.train.examples
    assert inputs.shape == (3, 5, 7, 3)
    assert inputs.dtype == np.uint8
    np.testing.assert_array_equal(inputs[:, 2, 3], [RED, GREEN, BLUE])
    np.testing.assert_array_equal(targets, [0, 0, 1])
    assert (splits.class_names, splits.name) == (("cats", "dogs"), root.name)
    assert splits.validation.num_examples == 2
    assert splits.test is None


def test_height_comes_before_width_and_rows_before_columns(tmp_path):
    # 2 wide, 4 high: the upper half white, the lower black.
    pixels = np.array([[255, 255], [255, 255], [0, 0], [0, 0]], np.uint8)
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "train" / "a" / "x.png")
    image = image_folder(tmp_path, (4, 2), grayscale=True).train.examples.inputs[0]
    np.testing.assert_array_equal(image[..., 0], pixels)


def test_resizing_is_bilinear(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(np.array([[0, 100]], np.uint8)).save(tmp_path / "train" / "a" / "x.png")
    image = image_folder(tmp_path, (1, 4), grayscale=True).train.examples.inputs[0]
    # The new pixels' centres lie at -1/4, 1/4, 3/4 and 5/4 between the two, clamped outside.
    np.testing.assert_array_equal(image[0, :, 0], [0, 25, 75, 100])


def test_grey_becomes_three_equal_channels_and_colour_one_by_its_luminance(tmp_path):
    picture(tmp_path / "train" / "a" / "grey.png", 77)
    picture(tmp_path / "train" / "a" / "red.png", (255, 0, 0))
    colour = image_folder(tmp_path, (2, 2)).train.examples.inputs
    np.testing.assert_array_equal(colour[0, 0, 0], [77, 77, 77])
    grey = image_folder(tmp_path, (2, 2), grayscale=True).train.examples.inputs
    assert grey.shape == (2, 2, 2, 1)
    # ITU-R 601: 0.299 * 255 = 76.2.
    assert grey[:, 0, 0, 0].tolist() == [77, 76]


def test_a_file_that_does_not_decode_is_named(root):
    good = (root / "train" / "cats" / "a.png").read_bytes()
    for bad in (b"", b"not a picture", good[: len(good) // 2], good[:40] + b"\0" * 20 + good[60:]):
        path = root / "train" / "dogs" / "broken.jpg"
        path.write_bytes(bad)
        with pytest.raises(DataError, match=r"broken\.jpg does not decode") as caught:
            image_folder(root, (2, 2))
        assert str(path) in str(caught.value)


def test_a_decompression_bomb_is_refused(root, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(DataError, match=r"a\.png has more pixels than"):
        image_folder(root, (2, 2))


def png_header(width, height):
    """A picture of this size, as far as its header says; there is next to nothing behind it."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(100)))


# Pillow warns of the first and refuses the second.
@pytest.mark.parametrize("side", (13_000, 60_000))
@pytest.mark.parametrize("error_filter", ("error", "default"))
def test_a_large_picture_is_refused_before_it_is_decoded(root, side, error_filter, recwarn):
    (root / "train" / "dogs" / "large.png").write_bytes(png_header(side, side))
    warnings.simplefilter(error_filter)
    with pytest.raises(DataError, match=r"large\.png has .*pixels.*make it smaller"):
        image_folder(root, (2, 2))
    assert not recwarn.list


@pytest.mark.parametrize("kind", ("GIF", "BMP", "WEBP", "TIFF"))
def test_other_pictures_under_the_usual_names_are_read(tmp_path, kind):
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.new("RGB", (4, 4), (255, 255, 255)).save(tmp_path / "train" / "a" / "x.jpg", kind)
    assert (image_folder(tmp_path, (2, 2)).train.examples.inputs == 255).all()


def test_no_program_is_started_for_a_picture(root):
    path = root / "train" / "dogs" / "drawn.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    Image.open(path).close()  # Pillow knows it, and would have Ghostscript draw it
    with pytest.raises(DataError, match=r"drawn\.png does not decode .*cannot identify"):
        image_folder(root, (2, 2))


@pytest.mark.parametrize("make", (os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")))
def test_what_is_no_file_is_named(root, make):
    make(root / "train" / "dogs" / "odd.png")
    with pytest.raises(DataError, match=r"odd\.png is a broken link"):
        image_folder(root, (2, 2))


def test_other_layouts_are_named(root, tmp_path):
    # What folders of texts and of pictures have in common is tested with texts.
    (root / "val" / "dogs" / "a.png").unlink()
    for folder, message in (
        (root, r"val/dogs holds no \.jpg or \.jpeg or \.png"),
        (root / "train", r"no train/ \(of train, val and test it has none of them\): arrange .* train/<class>"),
        (tmp_path / ("x" * 300), "xxx cannot be read: File name too long"),
    ):
        with pytest.raises(DataError, match=message):
            image_folder(folder, (2, 2))


@pytest.mark.parametrize("image_size", (32, (32,), (0, 4), (4, -1), (4.0, 4)))
def test_a_bad_size_is_named(root, image_size):
    with pytest.raises(DataError, match=r"image_size must be \(height, width\)"):
        image_folder(root, image_size)


def test_real_photographs(data_dir):
    splits = image_folder(data_dir / "cats_vs_dogs", (24, 32))
    assert splits.class_names == ("cats", "dogs")
    assert splits.train.examples.inputs.shape == (2000, 24, 32, 3)
    assert np.bincount(splits.validation.examples.targets).tolist() == [500, 500]
    # Photographs are neither black nor all alike.
    means = splits.train.examples.inputs.mean(axis=(1, 2, 3))
    assert 50 < means.mean() < 200
    assert means.std() > 10


@pytest.fixture
def greys(tmp_path):
    """Five grey pictures of two classes to train on, two to validate with."""
    for split, names in (("train", ("cats/a", "cats/b", "dogs/a", "dogs/b", "dogs/c")), ("val", ("cats/a", "dogs/a"))):
        for number, name in enumerate(names):
            path = tmp_path / split / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (6 + number, 8), (40 * number + 10,) * 3).save(path)
    return tmp_path


def streamed(root, **options):
    return image_folder(root, (4, 5), **{"stream": True, "num_workers": 0, **options})


@pytest.mark.parametrize("grayscale", (False, True))
def test_streamed_pictures_are_those_in_memory(greys, grayscale):
    held, files = image_folder(greys, (4, 5), grayscale=grayscale), streamed(greys, grayscale=grayscale)
    assert (files.name, files.class_names) == (held.name, held.class_names)
    assert list(files.named()) == list(held.named()) == ["train", "validation"]
    for split, source in files.named().items():
        examples = held.named()[split].examples
        found = source.read(np.arange(source.num_examples))
        np.testing.assert_array_equal(found.inputs, examples.inputs)
        np.testing.assert_array_equal(found.targets, examples.targets)
        np.testing.assert_array_equal(source.targets, examples.targets)
    order = held.train.order(3, np.arange(4, dtype=np.int32), 2)
    for batch, indices in zip(take(files.train, 3, 0, 4, batch_size=2), order, strict=True):
        np.testing.assert_array_equal(batch.inputs, held.train.examples.inputs[indices])


def test_pictures_are_augmented_on_the_host_where_they_are_trained_on(greys):
    files = streamed(greys, augment=lambda rng, image: 255 - image)
    plain = streamed(greys)
    found, expected = (take(splits.train, 3, 0, 1, batch_size=2)[0].inputs for splits in (files, plain))
    np.testing.assert_array_equal(found, 255 - expected)
    found, expected = (splits.validation.read(np.arange(2)).inputs for splits in (files, plain))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("option", ({"num_workers": 2}, {"augment": lambda rng, image: image}))
def test_options_of_a_stream_are_refused_for_pictures_in_memory(greys, option):
    with pytest.raises(
        ConfigError, match="give stream=True too, or augment those in memory by jn.data.with_augmentation"
    ):
        image_folder(greys, (4, 5), **option)


def digest_of(root, **options):
    digest = hashlib.blake2b()
    streamed(root, **options).train.fingerprint(digest)
    return digest.hexdigest()


def test_a_fingerprint_covers_names_sizes_labels_and_what_becomes_of_them(greys):
    train = greys / "train"
    before = digest_of(greys)
    assert digest_of(greys) == before
    assert len({before, digest_of(greys, grayscale=True)}) == 2
    (train / "cats" / "a.png").touch()
    assert digest_of(greys) == before
    (train / "dogs" / "c.png").rename(train / "dogs" / "d.png")
    renamed = digest_of(greys)
    (train / "dogs" / "d.png").write_bytes((train / "dogs" / "d.png").read_bytes() + b"\0")
    grown = digest_of(greys)
    (train / "dogs" / "a.png").rename(train / "cats" / "c.png")
    assert len({before, renamed, grown, digest_of(greys)}) == 4


def test_a_damaged_picture_is_named_when_it_is_its_turn(greys):
    bad = greys / "train" / "dogs" / "b.png"
    bad.write_bytes(b"not a picture")
    files = streamed(greys)
    batches = files.train.batches(0, 0, 5)
    with pytest.raises(DataError, match=r"dogs/b\.png does not decode as a picture"):
        next(batches)
    with pytest.raises(DataError, match=r"dogs/b\.png does not decode as a picture"):
        files.train.read(np.arange(5))


def test_where_photographs_of_cats_and_dogs_are_missing_it_is_told_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"cats_vs_dogs lacks train, .* as train/cats/\*\.jpg, .* set JAXNN_DATA"):
        cats_vs_dogs(tmp_path)


def test_real_photographs_of_cats_and_dogs(data_dir):
    splits = cats_vs_dogs(data_dir, (24, 32), num_workers=0)
    assert (splits.name, splits.class_names) == ("cats_vs_dogs", ("cats", "dogs"))
    assert np.bincount(splits.train.targets).tolist() == [1000, 1000]
    batch = take(splits.train, 0, 7, 1, batch_size=32)[0]
    assert batch.inputs.shape == (32, 24, 32, 3)
    order = splits.train.order(0, np.array([7], np.int32), 32)[0]
    held = image_folder(data_dir / "cats_vs_dogs", (24, 32)).train.examples
    np.testing.assert_array_equal(batch.inputs, held.inputs[order])
    np.testing.assert_array_equal(batch.targets, held.targets[order])
