"""Text as data: texts to classify, and running text whose next token is to be predicted."""
