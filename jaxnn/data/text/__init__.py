"""Text as data: texts to classify, and running text whose next token is to be predicted."""

from jaxnn.data.text._tables import ag_news as ag_news
from jaxnn.data.text._tables import csv as csv
from jaxnn.data.text._tables import sms_spam as sms_spam
from jaxnn.data.text._tables import tsv as tsv
from jaxnn.data.text._text_sets import imdb as imdb
from jaxnn.data.text._text_sets import text_folder as text_folder
from jaxnn.data.text._text_sets import texts as texts
from jaxnn.data.text._text_sets import vocabulary as vocabulary
from jaxnn.data.text._tokenizer import Tokenizer as Tokenizer
from jaxnn.data.text._tokenizer import Vocabulary as Vocabulary
from jaxnn.data.text._windows import characters as characters
from jaxnn.data.text._windows import ptb as ptb
from jaxnn.data.text._windows import words as words
