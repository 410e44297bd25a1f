"""Folders of pictures: order, sizes and colours of what is read, and each defect by its name."""

import os
import pathlib
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxnn.data import image_folder
from jaxnn.types import DataError

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


def test_the_order_is_not_that_of_the_file_system(root, monkeypatch):
    expected = image_folder(root, (2, 2))
    listed = pathlib.Path.iterdir
    for reverse in (False, True):

        def iterdir(path, reverse=reverse):
            return iter(sorted(listed(path), reverse=reverse))

        monkeypatch.setattr(pathlib.Path, "iterdir", iterdir)
        splits = image_folder(root, (2, 2))
        assert splits.class_names == expected.class_names == ("cats", "dogs")
        np.testing.assert_array_equal(splits.train.examples.inputs, expected.train.examples.inputs)


def test_validation_and_test_are_found_by_their_names(root):
    (root / "val").rename(root / "validation")
    picture(root / "test" / "cats" / "a.png")
    picture(root / "test" / "dogs" / "a.png")
    assert list(image_folder(root, (2, 2)).named()) == ["train", "validation", "test"]


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


def test_other_and_hidden_files_are_no_pictures(root):
    (root / "train" / "cats" / "notes.txt").write_text("not a picture")
    (root / "train" / "cats" / "._a.png").write_bytes(b"what some systems leave behind")
    (root / "train" / ".cache").mkdir()
    assert image_folder(root, (2, 2)).train.num_examples == 3


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


def test_an_empty_class_and_an_empty_split_are_named(root):
    (root / "val" / "dogs" / "a.png").unlink()
    with pytest.raises(DataError, match=r"val/dogs holds no \.jpg"):
        image_folder(root, (2, 2))
    picture(root / "val" / "dogs" / "a.png")
    (root / "test").mkdir()
    with pytest.raises(DataError, match="test has no class folders"):
        image_folder(root, (2, 2))


def test_classes_that_differ_between_splits_are_named(root):
    picture(root / "val" / "birds" / "a.png")
    with pytest.raises(DataError, match=r"val does not have .* differ in birds"):
        image_folder(root, (2, 2))


def test_other_layouts_are_told_what_is_expected(root, tmp_path):
    with pytest.raises(
        DataError, match=r"no train/ \(of train, val and test it has none of them\): arrange .* train/<class>"
    ):
        image_folder(root / "train", (2, 2))
    with pytest.raises(DataError, match="nowhere is not a folder"):
        image_folder(tmp_path / "nowhere", (2, 2))
    with pytest.raises(DataError, match="xxx cannot be read: File name too long"):
        image_folder(tmp_path / ("x" * 300), (2, 2))
    picture(root / "validation" / "cats" / "a.png")
    with pytest.raises(DataError, match="both val and validation"):
        image_folder(root, (2, 2))


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
