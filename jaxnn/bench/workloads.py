"""The articles' networks as experiments: the same as the scripts in ``experiments/articles`` write them out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import optax

from jaxnn import data, models
from jaxnn.loop.quick import TrainConfig
from jaxnn.nn import avg_pool, max_pool
from jaxnn.optim import schedules
from jaxnn.tasks import binary_classification, classification, next_token
from jaxnn.types import Experiment, Splits, Task

# Ids for padding, the unknown, 19,998 words, and all pairs of words in IMDb's training reviews.
WORDS_AND_PAIRS = 1_203_034


class Workload(NamedTuple):
    """A network of an article with its data, optimizer and length.

    Attributes:
        batch_size: examples a step.
        num_steps: of a whole run.
        examples: of an epoch.
        parameters: how many the network has.
        data: from the data directory, or None, to the splits.
        task: makes model and loss.
        optimizer: made of the config.
    """

    batch_size: int
    num_steps: int
    examples: int
    parameters: int
    data: Callable[[Path | None], Splits]
    task: Callable[[], Task]
    optimizer: Callable[[TrainConfig], optax.GradientTransformation]

    @property
    def epochs(self) -> float:
        """How often a run sees each example."""
        return self.num_steps * self.batch_size / self.examples

    def experiment(self, data_dir: Path | None = None, batch_size: int | None = None) -> Experiment[TrainConfig]:
        """The workload as an experiment; its data are read once, and held."""
        config = TrainConfig(batch_size=batch_size or self.batch_size, num_steps=self.num_steps, seed=0)
        return Experiment(config, lambda _: read_data(self.data, data_dir), lambda _: self.task(), self.optimizer)


@functools.lru_cache(maxsize=1)
def read_data(source: Callable[[Path | None], Splits], data_dir: Path | None) -> Splits:
    """What ``source`` reads; the last one is kept, since a study measures it on device after device."""
    return source(data_dir)


def _cifar10_moved(pixels: int) -> Callable[[Path | None], Splits]:
    return lambda folder: data.augmented(data.cifar10(folder), data.chain(data.shift(pixels), data.flip()))


def _imdb(folder: Path | None) -> Splits:
    return data.imdb(data.Tokenizer(vocabulary_size=20_000, length=100, pad="start"), data_dir=folder)


def _imdb_pairs(folder: Path | None) -> Splits:
    return data.imdb(data.Tokenizer(ngrams=2, vocabulary_size=20_000, length=400, pad="start"), data_dir=folder)


def _text(folder: Path | None) -> Splits:
    return data.characters(length=40, stride=3, targets="last", lowercase=True, data_dir=folder)


def _news(folder: Path | None) -> Splits:
    return data.ag_news(data.Tokenizer(vocabulary_size=20_000, length=64), data_dir=folder)


def _photographs(folder: Path | None) -> Splits:
    return data.cats_vs_dogs(folder, image_size=(150, 150), stream=False)


def _mlp() -> Task:
    return classification(models.MLP((512, 512, 10), dropout=0.2))


def _mnist_cnn() -> Task:
    return classification(models.CNN(10, blocks=((32, 64),), padding="VALID", dropout=0.25, dense_dropout=0.5))


def _cifar10_cnn() -> Task:
    blocks, padding = ((32, 32), (64, 64)), ("SAME", "VALID")
    return classification(models.CNN(10, blocks=blocks, padding=padding, dense=(512,), dropout=0.25, dense_dropout=0.5))


def _imdb_lstm() -> Task:
    return binary_classification(models.RecurrentClassifier(1, vocabulary_size=20_000, bidirectional=True, dropout=0.5))


def _fasttext() -> Task:
    return binary_classification(models.BagOfTokens(1, vocabulary_size=WORDS_AND_PAIRS))


def _character_lstm() -> Task:
    return classification(models.RecurrentClassifier(39, vocabulary_size=39, embedding_features=None, features=128))


def _text_generator() -> Task:
    return classification(models.TextGenerator(39), auxiliary_weight=0.2)


def _fcn5() -> Task:
    return classification(models.MLP((2048, 4096, 1024, 10), activation=jax.nn.sigmoid))


def _alexnet_r() -> Task:
    pooling = (max_pool, max_pool, avg_pool)
    blocks = ((32,), (32,), (64,))
    return classification(
        models.CNN(10, blocks=blocks, kernel_size=(5, 5), pool=(3, 3), pool_strides=(2, 2), pooling=pooling, dense=())
    )


def _resnet56() -> Task:
    return classification(models.ResNet(10, num_blocks=(9, 9, 9)))


def _ptb_lstm() -> Task:
    return next_token(models.RecurrentLanguageModel(10_000, features=256, num_layers=2))


def _photograph_cnn() -> Task:
    blocks = ((32,), (64,), (128,), (256,))
    return binary_classification(models.CNN(1, blocks=blocks, padding="VALID", dense=(128,)))


def _news_bag() -> Task:
    return classification(models.BagOfTokens(4, vocabulary_size=20_000, features=64, pad_id=0))


def _news_lstm() -> Task:
    model = models.RecurrentClassifier(4, vocabulary_size=20_000, bidirectional=True, dropout=0.5, pad_id=0)
    return classification(model)


def _adam(rate: float = 1e-3) -> Callable[[TrainConfig], optax.GradientTransformation]:
    return lambda _: optax.adam(rate)


def _rmsprop(rate: optax.ScalarOrSchedule) -> Callable[[TrainConfig], optax.GradientTransformation]:
    # Keras adds epsilon to the root; under it, where Optax has it, the same epsilon holds small gradients back.
    return lambda _: optax.rmsprop(rate, eps=1e-7, eps_in_sqrt=False)


def _keras_adam(config: TrainConfig) -> optax.GradientTransformation:
    return optax.adam(schedules.inverse_time(1e-3, 1e-4))


def _momentum(config: TrainConfig) -> optax.GradientTransformation:
    return optax.sgd(schedules.cosine(0.1, config.num_steps), momentum=0.9)


def _clipped(config: TrainConfig) -> optax.GradientTransformation:
    # The loss is a mean over words, where the article's scripts add up the 32 of a sequence.
    return optax.chain(optax.scale(32.0), optax.clip_by_global_norm(5.0), optax.sgd(1.0))


# Batch size, steps of a run, examples of an epoch, parameters; the articles' epochs.
WORKLOADS: Mapping[str, Workload] = {
    "mnist_mlp": Workload(128, 9_380, 60_000, 669_706, data.mnist, _mlp, _rmsprop(1e-3)),
    "mnist_cnn": Workload(
        128, 5_628, 60_000, 1_199_882, data.mnist, _mnist_cnn, lambda _: optax.adadelta(1.0, rho=0.95)
    ),
    "cifar10_cnn": Workload(
        32, 31_260, 50_000, 1_250_858, _cifar10_moved(3), _cifar10_cnn, _rmsprop(schedules.inverse_time(1e-4, 1e-6))
    ),
    "imdb_lstm": Workload(32, 3_128, 25_000, 2_658_945, _imdb, _imdb_lstm, _adam()),
    "imdb_fasttext": Workload(32, 3_910, 25_000, 60_151_751, _imdb_pairs, _fasttext, _adam()),
    "lstm_text_generation": Workload(128, 26_130, 334_605, 91_047, _text, _character_lstm, _rmsprop(1e-2)),
    "text_generator": Workload(128, 26_130, 334_605, 444_546, _text, _text_generator, _keras_adam),
    "fcn5": Workload(342, 1_750, 60_000, 14_205_962, data.mnist, _fcn5, _adam()),
    "alexnet_r": Workload(128, 7_800, 50_000, 85_098, data.cifar10, _alexnet_r, _adam()),
    "resnet56": Workload(128, 3_900, 50_000, 855_770, _cifar10_moved(4), _resnet56, _momentum),
    "ptb_lstm": Workload(
        64, 3_624, 29_049, 6_180_624, lambda folder: data.ptb(length=32, data_dir=folder), _ptb_lstm, _clipped
    ),
    "cats_and_dogs": Workload(150, 267, 2_000, 1_994_305, _photographs, _photograph_cnn, _adam()),
    "news_bag": Workload(32, 2_000, 6_840, 1_280_260, _news, _news_bag, _adam(3e-3)),
    "news_lstm": Workload(32, 1_000, 6_840, 2_659_332, _news, _news_lstm, _adam()),
}
