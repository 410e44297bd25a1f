"""Pictures that stay files: the numbers of those in memory, known again by their names, sizes and labels."""

import hashlib

import numpy as np
import pytest
from PIL import Image

from jaxnn.data import cats_vs_dogs, image_folder
from jaxnn.types import ConfigError, DataError
from tests.data.test_stream import take


@pytest.fixture
def root(tmp_path):
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
def test_streamed_pictures_are_those_in_memory(root, grayscale):
    held, files = image_folder(root, (4, 5), grayscale=grayscale), streamed(root, grayscale=grayscale)
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


def test_pictures_are_augmented_on_the_host_where_they_are_trained_on(root):
    files = streamed(root, augment=lambda rng, image: 255 - image)
    plain = streamed(root)
    found, expected = (take(splits.train, 3, 0, 1, batch_size=2)[0].inputs for splits in (files, plain))
    np.testing.assert_array_equal(found, 255 - expected)
    found, expected = (splits.validation.read(np.arange(2)).inputs for splits in (files, plain))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("option", ({"num_workers": 2}, {"augment": lambda rng, image: image}))
def test_options_of_a_stream_are_refused_for_pictures_in_memory(root, option):
    with pytest.raises(ConfigError, match="give stream=True too, or augment those in memory by jn.data.augmented"):
        image_folder(root, (4, 5), **option)


def digest_of(root, **options):
    digest = hashlib.blake2b()
    streamed(root, **options).train.fingerprint(digest)
    return digest.hexdigest()


def test_a_fingerprint_covers_names_sizes_labels_and_what_becomes_of_them(root):
    train = root / "train"
    before = digest_of(root)
    assert digest_of(root) == before
    assert len({before, digest_of(root, grayscale=True)}) == 2
    (train / "cats" / "a.png").touch()
    assert digest_of(root) == before
    (train / "dogs" / "c.png").rename(train / "dogs" / "d.png")
    renamed = digest_of(root)
    (train / "dogs" / "d.png").write_bytes((train / "dogs" / "d.png").read_bytes() + b"\0")
    grown = digest_of(root)
    (train / "dogs" / "a.png").rename(train / "cats" / "c.png")
    assert len({before, renamed, grown, digest_of(root)}) == 4


def test_a_damaged_picture_is_named_when_it_is_its_turn(root):
    bad = root / "train" / "dogs" / "b.png"
    bad.write_bytes(b"not a picture")
    files = streamed(root)
    batches = files.train.batches(0, 0, 5)
    with pytest.raises(DataError, match=r"dogs/b\.png does not decode as a picture"):
        next(batches)
    with pytest.raises(DataError, match=r"dogs/b\.png does not decode as a picture"):
        files.train.read(np.arange(5))


def test_where_photographs_of_cats_and_dogs_are_missing_it_is_told_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"not in .*cats_vs_dogs, .* as train/cats/\*\.jpg, .* set JAXNN_DATA"):
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
