"""Two small sets of texts to classify: news and text messages."""

from __future__ import annotations

import os

from jaxnn.data.files import data_dir as find_data_dir
from jaxnn.data.files import fetch, refusals_named
from jaxnn.data.text.tables import Layout, table
from jaxnn.data.text.tokenizer import Tokenizer
from jaxnn.types import DataError, Splits

_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/test.csv"
_AG_NEWS_SHA256 = "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699"
_AG_NEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")


def ag_news(
    tokenizer: Tokenizer | None = None,
    *,
    test: float = 0.1,
    validation: float = 0.0,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
) -> Splits:
    """The 7,600 news of AG News' test file, titles and descriptions, in 4 classes of 1,900.

    Zhang, Zhao & LeCun, "Character-level Convolutional Networks for Text Classification" (2015). Its 120,000 training
    news are not among them: accuracies do not compare with published ones. Reads ``ag_news_test/test.csv`` in the data
    directory, and downloads 2 MB if it is not there.

    Args:
        tokenizer: how texts become ids; None: ``Tokenizer()``.
        test: the share held out as ``test``.
        validation: the share held out as ``validation``.
        seed: of the shuffle before that.
        data_dir: the data directory; by default ``JAXNN_DATA``, else the user's cache.

    Raises:
        DataError: the file is missing and cannot be downloaded, or damaged; shares that cannot be held out.
    """
    path = fetch("ag_news_test", "test.csv", _AG_NEWS, _AG_NEWS_SHA256, data_dir)
    plain = Layout(",", quoting=True, header=False, text=(1, 2), label=0)
    splits = table(path, tokenizer, plain, {"test": test, "validation": validation}, seed)
    if splits.class_names != ("1", "2", "3", "4"):
        raise DataError(f"{path} has the classes {', '.join(splits.class_names)} instead of 1 to 4: get it again.")
    return splits._replace(name="ag_news", class_names=_AG_NEWS_CLASSES)


@refusals_named()
def sms_spam(
    tokenizer: Tokenizer | None = None,
    *,
    test: float = 0.2,
    validation: float = 0.0,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
) -> Splits:
    """5,574 text messages, of which 747 are spam (label 1); 403 are repetitions of others, so splits share some.

    Almeida, Gómez Hidalgo & Yamakami, "Contributions to the Study of SMS Spam Filtering" (2011). Read from
    ``sms_spam/SMSSpamCollection.tsv`` in the data directory; not downloaded. Arguments as of `ag_news`.

    Raises:
        DataError: the file is not there; it says how to put it there. Else as `csv`.
    """
    path = find_data_dir(data_dir) / "sms_spam" / "SMSSpamCollection.tsv"
    if not path.is_file():
        raise DataError(
            f"{path} is not there: get SMSSpamCollection from the UCI Machine Learning Repository and put it there "
            "under that name, or set JAXNN_DATA to a folder that has sms_spam/."
        )
    plain = Layout("\t", quoting=False, header=False, text=(1,), label=0)
    return table(path, tokenizer, plain, {"test": test, "validation": validation}, seed)._replace(name="sms_spam")
